"""Health as it is once the daemon has looked at its disk: on a busy machine a write may take seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

__all__ = ["looked_at"]

T = TypeVar("T")
WAIT_S = 300


def looked_at(ask: Callable[[], T], body: Callable[[T], Mapping[str, Any]]) -> T:
    """``ask()``, again while its ``body`` says that the store has not answered yet."""
    ends_s = time.monotonic() + WAIT_S
    while True:
        answer = ask()
        if not any(check["detail"].startswith("no answer for") for check in body(answer)["checks"]):
            return answer
        assert time.monotonic() < ends_s, "the disk takes minutes"
