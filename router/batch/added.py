"""Rows of no list, of one batch: those that were added since the lists were written, as far as the host scans them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from hybridindex.router.batch.batch import Batch
from hybridindex.router.batch.split import HOST, ProbePart
from hybridindex.router.batch.stages import ADDED_SCAN
from hybridindex.tiers.host.added_scanner import AddedScanner
from hybridindex.types import F32, I64

__all__ = ["find_added", "find_instead", "scan_added"]

_log = logging.getLogger(__name__)


def scan_added(batch: Batch, find: Callable[[], tuple[F32, I64] | None]) -> None:
    """Scans them for all queries of a batch, where there are any, or fails the batch. Never raises; ends the scan.

    ``find``: scans, as :meth:`AddedScanner.scan` answers.
    """
    if batch.added_lists is None:
        return
    started = time.perf_counter()
    try:
        found = find()
        batch.clock.note(ADDED_SCAN, started)
        batch.complete_added(found)
    except BaseException as error:  # noqa: BLE001 - handed to those who wait
        _log.exception("the scan of added rows failed")
        batch.fail(error)
    finally:
        batch.end_scan()


def find_added(scanner: AddedScanner, batch: Batch, probes: I64) -> tuple[F32, I64] | None:
    """Those that no device scans, for all queries."""
    assert batch.added_lists is not None
    if batch.added_there is not None:
        probes = batch.added_there.elsewhere(probes)
    return scanner.scan(batch.added_lists, batch.queries, probes, batch.k_of_added)


def find_instead(scanner: AddedScanner, batch: Batch, part: ProbePart) -> tuple[F32, I64] | None:
    """Those that the device would have scanned whose part the host takes over."""
    there = batch.added_there
    if there is None or part.device == HOST:
        return None
    return scanner.scan(there.added, batch.queries[part.rows], there.there(part.probes), batch.k_of_added)
