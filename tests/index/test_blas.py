"""faiss's OpenBLAS runs the kernels of this CPU, also where it does not know it; a user's own choice stands."""

from __future__ import annotations

import os
import subprocess
import sys

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


def test_faiss_gets_the_kernels_of_this_cpu_and_nobody_else_is_told() -> None:
    if not (kernels := blas_kernels()):
        pytest.skip("OpenBLAS knows this CPU's kernels best")
    if not (said := _said(OURS, None)):
        pytest.skip("this faiss brings no OpenBLAS of its own")
    assert said == [kernels, "None"]


def test_a_users_choice_stands() -> None:
    if not blas_kernels() or not _said(OURS, None):
        pytest.skip("no OpenBLAS of faiss's here, or no choice")
    assert _said(OURS, "Prescott") == ["Prescott", "Prescott"]
    assert _said(f"import faiss; {OURS}", "Prescott") == ["Prescott", "Prescott"]
