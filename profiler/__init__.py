"""Measures one index on one machine: access skew, recall, latencies, transfers. Decides nothing, stores nothing.

Start at :func:`hybridindex.profiler.run.profile_index`.
"""

from hybridindex.profiler.check import check_profile
from hybridindex.profiler.hardware import hardware_info
from hybridindex.profiler.request import ProfileRequest
from hybridindex.profiler.run import profile_index

__all__ = ["ProfileRequest", "check_profile", "hardware_info", "profile_index"]
