"""Our host scanner, as the benchmarks take it: the one place that says which one "ours" is."""

from __future__ import annotations

import sys
from typing import Any

from hybridindex.index.ivf import IVFIndex

__all__ = ["close_scanner", "host_scanner"]


def host_scanner(ivf: IVFIndex, threads: int) -> Any:
    """The native scanner; where this tree lacks it, faiss stands in and stderr says so."""
    try:
        from hybridindex.tiers.host.native_scanner import HostNativeScanner as Scanner
    except ImportError:
        from hybridindex.tiers.host.faiss_scanner import HostFaissScanner as Scanner  # type: ignore[assignment]

        sys.stderr.write("no native scanner: faiss stands in for ours, so every ratio is about 1\n")
    return Scanner(ivf, threads=threads)


def close_scanner(scanner: Any) -> None:
    """Ends what the scanner started; the stand-in has nothing to end."""
    close = getattr(scanner, "close", None)
    if close is not None:
        close()
