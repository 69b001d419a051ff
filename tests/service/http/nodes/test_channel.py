"""The answering end of a channel, over real sockets: limits, cancellation, keys, its end."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from hybridindex.router.remote.frames import ANSWER, ASK, CANCEL, HEAD_BYTES, REFUSAL, frame
from hybridindex.service.config import Limits
from hybridindex.service.http.nodes.channel import ScanChannel
from hybridindex.service.intake.request_memory import RequestMemory

PATIENCE_S = 20.0


class End:
    """An asking end that says what it likes."""

    def __init__(self, reader, writer):
        self._reader, self.writer = reader, writer

    def ask(self, number, body, options=b"now"):
        self.writer.write(frame(ASK, number, options, body, extra=len(options)))

    async def answer(self):
        """Kind, number, extra and payload; None: the connection has ended."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                head = await self._reader.readexactly(HEAD_BYTES)
                length = int.from_bytes(head[:4], "little")
                payload = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        number, kind, extra = (int.from_bytes(head[a:b], "little") for a, b in ((4, 8), (8, 10), (10, 12)))
        return kind, number, extra, payload


class Scans:
    """Echoes what is asked "now" at once, and all else when it is let go."""

    def __init__(self):
        self.go = asyncio.Event()
        self.begun, self.cancelled = [], []

    def __call__(self, options, body, _charge):
        if options == "raise":
            raise ValueError("the test has it fail")
        return bytes(body) if options == "now" else self._later(bytes(body))

    async def _later(self, body):
        self.begun.append(body)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.append(body)
            raise
        return body


class Side:
    def __init__(self, **limits):
        self.scans, self.allowed, self.answers = Scans(), True, []
        self.memory = RequestMemory(1 << 28, client_share=1.0)
        self.limits = Limits(**limits)
        self.channels, self.ended = [], []

    def make(self):
        channel = ScanChannel(
            self.scans,
            lambda: self.memory.open("node"),
            self.limits,
            is_allowed=lambda: self.allowed,
            on_answer=lambda status, _seconds: self.answers.append(status),
        )
        channel.on_end = self.ended.append
        self.channels.append(channel)
        return channel


@asynccontextmanager
async def opened(**limits):
    side = Side(**limits)
    server = await asyncio.get_running_loop().create_server(side.make, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        yield side, End(reader, writer)
    finally:
        writer.close()
        server.close()
        async with asyncio.timeout(PATIENCE_S):
            while side.ended != side.channels:
                await asyncio.sleep(0.01)
    side.memory.check_invariants()
    assert side.memory.taken_bytes == 0


def running(test):
    """Runs an async test on an own loop."""

    def run():
        asyncio.run(test())

    run.__name__ = test.__name__
    return run


async def until(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


@running
async def test_many_scans_are_answered_as_they_end():
    async with opened() as (side, end):
        end.ask(1, b"first", b"later")
        end.ask(2, b"second")
        assert await end.answer() == (ANSWER, 2, 0, b"second")
        side.scans.go.set()
        assert await end.answer() == (ANSWER, 1, 0, b"first")
        assert side.answers == [200, 200]


@running
async def test_what_is_cancelled_is_not_answered():
    async with opened() as (side, end):
        end.ask(1, b"first", b"later")
        await until(lambda: side.scans.begun)
        end.writer.write(frame(CANCEL, 1) + frame(CANCEL, 9))
        end.ask(2, b"second")
        assert await end.answer() == (ANSWER, 2, 0, b"second")
        await until(lambda: side.scans.cancelled == [b"first"])
        # A number may be used again.
        end.ask(1, b"third")
        assert await end.answer() == (ANSWER, 1, 0, b"third")


@running
async def test_who_ends_the_connection_waits_for_nothing():
    async with opened() as (side, end):
        end.ask(1, b"first", b"later")
        await until(lambda: side.scans.begun)
        end.writer.close()
        await until(lambda: side.scans.cancelled == [b"first"])


@running
async def test_what_fails_is_refused_and_the_channel_goes_on():
    async with opened() as (side, end):
        end.ask(1, b"", b"raise")
        kind, number, status, payload = await end.answer()
        assert (kind, number, status) == (REFUSAL, 1, 500)
        assert json.loads(payload)["status"] == 500
        end.ask(2, b"second")
        assert await end.answer() == (ANSWER, 2, 0, b"second")
        assert side.answers == [500, 200]


@running
async def test_what_is_too_large_is_refused_before_it_comes():
    async with opened(max_body_bytes=1 << 16) as (_side, end):
        whole = frame(ASK, 1, bytes(1 << 17))
        end.writer.write(whole[: 1 << 10])
        kind, number, status, payload = await end.answer()
        assert (kind, number, status) == (REFUSAL, 1, 413)
        assert b"65536" in payload
        end.writer.write(whole[1 << 10 :])
        end.ask(2, b"second")
        assert await end.answer() == (ANSWER, 2, 0, b"second")


@running
async def test_without_memory_it_is_refused():
    async with opened() as (side, end):
        with side.memory.open("other") as charge:
            charge.hold(charge.most)
            end.ask(1, b"first")
            kind, number, status, _ = await end.answer()
            assert (kind, number, status) == (REFUSAL, 1, 503)
        end.ask(2, b"second")
        assert await end.answer() == (ANSWER, 2, 0, b"second")


@pytest.mark.parametrize(
    "sent",
    [frame(ANSWER, 1, b"what"), frame(CANCEL, 1, b"what"), frame(99, 1), b"GET / HTTP/1.1\r\n\r\n"],
    ids=["answer", "cancel-with-payload", "unknown", "http"],
)
def test_what_is_no_question_ends_the_channel(sent):
    async def test():
        async with opened() as (side, end):
            end.writer.write(sent)
            assert await end.answer() is None
            assert side.answers == []

    asyncio.run(test())


@running
async def test_a_scan_that_is_asked_twice_ends_the_channel():
    async with opened() as (side, end):
        end.ask(1, b"first", b"later")
        end.ask(1, b"second", b"later")
        assert await end.answer() is None
        await until(lambda: side.scans.cancelled or not side.scans.begun)


@running
async def test_half_a_frame_is_not_waited_for():
    async with opened(client_timeout_s=0.2) as (side, end):
        end.writer.write(frame(ASK, 1, b"whole")[:-1])
        assert await end.answer() is None
        assert side.answers == []


@running
async def test_frames_that_keep_coming_may_always_have_begun():
    async with opened(client_timeout_s=0.3) as (_side, end):
        data = b"".join(frame(ASK, number, b"now", b"body", extra=3) for number in range(20))
        size = len(data) // 20
        # Cut within frames: one has always begun.
        for number in range(20):
            end.writer.write(data[max(0, number * size - 5) : (number + 1) * size - 5])
            await asyncio.sleep(0.05)
        end.writer.write(data[-5:])
        assert [(await end.answer())[1] for _ in range(20)] == list(range(20))


@running
async def test_answers_that_nobody_reads_are_not_kept_for_ever():
    async with opened(client_timeout_s=0.2) as (side, end):
        body = bytes(1 << 20)
        end.writer.transport.pause_reading()
        for number in range(64):
            end.ask(number, body)
        await until(lambda: side.ended)


@running
async def test_a_node_that_asks_nothing_any_more_has_no_channel():
    """As one whose machine is gone: nothing says that the connection has ended."""
    async with opened(client_timeout_s=0.3) as (side, end):
        end.ask(1, b"first")
        assert await end.answer() == (ANSWER, 1, 0, b"first")
        await until(lambda: side.ended)
        assert await end.answer() is None


@running
async def test_who_never_asked_has_none_either():
    async with opened(client_timeout_s=0.3) as (side, _end):
        await until(lambda: side.ended)


@running
async def test_a_channel_that_is_used_stays():
    async with opened(client_timeout_s=1.5) as (side, end):
        for number in range(5):
            end.ask(number, b"now")
            assert await end.answer() == (ANSWER, number, 0, b"now")
            await asyncio.sleep(0.4)
        # A scan that takes longer is one, too, and what follows its answer.
        end.ask(9, b"long", b"later")
        await asyncio.sleep(2)
        side.scans.go.set()
        assert await end.answer() == (ANSWER, 9, 0, b"long")
        await asyncio.sleep(0.1)
        end.ask(10, b"now")
        assert await end.answer() == (ANSWER, 10, 0, b"now")


@running
async def test_a_key_that_was_taken_away_ends_the_channel():
    async with opened() as (side, end):
        end.ask(1, b"first")
        assert await end.answer() == (ANSWER, 1, 0, b"first")
        side.allowed = False
        answered = 1
        async with asyncio.timeout(PATIENCE_S):
            while True:
                end.ask(2, b"second")
                if await end.answer() is None:
                    break
                answered += 1
                await asyncio.sleep(0.05)
        assert side.answers == [200] * answered


@running
async def test_a_server_that_stops_answers_what_came_first():
    async with opened() as (side, end):
        end.ask(1, b"first", b"later")
        await until(lambda: side.scans.begun)
        side.channels[0].shutdown()
        end.ask(2, b"second")
        side.scans.go.set()
        assert await end.answer() == (ANSWER, 1, 0, b"first")
        assert await end.answer() is None
        assert side.answers == [200]
