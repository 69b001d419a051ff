"""Simulated threads, locks, queues, futures and loops behave as the standard library's; waiting for ever is found."""

from __future__ import annotations

import asyncio

import pytest

from tests.simulation.virtual.event_loop import on_loop
from tests.simulation.virtual.primitives import (
    Condition,
    Event,
    Executor,
    Future,
    Local,
    Lock,
    RLock,
    Semaphore,
    SimpleQueue,
)
from tests.simulation.virtual.scheduler import Scheduler, SimThread, ViolationError, running

SEEDS = range(20)


def test_time_jumps_when_nobody_can_go_on():
    def main():
        began = running().now
        threads = [SimThread(target=running().sleep, args=(hours * 3600.0,)) for hours in (3, 1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return running().now - began

    assert Scheduler(0).run(main) == pytest.approx(3 * 3600)


@pytest.mark.parametrize("lock", [Lock, RLock])
def test_a_lock_is_held_by_one_in_any_order(lock):
    def main():
        guard, inside, order = lock(), [], []

        def work(number):
            for _ in range(5):
                with guard:
                    assert not inside
                    inside.append(number)
                    running().sleep(0.1)
                    inside.remove(number)
                order.append(number)

        threads = [SimThread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return tuple(order)

    orders = {Scheduler(seed).run(main) for seed in SEEDS}
    assert len(orders) > 10
    again = {Scheduler(seed).run(main) for seed in SEEDS}
    assert orders == again


def test_a_seed_gives_the_same_run_again():
    def main():
        jobs, done = SimpleQueue(), []

        def work():
            while (job := jobs.get()) is not None:
                running().sleep(running().random.random())
                done.append(job)

        threads = [SimThread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for number in range(30):
            jobs.put(number)
        for _ in threads:
            jobs.put(None)
        for thread in threads:
            thread.join()
        assert sorted(done) == list(range(30))
        return tuple(done)

    def digest(seed):
        sim = Scheduler(seed)
        return sim.run(main), sim.digest

    assert digest(1) == digest(1)
    assert digest(1) != digest(2)


def test_what_a_thread_has_of_its_own_is_no_later_thread_s():
    def main():
        own = Local()

        def work():
            assert not hasattr(own, "value")
            own.value = 1
            assert own.value == 1

        for _ in range(100):
            thread = SimThread(target=work)
            thread.start()
            thread.join()
            del thread

    Scheduler(0).run(main)


def test_waiting_for_ever_is_found():
    def main():
        first, second = Lock(), Lock()

        def work(one, other):
            with one:
                running().sleep(1)
                with other:
                    pass

        threads = [SimThread(target=work, args=pair) for pair in ((first, second), (second, first))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with pytest.raises(ViolationError, match="wait for ever"):
        Scheduler(0).run(main)


def test_what_ends_a_thread_ends_the_simulation():
    def main():
        thread = SimThread(target=lambda: 1 / 0, name="broken")
        thread.start()
        thread.join()

    with pytest.raises(ViolationError, match="broken ended with ZeroDivisionError"):
        Scheduler(0).run(main)


def test_a_loop_without_end_is_found():
    def main():
        while True:
            running().sleep(0)

    with pytest.raises(ViolationError, match="no end"):
        Scheduler(0, most_steps=1000).run(main)


@pytest.mark.parametrize("seed", SEEDS)
def test_conditions_events_and_semaphores_wake_and_time_out(seed):
    def main():
        sim, condition, event, slots = running(), Condition(), Event(), Semaphore(0)
        told, missed = [], []

        def wait(limit):
            with condition:
                if condition.wait_for(lambda: len(told) >= 2, limit):
                    told.append("waiter")
                else:
                    missed.append(sim.now)

        waiters = [SimThread(target=wait, args=(limit,)) for limit in (1.0, 100.0, None)]
        for thread in waiters:
            thread.start()
        sim.sleep(5)
        assert len(missed) == 1
        with condition:
            told.append(1)
            condition.notify_all()
        sim.sleep(5)
        assert len(told) == 1
        with condition:
            told.append(2)
            condition.notify()
            condition.notify()
        assert not event.wait(1.5)
        assert len(told) == 4
        SimThread(target=event.set).start()
        assert event.wait(100)
        assert not slots.acquire(timeout=2)
        SimThread(target=slots.release, args=(2,)).start()
        assert slots.acquire()
        assert slots.acquire(timeout=1)
        assert not slots.acquire(blocking=False)
        for thread in waiters:
            thread.join(1)
            assert not thread.is_alive()

    Scheduler(seed).run(main)


@pytest.mark.parametrize("seed", SEEDS)
def test_pools_and_futures_give_results_errors_and_cancel(seed):
    def main():
        sim, pool = running(), Executor(2, "pool")
        slow = [pool.submit(lambda n: sim.sleep(1) or n, number) for number in range(4)]
        broken = pool.submit(lambda: 1 / 0)
        assert [future.result(10) for future in slow] == [0, 1, 2, 3]
        assert isinstance(broken.exception(), ZeroDivisionError)
        never: Future[None] = Future()
        with pytest.raises(TimeoutError):
            never.result(3)
        last = [pool.submit(sim.sleep, 1) for _ in range(5)]
        sim.sleep(0.5)
        pool.shutdown(cancel_futures=True)
        assert sum(future.cancelled() for future in last) == 3
        with pytest.raises(RuntimeError):
            pool.submit(print)
        return sim.now

    Scheduler(seed).run(main)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_loop_runs_on_virtual_time_beside_threads(seed):
    async def talk(loop):
        began = loop.time()
        naps = asyncio.gather(*(asyncio.sleep(3600 * n) for n in range(1, 4)))
        assert await asyncio.to_thread(lambda: running().sleep(60) or 7) == 7
        assert loop.time() - began == pytest.approx(60, abs=1e-3)
        await naps
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await loop.create_future()
        return loop.time() - began

    assert Scheduler(seed).run(lambda: on_loop(talk)) == pytest.approx(3 * 3600 + 5, abs=1e-2)
