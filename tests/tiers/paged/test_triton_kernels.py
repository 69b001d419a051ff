"""What GPUs' compilers make of the kernels, where there is no GPU: the interpreter accepts what a compiler does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks.device.compiled import ARCHES, DIMS, launches

triton = pytest.importorskip("triton", reason="the kernels are triton's: without it there are none")

ROOT = Path(__file__).resolve().parents[3]
TABLE = json.loads((ROOT / "benchmarks" / "results" / "compiled.json").read_text())
#: Of a thread, whatever the GPU.
MOST_REGISTERS = 255

COMPILE = """
import json, sys
from benchmarks.device.compiled import compile_for, launches

arch, dim, kernels = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
words = ("mma", "wgmma", "tf32", "fma", "ftz", "popc", ".s32.s8.s8", ".local",
         "ld.global.L1::evict_first.L2::cache_hint.v4.b32")
found = {}
for launch in launches([dim]):
    if launch.name.startswith(kernels):
        row, ptx = compile_for(launch, arch)
        most = launch.shape.options.get("maxnreg", 255)
        found[f"{launch.name} sm_{arch}"] = row | {"most": most, "words": [word for word in words if word in ptx]}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiler():
    """Of triton, for NVIDIA's GPUs."""
    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    assembler = os.environ.get("TRITON_PTXAS_PATH", bundled)
    if not os.access(assembler, os.X_OK):
        pytest.skip(f"triton's assembler cannot be run: {assembler}")


# Among the slowest: each goes through the real compiler some twenty times. The rest of the table is the benchmark's.
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("arch", "dim", "kernels"),
    [
        (90, 384, "scan"),
        (90, 384, "estimate"),
        (90, 384, "add_up"),
        (90, 384, "select"),
        (90, 384, "leave_out"),
        (90, 4096, "scan"),
        (80, 768, "scan_heavy"),
        (100, 768, "scan_heavy"),
    ],
)
def test_kernels_compile_for_gpus_and_stay_in_registers(arch, dim, kernels):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, str(arch), str(dim), kernels]
    out = subprocess.run(
        command, capture_output=True, text=True, env=environment | {"PYTHONPATH": str(ROOT)}, check=False
    )
    assert out.returncode == 0, out.stderr
    for name, row in json.loads(out.stdout).items():
        words = set(row["words"])
        assert row["registers"] <= row["most"], (name, row)
        assert row["shared_bytes"] <= ARCHES[arch] << 10, (name, row)
        assert ".local" not in words, f"{name} keeps an array in local memory"
        # Another version of triton brings another assembler.
        if TABLE["environment"]["versions"]["triton"] == version("triton"):
            assert row["spilled_bytes"] <= TABLE["kernels"][name]["spilled_bytes"], (name, row)
        # Its float32 numbers would be shortened.
        assert "tf32" not in words, name
        if name.startswith("scan_light"):
            assert "mma" not in words, name
            # Rows come in whole vectors, and do not drive queries and tables out of the near cache.
            assert dim > 768 or "ld.global.L1::evict_first.L2::cache_hint.v4.b32" in words, name
        if name.startswith("scan_heavy") and arch == 90:
            assert "wgmma" in words, name
        if name.startswith(("estimate", "add_up")):
            # Every product and sum is rounded by itself, and small numbers stay.
            assert not words & {"fma", "ftz"}, name
        if name.startswith("estimate"):
            assert ("popc" in words) == ("mma" not in words) == name.startswith("estimate_light"), name
            assert "popc" in words or words >= {"wgmma", ".s32.s8.s8"}, name


def test_the_table_holds_every_kernel_within_the_limits():
    """``python -m benchmarks.device.compiled --json benchmarks/results/compiled.json`` writes it."""
    table = TABLE["kernels"]
    assert set(table) == {f"{launch.name} sm_{arch}" for launch in launches(DIMS) for arch in ARCHES}
    for name, row in table.items():
        assert row["registers"] <= MOST_REGISTERS, name
        assert row["shared_bytes"] <= ARCHES[int(name.rpartition("_")[2])] << 10, name
