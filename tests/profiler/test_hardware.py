from __future__ import annotations

import logging

import numpy as np
import pytest

from hybridindex.profiler.hardware import (
    _fingerprint,
    _parse_cpuinfo,
    hardware_info,
    load_average,
    measurement_warnings,
    omp_wait_policy,
    usable_cores,
)

X86 = """processor\t: 0
model name\t: Example CPU @ 2.0GHz
flags\t\t: fpu sse2 avx2 avx512f avx512_vnni amx_int8 fma
processor\t: 1
model name\t: Example CPU @ 2.0GHz
flags\t\t: fpu
"""
ARM = """processor : 0
Features : fp asimd sve2 crc32
CPU implementer : 0x41
CPU part : 0xd4f
"""


def test_the_fingerprint_is_stable_and_describes_this_machine():
    first, second = hardware_info(), hardware_info()
    assert first == second
    assert first.cores == usable_cores() >= 1
    assert first.memory_bytes > 1 << 28
    assert first.versions["numpy"] == np.__version__
    assert list(first.cpu_flags) == sorted(first.cpu_flags)
    assert len(first.fingerprint) == 16


def test_the_fingerprint_changes_with_what_changes_speed_only():
    base = ("cpu", ("avx2",), 4, 8 << 30, ())
    assert _fingerprint(*base) == _fingerprint("cpu", ("avx2",), 4, (8 << 30) - (100 << 20), ())
    others = [
        ("cpu2", *base[1:]),
        (base[0], ("avx2", "avx512f"), *base[2:]),
        (*base[:2], 8, *base[3:]),
        (*base[:3], 16 << 30, ()),
        (*base[:4], ("cuda:0 GPU, 80 GiB",)),
    ]
    assert len({_fingerprint(*facts) for facts in [base, *others]}) == 6


def test_cpuinfo_of_x86_and_arm():
    assert _parse_cpuinfo(X86) == ("Example CPU @ 2.0GHz", ("amx_int8", "avx2", "avx512_vnni", "avx512f", "fma"))
    assert _parse_cpuinfo(ARM) == ("0x41 0xd4f", ("asimd", "sve2"))
    assert _parse_cpuinfo("")[0]


@pytest.mark.parametrize(("environ", "policy"), [({}, "unset"), ({"OMP_WAIT_POLICY": " passive "}, "PASSIVE")])
def test_wait_policy_is_read_as_written(environ, policy):
    assert omp_wait_policy(environ) == policy


def test_spinning_and_load_are_warned_of_and_logged(caplog):
    with caplog.at_level(logging.WARNING):
        spinning, busy = measurement_warnings("unset", 9.0, 2)
    assert "OMP_WAIT_POLICY=PASSIVE" in spinning
    assert "9.0 on 2 cores" in busy
    assert len(caplog.records) == 2
    assert measurement_warnings("PASSIVE", 1.0, 2) == []


def test_load_average_is_a_number():
    assert load_average() >= 0
