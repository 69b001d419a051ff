"""What the native host scan starts, it ends."""

from __future__ import annotations

import os
import threading

from hybridindex.tiers.host.native_scanner import HostNativeScanner
from tests.clustered import small_index

WAIT_S = 300


def threads_here() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def test_closing_ends_its_threads(tmp_path):
    with small_index(tmp_path / "i", n=600) as index:
        before = threads_here()
        scanner = HostNativeScanner(index, threads=4)
        own = threads_here() - before
        assert len(own) == 3  # the calling thread is the fourth
        scanner.close()
        scanner.close()
        for _ in range(WAIT_S * 1000):
            if not own & threads_here():
                break
            threading.Event().wait(0.001)  # the system forgets a thread a little after it ended
        assert not own & threads_here()
