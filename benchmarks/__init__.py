"""Benchmarks: ``python -m benchmarks.NAME --json FILE``. Both sides in one run, interleaved; medians and spread."""
