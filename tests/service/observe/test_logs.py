"""Lines of answered requests: the same as of a record, written together, and none where nobody listens."""

from __future__ import annotations

import asyncio
import io
import json
import logging

import pytest

from hybridindex.service.observe.logs import AccessLog, JsonFormatter, LineHandler, TextFormatter

FIELDS = {"method": "POST", "route": "/v1/search", "status": 200, "ms": 1.25, "client": "web", "request_id": "abc"}


class Lines(io.StringIO):
    """Counts how often it is written to."""

    n_writes = 0

    def write(self, text: str) -> int:
        self.n_writes += 1
        return super().write(text)


@pytest.fixture
def logger():
    found = logging.getLogger("a_daemon")
    found.propagate = False
    found.setLevel(logging.INFO)
    yield found
    found.handlers.clear()


@pytest.mark.parametrize("formatter", [JsonFormatter, TextFormatter])
def test_a_line_without_a_record_is_the_records_line(formatter):
    made = formatter()
    record = logging.makeLogRecord(
        {"name": "hybridindex.access", "levelname": "INFO", "msg": "request", "created": 1.7e9 + 0.25, "msecs": 250}
        | FIELDS
    )
    for _ in range(2):
        assert made.line(record.created, "INFO", record.name, "request", FIELDS) == made.format(record)


def test_lines_are_written_together_and_soon(logger):
    stream = Lines()
    logger.addHandler(LineHandler(stream, JsonFormatter()))
    access = AccessLog(logging.getLogger("a_daemon.access"))

    async def answer_three():
        for number in range(3):
            access.note("request", {**FIELDS, "status": 200 + number})
        assert stream.n_writes == 0
        async with asyncio.timeout(300):
            while not stream.n_writes:
                await asyncio.sleep(0.01)

    asyncio.run(answer_three())
    assert stream.n_writes == 1
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["status"] for line in lines] == [200, 201, 202]
    assert {line["logger"] for line in lines} == {"a_daemon.access"}
    access.flush()
    assert stream.n_writes == 1


def test_handlers_of_others_get_records(logger):
    seen: list[logging.LogRecord] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record)

    logger.addHandler(Keeping())
    access = AccessLog(logging.getLogger("a_daemon.access"))

    async def answer():
        access.note("request", FIELDS)
        access.flush()

    asyncio.run(answer())
    assert [(r.getMessage(), r.levelno, r.name, r.client) for r in seen] == [
        ("request", logging.INFO, "a_daemon.access", "web")
    ]


def test_a_level_that_is_off_keeps_nothing(logger):
    stream = Lines()
    logger.addHandler(LineHandler(stream, JsonFormatter()))
    logger.setLevel(logging.WARNING)
    access = AccessLog(logging.getLogger("a_daemon.access"))
    # Outside an event loop: nothing is put off.
    access.note("request", FIELDS)
    access.flush()
    assert stream.n_writes == 0


def test_a_stream_that_is_gone_ends_nothing(logger, monkeypatch):
    stream = Lines()
    logger.addHandler(LineHandler(stream, TextFormatter()))
    stream.close()
    monkeypatch.setattr(logging, "raiseExceptions", False)
    access = AccessLog(logging.getLogger("a_daemon.access"))

    async def answer():
        access.note("request", FIELDS)
        access.flush()

    asyncio.run(answer())
