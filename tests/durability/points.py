"""Named points at which a process is killed, and how a function of the product becomes one. Data and one wrapper."""

from __future__ import annotations

import functools
import importlib
import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

__all__ = ["Point", "arm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """SIGKILL before or after the ``count``-th call of a function."""

    name: str
    #: ``module:function`` or ``module:Class.method``, where the product looks it up.
    target: str
    when: Literal["before", "after"]
    count: int = 1
    #: Only calls count that have this in an argument's text.
    having: str = ""
    #: Only calls count that come after this file was made; empty: all.
    armed_by: str = ""

    def armed(self, file: Path | str) -> Point:
        """The same, from when ``file`` is there."""
        return replace(self, armed_by=str(file))


def arm(point: Point) -> None:
    """Wraps the function in this process; the product's code stays as it is.

    Raises:
        AttributeError, ImportError: there is no such function any more.
    """
    module, _, path = point.target.partition(":")
    owner: Any = importlib.import_module(module)
    *parts, name = path.split(".")
    for part in parts:
        owner = getattr(owner, part)
    # Through the class's dictionary, so that a classmethod stays one.
    stored = owner.__dict__[name]
    real = stored.__func__ if isinstance(stored, classmethod | staticmethod) else stored
    calls = 0

    @functools.wraps(real)
    def deadly(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if point.armed_by and not os.path.exists(point.armed_by):
            return real(*args, **kwargs)
        if point.having and not any(point.having in str(value) for value in (*args, *kwargs.values())):
            return real(*args, **kwargs)
        calls += 1
        if calls == point.count and point.when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **kwargs)
        if calls == point.count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, type(stored)(deadly) if isinstance(stored, classmethod | staticmethod) else deadly)
