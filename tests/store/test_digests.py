"""Damage of a row is found when it is read; rows of an older version have no digest and are read as they are."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import text

from hybridindex.errors import HybridIndexError, StoreError
from hybridindex.store import ControlStore
from hybridindex.store.records import ScheduleEntry
from hybridindex.types import Profile, StageSample

Maker = Callable[..., Profile]
PLAN: dict[str, Any] = {
    "data": {"verdict": "feasible", "coverage": 0.3, "request": {"slo_ms": 50}},
    "arrays": {"list_device": np.array([0, -1, 0], dtype=np.int8)},
}


def fill(store: ControlStore, profile_of: Maker) -> None:
    parent = store.save_profile(profile_of())
    store.save_profile(replace(parent, id=None, seed=7), parent=parent)
    store.save_plan(PLAN, 1)
    store.record_event("plan_current", {"plan_id": 1, "index_fingerprint": "ix-a"})
    store.set_schedule(ScheduleEntry(name="nightly", kind="cron", spec="0 3 * * *", action="update"))
    store.mark_schedule_run("nightly")


def content(store: ControlStore) -> str:
    profiles = [store.load_profile(row.id) for row in store.list_profiles()]
    plans = [store.load_plan(row.id) for row in store.list_plans()]
    return repr((profiles, plans, store.list_plans(), store.list_events(), store.list_schedule()))


@pytest.mark.parametrize(
    ("damage", "names"),
    [
        ('UPDATE plans SET data = \'{"verdict": "feasible", "coverage": 0.9}\'', "plan 1"),
        ("UPDATE plans SET verdict = 'infeasible'", "plan 1"),
        ("UPDATE plans SET profile_id = 2", "plan 1"),
        ("UPDATE plans SET trial = true", "plan 1"),
        ("UPDATE plan_arrays SET data = (SELECT data FROM profile_arrays LIMIT 1)", "plan 1"),
        ("DELETE FROM plan_arrays", "plan 1"),
        ("UPDATE profiles SET nprobe = 2 WHERE id = 2", "profile 2"),
        ("UPDATE profiles SET load_average = 0.125 WHERE id = 2", "profile 2"),
        ("UPDATE profile_arrays SET name = 'held_probes2' WHERE name = 'held_probes' AND profile_id = 2", "profile 2"),
        ("UPDATE latency_samples SET seconds = 0.125 WHERE profile_id = 2 AND position = 1", "stages of profile 2"),
        ("UPDATE latency_samples SET position = 9 WHERE profile_id = 2 AND position = 0", "stages of profile 2"),
        ("DELETE FROM transfer_samples WHERE profile_id = 2", "transfers of profile 2"),
        ("UPDATE recall_points SET recall = 1 WHERE profile_id = 2", "recall of profile 2"),
        ("UPDATE hardware SET data = '{}'", "the machine of profile [12]"),
        (
            'UPDATE events SET data = \'{"plan_id": 2, "index_fingerprint": "ix-a"}\'',
            r"event 1 \(plan_current\)",
        ),
        ("UPDATE events SET at = '2031-01-01T00:00:00+00:00'", "event 1 .plan_current."),
        ("UPDATE refresh_schedule SET spec = '0 4 * * *'", "schedule 'nightly'"),
        ("UPDATE refresh_schedule SET last_run_at = NULL", "schedule 'nightly'"),
    ],
)
def test_another_value_is_an_error_that_names_store_row_and_cure(
    sqlite_path: Path, empty_store: Path, profile_of: Maker, damage: str, names: str
) -> None:
    shutil.copy(empty_store, sqlite_path)
    with ControlStore.open(sqlite_path) as store:
        fill(store, profile_of)
        store.check_invariants()
        with store._opened.writer.begin() as connection:
            connection.execute(text(damage))
        says = f"control store .*: {names}: damaged, .*restore the store from a copy, or "
        with pytest.raises(StoreError, match=says):
            content(store)
        with pytest.raises(StoreError, match=says):
            store.check_invariants()


def test_rows_of_an_older_version_are_read_as_they_are(store: ControlStore, profile_of: Maker) -> None:
    fill(store, profile_of)
    whole = content(store)
    with store._opened.writer.begin() as connection:
        for table in ("plans", "profiles", "events", "refresh_schedule"):
            connection.execute(text(f"UPDATE {table} SET digest = NULL"))
        connection.execute(text("UPDATE profiles SET sample_digests = NULL"))
    assert content(store) == whole
    store.mark_schedule_run("nightly")
    # Copied samples get the digest that those they are copied from have not.
    parent = store.load_profile(1)
    renewed = store.save_profile(replace(parent, id=None, seed=9), parent=parent)
    with store._opened.writer.begin() as connection:
        connection.execute(text(f"UPDATE latency_samples SET batch = 5 WHERE profile_id = {renewed.id}"))
    with pytest.raises(StoreError, match=f"stages of profile {renewed.id}: damaged"):
        store.load_profile(renewed.id)
    with store._opened.writer.begin() as connection:
        connection.execute(text(f"DELETE FROM profiles WHERE id = {renewed.id}"))


def test_a_damaged_row_of_the_schedule_is_not_made_good_by_its_run(store: ControlStore) -> None:
    store.set_schedule(ScheduleEntry(name="nightly", kind="cron", spec="0 3 * * *", action="update"))
    with store._opened.writer.begin() as connection:
        connection.execute(text("UPDATE refresh_schedule SET action = 'other'"))
    with pytest.raises(StoreError, match=r"schedule 'nightly': damaged, .*remove the row and set it again"):
        store.mark_schedule_run("nightly")
    store.remove_schedule("nightly")


def test_whole_numbers_in_columns_of_doubles_are_no_damage(store: ControlStore, profile_of: Maker) -> None:
    sample = StageSample(stage="coarse", batch=4, seconds=1)
    saved = store.save_profile(profile_of(load_average=2, stages=(sample,)))
    assert store.load_profile(saved.id).stages == (sample,)


def test_a_negative_zero_is_no_damage(store: ControlStore, profile_of: Maker) -> None:
    sample = StageSample(stage="coarse", batch=4, seconds=-0.0)
    saved = store.save_profile(profile_of(load_average=-0.0, stages=(sample,)))
    assert store.load_profile(saved.id).stages == (sample,)
    plan = store.save_plan({**PLAN, "data": {**PLAN["data"], "coverage": -0.0}}, saved.id)
    assert store.load_plan(plan).record["data"]["coverage"] == 0.0


def test_a_flipped_byte_of_the_file_changes_no_value(sqlite_path: Path, empty_store: Path, profile_of: Maker) -> None:
    shutil.copy(empty_store, sqlite_path)
    with ControlStore.open(sqlite_path) as store:
        fill(store, profile_of)
        whole = content(store)
    data, chosen, refused = sqlite_path.read_bytes(), random.Random(7), 0
    used = np.flatnonzero(np.frombuffer(data, np.uint8))
    for place in chosen.sample(used.tolist(), 24):
        damaged = bytearray(data)
        damaged[place] ^= 1 << chosen.randrange(8)
        sqlite_path.write_bytes(damaged)
        try:
            with ControlStore.open(sqlite_path) as store:
                store.check_invariants()
                found = content(store)
        except HybridIndexError as error:
            if str(sqlite_path) not in str(error):
                raise
            refused += 1
        else:
            assert found == whole
    assert refused > 10
