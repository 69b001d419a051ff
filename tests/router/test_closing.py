"""Closing a router whose device never ends a scan or a copy: everything is answered, what is in use is left alone."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
import threading
from contextlib import ExitStack

import numpy as np
import pytest

from hybridindex.errors import DeviceError, RouterClosedError
from hybridindex.router import HealthPolicy, Router
from hybridindex.router.devices import device_queue
from hybridindex.tiers.contract import bounded_join as leaving
from hybridindex.tiers.paged import device_tier as device
from hybridindex.tiers.paged.arena import PageArena
from hybridindex.tiers.paged.copier import Copier
from hybridindex.tiers.paged.native_scanner import NativePageScanner
from hybridindex.tiers.shard.builder import ShardBuilder
from hybridindex.tiers.shard.scanner import StandInShard
from tests.clustered import NLIST, hand_made_plan, small_index
from tests.router.devices.test_health import QUERIES
from tests.router.test_router import check
from tests.stuck import WAIT_S, Stuck, ended
from tests.tiers.late_stream import LateStream

STUCK_S = 0.05


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("idx") / "i", n=1000, nprobe=8) as index:
        yield index


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Whose lists come in shards."""
    with small_index(tmp_path_factory.mktemp("idx") / "i", n=1000, nprobe=8, codec="faiss:PQ6x6np") as index:
        yield index


@pytest.fixture
def stuck():
    """Makes calls get stuck, until the test ends."""
    with ExitStack() as made:
        yield lambda *args: made.enter_context(Stuck(*args))


def open_router(index, judge="all", where=0, devices=("cpu",), **options):
    plan = hand_made_plan(index, np.full(NLIST, where), n_devices=len(devices))
    health = HealthPolicy(judge=judge, stuck_s=STUCK_S)
    return Router(index, plan=plan, devices=list(devices), health=health, **options)


def lane_thread(router, ordinal=0):
    return router._served.engine._device_queues[ordinal]._thread


@pytest.mark.parametrize("judge", ["all", "none"])
def test_a_scan_that_never_ends_is_answered_by_the_host_and_left_behind(index, stuck, caplog, judge):
    scan = stuck(NativePageScanner, "scan")
    router = open_router(index, judge)
    [tier] = router.devices
    lease = router._served.residency.n_leases
    futures = [router.submit(QUERIES[i:], 10, 8) for i in range(4)]  # more than batches may be under way
    assert scan.begun.wait(WAIT_S)
    ended(router.close)
    for i, future in enumerate(futures):
        check(index, QUERIES[i:], 10, 8, future.result(0))
    [record] = [r for r in caplog.records if "left behind" in r.message]
    assert f"device {tier.label}: a scan does not end" in record.message
    assert len(tier.arena.data) >= tier.arena.pages.n_pages > 0, "its memory went under the scan"
    assert router._served.residency.n_leases > lease
    ended(router.close)
    scan.go_on.set()
    lane_thread(router).join(WAIT_S)
    assert not lane_thread(router).is_alive()
    tier._mover.join(WAIT_S)
    assert not tier._mover.is_alive()
    assert router._served.residency.n_leases == lease
    assert "Traceback" not in caplog.text


def test_an_answer_that_a_device_s_thread_makes_on_the_host_is_waited_for(index, stuck, monkeypatch):
    """It ends: only what the device keeps is left behind."""
    router, asked = open_router(index), threading.Event()

    def broken(*_args, **_options):
        raise RuntimeError("it broke")

    def join_within(thread, limit_s, may_leave):
        def told():
            may = may_leave()
            asked.set()
            return may

        return leaving.join_within(thread, limit_s, told)

    monkeypatch.setattr(device_queue, "join_within", join_within)
    monkeypatch.setattr(NativePageScanner, "scan", broken)
    scan = stuck(type(router._served.host), "scan_checked")
    future = router.submit(QUERIES, 10, 8)
    assert scan.begun.wait(WAIT_S)
    closer = threading.Thread(target=router.close, daemon=True)
    closer.start()
    assert asked.wait(WAIT_S), "the wait has no end"
    assert closer.is_alive()
    scan.go_on.set()
    closer.join(WAIT_S)
    check(index, QUERIES, 10, 8, future.result(0))
    assert not lane_thread(router).is_alive()


def test_every_part_is_closed_whatever_another_raises(index, monkeypatch):
    router = open_router(index, devices=("cpu", "cpu"), device_budget_bytes=4 << 20)
    first, second = router.devices

    def broken():
        raise RuntimeError("a device was lost")

    monkeypatch.setattr(first, "_release", broken)
    with monkeypatch.context() as patch:
        closed = []
        patch.setattr(router._served.host, "close", lambda: closed.append("host"))
        with pytest.raises(RuntimeError, match="a device was lost"):
            router.close()
        assert closed == ["host"]
    assert len(second.arena.data) == 0
    router.close()
    router._served.host.close()


def test_the_other_devices_give_their_memory_back(index, stuck, caplog):
    router = open_router(index, devices=("cpu", "cpu"), device_budget_bytes=4 << 20, where=1)
    scan = stuck(NativePageScanner, "scan")
    router.submit(QUERIES, 10, 8)
    assert scan.begun.wait(WAIT_S)
    ended(router.close)
    assert [len(tier.arena.data) > 0 for tier in router.devices] == [False, True]


def test_a_shard_is_kept_for_its_scan(shards, stuck, caplog):
    scan = stuck(StandInShard, "search", lambda self, queries, *_: len(queries) == len(QUERIES))
    router = open_router(shards)
    [tier] = router.devices
    future = router.submit(QUERIES, 10, 8)
    assert scan.begun.wait(WAIT_S)
    ended(router.close)
    check(shards, QUERIES, 10, 8, future.result(0))
    assert tier.pages.n_shards == 1
    assert caplog.text.count("left behind") == 1
    scan.go_on.set()
    lane_thread(router).join(WAIT_S)
    assert "Traceback" not in caplog.text


def test_a_copy_that_never_ends_is_left_with_all_that_it_reads_and_writes(index, stuck, caplog):
    options = {"devices": ["cpu"], "device_budget_bytes": 8 << 20, "pin_host_lists": 8 << 20}
    router = Router(index, health=HealthPolicy(stuck_s=STUCK_S), **options)
    [tier] = router.devices
    held = router.stats().pinned_host_bytes
    assert held > 0
    write = stuck(PageArena, "write")
    session = router.session()
    landed = session.lookahead(QUERIES, nprobe=8)
    assert write.begun.wait(WAIT_S)
    ended(router.close)
    landed.result(0)
    assert f"device {tier.label}: a move does not end" in caplog.text
    assert len(tier.arena.data) >= tier.arena.pages.n_pages > 0
    assert router.stats().pinned_host_bytes == held
    write.go_on.set()
    tier._mover.join(WAIT_S)
    assert not tier._mover.is_alive()
    assert "Traceback" not in caplog.text


def test_so_is_a_copy_stream_that_never_drains(index, stuck, monkeypatch, caplog):
    monkeypatch.setattr(device, "open_copier", lambda arena, staging_bytes: Copier(arena, LateStream()))
    drain = stuck(LateStream, "drain")
    ended(open_router(index).close)
    assert drain.begun.is_set()
    assert "a move does not end" in caplog.text


def test_a_shard_that_is_never_built_is_waited_for_by_nobody(shards, stuck, caplog):
    router = open_router(shards, where=-1, device_budget_bytes=8 << 20)
    build = stuck(ShardBuilder, "_move")
    plan = hand_made_plan(shards, np.zeros(NLIST))

    def change():
        with contextlib.suppress(RouterClosedError):
            router.apply_plan(plan)

    changing = threading.Thread(target=change, daemon=True)
    changing.start()
    assert build.begun.wait(WAIT_S)
    [tier] = router.devices
    other = tier.load([0], router._served.residency)
    ended(router.close)
    changing.join(WAIT_S)
    assert not changing.is_alive()
    assert isinstance(other.exception(0), DeviceError)
    assert "a move does not end" in caplog.text
    assert tier.used_bytes > 0


@pytest.mark.parametrize("busy", ["plan", "device that came back", "lists that come late"])
def test_nobody_waits_for_a_device_that_was_about_to_get_lists(index, stuck, busy):
    """A change of plan ends with settle, before the close: a daemon waits for its threads in between."""
    router = open_router(index)
    [tier] = router.devices
    router._served.recovery.close()  # it would do the same
    router._served.residency.publish({}, drops=range(NLIST))
    write = stuck(PageArena, "write")
    target, *args = {
        "plan": (router.apply_plan, router.plan),
        "device that came back": (router._served._restore, tier),
        "lists that come late": (router._served.placement.complete,),
    }[busy]
    ends = []

    def change():
        try:
            ends.append(target(*args))
        except RouterClosedError as error:
            ends.append(str(error))

    before = router.plan
    changing = threading.Thread(target=change, daemon=True)
    changing.start()
    assert write.begun.wait(WAIT_S)
    router.settle()
    changing.join(WAIT_S)
    assert not changing.is_alive()
    assert router.plan is before
    # Whoever asked for a plan whose lists did not come is not told that it serves.
    assert ("while lists of the plan were moving" in str(ends[0])) == (busy == "plan")
    ended(router.close)


def test_a_trial_that_never_ends_keeps_no_thread(index, stuck, monkeypatch):
    router = open_router(index)
    [tier] = router.devices
    router._served.recovery._trial_wait_s = 1e9
    router._served.residency.publish({}, drops=range(NLIST))
    tier.fail(RuntimeError("it broke"))
    write = stuck(PageArena, "write")
    monkeypatch.setattr(tier, "retry_due", lambda now: tier.failure is not None)
    assert write.begun.wait(WAIT_S)  # the recovery looks each second
    ended(router.close)


def test_the_process_ends(tmp_path):
    """Threads that are left behind keep no interpreter alive. Takes as long as an interpreter with torch."""
    script = f"""
        import threading
        from pathlib import Path
        import numpy as np
        from hybridindex.router import HealthPolicy, Router
        from hybridindex.tiers.paged.native_scanner import NativePageScanner
        from tests.clustered import NLIST, hand_made_plan, small_index
        from tests.router.devices.test_health import QUERIES

        begun = threading.Event()
        NativePageScanner.scan = lambda *args, **options: begun.set() or threading.Event().wait()
        with small_index(Path({str(tmp_path)!r}) / "i", n=600, nprobe=8) as index:
            health = HealthPolicy(judge="all", stuck_s={STUCK_S})
            with Router(index, plan=hand_made_plan(index, np.zeros(NLIST)), devices=["cpu"], health=health) as router:
                future = router.submit(QUERIES, 10, 8)
                begun.wait()
        print(future.result(0).ids.shape)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, str((len(QUERIES), 10))), done.stderr


@pytest.mark.parametrize("devices", [(), ("cpu", "cpu")], ids=["host", "devices"])
def test_a_router_that_cannot_start_a_thread_leaves_none_behind(index, devices, monkeypatch):
    """Where a process may have no more threads, each attempt would keep some."""
    start, before, number = threading.Thread.start, set(threading.enumerate()), 0
    while True:
        left = number

        def refusing(thread):
            nonlocal left
            left -= 1
            if left < 0:
                raise RuntimeError("can't start new thread")
            start(thread)

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refusing)
            try:
                router = open_router(index, devices=devices, where=0 if devices else -1)
            except RuntimeError:
                router = None
        if router is not None:
            break
        for thread in set(threading.enumerate()) - before:
            thread.join(1)
        assert set(threading.enumerate()) <= before, f"of thread {number}"
        number += 1
    router.close()
    assert number > 2
