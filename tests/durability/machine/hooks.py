"""What a test switches on and off in a daemon that runs, by files: searches that do not end, a device that fails.

:func:`begin` is called in the daemon's process before anything else; without those files nothing changes.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

__all__ = ["BROKEN_DEVICE", "HELD", "begin", "put"]

#: Names of the files.
HELD, BROKEN_DEVICE = "held", "broken-device"


def begin(switches: str, mutant: str = "") -> None:
    """``switches``: the folder of those files. ``mutant``: a fault that is seeded into the product, by name."""
    _hold(Path(switches, HELD))
    _break(Path(switches, BROKEN_DEVICE))
    if mutant:
        from tests.durability.machine.mutants import MUTANTS

        MUTANTS[mutant]()


def put(owner: Any, name: str, value: Any) -> None:
    """Puts something in the place of a method or a function of a module."""
    assert hasattr(owner, name), f"{owner} has no {name} any more"
    setattr(owner, name, value)


def _hold(file: Path) -> None:
    """Searches that were admitted do not go on while the file is there."""
    from hybridindex.service.searches import RouterSearches

    run = RouterSearches.__call__

    async def held(self: RouterSearches, *args: Any) -> Any:
        while file.exists():
            await asyncio.sleep(0.005)
        return await run(self, *args)

    put(RouterSearches, "__call__", held)


def _break(file: Path) -> None:
    """Scans of the stand-in device fail while the file is there."""
    from hybridindex.tiers.paged.page_scanner import PageScanner

    scan = PageScanner.scan

    def fail(self: PageScanner, *args: Any, **options: Any) -> Any:
        if file.exists():
            raise RuntimeError("the device fell off the bus")
        return scan(self, *args, **options)

    put(PageScanner, "scan", fail)
