"""Benchmarks: ``python -m benchmarks.ROOM.NAME --json FILE``. Both sides run interleaved; medians and spread."""

from __future__ import annotations

from pathlib import Path

__all__ = ["ROOT"]

#: The checkout: where processes that import benchmarks start.
ROOT = Path(__file__).resolve().parents[1]
