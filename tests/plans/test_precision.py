"""Which plans of an index count: those of its rows, or those of its codes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.errors import InvalidInputError, ProfileError, ProfileMismatchError, UnsupportedIndexError
from hybridindex.index import open_index
from hybridindex.index.compress import compress
from hybridindex.plans.current import current_plan_id
from hybridindex.plans.precision import choose_view, precision_of, stored_history, view_of, view_to_profile, views_of
from hybridindex.plans.stored import load_plan
from tests.clustered import clustered, small_index
from tests.partitioner.synthetic import profile_of


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("planned") / "idx"
    with small_index(path) as index:
        compress(index, bits=1)
    return path


@pytest.fixture
def index(path):
    (path / "control.sqlite").unlink(missing_ok=True)
    with hx.open(path) as index:
        yield index


def keep(index, *views):
    with index.store() as store:
        return [store.save_profile(profile_of(view)) for view in views]


def test_rows_and_codes_have_plans_of_their_own(index):
    rows, codes = views_of(index.ivf)
    assert [precision_of(view) for view in (rows, codes)] == ["rows", "codes"]
    assert view_of(index.ivf, codes.fingerprint).fingerprint == codes.fingerprint != rows.fingerprint
    assert view_of(index.ivf, "other") is None
    with pytest.raises(InvalidInputError, match="precision is 'bits'"):
        views_of(index.ivf, "bits")
    keep(index, rows)
    # A profile of codes is what auto waits for.
    assert index.plan(100, 1 << 20).bits is None
    with pytest.raises(ProfileError):
        index.plan(100, 1 << 20, precision="codes")
    keep(index, codes)
    assert index.plan(100, 1 << 20).bits == index.plan(100, 1 << 20, precision="codes").bits == 1
    assert index.plan(100, 1 << 20, precision="rows").bits is None


def test_profiles_of_another_machine_do_not_count(index):
    rows, codes = views_of(index.ivf)
    keep(index, rows)
    made = profile_of(codes)
    with index.store() as store:
        store.save_profile(replace(made, hardware=replace(made.hardware, fingerprint="other")))
        assert choose_view(index.ivf, store).fingerprint == rows.fingerprint
    assert index.plan(100, 1 << 20).bits is None
    assert index.plan(100, 1 << 20, allow_other_hardware=True).bits == 1


def test_a_profile_says_what_a_plan_is_of(index):
    rows, codes = keep(index, *views_of(index.ivf))
    assert (index.plan(100, 1 << 20, rows).bits, index.plan(100, 1 << 20, codes).bits) == (None, 1)
    with pytest.raises(ProfileMismatchError, match="precision is 'codes', and the profile was measured with rows"):
        index.plan(100, 1 << 20, rows, precision="codes")
    with pytest.raises(ProfileMismatchError):
        index.plan(100, 1 << 20, replace(rows, index_fingerprint="other"))


def test_the_plan_that_was_applied_last_counts(index):
    rows, codes = keep(index, *views_of(index.ivf))
    of_rows = index.plan(100, 1 << 20, rows, coverage=0.5)
    of_codes = index.plan(100, 1 << 20, codes, coverage=0.5)
    assert index.current_plan() is None
    first = index.apply_plan(of_codes, force=True)
    assert index.current_plan().bits == 1
    second = index.apply_plan(of_rows, force=True)
    assert index.current_plan().bits is None
    assert index.current_plan(precision="codes").bits == 1
    index.apply_plan(first, force=True)
    with index.store() as store:
        rows_view, codes_view = views_of(index.ivf)
        assert choose_view(index.ivf, store).fingerprint == codes_view.fingerprint
        assert choose_view(index.ivf, store, "current", "rows").fingerprint == rows_view.fingerprint
        assert choose_view(index.ivf, store, str(second)).fingerprint == rows_view.fingerprint
        assert choose_view(index.ivf, store, str(first)).fingerprint == codes_view.fingerprint
        assert choose_view(index.ivf, store, "999999").fingerprint == rows_view.fingerprint
        assert current_plan_id(store, rows_view.fingerprint) == second
        found = stored_history(index.ivf, store, first)
        assert [plan.id for plan in found["plans"]] == [first, second]
        assert [row["plan_id"] for row in found["applied"]] == [first, second, first]
        assert [row.codec for row in found["profiles"]] == ["flat", "rabitq1"]
        # The plan that was made last.
        again = store.save_plan(index.plan(50, 1 << 20, rows).to_record(), rows.id)
        assert again > second
        assert choose_view(index.ivf, store, "latest").fingerprint == rows_view.fingerprint
        store.save_plan(index.plan(60, 1 << 20, codes).to_record(), codes.id)
        assert choose_view(index.ivf, store, "latest").fingerprint == codes_view.fingerprint


def test_a_named_plan_that_cannot_serve_says_what_it_is_of(index):
    rows, codes = keep(index, *views_of(index.ivf))
    of_rows, of_codes = (
        str(index.apply_plan(index.plan(100, 1 << 20, made, coverage=0.5), force=True)) for made in (rows, codes)
    )
    with index.store() as store:
        for number, precision, held in ((of_rows, "codes", "rows"), (of_codes, "rows", "codes")):
            said = f"precision is '{precision}', but plan {number} is of {held}"
            with pytest.raises(ProfileMismatchError, match=said):
                choose_view(index.ivf, store, number, precision)
        store.save_profile(replace(codes, id=None, index_fingerprint="other codes"))
        lost = store.save_plan(
            index.plan(100, 1 << 20, codes).to_record(), store.list_profiles(index_fingerprint="other codes")[0].id
        )
        with pytest.raises(ProfileMismatchError, match=f"plan {lost} is of codes that this index does not have"):
            choose_view(index.ivf, store, str(lost))
        store.save_profile(replace(rows, id=None, index_fingerprint="other rows"))
        foreign = store.save_plan(
            index.plan(100, 1 << 20, rows).to_record(), store.list_profiles(index_fingerprint="other rows")[0].id
        )
        with pytest.raises(ProfileMismatchError, match="measured on index 'other rows'"):
            load_plan(choose_view(index.ivf, store, str(foreign)), str(foreign), store)


def test_history_shows_codes_that_are_gone(index):
    rows, codes = views_of(index.ivf)
    made = profile_of(codes)
    of_it, of_others = ({"codes": {"bits": 1, "of": name}} for name in (rows.fingerprint, "others"))
    with index.store() as store:
        old = store.save_profile(replace(made, index_fingerprint="old codes", notes=of_it))
        store.save_profile(replace(made, index_fingerprint="others' codes", notes=of_others))
        new = store.save_profile(replace(made, notes=of_it))
        plan_id = store.save_plan(index.plan(100, 1 << 20, new).to_record(), old.id)
        found = stored_history(index.ivf, store, None)
    assert [row.id for row in found["profiles"]] == [old.id, new.id]
    assert [row.id for row in found["plans"]] == [plan_id]
    assert found["gone"] == ["old codes"]


def test_a_router_serves_what_its_plan_is_of(index, caplog):
    rows, codes = keep(index, *views_of(index.ivf))
    queries = clustered(20, seed=5)
    with index.router(precision="codes") as router:
        expected = router.search(queries, 5, 6)
    for profile, precision in ((rows, "rows"), (codes, "codes: rabitq 1 bit")):
        plan = index.plan(100, 8 << 20, profile, coverage=0.5)
        with index.router(plan, devices=["cpu"]) as router:
            assert router.precision.startswith(precision)
            assert router.residency.n_resident == len(plan.resident_lists)
            found = router.search(queries, 5, 6)
        if plan.bits:
            np.testing.assert_array_equal(found.ids, expected.ids)
            np.testing.assert_array_equal(found.distances, expected.distances)
    caplog.clear()
    index.router(index.plan(100, 8 << 20, rows), devices=()).close()
    assert "without devices a plan of the other precision gives nprobe alone" in caplog.text
    with pytest.raises(ProfileMismatchError, match="the plan is of codes"):
        index.router(plan, devices=["cpu"], precision="rows")


def test_an_index_without_codes_has_plans_of_rows_alone(tmp_path):
    small_index(tmp_path / "idx").close()
    with open_index(tmp_path / "idx") as ivf:
        assert len(views_of(ivf)) == 1
        assert view_to_profile(ivf, "auto") is ivf
        with pytest.raises(UnsupportedIndexError, match="hybridindex compress"):
            view_to_profile(ivf, "codes")


def test_auto_profiles_what_searches_scan(index):
    assert precision_of(view_to_profile(index.ivf, "auto")) == "codes"
    assert precision_of(view_to_profile(index.ivf, "auto", "faiss")) == "rows"
    assert precision_of(view_to_profile(index.ivf, "rows")) == "rows"
    quick = {"batches": (1, 4), "repeats": 1, "coverages": (), "max_seconds": 2, "threads": 1}
    profile = index.profile(clustered(128, seed=3), 4, k=5, devices=["cpu"], **quick)
    assert profile.bits == 1
    assert {s.stage for s in profile.stages} == {"coarse", "host_scan", "device_scan", "rerank", "batch"}
    # Routed batches with codes on the device.
    assert {s.coverage for s in profile.stages if s.stage == "batch"} > {0.0}
