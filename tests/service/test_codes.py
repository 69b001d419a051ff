"""A daemon over an index with codes: over HTTP, through reloads, beside devices."""

from __future__ import annotations

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.client import Client
from hybridindex.errors import InvalidInputError, ProfileMismatchError, ReloadError, UnsupportedIndexError
from hybridindex.index import open_index
from hybridindex.index.compress import compress
from hybridindex.index.rabitq.spec import RabitqSpec
from hybridindex.plans.precision import views_of
from hybridindex.refresh.config import RefreshConfig
from hybridindex.refresh.refresher import Refresher
from hybridindex.service import daemon
from hybridindex.service.observe.series import Series
from hybridindex.service.serving import PlanChoice, close_serving, open_serving
from tests.clustered import clustered
from tests.partitioner.synthetic import profile_of, with_candidates, with_row_faults
from tests.router.slow_copies import until
from tests.service.conftest import ask, assert_same
from tests.service.live import live


@pytest.fixture
def coded_path(index_path):
    with open_index(index_path) as index:
        compress(index, bits=2)
    return index_path


def replace(path):
    """By an index of other vectors, without codes."""
    hx.build(clustered(2000, seed=7), path, nlist=16, metric="l2", nprobe=6, replace=True).close()


def test_a_daemon_keeps_rows_on_disk(coded_path, make_service, queries):
    service = make_service(router={"devices": (), "rows": "mapped"})
    with (
        hx.open(coded_path) as index,
        index.router(precision="codes") as router,
        live(service) as port,
        Client(f"http://127.0.0.1:{port}") as client,
    ):
        assert_same(client.search(queries, 10, 6), router.search(queries, 10, 6))
        status = client.status()
        assert status["index"]["rows"] == "mapped"
        assert status["router"]["row_pages"] >= 0
        assert service.router.warmed.nbytes == 0
        replace(coded_path)
        with pytest.raises(ReloadError, match="rows is 'mapped', and searches would scan rows"):
            service.reload()
        assert_same(client.search(queries, 10, 6), router.search(queries, 10, 6))


def test_a_daemon_searches_by_codes_over_http(coded_path, make_service, queries):
    service = make_service(router={"devices": ()})
    with hx.open(coded_path) as index, index.router(precision="codes") as router, live(service) as port:
        with Client(f"http://127.0.0.1:{port}") as client:
            assert_same(client.search(queries, 10, 6), router.search(queries, 10, 6))
            few = client.search(queries, 10, 6, candidates=10)
            assert_same(few, router.search(queries, 10, 6, candidates=10))
            with client.session() as session:
                assert_same(session.search(queries, 10, 6, candidates=10), few)
            counted = []
            service.router.on_batch.append(lambda report: counted.append((report.k, report.candidates)))
            client.search(queries, 7, 6, candidates=9)  # no warm-up has this k
            until(lambda: (7, 9 * len(queries)) in counted)  # batches end after the answer
            status = client.status()
            assert status["index"]["precision"] == status["router"]["precision"] == router.precision
            assert status["index"]["precision"].startswith("codes: rabitq 2 bits, ")
            assert status["index"]["host_scanner"] == "rabitq"
            assert (status["index"]["bits"], status["index"]["candidates"]) == (2, service.router.candidates)
            assert f", {service.router.candidates} candidates for k 10 at" in service.router.precision
            until(lambda: client.search(queries, 10, 6) and "rerank" in client.status()["router"]["stages"])
            with pytest.raises(InvalidInputError, match="candidates is 9 and k is 10"):
                client.search(queries, 10, candidates=9)
        exact = index.search(queries, 10, 6)
        with index.router(precision="rows") as rows:
            assert_same(rows.search(queries, 10, 6), rows.search(queries, 10, 6, candidates=10))
            found = [np.isin(a, b).mean() for a, b in zip(exact.ids, rows.search(queries, 10, 6).ids, strict=True)]
            assert np.mean(found) > 0.9


def test_the_daemon_says_what_it_scans(coded_path, make_service):
    service = make_service(router={"devices": ()})
    assert daemon._precision(service) == f" ({service.router.precision})"
    answer = ask(service, "POST", "/v1/search", json={"queries": [[0.5] * service.index.dim], "candidates": 0})
    assert (answer.status_code, "candidates" in answer.json()["detail"]) == (400, True)
    found = ask(service, "GET", "/metrics").text
    assert "hybridindex_candidates_total" in found


def test_large_requests_are_divided_by_their_candidates(coded_path, make_service, monkeypatch):
    monkeypatch.setattr("hybridindex.service.core.TURN_CELLS", 1000)
    service = make_service(router={"devices": (), "candidates": 200})
    many, counted = clustered(20, seed=4), []
    # Batches of the warm-up have another k.
    service.router.on_batch.append(lambda report: counted.append(report.n_queries) if report.k == 5 else None)
    with live(service) as port, Client(f"http://127.0.0.1:{port}") as client:
        found = client.search(many, 5, 6)
        until(lambda: sum(counted) == len(many))  # batches end after the answer
    assert counted == [5, 5, 5, 5]
    assert_same(found, service.router.search(many, 5, 6))


def test_requests_with_very_many_candidates_are_answered(coded_path, make_service, monkeypatch):
    service = make_service(router={"devices": (), "candidates": 200})
    many = clustered(20, seed=4)
    expected, counted = service.router.search(many, 5, 6), []
    # Of the router: the daemon's own bound is far above.
    monkeypatch.setattr("hybridindex.router.precision._MOST_CELLS", 1000)
    monkeypatch.setattr("hybridindex.router.batch.batching.MAX_BATCH_CELLS", 1000)
    service.router.on_batch.append(lambda report: counted.append(report.n_queries) if report.k == 5 else None)
    with live(service) as port, Client(f"http://127.0.0.1:{port}") as client:
        assert_same(client.search(many, 5, 6), expected)
        with client.session() as session:
            assert_same(session.search(many, 5, 6), expected)
        until(lambda: counted == [5] * 8)  # batches end after the answer


def test_a_daemon_with_few_candidates_becomes_ready_and_reloads(coded_path, make_service, queries):
    service = make_service(router={"devices": (), "candidates": 5})
    assert service.router.search(queries, 5, 6).ids.shape == (len(queries), 5)
    with open_index(coded_path) as index:
        compress(index, bits=1)
    assert service.reload()["reloaded"]
    assert service.router.precision == "codes: rabitq 1 bit, 5 candidates"


def test_a_reload_takes_up_codes_that_were_made_meanwhile(index_path, make_service, queries):
    service = make_service(router={"devices": ()})
    assert service.router.precision == "rows"
    series = Series(service, lambda: 7.0).read()
    assert (series["precision"], series["bits"], series["candidates"]) == ("rows", None, None)
    with open_index(index_path) as index:
        compress(index)
    assert service.generations.changed()
    assert service.reload()["reloaded"]
    assert service.router.precision.startswith("codes: rabitq 1 bit, ")
    series = ask(service, "GET", "/v1/series").json()
    assert (series["bits"], series["candidates"]) == (1, service.router.candidates)
    assert not service.generations.changed()
    assert service.reload()["reloaded"] is False
    replace(index_path)
    assert service.reload()["generation"] == 2
    assert service.router.precision == "rows"


def test_codes_that_cannot_be_used_are_not_opened_again_until_they_are_made_anew(coded_path, make_service, queries):
    file = next(coded_path.glob("gen-*/rabitq-*.bin"))
    whole = file.read_bytes()
    file.write_bytes(whole[:70] + bytes([whole[70] ^ 1]) + whole[71:])
    service = make_service(router={"devices": ()})
    assert "differs from its checksum" in service.router.precision
    assert not service.generations.changed()
    assert service.reload()["reloaded"] is False
    with open_index(coded_path) as index:
        compress(index, bits=2)
    assert file.read_bytes() == whole
    assert service.generations.changed()
    assert service.reload()["reloaded"]
    assert service.router.precision.startswith("codes: rabitq 2 bits, ")
    assert not service.generations.changed()


@pytest.fixture
def spoilt(coded_path):
    """Damages the file of codes; the function puts it back as it was."""
    file = next(coded_path.glob("gen-*/rabitq-*.bin"))
    whole = file.read_bytes()

    def spoil():
        file.write_bytes(whole[:70] + bytes([whole[70] ^ 1]) + whole[71:])
        return lambda: file.write_bytes(whole)

    return spoil


def test_a_reload_takes_up_codes_that_were_restored(coded_path, make_service, queries, spoilt):
    with hx.open(coded_path) as index, index.router(precision="codes") as router:
        expected, precision = router.search(queries, 5, 6), router.precision
    restore = spoilt()
    service = make_service(router={"devices": ()})
    assert "differs from its checksum" in service.router.precision
    assert service.reload()["reloaded"] is False
    restore()
    assert service.reload()["reloaded"]
    assert service.router.precision == precision
    assert_same(service.router.search(queries, 5, 6), expected)
    # Those in memory stay as they are.
    spoilt()
    assert service.reload()["reloaded"] is False
    assert_same(service.router.search(queries, 5, 6), expected)


@pytest.mark.parametrize("last", ["rows", "codes"])
def test_codes_that_were_restored_bring_their_plan(coded_path, make_service, spoilt, last):
    rows, codes = plans_of_both(coded_path)
    with hx.open(coded_path) as index:
        for plan in (rows, codes) if last == "codes" else (codes, rows):
            index.apply_plan(plan, force=True)
    restore = spoilt()
    service = make_service()
    assert (service.plan_id, service.router.plan.bits) == (rows, None)
    restore()
    answer = service.reload()
    expected = (codes, 2, "stored") if last == "codes" else (rows, None, "carried over")
    assert (answer["plan_id"], service.router.plan.bits, answer["plan_origin"]) == expected
    assert service.router.residency.n_resident == len(service.router.plan.resident_lists) == 12
    assert service.reload()["reloaded"] is False


def test_a_reload_takes_up_other_candidates_of_the_same_codes(coded_path, make_service):
    service = make_service(router={"devices": ()})
    before = service.router.precision
    with open_index(coded_path) as index:
        compress(index, bits=2, recall_loss=0)
    assert service.reload()["reloaded"]
    assert service.router.precision != before


def test_codes_that_the_host_scanner_does_not_scan_are_nothing_to_reload(coded_path, make_service):
    service = make_service(router={"devices": (), "host_scanner": "faiss"})
    with open_index(coded_path) as index:
        compress(index, bits=1)
    assert not service.generations.changed()
    assert service.reload()["reloaded"] is False


def test_codes_that_were_asked_for_are_not_given_up(coded_path, make_service, queries):
    service = make_service(router={"devices": (), "precision": "codes"})
    expected = service.router.search(queries, 5, 6)
    replace(coded_path)
    with pytest.raises(ReloadError, match="INDEX has no codes that can be used: hybridindex compress INDEX"):
        service.reload()
    assert_same(service.router.search(queries, 5, 6), expected)
    with open_index(coded_path) as index:
        compress(index)
    assert service.reload()["generation"] == 2
    assert service.router.precision.startswith("codes: ")


def test_a_daemon_without_the_codes_it_was_told_to_search_does_not_start(index_path, make_service):
    with pytest.raises(UnsupportedIndexError, match="has no codes that can be used"):
        make_service(router={"devices": (), "precision": "codes"})


def test_devices_without_a_plan_stay_closed_and_the_host_searches_by_codes(coded_path, make_service, queries):
    service = make_service(plan="none")
    with hx.open(coded_path) as index, index.router(precision="codes") as codes:
        assert not service.router.devices
        assert_same(service.router.search(queries, 5, 6), codes.search(queries, 5, 6))
    assert not service.generations.changed()


def test_devices_hold_what_the_plan_is_of(coded_path, make_service):
    service = make_service()
    assert service.router.devices
    assert service.router.precision == "rows: the index has codes, but the plan is of rows"
    assert not service.generations.changed()


def plans_of_both(path):
    """Stores a plan of rows and one of codes; their ids."""
    with hx.open(path) as index, index.store() as store:
        made = []
        for view in views_of(index.ivf):
            profile = store.save_profile(profile_of(view))
            plan = index.plan(1000, 4 << 20, profile, coverage=0.5)
            made.append(store.save_plan(plan.to_record(), profile.id))
    return made


def test_a_daemon_starts_with_the_current_plan_of_its_precision(coded_path, make_service, queries):
    rows, codes = plans_of_both(coded_path)
    with hx.open(coded_path) as index:
        index.apply_plan(rows, force=True)
        index.apply_plan(codes, force=True)
        with index.router(precision="codes") as router:
            expected = router.search(queries, 5, 6)
    service = make_service()
    assert (service.plan_id, service.router.plan.bits) == (codes, 2)
    assert service.router.precision.startswith("codes: ")
    assert service.router.residency.n_resident == len(service.router.plan.resident_lists)
    assert_same(service.router.search(queries, 5, 6), expected)
    status = ask(service, "GET", "/v1/status").json()
    assert status["plan_id"] == codes
    assert status["index"]["list_bytes"] == service.index.ivf.rabitq.list_bytes.sum() < service.index.list_bytes.sum()
    assert status["devices"][0]["resident_bytes"] < status["index"]["list_bytes"] + (1 << 20)
    assert status["residency"] == {"version": status["residency"]["version"], "lists": 12, "rows": 0}
    service.close()
    of_rows = make_service(router={"precision": "rows"})
    assert (of_rows.plan_id, of_rows.router.plan.bits, of_rows.router.precision) == (rows, None, "rows")


def test_the_host_scans_codes_in_the_place_of_devices_that_do(coded_path, make_service, queries, monkeypatch):
    """Where many candidates would make ``auto`` take rows, too."""
    _, codes = plans_of_both(coded_path)
    with hx.open(coded_path) as index:
        index.apply_plan(codes, force=True)
    monkeypatch.setattr(RabitqSpec, "hardly_pays", lambda *_: "many would be compared")
    service = make_service()
    now = service.generations.current
    choice = PlanChoice(plan=now.router.plan, plan_id=codes)
    stands_in = open_serving(now.index, choice, service.config, service.store, None, on_host=True)
    try:
        assert service.router.devices
        assert not stands_in.router.devices
        assert stands_in.router.precision == service.router.precision
        assert_same(stands_in.router.search(queries, 5, 6), service.router.search(queries, 5, 6))
    finally:
        close_serving(stands_in, index=False)


def test_a_daemon_with_rows_on_disk_refuses_plans_of_rows(coded_path, make_service):
    rows, codes = plans_of_both(coded_path)
    service = make_service(router={"rows": "mapped"})
    assert not service.router.devices
    with pytest.raises(ProfileMismatchError, match=f"precision is 'codes', but plan {rows} is of rows"):
        service.apply_plan(str(rows), apply=True, force=True)
    assert service.apply_plan(str(codes), apply=True, force=True)["plan_id"] == codes
    assert service.router.devices
    service.close()
    assert make_service(router={"rows": "mapped"}).plan_id == codes


def test_a_row_cache_is_taken_back_and_left_behind(coded_path, make_service):
    with hx.open(coded_path) as index, index.store() as store:
        profile = with_row_faults(with_candidates(profile_of(index.ivf.by_codes()), index.ivf.code_size))
        plan = index.plan(1000, 4 << 20, store.save_profile(profile), coverage=0.5, row_cache_bytes=1 << 20)
        index.apply_plan(plan, force=True)
    service = make_service(router={"rows": "mapped"})
    changed = {"apply": False, "coverage": 0.5}
    assert service.repartition(**changed)["plan"]["row_cache_bytes"] == 1 << 20
    assert service.repartition(**changed, row_cache_bytes=2 << 20)["plan"]["row_cache_bytes"] == 2 << 20
    body = {**changed, "row_cache_bytes": "all"}
    assert ask(service, "POST", "/v1/repartition", json=body).json()["plan"]["row_cache_bytes"] is None
    # The next content has a profile that did not measure what reading rows takes.
    with open_index(coded_path) as index:
        compress(index, bits=1)
    with hx.open(coded_path) as index, index.store() as store:
        store.save_profile(profile_of(index.ivf.by_codes()))
    assert service.reload()["plan_origin"] == "made anew"
    assert (service.router.plan.bits, service.router.plan.request.row_cache_bytes) == (1, None)


def test_a_daemon_by_codes_plans_codes_and_refuses_plans_of_rows(coded_path, make_service):
    rows, codes = plans_of_both(coded_path)
    with hx.open(coded_path) as index:
        index.apply_plan(codes, force=True)
    service = make_service()
    found = service.history()
    assert found["current"] == codes
    assert {plan["id"] for plan in found["plans"]} >= {rows, codes}
    answer = service.repartition(apply=True, coverage=0.25, force=True)
    assert answer["applied"]
    assert service.router.plan.bits == 2
    assert service.router.residency.n_resident == len(service.router.plan.resident_lists) == 6
    events = ask(service, "GET", "/v1/events").json()["events"]
    assert answer["plan_id"] in [e["payload"].get("plan_id") for e in events if e["kind"] == "plan_current"]
    with pytest.raises(InvalidInputError, match=f"plan {rows} is of rows, but the daemon searches by codes"):
        service.apply_plan(str(rows), apply=True, force=True)
    assert service.apply_plan(str(codes), apply=True, force=True)["plan_id"] == codes
    # What was made last, of codes.
    assert service.stored_plan(str(rows))["plan"]["precision"] == "rows"
    assert service.plan()["plan"]["precision"] == "codes"


def test_a_reload_follows_the_codes(coded_path, make_service, queries):
    _, codes = plans_of_both(coded_path)
    with hx.open(coded_path) as index:
        index.apply_plan(codes, force=True)
    service = make_service()
    # The codes of a plan are replaced: it is none of theirs.
    with open_index(coded_path) as index:
        compress(index, bits=1)
    assert service.generations.changed()
    answer = service.reload()
    assert answer["reloaded"]
    assert (service.router.plan is None) or service.router.plan.bits in (None, 1)
    with hx.open(coded_path) as index:
        assert service.router.plan is None or service.router.plan.index_fingerprint in {
            view.fingerprint for view in views_of(index.ivf)
        }
        profile = profile_of(index.ivf.by_codes())
        with index.store() as store:
            profile = store.save_profile(profile)
        index.apply_plan(index.plan(1000, 4 << 20, profile, coverage=0.5), force=True)
    service.close()
    again = make_service()
    assert again.router.plan.bits == 1
    assert again.router.devices


def test_a_daemon_keeps_a_plan_of_codes_up_to_date(coded_path, make_service, queries):
    _, codes = plans_of_both(coded_path)
    with hx.open(coded_path) as index:
        index.apply_plan(codes, force=True)
    config = RefreshConfig(planning="here", tick_s=3600, min_queries=64)
    service = make_service(make_refresher=lambda index, router, store: Refresher(index, router, store, config))
    many = clustered(200, seed=8)
    result = service.router.search(many, 5, 6)
    service.refresher.observe(many, 0.001, result.hit_rate)
    answer = service.repartition(apply=True, coverage=0.25, force=True)
    assert answer["applied"]
    plan = service.router.plan
    assert (plan.bits, len(plan.resident_lists)) == (2, 6)
    assert "renewed" in plan.analysis.profile.notes
