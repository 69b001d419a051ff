"""The kernels compile for an H100 or H200 where there is none: the interpreter accepts what the compiler does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

COMPILE = """
import contextlib, io, itertools, re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hybridindex.tiers.paged import triton_scanner as device_triton
from hybridindex.tiers.paged import triton_kernels as kernels
from hybridindex.tiers.paged.codes import triton_code_kernels as code_kernels
from hybridindex.tiers.paged.codes import triton_code_scanner as device_codes
from hybridindex.tiers.paged.tables.scan_tables import GROUP, Selection

POINTERS = {"ints": "*i32", "floats": "*fp32", "keys": "*i64"}
POINTERS |= {"words": "*i32", "halves": "*fp16", "singles": "*fp32", "bytes_": "*i8"}
DATA = {"f32": "*fp32", "f16": "*fp16", "bf16": "*i16", "sq8": "*u8"}


def compile_for_hopper(kernel, constants, data="", spilled=0, **options):
    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else {**POINTERS, "data": data}.get(name, "i32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name] != "constexpr"}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
    with contextlib.redirect_stdout(io.StringIO()) as log:
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, **options}).asm["ptx"]
    assert ".local" not in ptx, f"{kernel.__name__} {constants} keeps an array in local memory"
    found = re.search(r"(\\d+) bytes spill stores[^\\0]*Used (\\d+) registers", log.getvalue())
    assert int(found[1]) <= spilled, f"{kernel.__name__} {constants}: {log.getvalue()}"
    assert int(found[2]) <= options.get("maxnreg", 255)
    return ptx


for (kind, data), (dim, residual) in itertools.product(DATA.items(), [(384, False), (100, True)]):
    rows = 65536 // (dim * {"f32": 4, "sq8": 1}.get(kind, 2))
    shared = {"D": dim, "PAGE_ROWS": rows, "GROUP": GROUP, "KIND": kind, "RESIDUAL": residual}
    cols = device_triton._columns(dim)
    for keep_max in (True, False):
        ptx = compile_for_hopper(
            kernels.scan_light,
            {**shared, "KEEP_MAX": keep_max, "ROWS": device_triton._rows_at_once(dim, cols, rows), "COLS": cols},
            data,
            # For four programs a multiprocessor, a few values that one of 128 threads reads back.
            spilled=64,
            maxnreg=device_triton._LIGHT_REGISTERS,
        )
        assert "mma" not in ptx
        # Rows come in whole vectors, and do not drive queries and tables out of the near cache.
        assert dim % 64 or "ld.global.L1::evict_first.L2::cache_hint.v4.b32" in ptx
    ptx = compile_for_hopper(
        kernels.scan_heavy, {**shared, "WIDE": False, "ROWS": 64, "COLS": 32 if kind == "f32" else 64}, data
    )
    # float32 products on the matrix units would be shortened.
    assert ("wgmma" in ptx) == (kind != "f32")
    assert "tf32" not in ptx
for k in (10, 2048):
    selection = Selection.of(k)
    for first, keep_max in ((True, True), (True, False), (False, True)):
        compile_for_hopper(
            kernels.select_best,
            {"FROM_DISTANCES": first, "KEEP_MAX": keep_max, "CHUNK": selection.chunk, "KEPT": selection.kept},
            num_warps=4 if selection.chunk <= 2048 else 8,
        )
for bits, dim, l2 in ((1, 384, False), (2, 416, True), (4, 32, True)):
    form = device_codes.CodeFormat(
        bits=bits, dim=dim, padded_dim=dim, metric="l2" if l2 else "ip", seed=0, rounds=4, f_scale=1.0, g_scale=1.0,
    )
    shapes = device_codes.shapes_of(form, 65536 // form.block_bytes * 16, True)
    for kernel, constants in zip((code_kernels.estimate_light, code_kernels.estimate_heavy), shapes, strict=True):
        ptx = compile_for_hopper(kernel, constants, **device_codes.OPTIONS)
        # Every product and sum is rounded by itself, and small numbers stay.
        assert "fma" not in ptx and "ftz" not in ptx
        assert ("popc" in ptx) == ("mma" not in ptx)
        assert kernel is code_kernels.estimate_light or ("wgmma" in ptx and ".s32.s8.s8" in ptx)
print("compiled")
"""


def test_kernels_compile_for_hopper_and_stay_in_registers(tmp_path):
    """Among the slowest: 30 kernels go through the real compiler. Without a GPU nothing else shows that they do."""
    triton = pytest.importorskip("triton", reason="triton is not installed")
    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    if not os.access(os.environ.get("TRITON_PTXAS_PATH", bundled), os.X_OK):
        pytest.skip(f"triton's assembler cannot be run: {bundled}")
    script = tmp_path / "compile_kernels.py"
    script.write_text(COMPILE)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT), "TRITON_DUMP_PTXAS_LOG": "1"}
    out = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False)
    assert out.stdout.strip() == "compiled", out.stderr
