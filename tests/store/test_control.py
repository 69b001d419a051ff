"""The contract of the store, on SQLite and on PostgreSQL."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import event, text, update

from hybridindex.errors import InvalidInputError, ProfileError, ProfileMismatchError, StoreError, StoreLockedError
from hybridindex.store import ControlStore
from hybridindex.store.digests import digest_of_json
from hybridindex.store.models import HardwareRow
from hybridindex.store.retention import Retention
from hybridindex.types import AccessSample, Profile, StageSample

Maker = Callable[..., Profile]


def assert_same(a: Any, b: Any) -> None:
    for field in fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, AccessSample):
            assert_same(x, y)
        elif isinstance(x, np.ndarray):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)
        else:
            assert x == y, field.name
            assert type(x) is type(y), field.name


def test_profile_comes_back_as_it_was_saved(store: ControlStore, profile_of: Maker) -> None:
    saved = store.save_profile(profile_of())
    assert saved.id is not None
    assert_same(store.load_profile(saved.id), saved)
    assert_same(replace(saved, id=None), profile_of())


def test_profile_survives_reopening(store_url: str, profile_of: Maker) -> None:
    with ControlStore.open(store_url) as first:
        saved = first.save_profile(profile_of())
    with ControlStore.open(store_url) as second:
        assert_same(second.load_profile(saved.id), saved)


def test_profile_may_have_no_samples_and_no_held_queries(store: ControlStore, profile_of: Maker) -> None:
    access = replace(profile_of().access, held_probes=np.empty((0, 3), np.int32))
    saved = store.save_profile(profile_of(stages=(), transfers=(), recall=(), notes={}, access=access))
    assert_same(store.load_profile(), saved)


def test_candidates_come_back_where_they_were_counted(store: ControlStore, profile_of: Maker) -> None:
    access = profile_of().access
    rng = np.random.default_rng(1)
    held = rng.random(access.held_probes.shape).astype(np.float32)
    counted = replace(access, list_candidates=rng.random(16), held_candidates=held)
    saved = store.save_profile(profile_of(access=counted))
    assert_same(store.load_profile(saved.id).access, counted)
    assert store.load_profile(store.save_profile(profile_of()).id).access.list_candidates is None
    with pytest.raises(InvalidInputError, match=r"access.held_candidates: NoneType given"):
        store.save_profile(profile_of(access=replace(counted, held_candidates=None)))


def test_a_profile_that_goes_while_it_is_read_is_whole(store: ControlStore, store_url: str, profile_of: Maker) -> None:
    saved = store.save_profile(profile_of())
    store.save_profile(profile_of())
    pruned = []
    with ControlStore.open(store_url) as other:

        @event.listens_for(store._opened.reader, "after_cursor_execute")
        def prune(_: Any, __: Any, statement: str, *___: Any) -> None:
            if "profiles" in statement and not pruned:
                pruned.append(other.prune(Retention(plans=1, profiles=1, events=1)).profiles)

        loaded = store.load_profile(saved.id)
    assert pruned == [1]
    assert_same(loaded, saved)
    with pytest.raises(ProfileError):
        store.load_profile(saved.id)


def inserted_samples(store: ControlStore) -> list[int]:
    """Rows of samples that statements brought from here, as they come; copies within the store bring none."""
    found: list[int] = []

    @event.listens_for(store._opened.engine, "before_cursor_execute")
    def count(_: Any, __: Any, statement: str, parameters: Any, ___: Any, many: bool) -> None:
        if statement.startswith("INSERT INTO") and "samples" in statement and "SELECT" not in statement:
            found.append(len(parameters) if many else 1)

    return found


def test_samples_that_a_profile_shares_with_its_parent_are_copied_in_the_store(
    store: ControlStore, profile_of: Maker
) -> None:
    parent = store.save_profile(profile_of())
    renewed = replace(parent, id=None, recall=(), created_at="2030-02-01T12:00:00+00:00")
    brought = inserted_samples(store)
    saved = store.save_profile(renewed, parent=parent)
    assert brought == []
    assert saved.id != parent.id
    assert_same(store.load_profile(saved.id), saved)
    assert_same(store.load_profile(parent.id), parent)


@pytest.mark.parametrize("gone", ["pruned", "another row", "samples lost", "never stored"])
def test_samples_of_a_parent_that_the_store_does_not_hold_are_stored_anew(
    store: ControlStore, profile_of: Maker, gone: str
) -> None:
    parent = store.save_profile(profile_of())
    renewed = replace(parent, id=None, created_at="2030-02-01T12:00:00+00:00")
    if gone == "pruned":
        parent = replace(parent, id=4711)
    elif gone == "another row":
        parent = replace(parent, id=store.save_profile(profile_of(index_fingerprint="ix-b")).id)
    elif gone == "samples lost":
        with store._opened.engine.begin() as connection:
            connection.execute(text("DELETE FROM latency_samples"))
    else:
        parent = replace(parent, id=None)
    brought = inserted_samples(store)
    saved = store.save_profile(renewed, parent=parent)
    assert sum(brought) >= len(renewed.stages)
    assert_same(store.load_profile(saved.id), saved)
    if gone == "samples lost":
        with pytest.raises(StoreError, match=f"stages of profile {parent.id}: damaged, .*profile the index again"):
            store.load_profile(parent.id)
        remove_profiles(store)


def remove_profiles(store: ControlStore) -> None:
    """Damage that the fixture shall not find at the end."""
    with store._opened.writer.begin() as connection:
        connection.execute(text("DELETE FROM profiles"))


def test_newest_matching_profile_is_loaded(store: ControlStore, profile_of: Maker) -> None:
    other_hardware = replace(profile_of().hardware, fingerprint="hw-b")
    ids = [
        store.save_profile(p).id
        for p in (
            profile_of(seed=0),
            profile_of(seed=1),
            profile_of(seed=2, index_fingerprint="ix-b"),
            profile_of(seed=3, hardware=other_hardware),
        )
    ]
    assert store.load_profile().id == ids[3]
    assert store.load_profile(index_fingerprint="ix-b").id == ids[2]
    assert store.load_profile(index_fingerprint="ix-a").id == ids[3]
    assert store.load_profile(index_fingerprint="ix-a", hardware_fingerprint="hw-a").id == ids[1]
    assert store.load_profile(ids[0], index_fingerprint="ix-a", hardware_fingerprint="hw-a").seed == 0
    assert [s.id for s in store.list_profiles()] == ids
    assert [s.id for s in store.list_profiles(index_fingerprint="ix-b")] == [ids[2]]
    assert {s.hardware_fingerprint for s in store.list_profiles()} == {"hw-a", "hw-b"}


def test_profile_of_another_index_or_machine_is_refused_by_name(store: ControlStore, profile_of: Maker) -> None:
    saved = store.save_profile(profile_of())
    for profile_id in (saved.id, None):
        with pytest.raises(ProfileMismatchError, match="index 'ix-a', not 'ix-z'; run profile again"):
            store.load_profile(profile_id, index_fingerprint="ix-z", hardware_fingerprint="hw-a")
        with pytest.raises(ProfileMismatchError, match="machine 'hw-a', not 'hw-z'"):
            store.load_profile(profile_id, index_fingerprint="ix-a", hardware_fingerprint="hw-z")
        with pytest.raises(ProfileMismatchError, match="index 'ix-a', not 'ix-z' and machine 'hw-a', not 'hw-z'"):
            store.load_profile(profile_id, index_fingerprint="ix-z", hardware_fingerprint="hw-z")


def test_mismatch_speaks_of_the_same_index_before_another(store: ControlStore, profile_of: Maker) -> None:
    store.save_profile(profile_of())
    store.save_profile(profile_of(index_fingerprint="ix-b"))
    with pytest.raises(ProfileMismatchError, match=r"profile \d+ was measured on machine 'hw-a', not 'hw-z'"):
        store.load_profile(index_fingerprint="ix-a", hardware_fingerprint="hw-z")


def test_missing_profile_and_plan_are_errors(store: ControlStore, profile_of: Maker) -> None:
    with pytest.raises(ProfileError, match="no profile yet; run profile first"):
        store.load_profile(index_fingerprint="ix-a")
    with pytest.raises(ProfileError, match="no profile 7"):
        store.load_profile(7)
    with pytest.raises(InvalidInputError, match="profile_id"):
        store.load_profile("7")  # type: ignore[arg-type]
    with pytest.raises(ProfileError, match=r"no plan; store one with 'hybridindex plan'.*Index\.apply_plan"):
        store.load_plan()
    with pytest.raises(ProfileError, match="no plan of index 'ix-a'; store one with"):
        store.load_plan(index_fingerprint="ix-a")
    with pytest.raises(ProfileError, match="no plan 7; 'hybridindex history' lists plans"):
        store.load_plan(7)
    with pytest.raises(ProfileError, match="no profile 7 for this plan"):
        store.save_plan({"data": {"verdict": "feasible"}, "arrays": {}}, 7)
    assert store.list_plans() == []
    assert store.list_profiles() == []


def test_one_machine_is_kept_once_but_exactly(store: ControlStore, profile_of: Maker) -> None:
    newer = replace(profile_of().hardware, versions={"numpy": "99"})
    saved = [store.save_profile(profile_of(hardware=h)) for h in (newer, profile_of().hardware, newer)]
    for profile in saved:
        assert store.load_profile(profile.id).hardware == profile.hardware
    with store._opened.engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM hardware")).scalar_one() == 2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"created_at": "yesterday"}, "profile.created_at: 'yesterday'"),
        ({"created_at": "2030-01-31T12:00:00"}, "profile.created_at"),
        ({"created_at": "2030-01-31T12:00:00+01:00"}, "profile.created_at"),
        ({"load_average": math.nan}, "profile.load_average: nan"),
        ({"seed": 1 << 63}, "profile.seed"),
        ({"dim": np.int64(8)}, "profile.dim"),
        ({"index_fingerprint": ""}, "index_fingerprint"),
        ({"codec": "a\x00"}, "profile.codec"),
        ({"scanner": "\ud800"}, "profile.scanner"),
        ({"list_bytes": np.zeros(3, np.int64)}, r"profile.list_bytes: int64 \(3,\) given, int64 \(16,\)"),
        ({"list_sizes": np.zeros(16, np.int32)}, "profile.list_sizes: int32"),
        ({"list_bytes": [0] * 16}, "profile.list_bytes: list"),
        ({"notes": {"a": np.zeros(3)}}, "profile.notes.a"),
        ({"stages": (StageSample(stage="merge", batch=1, seconds=math.inf),)}, r"profile.stages\[0\].seconds: inf"),
        ({"stages": (StageSample(stage="merge", batch=True, seconds=1.0),)}, r"profile.stages\[0\].batch"),
    ],
)
def test_bad_profile_is_refused_by_field_and_leaves_nothing(
    store: ControlStore, profile_of: Maker, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidInputError, match=named):
        store.save_profile(profile_of(**changes))
    assert store.list_profiles() == []


def test_plan_comes_back_as_it_was_saved(store: ControlStore, profile_of: Maker) -> None:
    profile = store.save_profile(profile_of())
    assert profile.id is not None
    data = {
        "verdict": "feasible",
        "request": {"slo_ms": 50.0},
        "coverage": np.float64(0.2),
        "device_bytes": np.int64(1 << 40),
    }
    extra = {"bound": math.inf, "missing": None, "trace": [[0, 0.5], [1, -math.inf]], "ünï": "çöde ☃"}
    arrays = {"resident_lists": np.arange(5), "list_device": np.full(16, -1, np.int16), "empty": np.empty((0, 2))}
    plan_id = store.save_plan({"data": {**data, **extra}, "arrays": arrays}, profile.id)
    plan = store.load_plan(plan_id)
    assert (plan.id, plan.profile_id, plan.index_fingerprint) == (plan_id, profile.id, "ix-a")
    assert plan.created_at == "2030-01-01T00:00:01.000000+00:00"
    assert plan.record["data"] == {**data, **extra}
    assert type(plan.record["data"]["device_bytes"]) is int
    assert plan.record["arrays"].keys() == arrays.keys()
    for name, array in arrays.items():
        assert plan.record["arrays"][name].dtype == array.dtype
        np.testing.assert_array_equal(plan.record["arrays"][name], array)
    (summary,) = store.list_plans()
    assert (summary.verdict, summary.slo_ms, summary.coverage, summary.device_bytes) == ("feasible", 50.0, 0.2, 1 << 40)


def test_newest_plan_of_an_index_is_loaded(store: ControlStore, profile_of: Maker) -> None:
    profiles = [store.save_profile(profile_of(index_fingerprint=f)).id for f in ("ix-a", "ix-b")]
    record = {"data": {"verdict": "feasible", "slo_ms": 5, "coverage": math.inf}, "arrays": {}}
    ids = [store.save_plan(record, profiles[i] or 0) for i in (0, 0, 1)]
    assert store.load_plan().id == ids[2]
    assert {(p.slo_ms, p.coverage, p.device_bytes) for p in store.list_plans()} == {(5.0, None, None)}
    assert store.load_plan(index_fingerprint="ix-a").id == ids[1]
    assert [p.id for p in store.list_plans(index_fingerprint="ix-a")] == ids[:2]
    with pytest.raises(ProfileMismatchError, match="index 'ix-b', not 'ix-a'"):
        store.load_plan(ids[2], index_fingerprint="ix-a")
    with pytest.raises(ProfileError, match="no plan of index 'ix-c'"):
        store.load_plan(index_fingerprint="ix-c")


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({"data": {"verdict": "x"}}, "exactly the keys"),
        ({"data": {}, "arrays": {}}, "plan.data.verdict"),
        ({"data": {"verdict": "x", "a": np.zeros(1)}, "arrays": {}}, "plan.data.a"),
        ({"data": {"verdict": "x"}, "arrays": {"a": [1]}}, "plan.arrays.a"),
        ({"data": {"verdict": "x"}, "arrays": {"a": np.array([None])}}, "plan.arrays.a: dtype object"),
        ({"data": {"verdict": "x"}, "arrays": [1]}, "plan.arrays: list"),
    ],
)
def test_bad_plan_is_refused_and_leaves_nothing(
    store: ControlStore, profile_of: Maker, record: dict[str, Any], named: str
) -> None:
    profile = store.save_profile(profile_of())
    with pytest.raises(InvalidInputError, match=named):
        store.save_plan(record, profile.id or 0)
    assert store.list_plans() == []


def test_events_are_listed_newest_first(store: ControlStore) -> None:
    for i in range(5):
        store.record_event("refresh" if i % 2 else "drift", {"i": i, "rate": np.float32("nan")})
    assert [e.payload["i"] for e in store.list_events()] == [4, 3, 2, 1, 0]
    assert [e.payload["i"] for e in store.list_events(kind="drift", limit=2)] == [4, 2]
    newest = store.list_events(limit=1)[0]
    assert (newest.kind, newest.at) == ("drift", "2030-01-01T00:00:05.000000+00:00")
    assert math.isnan(newest.payload["rate"])
    for bad in (lambda: store.record_event("", {}), lambda: store.list_events(limit=0)):
        with pytest.raises(InvalidInputError):
            bad()


def test_events_of_one_index_are_asked_for_with_those_of_none(store: ControlStore) -> None:
    for i in range(4):
        store.record_event("refresh", {"index": "a", "i": i})
        store.record_event("refresh", {"index_fingerprint": "b", "i": i})
    store.record_event("drift", {"i": 4})
    store.record_event("drift", {"index": "b", "i": 5})

    def found(index: str, **options: Any) -> list[int]:
        return [e.payload["i"] for e in store.list_events(index_fingerprint=index, **options)]

    assert found("a") == [4, 3, 2, 1, 0]
    assert found("b", limit=3) == [5, 4, 3]
    assert found("a", limit=2, after_id=3) == [4, 3]
    assert found("a", after_id=5) == [4, 3]
    assert found("b", kind="refresh", limit=2) == [3, 2]
    assert found("c") == [4]
    assert [e.payload["i"] for e in store.list_events(after_id=8)] == [5, 4]


def test_events_of_one_index_are_found_without_reading_all(sqlite_path: Path) -> None:
    """By SQLite's plan alone: PostgreSQL plans by the sizes of tables."""
    asked: list[tuple[str, Any]] = []
    with ControlStore.open(sqlite_path) as store, store._opened.engine.connect() as connection:
        event.listen(
            store._opened.engine, "before_cursor_execute", lambda _c, _k, sql, values, *_: asked.append((sql, values))
        )
        store.list_events(index_fingerprint="a")
        sql, values = asked[-1]
        plan = [step[3] for step in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", values)]
    assert sum("ix_events_index_fingerprint (index_fingerprint=? AND id>?)" in step for step in plan) == 2
    assert not any("SCAN events" in step or "TEMP B-TREE" in step for step in plan)


def test_damaged_array_is_an_error_that_names_it(store: ControlStore, profile_of: Maker) -> None:
    profile = store.save_profile(profile_of())
    with store._opened.writer.begin() as connection:
        update = "UPDATE profile_arrays SET data = :d WHERE name = 'fit_probes'"
        connection.execute(text(update), {"d": b"HXA1 nonsense, nonsense"})
        # Of an older version: without it, the digest of the row is compared first.
        connection.execute(text("UPDATE profiles SET digest = NULL"))
    with pytest.raises(StoreError, match=f"profile {profile.id}, fit_probes"):
        store.load_profile(profile.id)
    with store._opened.writer.begin() as connection:
        connection.execute(text("DELETE FROM profile_arrays WHERE name = 'list_bytes'"))
    with pytest.raises(StoreError, match="list_bytes"):
        store.load_profile(profile.id)
    remove_profiles(store)


def test_a_plan_without_its_profile_cannot_exist(store: ControlStore, profile_of: Maker) -> None:
    profile = store.save_profile(profile_of())
    store.save_plan({"data": {"verdict": "x"}, "arrays": {}}, profile.id or 0)
    with pytest.raises(Exception, match=r"(?i)foreign key"), store._opened.writer.begin() as connection:
        connection.execute(text("DELETE FROM profiles"))


def test_threads_share_a_store(store: ControlStore, profile_of: Maker) -> None:
    start = threading.Barrier(6)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            start.wait()
            for i in range(4):
                profile = store.save_profile(profile_of(seed=number * 10 + i))
                assert store.load_profile(profile.id).seed == number * 10 + i
                store.record_event("thread", {"n": number})
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len({p.id for p in store.list_profiles()}) == 24
    assert len(store.list_events()) == 24


def test_closed_store_says_so(store_url: str) -> None:
    store = ControlStore.open(store_url)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="was closed"):
        store.list_plans()


def test_close_waits_for_calls_under_way(store_url: str) -> None:
    store = ControlStore.open(store_url)
    closer = threading.Thread(target=store.close)
    with store._transaction(writes=True) as session:
        closer.start()
        closer.join(0.05)
        assert closer.is_alive()
        session.execute(text("SELECT 1"))
    closer.join(300)
    assert not closer.is_alive()


def test_clock_must_tell_utc(store_url: str) -> None:
    with (
        ControlStore.open(store_url, clock=lambda: datetime(2030, 1, 1)) as store,
        pytest.raises(InvalidInputError, match="clock"),
    ):
        store.record_event("x", {})


@pytest.mark.parametrize("timeout", [0, -1, math.nan, math.inf, "5"])
def test_timeout_is_checked(tmp_path: Path, timeout: Any) -> None:
    with pytest.raises(InvalidInputError, match="busy_timeout_s"):
        ControlStore.open(tmp_path / "c.sqlite", busy_timeout_s=timeout)


def test_writer_waits_for_its_turn_and_then_gives_up(sqlite_path: Path) -> None:
    with ControlStore.open(sqlite_path) as holder, ControlStore.open(sqlite_path, busy_timeout_s=0.05) as other:
        with holder._opened.writer.begin():
            assert other.list_events() == []  # readers do not wait
            with pytest.raises(StoreLockedError, match="another process holds it"):
                other.record_event("x", {})
        assert other.record_event("x", {}) == 1


def test_full_disk_is_an_error_and_leaves_nothing(sqlite_path: Path, profile_of: Maker) -> None:
    with ControlStore.open(sqlite_path) as store:
        saved = store.save_profile(profile_of())

        @event.listens_for(store._opened.engine, "connect")
        def no_more_pages(connection: Any, record: object) -> None:
            connection.execute("PRAGMA max_page_count=1")  # SQLite takes the present size

        # Of the pool alone: a new pool would not close the connection that is out of this one.
        store._opened.engine.pool.dispose()
        with pytest.raises(StoreError, match=r"control\.sqlite: the disk is full; nothing was written"):
            store.save_profile(profile_of(nlist=5000))
        assert [p.id for p in store.list_profiles()] == [saved.id]
        store.check_invariants()


def test_password_is_not_in_messages() -> None:
    with pytest.raises(StoreError, match="postgresql") as caught:
        ControlStore.open("postgresql://u:s3cret@127.0.0.1:9/none", busy_timeout_s=1)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("data", [{}, [], 5, {"cpu_flags": [], "devices": []}, {"cpu_flags": 5, "devices": []}])
def test_damaged_hardware_is_an_error_that_names_it(store: ControlStore, profile_of: Maker, data: Any) -> None:
    saved = store.save_profile(profile_of())
    with store._opened.writer.begin() as connection:
        connection.execute(update(HardwareRow).values(data=data))
    with pytest.raises(StoreError, match=f"the machine of profile {saved.id}: damaged"):
        store.load_profile(saved.id)
    # As another version could have written it.
    with store._opened.writer.begin() as connection:
        connection.execute(update(HardwareRow).values(digest=digest_of_json(data)))
        connection.execute(text("UPDATE profiles SET digest = NULL"))
    with pytest.raises(StoreError, match=f"profile {saved.id}: its hardware is a damaged row"):
        store.load_profile(saved.id)
    remove_profiles(store)


@pytest.mark.parametrize("damage", ["'{\"cpu_flags\": ['", "CAST(x'ff7b7d' AS TEXT)", "'" + "[" * 100_000 + "'"])
def test_damaged_json_and_text_are_errors_that_name_the_store(
    sqlite_path: Path, profile_of: Maker, damage: str
) -> None:
    with ControlStore.open(sqlite_path) as store:
        saved = store.save_profile(profile_of())
        with store._opened.writer.begin() as connection:
            connection.exec_driver_sql(f"UPDATE hardware SET data = {damage}")
        with pytest.raises(StoreError, match=r"control store .*control\.sqlite: .*(damaged|decode)"):
            store.load_profile(saved.id)
