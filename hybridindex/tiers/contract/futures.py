"""Completing futures on a thread that must go on: what their callbacks raise is logged."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["done", "fail", "settle"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


def done(result: _T) -> Future[_T]:
    """A future that has its result."""
    future: Future[_T] = Future()
    future.set_result(result)
    return future


def settle(future: Future[_T], result: _T) -> None:
    """Sets the result, unless the future is done. Even SystemExit from a callback does not end the thread."""
    if future.done():
        return
    try:
        future.set_result(result)
    except BaseException:  # noqa: BLE001
        _log.exception("a callback of a future raised")


def fail(future: Future[Any], error: BaseException) -> None:
    """Sets the error, as :func:`settle`."""
    if future.done():
        return
    try:
        future.set_exception(error)
    except BaseException:  # noqa: BLE001
        _log.exception("a callback of a future raised")
