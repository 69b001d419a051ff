"""Puts simulated threads, locks, queues and clocks into the product's modules, and takes them out again."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import pkgutil
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import hybridindex
from hybridindex.router.remote.loop_thread import new_event_loop
from tests.simulation.virtual.event_loop import ASYNCIO, SimLoop
from tests.simulation.virtual.primitives import REPLACED, Module
from tests.simulation.virtual.scheduler import current

__all__ = ["patched", "product_modules"]

#: Rooms that no router and no daemon imports.
_OTHER = ("cli", "demo", "report", "rag", "integrations", "studies", "client", "llm", "old_paths", "__main__")


def _make_loop() -> asyncio.AbstractEventLoop:
    return new_event_loop() if current() is None else SimLoop()


_REPLACED = [*REPLACED, (asyncio, Module(asyncio, ASYNCIO)), (new_event_loop, _make_loop)]


def product_modules() -> list[types.ModuleType]:
    """All modules of the product that serve; imported first, so that none is made during a simulation."""
    found = [hybridindex]
    importlib.import_module("torch").set_num_threads(1)
    importlib.import_module("faiss").omp_set_num_threads(1)
    # Not the package's path: an editable install puts the repository there, tests and benchmarks included.
    home = str(Path(hybridindex.__file__).parent)
    for part in pkgutil.walk_packages([home], "hybridindex."):
        if part.name.split(".")[1] in _OTHER or ".migrations." in part.name:
            continue
        with contextlib.suppress(ImportError):  # extras that are not installed
            found.append(importlib.import_module(part.name))
    return found


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Within the block the product's modules hold simulated parts, which threads outside a simulation do not see."""
    undo: list[Callable[[], None]] = []
    try:
        for module in product_modules():
            held = vars(module)
            for name, value in list(held.items()):
                replacement = _replacement(value)
                if replacement is not None:
                    held[name] = replacement
                    undo.append(partial(held.__setitem__, name, value))
                elif getattr(value, "__module__", None) == module.__name__:
                    _patch_defaults(value, undo)
        yield
    finally:
        for back in reversed(undo):
            back()


def _replacement(value: Any) -> Any:
    return next((new for old, new in _REPLACED if value is old), None)


def _patch_defaults(value: Any, undo: list[Callable[[], None]]) -> None:
    """Clocks that are defaults of arguments, also those of dataclasses."""
    if isinstance(value, type):
        for part in list(vars(value).values()):
            if isinstance(part, types.FunctionType | classmethod | staticmethod):
                _patch_defaults(part, undo)
        return
    function = getattr(value, "__func__", value)
    if not isinstance(function, types.FunctionType):
        return
    named: dict[str, Any] = function.__kwdefaults__ or {}
    for name, default in named.items():
        if (new := _replacement(default)) is not None:
            named[name] = new
            undo.append(partial(named.__setitem__, name, default))
    before: tuple[Any, ...] = function.__defaults__ or ()
    if any(_replacement(default) is not None for default in before):
        function.__defaults__ = tuple(_replacement(d) or d for d in before)
        undo.append(partial(setattr, function, "__defaults__", before))
    for cell in function.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:
            continue
        if (new := _replacement(held)) is not None:
            cell.cell_contents = new
            undo.append(partial(setattr, cell, "cell_contents", held))
