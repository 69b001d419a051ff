"""``OMP_WAIT_POLICY`` of the command line, which importing this module sets, before faiss loads.

Spinning OpenMP threads distort timings on a busy machine. Only entry points import this; the library warns.
"""

from __future__ import annotations

import os

__all__ = ["GIVEN"]

#: What the caller's environment says, and programs other than this one get; empty where it is not set.
GIVEN = os.environ.get("OMP_WAIT_POLICY", "")

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
