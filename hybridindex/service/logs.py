"""Log lines of the daemon: text or one JSON object each, with the id of the request they belong to."""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal, TextIO

__all__ = ["REQUEST_ID", "JsonFormatter", "TextFormatter", "configure"]

#: The request that is being served; empty outside one.
REQUEST_ID: ContextVar[str] = ContextVar("hybridindex_request_id", default="")
#: Extra fields that a line may carry.
_FIELDS = ("method", "route", "status", "ms", "client", "queries", "action", "outcome")


def _fields(record: logging.LogRecord) -> dict[str, object]:
    found = {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}
    if request_id := REQUEST_ID.get():
        found["request_id"] = request_id
    return found


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the line's fields, and the traceback of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """For people: the same, on one line; control characters of clients are escaped by whoever logs them."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        extra = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        line = super().format(record)
        head, newline, rest = line.partition("\n")
        return f"{head} {extra}{newline}{rest}" if extra else line


def configure(kind: Literal["text", "json"], stream: TextIO | None = None) -> None:
    """Sends the daemon's log lines, and those of its HTTP server, to ``stream`` (default standard error)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if kind == "json" else TextFormatter())
    for name in ("hybridindex", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False
    # What keeps spans from their collector.
    exporter = logging.getLogger("opentelemetry")
    exporter.handlers[:] = [handler]
    exporter.propagate = False
    # Our own access line knows route, client and request id.
    logging.getLogger("uvicorn.access").disabled = True
