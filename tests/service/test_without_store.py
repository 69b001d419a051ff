"""Searches never need the control store: a daemon starts without it, and goes on and keeps its plan when it is lost."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.config import RouterConfig
from hybridindex.errors import DeviceError, OverloadedError, StoreError
from hybridindex.plans.current import save_plan
from hybridindex.refresh.refresher import Refresher
from hybridindex.service import core, reload
from hybridindex.service.config import ServiceConfig
from hybridindex.service.core import Service
from hybridindex.service.several.config import IndexConfig
from hybridindex.service.several.indexes import Indexes
from hybridindex.service.status import status_of
from tests.clustered import clustered
from tests.service.changes.test_served_plan import forget_what_was_applied
from tests.service.conftest import ask, assert_same


def no_database(file):
    file.write_bytes(b"no database" * 1000)


def malformed(file):
    with file.open("r+b") as raw:
        raw.seek(8192)
        raw.write(b"\xff" * (file.stat().st_size - 8192))


def of_another_program(file):
    with closing(sqlite3.connect(file)) as raw:
        raw.execute("CREATE TABLE notes (text)")


def newer(file):
    with closing(sqlite3.connect(file)) as raw:
        raw.executescript(
            "CREATE TABLE alembic_version (version_num TEXT); INSERT INTO alembic_version VALUES ('9999')"
        )
        raw.execute(f"PRAGMA application_id={0x68796278}")


def folder(file):
    file.mkdir()


DAMAGES = [
    (no_database, "restore it from a copy"),
    (malformed, "restore it from a copy"),
    (of_another_program, "move it away"),
    (newer, "upgrade hybridindex"),
    (folder, "give the path of a file"),
]


@pytest.fixture
def file(index_path):
    return index_path / "control.sqlite"


def spoil(file, damage):
    """Keeps a copy of the store, to be put back."""
    kept = file.with_name("kept")
    kept.write_bytes(file.read_bytes())
    if damage is not malformed:
        file.unlink()
    damage(file)
    return kept


def put_back(service, kept):
    file = service.store.file
    if file.is_dir():
        file.rmdir()
    kept.rename(file)
    # It is tried once a second.
    service.store._retry_s = 0.0


def wrong(service):
    answer = ask(service, "GET", "/healthz")
    found = {check["name"]: check["detail"] for check in answer.json()["checks"] if not check["ok"]}
    assert answer.status_code == (503 if found else 200)
    return found


@pytest.mark.parametrize(("damage", "cure"), DAMAGES)
def test_the_host_serves_and_the_plan_follows_when_the_store_is_back(
    make_service, index_path, file, damage, cure, caplog
):
    with hx.open(index_path) as index:
        expected = index.search(clustered(20, seed=3), 5)
    kept = spoil(file, damage)
    service = make_service()
    assert (service.plan_id, service.router.devices) == (None, ())
    assert_same(service.router.search(clustered(20, seed=3), 5), expected)
    # The log names the path; clients are told no path.
    assert str(file) in caplog.text
    note = status_of(service)["note"]
    assert cure in note
    assert str(file.parent) not in note
    assert list(wrong(service)) == ["control store"]
    assert cure in wrong(service)["control store"]
    assert ask(service, "POST", "/v1/plans/1/apply", json={}).status_code == 507
    service.store._retry_s = 0.0
    assert not service.store_changed()

    put_back(service, kept)
    assert service.store_changed()
    service.take_up_store()
    assert service.plan_id == 1
    assert len(service.router.devices) == 1
    assert status_of(service)["note"] is None
    assert not wrong(service)
    assert not service.store_changed()
    assert_same(service.router.search(clustered(20, seed=3), 5), expected)


def test_devices_that_cannot_be_opened_are_tried_once_for_each_store(make_service, file, monkeypatch, caplog):
    """They were opened again every two seconds, for ever."""
    kept = spoil(file, no_database)
    service = make_service()
    put_back(service, kept)
    assert service.store_changed()

    def broken(*_args, **_options):
        raise DeviceError("it is broken")

    with monkeypatch.context() as patched:
        patched.setattr(reload, "open_serving", broken)
        service.take_up_store()
    assert "the devices could not be opened" in caplog.text
    assert "the host serves: it is broken" in status_of(service)["note"]
    assert not service.store_changed()
    assert service.apply_plan("1")["applied"]
    assert len(service.router.devices) == 1
    assert status_of(service)["note"] is None


def test_a_plan_that_is_named_needs_the_store(index_path, file):
    spoil(file, no_database)
    with pytest.raises(StoreError, match="restore it from a copy"):
        Service.open(index_path, ServiceConfig(plan="1"))


def test_without_a_plan_only_the_store_is_missing(make_service, file):
    kept = spoil(file, no_database)
    service = make_service(plan="none")
    assert status_of(service)["note"].startswith("no plan can be stored or applied, searches go on: control store")
    put_back(service, kept)
    assert service.store_changed()
    service.take_up_store()
    assert status_of(service)["note"] is None
    assert service.plan_id is None


def test_a_refresh_begins_when_the_store_is_back(make_service, file):
    kept = spoil(file, no_database)
    service = make_service(make_refresher=Refresher)
    service.start()
    assert service.refresher is None
    put_back(service, kept)
    assert service.store_changed()
    service.take_up_store()
    assert service.refresher.status().plan_id == 1


def test_another_generation_serves_without_the_store(make_service, index_path, file):
    service = make_service()
    kept = spoil(file, no_database)
    vectors = clustered(3000, seed=5)
    hx.build(vectors, index_path, nlist=24, metric="l2", nprobe=6, replace=True).close()
    assert service.reload()["reloaded"]
    assert service.index.count == 3000
    assert "is asked again" in status_of(service)["note"]
    put_back(service, kept)
    assert service.store_changed()
    service.take_up_store()
    # Its plan is of the content before.
    assert "no plan is stored" in status_of(service)["note"]
    assert not service.store_changed()


def test_one_of_several_indexes_serves_without_its_store(index_path, tmp_path, file):
    other = tmp_path / "other"
    with hx.open(index_path) as index:
        index.save(other).close()
    spoil(file, no_database)
    config = ServiceConfig(router=RouterConfig(devices=("cpu",), device_budget_bytes=8 << 20))
    told = {"sick": IndexConfig(path=index_path, slo_ms=20), "well": IndexConfig(path=other)}
    indexes = Indexes.open(told, config)
    try:
        rows = {row["name"]: row for row in indexes.listing()["indexes"]}
        assert "is asked again" in rows["sick"]["note"]
        assert rows["well"]["plan_id"] is not None
        for service in indexes.services.values():
            assert len(service.router.search(clustered(3, seed=3)).ids) == 3
    finally:
        indexes.close()


def test_a_damaged_plan_is_not_served_and_another_one_takes_its_place(make_service, index_path, file):
    with hx.open(index_path) as index:
        second = index.apply_plan(index.plan(50, 16 << 20, coverage=0.6))
    with closing(sqlite3.connect(file)) as raw, raw:
        raw.execute(f"UPDATE plans SET coverage = 0.9 WHERE id = {second}")
    service = make_service()
    assert service.plan_id is None
    says = f"plan {second}: damaged, it is not what was written; restore the store from a copy, or make and apply"
    assert says in status_of(service)["note"]
    assert says in wrong(service)["control store"]
    assert service.store_changed()
    service.take_up_store()
    assert service.store_changed(), "it is asked again"
    assert service.apply_plan("1")["applied"]
    service.take_up_store()
    assert not service.store_changed()
    assert not wrong(service)
    assert service.history()["applied"][-1]["plan_id"] == 1
    # One that serves and is applied anew is stored beside the damaged row.
    assert service.repartition(apply=True, coverage=0.6)["plan_id"] == second + 1


# Lost while it serves


def resumed(index_path):
    """The id of the plan that a restart serves, and its lists."""
    service = Service.open(index_path, ServiceConfig(router=RouterConfig(devices=("cpu",))))
    try:
        return service.plan_id, service.router.plan.resident_lists
    finally:
        service.close()


@pytest.mark.parametrize("refresh", [False, True])
def test_a_store_that_is_deleted_is_made_anew_with_the_plan_in_force(make_service, index_path, file, refresh, caplog):
    service = make_service(make_refresher=Refresher if refresh else None)
    service.start()
    assert not service.store_changed()
    lists = service.router.plan.resident_lists
    file.unlink()
    with pytest.raises(StoreError, match="deleted or moved away"):
        service.apply_plan("1")
    assert "rename it into place" in caplog.text
    assert "no plan can be stored or applied" in status_of(service)["note"]
    assert service.store_changed()
    service.take_up_store()
    assert not service.store_changed()
    assert status_of(service)["note"] is None
    assert not wrong(service)
    assert service.committed_plan_id() == 1
    # What is applied from now on lasts, too.
    answer = service.apply_plan("1")
    assert answer["plan_id"] == 1
    service.close()
    number, found = resumed(index_path)
    assert number == 1
    assert np.array_equal(found, lists)


def test_a_note_about_stored_plans_is_of_the_store_that_is_there(make_service, index_path, file):
    forget_what_was_applied(index_path)
    service = make_service()
    assert "plan 1 is stored" in status_of(service)["note"]
    file.unlink()
    with pytest.raises(StoreError, match="deleted or moved away"):
        service.history()
    assert service.store_changed()
    service.take_up_store()
    assert "plan 1 is stored" not in (status_of(service)["note"] or "")


def test_a_store_of_others_in_its_place_gets_the_plan_in_force(make_service, index_path, file):
    # Its row 1 is another profile, and another plan is current there.
    service = make_service()
    lists = service.router.plan.resident_lists
    other = file.with_name("other.sqlite")
    with hx.open(index_path) as index:
        profile = index.profile(clustered(300, seed=9), 6, devices=["cpu"], max_seconds=0.2, store_url=str(other))
        index.apply_plan(index.plan(50, 16 << 20, profile, coverage=0.6), store_url=str(other))
    other.rename(file)
    assert not service.store_changed()
    assert service.store_changed()
    service.take_up_store()
    assert service.plan_id == 2
    # Later plans are of the right profile.
    applied = service.repartition(apply=True, coverage=0.4)["plan_id"]
    stored = service.store.load_plan(applied)
    assert service.store.load_profile(stored.profile_id).created_at == service.router.plan.analysis.profile.created_at
    service.apply_plan("2")
    service.close()
    number, found = resumed(index_path)
    assert number == 2
    assert np.array_equal(found, lists)


def test_a_plan_that_could_not_be_recorded_at_the_start_is_later(make_service, index_path, monkeypatch, caplog):
    with hx.open(index_path) as index, index.store() as store:
        _, second = save_plan(store, index.plan(50, 16 << 20, coverage=0.6))

    def full(*_args, **_options):
        raise StoreError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(core, "make_current", full)
        service = make_service(plan=str(second))
    assert service.plan_id == second
    assert "a restart would not resume it; it is tried again: the disk is full" in caplog.text
    assert service.store_changed()
    service.take_up_store()
    assert not service.store_changed()
    assert service.history()["applied"][-1]["plan_id"] == second


def test_the_plan_waits_for_another_change(make_service, file):
    service = make_service()
    file.unlink()
    assert not service.store_changed()
    with service.changes.one_change(), pytest.raises(OverloadedError):
        service.take_up_store()
    assert service.store_changed()
