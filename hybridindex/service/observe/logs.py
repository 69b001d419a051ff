"""Log lines of the daemon, as text or JSON, with the request's id."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal, Protocol, TextIO

__all__ = ["REQUEST_ID", "AccessLog", "JsonFormatter", "TextFormatter", "configure"]

#: The request that is being served; empty outside one.
REQUEST_ID: ContextVar[str] = ContextVar("hybridindex_request_id", default="")
#: Extra fields that a line may carry.
_FIELDS = ("method", "route", "status", "ms", "client", "queries", "action", "outcome", "count", "request_id")
#: How long access lines are collected before they are written.
_ACCESS_S = 0.1


def _fields(record: logging.LogRecord) -> dict[str, object]:
    found = {name: value for name in _FIELDS if (value := getattr(record, name, None)) is not None}
    if "request_id" not in found and (request_id := REQUEST_ID.get()):
        found["request_id"] = request_id
    return found


class LineFormatter(Protocol):
    """Formats a line without a log record."""

    def line(self, created: float, level: str, logger: str, message: str, fields: Mapping[str, object]) -> str: ...


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the line's fields, and the traceback of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return self.line(record.created, record.levelname, record.name, record.getMessage(), fields)

    def line(self, created: float, level: str, logger: str, message: str, fields: Mapping[str, object]) -> str:
        at = datetime.fromtimestamp(created, UTC).isoformat(timespec="milliseconds")
        known = {"time": at, "level": level.lower(), "logger": logger, "message": message}
        return json.dumps({**known, **fields}, default=str)


class TextFormatter(logging.Formatter):
    """The same on one line, for people. Whoever logs a client's text escapes its control characters."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")
        self._second, self._shown = -1, ""

    def format(self, record: logging.LogRecord) -> str:
        extra = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        line = super().format(record)
        head, newline, rest = line.partition("\n")
        return f"{head} {extra}{newline}{rest}" if extra else line

    def line(self, created: float, level: str, logger: str, message: str, fields: Mapping[str, object]) -> str:
        second = int(created)
        if second != self._second:
            self._second, self._shown = second, time.strftime(self.default_time_format, time.localtime(second))
        extra = " ".join([f"{name}={value}" for name, value in fields.items()])
        return f"{self._shown},{int((created - second) * 1e3):03d} {level:<7} {message} {extra}"


class LineHandler(logging.StreamHandler[TextIO]):
    """The daemon's handler; also writes many ready lines with one system call."""

    def __init__(self, stream: TextIO, formatter: JsonFormatter | TextFormatter) -> None:
        super().__init__(stream)
        self.setFormatter(formatter)
        self.lines: LineFormatter = formatter

    def write(self, lines: list[str]) -> None:
        """Never raises, as :meth:`emit`."""
        try:
            with self.lock:  # type: ignore[union-attr]
                self.stream.write(self.terminator.join(lines) + self.terminator)
                self.flush()
        except Exception:  # noqa: BLE001 - a log that is full or gone must not end a request
            self.handleError(logging.makeLogRecord({"msg": "access lines"}))


class AccessLog:
    """One line per answered request, written in groups every tenth of a second. On one event loop.

    A system call and a log record per line would cost as much as the rest of an answer.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._pending: list[tuple[float, str, dict[str, object]]] = []

    def note(self, message: str, fields: dict[str, object]) -> None:
        """``fields``: names in ``_FIELDS``."""
        if not self._logger.isEnabledFor(logging.INFO):
            return
        self._pending.append((time.time(), message, fields))
        if len(self._pending) == 1:
            asyncio.get_running_loop().call_later(_ACCESS_S, self.flush)

    def flush(self) -> None:
        """Writes the collected lines."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        name = self._logger.name
        above = logging.getLogger(name.partition(".")[0])
        ready = [] if above.propagate else [h for h in above.handlers if isinstance(h, LineHandler)]
        for handler in ready:
            handler.write([handler.lines.line(at, "INFO", name, text, fields) for at, text, fields in pending])
        others = [h for h in above.handlers if h not in ready]
        if others or not ready:
            for at, text, fields in pending:
                record = _record(name, at, text, fields)
                for handle in [h.handle for h in others] if ready else [self._logger.handle]:
                    handle(record)


def _record(name: str, at: float, message: str, fields: dict[str, object]) -> logging.LogRecord:
    known = {"name": name, "levelno": logging.INFO, "levelname": "INFO", "msg": message, "created": at}
    return logging.makeLogRecord({**known, **fields})


def configure(kind: Literal["text", "json"], stream: TextIO | None = None) -> None:
    """Sends the daemon's log lines, and those of its HTTP server, to ``stream`` (default standard error)."""
    handler = LineHandler(stream or sys.stderr, JsonFormatter() if kind == "json" else TextFormatter())
    for name in ("hybridindex", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False
    # Errors of the exporter of traces.
    exporter = logging.getLogger("opentelemetry")
    exporter.handlers[:] = [handler]
    exporter.propagate = False
    # Our own access line has route, client and request id.
    logging.getLogger("uvicorn.access").disabled = True
