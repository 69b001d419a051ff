"""faiss's OpenBLAS runs the kernels of this CPU, also where it does not know it; a user's own choice stands."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from hybridindex.index.faiss_model import blas_kernels

#: What the OpenBLAS that faiss brought says that it runs.
_ASK = """
import ctypes, os
{imported}
found = {{line.split()[-1] for line in open("/proc/self/maps") if "faiss" in line and "openblas" in line}}
for path in found:
    name = ctypes.CDLL(path).openblas_get_corename
    name.restype = ctypes.c_char_p
    print(name().decode(), os.environ.get("OPENBLAS_CORETYPE"))
"""


def _said(imported: str, choice: str | None) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    if choice is not None:
        environment["OPENBLAS_CORETYPE"] = choice
    ran = subprocess.run(
        [sys.executable, "-c", _ASK.format(imported=imported)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return ran.stdout.split()


OURS = "from hybridindex.index.faiss_model import require_faiss; require_faiss()"


def _brought() -> list[Path]:
    """OpenBLAS as it lies beside the faiss that is installed."""
    spec = importlib.util.find_spec("faiss")
    assert spec is not None
    assert spec.origin is not None
    return list(Path(spec.origin).parents[1].glob("faiss*.libs/*openblas*"))


pytestmark = pytest.mark.skipif(
    not _brought(), reason="this faiss was built for another BLAS: no OpenBLAS lies beside it"
)


def test_faiss_gets_the_kernels_of_this_cpu_and_nobody_else_is_told() -> None:
    name, told = _said(OURS, None)
    assert told == "None"
    if kernels := blas_kernels():  # on 64-bit Arm none are named
        assert name == kernels


def test_a_users_choice_stands() -> None:
    oldest = "Prescott" if platform.machine() == "x86_64" else "ARMV8"
    for imported in (OURS, f"import faiss; {OURS}"):
        name, told = _said(imported, oldest)
        assert (name.lower(), told) == (oldest.lower(), oldest)
