"""The queue in front of the router: bounds, fairness, deadlines, and that nothing admitted is lost."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import DeadlineExceededError, OverloadedError
from hybridindex.service.admission import Admission
from hybridindex.service.config import Limits


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def admission(**limits) -> Admission:
    limits.setdefault("client_share", 1.0)
    return Admission(Limits(**limits), Clock())


@contextlib.asynccontextmanager
async def turn(queue: Admission, client: str, n: int, deadline_s: float | None = None):
    await queue.enter(client, n, deadline_s)
    try:
        yield
    finally:
        queue.leave(n)


async def settle() -> None:
    """Lets everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


class Requests:
    """Requests that hold their turn until told to end."""

    def __init__(self, queue: Admission) -> None:
        self.queue = queue
        self.started: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def send(self, name: str, client: str, n: int = 1, deadline_s: float | None = None) -> None:
        self.ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._run(name, client, n, deadline_s))
        await settle()
        self.queue.check_invariants()

    async def _run(self, name: str, client: str, n: int, deadline_s: float | None) -> None:
        async with turn(self.queue, client, n, deadline_s):
            self.started.append(name)
            await self.ends[name].wait()

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await self.tasks[name]
        await settle()
        self.queue.check_invariants()

    async def end_all(self) -> None:
        for name in list(self.ends):
            self.ends[name].set()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        await settle()
        self.queue.check_invariants()
        assert self.queue.n_waiting == self.queue.n_in_flight == 0


def test_requests_start_at_once_while_there_is_room():
    async def run():
        requests = Requests(admission(in_flight_queries=3))
        for number in range(4):
            await requests.send(str(number), "a")
        assert requests.started == ["0", "1", "2"]
        await requests.end("1")
        assert requests.started == ["0", "1", "2", "3"]
        await requests.end_all()

    asyncio.run(run())


def test_a_full_queue_refuses_and_says_when_to_come_again():
    async def run():
        queue = admission(in_flight_queries=1, queue_queries=4)
        requests = Requests(queue)
        await requests.send("running", "a")
        await requests.send("waits", "a", n=3)
        with pytest.raises(OverloadedError, match="3 queries wait and the queue holds 4") as refused:
            async with turn(queue, "b", 2):
                pass
        assert refused.value.retry_after_s >= 1
        assert not refused.value.own_share
        assert queue.refused["queue"] == 1
        await requests.end_all()
        assert requests.started == ["running", "waits"]

    asyncio.run(run())


def test_one_client_may_fill_only_its_share():
    async def run():
        queue = admission(in_flight_queries=1, queue_queries=4, client_share=0.5)
        requests = Requests(queue)
        await requests.send("running", "a")
        await requests.send("waits", "a", n=2)
        with pytest.raises(OverloadedError, match="2 of your queries wait") as refused:
            async with turn(queue, "a", 1):
                pass
        assert refused.value.own_share
        await requests.send("other", "b", n=2)
        await requests.end_all()
        assert sorted(requests.started) == ["other", "running", "waits"]

    asyncio.run(run())


def test_a_client_with_few_queries_goes_before_one_with_many():
    async def run():
        requests = Requests(admission(in_flight_queries=1))
        await requests.send("running", "greedy")
        for number in range(4):
            await requests.send(f"greedy-{number}", "greedy")
        await requests.send("modest", "modest")
        await requests.end("running")
        await requests.end("greedy-0")
        assert requests.started == ["running", "greedy-0", "modest"]
        await requests.end_all()

    asyncio.run(run())


def test_fairness_counts_queries_not_requests():
    async def run():
        requests = Requests(admission(in_flight_queries=1))
        await requests.send("running", "x")
        for number in range(2):
            await requests.send(f"large-{number}", "large", n=50)
            await requests.send(f"small-{number}", "small", n=1)
            await requests.send(f"small-{number}b", "small", n=1)
        for _ in range(6):
            await requests.end(requests.started[-1])
        # After its 50 the large client waits until the small one had its four.
        assert requests.started == ["running", "large-0", "small-0", "small-0b", "small-1", "small-1b", "large-1"]
        await requests.end_all()

    asyncio.run(run())


def test_a_request_larger_than_the_limit_goes_alone():
    async def run():
        requests = Requests(admission(in_flight_queries=2))
        await requests.send("one", "a")
        await requests.send("huge", "a", n=100)
        assert requests.started == ["one"]
        await requests.end("one")
        assert requests.started == ["one", "huge"]
        await requests.end_all()

    asyncio.run(run())


def test_a_deadline_that_has_passed_starts_nothing():
    async def run():
        queue = admission()
        with pytest.raises(DeadlineExceededError):
            async with turn(queue, "a", 1, deadline_s=99.0):
                pytest.fail("it started")
        assert queue.n_in_flight == 0
        assert queue.refused["deadline"] == 1

    asyncio.run(run())


def test_a_deadline_ends_the_wait():
    async def run():
        requests = Requests(admission(in_flight_queries=1))
        await requests.send("running", "a")
        await requests.send("late", "a", deadline_s=100.0 + 1e-4)
        with pytest.raises(DeadlineExceededError):
            await requests.tasks["late"]
        assert requests.queue.n_waiting == 0
        await requests.send("next", "a")
        await requests.end("running")
        assert requests.started == ["running", "next"]
        await requests.end_all()

    asyncio.run(run())


def test_who_gives_up_frees_the_place():
    async def run():
        requests = Requests(admission(in_flight_queries=1, queue_queries=1))
        await requests.send("running", "a")
        await requests.send("gone", "b")
        requests.tasks["gone"].cancel()
        await settle()
        requests.queue.check_invariants()
        await requests.send("next", "b")
        await requests.end("running")
        assert requests.started == ["running", "next"]
        await requests.end_all()

    asyncio.run(run())


def test_draining_refuses_the_new_and_serves_the_waiting():
    async def run():
        requests = Requests(admission(in_flight_queries=1))
        queue = requests.queue
        await requests.send("running", "a")
        await requests.send("waits", "a")
        queue.drain()
        with pytest.raises(OverloadedError, match="about to stop"):
            async with turn(queue, "b", 1):
                pass
        await requests.end("running")
        assert queue.n_in_flight == 1
        await requests.end("waits")
        assert queue.n_in_flight == queue.n_waiting == 0
        assert requests.started == ["running", "waits"]

    asyncio.run(run())


def test_refused_requests_are_given_times_of_their_own():
    async def run():
        queue = Admission(Limits(in_flight_queries=10, queue_queries=1000), Clock(), draw=lambda: 0.5)
        requests = Requests(queue)
        for name in ("first", "second", "third"):
            await requests.send(name, "a", n=10)
        # While nobody was answered with others waiting, nothing is known.
        assert queue.retry_after_s(4) == 1
        queue._clock.now += 100
        await requests.end("first")
        queue._clock.now += 4
        await requests.end("second")
        # 4 s for 10 queries, and 10 are left: from 2 s on, each behind the one before.
        assert [queue.retry_after_s(n) for n in (1, 1, 5)] == [2.4, 2.8, 4.8]
        queue._clock.now += 3
        assert queue.retry_after_s(1) == 2.4
        await requests.send("backlog", "b", n=10)
        assert queue.retry_after_s(1) == 4.4
        # Who asks again and again pushes nobody further than twice the queue and a second.
        assert max(queue.retry_after_s(5) for _ in range(100)) == 2 * 8 + 1 + 2
        await requests.send("many", "b", n=90)
        assert max(queue.retry_after_s(1) for _ in range(100)) == 30
        await requests.end_all()

    asyncio.run(run())


def test_a_short_queue_spreads_by_chance():
    draws = iter([0.0, 0.5, 0.99])
    queue = Admission(Limits(), Clock(), draw=lambda: next(draws))
    queue._pace._seconds, queue._pace._queries = 1e-6, 1.0
    assert [queue.retry_after_s(1) for _ in range(3)] == [0.03, 0.045, 0.06]


def test_the_pace_is_that_of_answers_while_others_wait():
    async def run():
        queue = Admission(Limits(in_flight_queries=4, queue_queries=1000), Clock(), draw=lambda: 0.5)
        requests = Requests(queue)
        # Seldom asked and slowly answered: no pace at all.
        for name in ("a", "b"):
            await requests.send(name, "x", n=4)
            queue._clock.now += 50
            await requests.end(name)
        queue._clock.now += 50
        for number in range(6):
            await requests.send(str(number), "x", n=4)
        for number in range(4):
            queue._clock.now += 2
            await requests.end(str(number))
        # 4 of 4 queries in 2 s each; 8 are left.
        assert queue._pace.seconds_per_query == pytest.approx(0.5)
        assert queue.retry_after_s(1) == 2.5
        await requests.end("4")
        queue._clock.now += 50
        await requests.end("5")
        assert queue._pace.seconds_per_query < 0.5
        await requests.end_all()

    asyncio.run(run())


def test_who_cannot_start_before_the_deadline_is_told_at_once():
    async def run():
        requests = Requests(admission(in_flight_queries=2))
        queue = requests.queue
        for number in range(8):
            await requests.send(str(number), "a", n=2)
        for number in range(2):
            queue._clock.now += 4
            await requests.end(str(number))
        # 2 s a query; 2 are in flight and 10 wait, all of one client: its next one starts in 24 s, another's in 4.
        now = queue._clock.now
        with pytest.raises(OverloadedError, match="10 queries wait, so deadline_ms would pass") as refused:
            await queue.enter("a", 2, now + 23)
        assert not refused.value.own_share
        with pytest.raises(OverloadedError, match="deadline_ms would pass"):
            await queue.enter("b", 2, now + 3)
        assert queue.refused["deadline"] == 2
        await requests.send("in time", "a", n=2, deadline_s=now + 25)
        await requests.send("modest", "b", n=2, deadline_s=now + 5)
        await requests.send("patient", "b", n=2)
        assert queue.n_waiting == 16
        # Whatever was measured, who finds nobody before them starts.
        await requests.end_all()
        await requests.send("alone", "c", n=2, deadline_s=queue._clock.now + 0.001)
        assert requests.started[-1] == "alone"
        await requests.end_all()

    asyncio.run(run())


def test_nprobe_falls_to_the_floor_as_the_queue_fills_and_only_if_asked():
    async def run():
        requests = Requests(admission(in_flight_queries=1, queue_queries=100, overload_min_nprobe=8))
        queue = requests.queue
        await requests.send("running", "a")
        assert queue.nprobe_under_load(64) == 64
        await requests.send("half", "a", n=50)
        assert queue.nprobe_under_load(64) == 64
        await requests.send("more", "a", n=25)
        assert queue.nprobe_under_load(64) == 36
        await requests.send("full", "a", n=25)
        assert queue.nprobe_under_load(64) == 8
        assert queue.nprobe_under_load(4) == 4
        await requests.end_all()
        firm = Requests(admission(in_flight_queries=1, queue_queries=10))
        await firm.send("running", "a")
        await firm.send("full", "a", n=10)
        assert firm.queue.nprobe_under_load(64) == 64
        await firm.end_all()

    asyncio.run(run())


@given(
    st.lists(
        st.tuples(st.sampled_from(["send", "end", "cancel"]), st.sampled_from("abc"), st.integers(1, 6)),
        max_size=40,
    )
)
def test_nothing_admitted_is_lost_in_any_order(steps):
    async def run():
        queue = admission(in_flight_queries=4, queue_queries=12, client_share=0.6)
        requests = Requests(queue)
        cancelled, n = set(), 0
        for what, client, size in steps:
            if what == "send":
                n += 1
                await requests.send(f"{n}", client, size)
                continue
            waiting = [name for name in requests.tasks if name not in requests.started and name not in cancelled]
            running = [name for name in requests.started if not requests.tasks[name].done()]
            if what == "end" and running:
                await requests.end(running[0])
            elif what == "cancel" and waiting:
                cancelled.add(waiting[size % len(waiting)])
                requests.tasks[waiting[size % len(waiting)]].cancel()
                await settle()
                queue.check_invariants()
        await requests.end_all()
        for name, task in requests.tasks.items():
            if not task.cancelled() and task.exception() is None:
                assert name in requests.started
            elif not task.cancelled():
                assert isinstance(task.exception(), OverloadedError)

    asyncio.run(run())
