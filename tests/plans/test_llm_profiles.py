"""LLM measurements in the control store, and what a plan takes from them."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import asdict, replace

import pytest

from hybridindex.errors import ProfileError, StoreError
from hybridindex.plans.llm_profiles import (
    find_llm_measurement,
    list_llm_measurements,
    llm_profile_from_data,
    load_llm_profile,
    save_llm_measurement,
)
from hybridindex.store import ControlStore
from hybridindex.types import LLMLevel, LLMMeasurement, LLMProfile

LEVEL = LLMLevel(concurrency=1, n_requests=4, input_tokens=10.5, output_tokens=3.0, throughput_rps=2.0, kv_usage=0.5)


def measurement(kv: int, rps: float, **changes) -> LLMMeasurement:
    profile = LLMProfile(
        kv_cache_bytes=kv, throughput_rps=rps, points=((kv, rps),), input_tokens=10, generation_s={"answer": 0.5}
    )
    made = LLMMeasurement(
        created_at="2030-01-31T12:00:00+00:00",
        hardware_fingerprint="hw-a",
        model="tiny",
        method="server",
        profile=profile,
        levels=(LEVEL,),
        prefill=((64, 0.1),),
        refused=((1, "too small"),),
        notes={"url": "http://h"},
    )
    return replace(made, **changes)


@pytest.fixture
def store(tmp_path):
    with ControlStore.open(tmp_path / "control.sqlite") as opened:
        yield opened


def test_the_latest_measurement_of_a_served_model_is_found(store: ControlStore) -> None:
    assert find_llm_measurement(store, "tiny") is None
    ours = [measurement(100, 1.0), measurement(100, 2.0)]
    for made in (*ours, measurement(100, 3.0, model="other"), measurement(100, 4.0, method="offline")):
        save_llm_measurement(store, made)
    assert find_llm_measurement(store, "tiny") == ours[1]


def test_measurements_come_back_as_they_were_saved(store: ControlStore) -> None:
    saved = [measurement(100, 1.0), measurement(200, 4.0)]
    numbers = [save_llm_measurement(store, m) for m in saved]
    assert list_llm_measurements(store) == list(zip(numbers, saved, strict=True))


def test_the_latest_is_a_curve_of_all_that_are_alike_here(store: ControlStore) -> None:
    first = save_llm_measurement(store, measurement(100, 1.0))
    save_llm_measurement(store, measurement(150, 9.0, hardware_fingerprint="hw-b"))
    save_llm_measurement(store, measurement(200, 4.0))
    assert load_llm_profile(store, hardware_fingerprint="hw-a").points == ((100, 1.0), (200, 4.0))
    assert load_llm_profile(store, str(first), hardware_fingerprint="hw-a").points == ((100, 1.0),)
    assert load_llm_profile(store, hardware_fingerprint="hw-b").points == ((150, 9.0),)


def test_what_is_missing_or_of_another_machine_is_said(store: ControlStore) -> None:
    with pytest.raises(ProfileError, match="no LLM measurement of this machine; run profile llm here"):
        load_llm_profile(store, hardware_fingerprint="hw-a")
    number = save_llm_measurement(store, measurement(100, 1.0))
    with pytest.raises(ProfileError, match="1 of another machine"):
        load_llm_profile(store, hardware_fingerprint="hw-z")
    with pytest.raises(ProfileError, match=f"no LLM measurement {number + 1}"):
        load_llm_profile(store, str(number + 1), hardware_fingerprint=None)


DAMAGES = {
    "other bytes": "UPDATE events SET data = replace(data, 'tiny', 'tinx') WHERE id = 2",
    "no JSON": "UPDATE events SET data = '{\"profile\": [' WHERE id = 2",
    "no text": "UPDATE events SET data = CAST(x'ff7b7d' AS TEXT) WHERE id = 2",
    "no measurement": "UPDATE events SET data = '{\"levels\": [{}]}', digest = NULL WHERE id = 2",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_measurement_hides_no_other(store: ControlStore, caplog, damage: str) -> None:
    first, _, last = (save_llm_measurement(store, measurement(100 * n, float(n))) for n in (1, 2, 3))
    with store._opened.writer.begin() as connection:
        connection.exec_driver_sql(damage)
    assert [number for number, _ in list_llm_measurements(store)] == [first, last]
    assert "LLM measurement 2 is left out: control store" in caplog.text
    assert find_llm_measurement(store, "tiny") == measurement(300, 3.0)
    assert load_llm_profile(store, hardware_fingerprint="hw-a").points == ((100, 1.0), (300, 3.0))
    assert load_llm_profile(store, "3", hardware_fingerprint="hw-a").points == ((300, 3.0),)
    with pytest.raises(StoreError, match=r"LLM measurement 2: control store .*(damaged|decode)"):
        load_llm_profile(store, "2", hardware_fingerprint="hw-a")


def test_a_store_that_cannot_be_read_is_an_error(store: ControlStore, monkeypatch) -> None:
    save_llm_measurement(store, measurement(100, 1.0))

    def fail(*_):
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr("hybridindex.store.plans.event_of", fail)
    with pytest.raises(StoreError, match="disk I/O error"):
        list_llm_measurements(store)


def test_a_file_may_hold_a_profile_or_a_whole_measurement() -> None:
    made = measurement(100, 1.0)
    for data in (asdict(made), asdict(made.profile)):
        assert llm_profile_from_data(json.loads(json.dumps(data))) == made.profile
