"""Rows of the control store say when updates are made; a row that makes no sense stops nothing."""

from __future__ import annotations

import dataclasses
import logging
import threading
from datetime import UTC, datetime, timedelta

import pytest

from hybridindex.errors import InvalidInputError, StoreError
from hybridindex.refresh.timetable import check_schedule, timetable_of
from hybridindex.store import ControlStore
from hybridindex.store.records import ScheduleEntry
from tests.cli.conftest import cli
from tests.refresh.world import CONFIG

__all__ = ["cli"]

NOW = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
HOURLY = ScheduleEntry(name="hourly", kind="interval", spec="3600", action="update")
NIGHTLY = ScheduleEntry(name="nightly", kind="cron", spec="0 3 * * *", action="update")


def ran(entry, **ago):
    return dataclasses.replace(entry, last_run_at=(NOW - timedelta(**ago)).isoformat())


def first_time(entry):
    table = timetable_of(entry, NOW)
    return table.first or table.trigger.get_next_fire_time(None, NOW)


def test_an_interval_goes_on_from_its_last_run_and_is_made_up_for_once():
    assert first_time(ran(HOURLY, minutes=40)) == NOW + timedelta(minutes=20)
    assert first_time(ran(HOURLY, days=3)) == NOW
    assert timetable_of(HOURLY, NOW).first is None


def test_an_interval_that_never_ran_counts_from_when_its_row_was_written():
    written = dataclasses.replace(HOURLY, created_at=(NOW - timedelta(minutes=40)).isoformat())
    assert first_time(written) == NOW + timedelta(minutes=20)
    assert first_time(dataclasses.replace(written, created_at="2026-03-01T00:00:00+00:00")) == NOW
    assert first_time(dataclasses.replace(ran(written, minutes=10))) == NOW + timedelta(minutes=50)


def test_a_cron_line_is_read_in_utc():
    assert first_time(NIGHTLY) == first_time(ran(NIGHTLY, days=3)) == datetime(2026, 3, 5, 3, tzinfo=UTC)


@pytest.mark.parametrize(
    ("days", "expected"),
    [
        ("* * 0", "Sun"),
        ("* * 7", "Sun"),
        ("* * 1-5", "Mon Tue Wed Thu Fri"),
        ("* * 0-2", "Sun Mon Tue"),
        ("* * 5-7", "Fri Sat Sun"),
        ("* * */2", "Sun Tue Thu Sat"),
        ("* * 1-5/2", "Mon Wed Fri"),
        ("* * 1,sat", "Mon Sat"),
        ("* * MON-FRI", "Mon Tue Wed Thu Fri"),
    ],
)
def test_days_of_the_week_are_those_of_cron(days, expected):
    trigger = timetable_of(dataclasses.replace(NIGHTLY, spec=f"0 3 {days}"), NOW).trigger
    at, found = NOW, set()
    for _ in range(14):
        at = trigger.get_next_fire_time(at, at + timedelta(seconds=1))
        found.add(f"{at:%a}")
    assert found == set(expected.split())


def test_either_of_two_days_is_enough():
    trigger = timetable_of(dataclasses.replace(NIGHTLY, spec="0 3 10 * fri"), NOW).trigger
    first = trigger.get_next_fire_time(None, NOW)
    second = trigger.get_next_fire_time(first, first + timedelta(seconds=1))
    third = trigger.get_next_fire_time(second, second + timedelta(seconds=1))
    assert [each.day for each in (first, second, third)] == [6, 10, 13]  # two Fridays, and the tenth between them


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("name", "", "interval"),
        ("name", "../x", "interval"),
        ("kind", "yearly", "interval"),
        ("action", "rm -rf", "interval"),
        ("spec", "0", "interval"),
        ("spec", "nan", "interval"),
        ("spec", "soon", "interval"),
        ("spec", "1e99", "interval"),
        ("spec", "61 3 * * *", "cron"),
        ("spec", "0 3", "cron"),
        ("spec", "0 3 * * 8", "cron"),
        ("spec", "0 3 * * 5-1", "cron"),
        ("spec", "0 3 * * 1/2", "cron"),
        ("spec", "0 3 * * mon-5", "cron"),
        ("spec", "0 3 30 2 *", "cron"),
        ("spec", "*" * 201, "cron"),
        ("last_run_at", "yesterday", "interval"),
        ("last_run_at", "2026-01-01T00:00:00", "interval"),
        ("last_run_at", "9026-01-01T00:00:00+00:00", "cron"),
        ("created_at", "yesterday", "interval"),
    ],
)
def test_a_bad_row_is_refused_by_name_and_field(field, value, kind):
    entry = dataclasses.replace(HOURLY if kind == "interval" else NIGHTLY, **{field: value})
    with pytest.raises(InvalidInputError) as refused:
        check_schedule(entry)
    assert str(refused.value).startswith(f"schedule {entry.name!r}: {field} is {value!r}; expected ")


def test_a_refresher_follows_the_rows_and_leaves_bad_ones_out(make_world, caplog):
    world = make_world(dataclasses.replace(CONFIG, tick_s=60.0))
    overdue = dataclasses.replace(HOURLY, last_run_at=None)
    world.store.set_schedule(dataclasses.replace(overdue, spec="1"))
    world.store.set_schedule(NIGHTLY)
    world.store.set_schedule(dataclasses.replace(NIGHTLY, name="off", enabled=False))
    world.store.set_schedule(dataclasses.replace(NIGHTLY, name="broken", spec="at noon"))
    ended = threading.Event()
    real = world.refresher._updates._on_ended
    world.refresher._updates._on_ended = lambda: (real(), ended.set())
    with caplog.at_level(logging.ERROR):
        world.refresher.start()
    status = world.refresher.status()
    assert status.schedule == ("hourly", "nightly")
    assert len(status.schedule_refused) == 1
    assert status.schedule_refused[0].startswith("schedule 'broken': spec is 'at noon'; expected a cron line")
    assert [r.getMessage() for r in caplog.records] == [f"a schedule is ignored: {status.schedule_refused[0]}"]
    assert ended.wait(300)
    world.refresher.close()
    assert world.events("refresh_ended")[0]["reason"] == "schedule hourly"
    rows = {row.name: row.last_run_at for row in world.store.list_schedule()}
    assert rows["hourly"] is not None
    assert rows["nightly"] is rows["off"] is rows["broken"] is None


def test_a_damaged_row_stops_no_other(make_world, caplog):
    world = make_world(dataclasses.replace(CONFIG, tick_s=60.0))
    world.store.set_schedule(dataclasses.replace(HOURLY, name="flipped"))
    world.store.set_schedule(NIGHTLY)
    with world.store._opened.writer.begin() as connection:
        connection.exec_driver_sql("UPDATE refresh_schedule SET spec = '3601' WHERE name = 'flipped'")
    with pytest.raises(StoreError, match="schedule 'flipped': damaged"):
        world.store.list_schedule()
    world.refresher.start()
    status = world.refresher.status()
    assert (status.running, status.schedule) == (True, ("nightly",))
    assert status.schedule_refused == ("schedule 'flipped': its row is damaged; remove it and set it again",)
    assert f"a schedule is ignored: control store {world.store.name}: schedule 'flipped': damaged" in caplog.text


@pytest.mark.parametrize("has_run", [True, False], ids=["has run", "never ran"])
def test_a_restart_keeps_the_schedule_and_its_times(make_world, has_run):
    world = make_world(dataclasses.replace(CONFIG, tick_s=60.0))
    world.store.set_schedule(HOURLY)
    if has_run:
        world.store.mark_schedule_run("hourly")
    world.refresher.start()
    world.refresher.close()
    world.store.close()
    again = make_world(dataclasses.replace(CONFIG, tick_s=60.0))
    again.refresher.start()
    assert again.refresher.status().schedule == ("hourly",)
    (row,) = again.store.list_schedule()
    (job,) = [j for j in again.refresher._scheduler.get_jobs() if j.id == "schedule hourly"]
    since = row.last_run_at if has_run else row.created_at
    assert job.next_run_time == datetime.fromisoformat(since) + timedelta(hours=1)


def test_a_row_replaces_the_one_of_its_name_and_there_is_an_end_to_them(tmp_path):
    with ControlStore.open(tmp_path / "control.sqlite") as store:
        for number in range(64):
            store.set_schedule(dataclasses.replace(HOURLY, name=f"row{number}"))
        with pytest.raises(InvalidInputError, match="64 are allowed"):
            store.set_schedule(HOURLY)
        store.mark_schedule_run("row7")
        store.mark_schedule_run("nobody")
        assert [row.name for row in store.list_schedule() if row.last_run_at] == ["row7"]
        store.set_schedule(dataclasses.replace(NIGHTLY, name="row7"))
        row7 = next(row for row in store.list_schedule() if row.name == "row7")
        assert row7 == dataclasses.replace(NIGHTLY, name="row7", created_at=row7.created_at)
        store.remove_schedule("row7")
        assert len(store.list_schedule()) == 63
        with pytest.raises(InvalidInputError, match="'row7'"):
            store.remove_schedule("row7")


def test_commands_write_show_and_remove_rows(cli, tmp_path):
    assert cli("refresh-schedule", "set", tmp_path, "often", "--every", "6h", "--json").json["spec"] == "21600"
    assert cli("refresh-schedule", "set", tmp_path, "nightly", "--cron", "0 3 * * *", "--disabled").code == 0
    rows = cli("refresh-schedule", "list", tmp_path, "--json").json["schedule"]
    assert [(r["name"], r["kind"], r["enabled"]) for r in rows] == [
        ("nightly", "cron", False),
        ("often", "interval", True),
    ]
    assert "0 3 * * *" in cli("refresh-schedule", "list", tmp_path).out
    for wrong in (["--every", "often"], ["--cron", "x"], [], ["--every", "1h", "--cron", "0 3 * * *"]):
        assert cli("refresh-schedule", "set", tmp_path, "bad", *wrong).code == 3, wrong
    assert cli("refresh-schedule", "remove", tmp_path, "often", "--json").json == {"removed": "often"}
    assert [r["name"] for r in cli("refresh-schedule", "list", tmp_path, "--json").json["schedule"]] == ["nightly"]
