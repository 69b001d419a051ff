"""A batch's part that lies in no list: rows that were added since the lists were written."""

from __future__ import annotations

import logging
import time

from hybridindex.router.batch.batch import Batch
from hybridindex.router.batch.stages import ADDED_SCAN
from hybridindex.tiers.host.added_scanner import AddedScanner
from hybridindex.types import I64

__all__ = ["scan_added"]

_log = logging.getLogger(__name__)


def scan_added(scanner: AddedScanner, batch: Batch, probes: I64) -> None:
    """Scans those that no device scans for all queries of a batch, where there are any, or fails the batch. Never
    raises; ends the scan."""
    if (added := batch.added_lists) is None:
        return
    started = time.perf_counter()
    try:
        if batch.added_there is not None:
            probes = batch.added_there.elsewhere(probes)
        found = scanner.scan(added, batch.queries, probes, batch.k_of_added)
        batch.clock.note(ADDED_SCAN, started)
        batch.complete_added(found)
    except BaseException as error:  # noqa: BLE001 - handed to those who wait
        _log.exception("the scan of added rows failed")
        batch.fail(error)
    finally:
        batch.end_scan()
