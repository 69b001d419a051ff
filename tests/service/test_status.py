"""What a daemon says of itself: hit rates, and in ``/healthz`` the key file and a store that cannot be written."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from contextlib import closing
from functools import partial

from hybridindex.cli.commands.daemon import _status_table
from hybridindex.cli.console import readable_bytes
from hybridindex.errors import DeviceSlowError
from hybridindex.service import pruning
from hybridindex.service.auth import KeyFile, Keyring
from hybridindex.service.http.store_calls import StoreCalls
from hybridindex.service.observe.series import Series
from hybridindex.service.pruning import prune
from hybridindex.service.status import status_of
from hybridindex.store.retention import Retention
from tests.service.conftest import ask

UNREADABLE = "the key file cannot be read; the keys read before stay in force"


def wrong(answer):
    return {c["name"]: c["detail"] for c in answer.json()["checks"] if not c["ok"]}


def test_a_key_file_that_cannot_be_read_is_told_and_the_last_keys_stay(service, tmp_path):
    file = KeyFile(tmp_path / "keys.json")
    key = file.add("web", "search")
    good = file.path.read_bytes()
    asked = {"app_options": {"keyring": Keyring(file.path)}, "headers": {"authorization": f"Bearer {key}"}}
    assert ask(service, "GET", "/healthz", **asked).status_code == 200
    for spoil in (
        lambda: file.path.write_text("{"),
        file.path.unlink,
        lambda: file.path.write_bytes(good),
        lambda: os.chmod(file.path, 0o622),
        lambda: os.chmod(file.path, 0o600),
    ):
        spoil()
        answer = ask(service, "GET", "/healthz", **asked)
        whole = file.path.exists() and file.path.read_bytes() == good and file.path.stat().st_mode & 0o022 == 0
        assert answer.status_code == (200 if whole else 503)
        assert wrong(answer) == (
            {} if whole else {"keys": "the key file cannot be read; the keys read before stay in force"}
        )
    # A stranger is told nothing.
    asked["headers"] = {}
    assert ask(service, "GET", "/healthz", **asked).status_code == 401


def test_without_keys_there_is_no_check_of_keys(service):
    assert "keys" not in {c["name"] for c in ask(service, "GET", "/healthz").json()["checks"]}


def test_a_slow_device_is_told_apart_from_a_failed_one(service, monkeypatch):
    [tier] = service.router.devices
    monkeypatch.setattr(tier, "retry_due", lambda now_s: False)  # it would work again
    tier.fail(DeviceSlowError("late"))
    assert wrong(ask(service, "GET", "/healthz")) == {
        f"device {tier.label}": "failed 1 time(s), the last by being slow"
    }
    tier.fail(RuntimeError("gone"))
    assert wrong(ask(service, "GET", "/healthz")) == {f"device {tier.label}": "failed 2 time(s)"}


def test_the_hit_rate_is_expected_of_the_lists_that_are_placed(make_service):
    service = make_service(router={"device_budget_bytes": 256 << 10})
    whole = service.repartition(apply=True, coverage=0.05, force=True)["planned"]["hit_rate"]
    assert status_of(service)["expected_hit_rate"] == status_of(service)["planned_hit_rate"] == whole
    few = service.repartition(apply=True, coverage=1.0, force=True)
    told, series = status_of(service), Series(service, lambda: 7.0)
    assert told["expected_hit_rate"] == few["placed"]["hit_rate"] < few["planned"]["hit_rate"]
    assert told["planned_hit_rate"] == series.read()["planned_hit_rate"] == few["planned"]["hit_rate"]
    assert series.sample().expected_hit_rate == told["expected_hit_rate"]
    expected, planned = f"{told['expected_hit_rate']:.1%}", f"{told['planned_hit_rate']:.1%}"
    lines = dict(zip(*(column.cells for column in _status_table(told).columns), strict=True))
    assert lines["hit rate"] == f"0.0% (expected {expected}; with all lists of the plan {planned})"
    device, nbytes = told["devices"][0], told["index"]["list_bytes"]
    assert f"of {readable_bytes(nbytes)} resident" in lines[device["name"]]
    # Rows beside codes are no part of what is scanned.
    told["residency"]["rows"] = 7
    lines = dict(zip(*(column.cells for column in _status_table(told).columns), strict=True))
    assert "with the rows of 7 lists resident" in lines[device["name"]]
    said = ask(service, "GET", "/metrics").text.splitlines()
    assert f"hybridindex_hit_rate_expected {told['expected_hit_rate']}" in said
    assert f"hybridindex_hit_rate_planned {told['planned_hit_rate']}" in said


def test_a_store_that_cannot_be_written_is_told(make_service, index_path):
    service = make_service()
    # What a directory that became read-only does to SQLite, which root would not notice by permissions.
    for connection in (service.store._opened.engine.raw_connection(),):
        connection.execute("PRAGMA query_only=ON")
        connection.close()
    answer = ask(service, "GET", "/healthz")
    assert answer.status_code == 503
    assert list(wrong(answer)) == ["control store"]
    assert "cannot be written" in wrong(answer)["control store"]
    # Searches go on.
    assert ask(service, "POST", "/v1/search", json={"queries": [0.0] * 24}).status_code == 200


def test_pruning_goes_on_after_a_surprise(service, monkeypatch, caplog):
    calls = []

    async def run():
        third = asyncio.Event()
        loop = asyncio.get_running_loop()

        def surprise(_service):
            calls.append(threading.current_thread().name)
            if len(calls) == 3:
                loop.call_soon_threadsafe(third.set)
            raise RuntimeError("nobody thought of this")

        monkeypatch.setattr(pruning, "prune", surprise)
        monkeypatch.setattr(pruning, "_EVERY_S", 0)
        store_calls = StoreCalls(loop.time, client_share=0.5)
        task = asyncio.create_task(pruning.prune_now_and_then(service, partial(store_calls.read, "")))
        await asyncio.wait([task, asyncio.create_task(third.wait())], return_when=asyncio.FIRST_COMPLETED)
        task.cancel()
        store_calls.close()

    asyncio.run(run())
    assert len(calls) >= 3
    assert all(name.startswith("hybridindex-store") for name in calls), "sessions would wait for it"
    assert "pruning failed" in caplog.text


def test_a_daemon_prunes_and_survives_a_store_that_refuses(make_service, caplog):
    service = make_service(retention=Retention(plans=1, profiles=1, events=1))
    for coverage in (0.5, 0.6, 0.7):
        service.repartition(apply=True, coverage=coverage)
    prune(service)
    history = service.history()
    assert [p["id"] for p in history["plans"]] == [4]
    assert [a["plan_id"] for a in history["applied"]] == [4]
    service.store.close()
    prune(service)
    assert "was not pruned" in caplog.text


def test_asking_for_health_changes_nothing_in_the_store(service, index_path):
    before = service.store.list_events(limit=1000)
    for _ in range(3):
        assert ask(service, "GET", "/healthz").status_code == 200
    assert service.store.list_events(limit=1000) == before
    service.store.check_invariants()
    with closing(sqlite3.connect(index_path / "control.sqlite")) as raw:
        assert raw.execute("PRAGMA user_version").fetchone() == (0,)
