"""``python -m hybridindex.cluster.tied PID WORDS``: ``hybridindex WORDS``, which ends with the process that started it.

A node's daemon must not outlive the actor that watches it: another one would be started on the same port.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

__all__: list[str] = []

#: linux/prctl.h.
_PR_SET_PDEATHSIG = 1


def _tie(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it ended before this
        raise SystemExit("the process that started this node has ended")


if __name__ == "__main__":
    _tie(int(sys.argv[1]))
    sys.argv = ["hybridindex", *sys.argv[2:]]
    runpy.run_module("hybridindex", run_name="__main__")
