"""What the compiler makes of our Triton kernels, without a GPU: registers, bytes that leave them, shared memory, time.

Compiles every kernel with the constants and options that scans launch it with, for the lengths of vectors and the GPUs
below. ``benchmarks/results/compiled.json`` holds the table; a test compiles a part of it anew and compares
(``tests/tiers/paged/test_triton_kernels.py``). Registers say how many programs a multiprocessor holds at once; what
leaves them is written to memory and read back. Times are this machine's.

    python -m benchmarks.device.compiled --json benchmarks/results/compiled.json
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.common.measure import arguments, show, write
from hybridindex.index.codec import DEVICE_KINDS, DeviceCodec, parse_codec
from hybridindex.index.pq.form import PqForm
from hybridindex.index.rabitq.spec import BLOCK_ROWS, ROUNDS, SUPPORTED_BITS, CodeFormat, pad_dim
from hybridindex.paging import PageGeometry, usual_page_bytes
from hybridindex.tiers.paged import launch_shapes
from hybridindex.tiers.paged.codes import triton_code_scanner
from hybridindex.tiers.paged.launch_shapes import Shape
from hybridindex.tiers.paged.pq import triton_pq_scanner
from hybridindex.tiers.paged.tables.scan_tables import Selection
from hybridindex.types import Metric

DIMS = (1, 128, 384, 768, 1024, 3072, 4096)
#: Compute capability -> KiB of shared memory that a program may have: A100, H100 and H200, B200.
ARCHES = {80: 163, 90: 227, 100: 227}
METRICS: tuple[Metric, ...] = ("ip", "l2")
#: k of a search: the smallest and the largest selection, and one between.
KS = (10, 128, 2048)
#: Tensors of launches, by the name of the argument; rows are of their kind.
_POINTERS = {"ints": "*i32", "floats": "*fp32", "keys": "*i64"}
_POINTERS |= {"words": "*i32", "halves": "*fp16", "singles": "*fp32", "bytes_": "*i8"}
_ROWS = {"f32": "*fp32", "f16": "*fp16", "bf16": "*i16", "sq8": "*u8", "pq": "*u8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A kernel as a scan launches it."""

    #: Of what: "bf16 ip".
    of: str
    #: 0 where it does not matter.
    dim: int
    shape: Shape
    #: The type of a page's rows as the kernel reads them.
    rows: str = ""

    @property
    def name(self) -> str:
        return f"{self.shape.kernel.__name__} {self.of}" + (f" d={self.dim}" if self.dim else "")


def launches(dims: Sequence[int]) -> Iterator[Launch]:
    """All that scans of vectors of ``dims`` dimensions launch on a GPU, on pages of the usual size."""
    for dim in dims:
        for codec in DEVICE_KINDS:
            # Built here; fp16 and sq8 of faiss may be residuals.
            for residual in (False, True) if codec in ("fp16", "sq8") else (False,):
                yield from _of_rows(codec, dim, residual)
        for bits in SUPPORTED_BITS:
            yield from _of_codes(bits, dim)
        yield from _of_pq(dim)
    for k in KS:
        for first, keep_max in ((True, True), (True, False), (False, False)):
            what = f"{'distances' if first else 'keys'} {'ip' if keep_max else 'l2'} k={k}"
            yield Launch(of=what, dim=0, shape=launch_shapes.selection_shape(first, keep_max, Selection.of(k)))
    yield Launch(of="filters", dim=0, shape=launch_shapes.mask_shape())


def _page_rows(codec: str, code_size: int, group_rows: int = 1) -> int:
    """Of long lists."""
    page_bytes = usual_page_bytes(codec, code_size, np.array([1 << 20]))
    return PageGeometry.for_code_size(code_size, page_bytes, group_rows=group_rows).rows_per_page


def _of_rows(name: str, dim: int, residual: bool) -> Iterator[Launch]:
    code_size = parse_codec(name, dim).code_size
    codec = DeviceCodec(kind=DEVICE_KINDS[name], dim=dim, code_size=code_size, by_residual=residual)
    page_rows, rows = _page_rows(name, code_size), _ROWS[codec.kind]
    of = codec.kind + (" residual" if residual else "")
    for metric in METRICS:
        shape = launch_shapes.light_shape(codec, page_rows, metric == "ip")
        yield Launch(of=f"{of} {metric}", dim=dim, shape=shape, rows=rows)
    yield Launch(of=f"{of} ip", dim=dim, shape=launch_shapes.heavy_shape(codec, page_rows, True), rows=rows)
    if not residual:
        yield Launch(of=of, dim=dim, shape=launch_shapes.split_shape(codec))


def _of_codes(bits: int, dim: int) -> Iterator[Launch]:
    for metric in METRICS:
        form = CodeFormat(
            bits=bits, dim=dim, padded_dim=pad_dim(dim), metric=metric, seed=0, rounds=ROUNDS, f_scale=1.0, g_scale=1.0
        )
        page_rows = _page_rows("rabitq", form.block_bytes // BLOCK_ROWS, BLOCK_ROWS)
        for shape in (
            triton_code_scanner.light_shape(form, page_rows, True),
            triton_code_scanner.heavy_shape(form, page_rows),
        ):
            yield Launch(of=f"{bits} bit {metric}", dim=dim, shape=shape)


def _of_pq(dim: int) -> Iterator[Launch]:
    for name, metric in itertools.product(("pq", "pqfs"), METRICS):
        spec = parse_codec(name, dim)
        form = PqForm(
            dim=dim,
            parts=spec.m,
            metric=metric,
            residual=spec.by_residual,
            codewords=np.zeros((dim, 256 if name == "pq" else 16), np.float32),
            middle=np.zeros(dim, np.float32),
        )
        codec = DeviceCodec(kind="pq", dim=dim, code_size=form.code_size, by_residual=form.residual, pq=form)
        shape = triton_pq_scanner.shape_of(codec, _page_rows(name, form.row_bytes, form.group_rows))
        yield Launch(of=f"{name} {metric}", dim=dim, shape=shape, rows=_ROWS["pq"])


def compile_for(launch: Launch, arch: int) -> tuple[dict[str, Any], str]:
    """What the compiler says of a launch, and the PTX that it wrote.

    Raises:
        RuntimeError: triton interprets in this process.
    """
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if knobs.runtime.interpret:
        raise RuntimeError("triton interprets in this process (TRITON_INTERPRET=1)")
    kernel, constants = launch.shape.kernel, launch.shape.constants
    types = {
        each.name: "constexpr" if each.name in constants else {**_POINTERS, "data": launch.rows}.get(each.name, "i32")
        for each in kernel.params
    }
    # As a launch finds its arguments: pointers and offsets are multiples of 16.
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, each in enumerate(kernel.params)
        if each.name not in constants and not each.do_not_specialize
    }
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
    start = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as cache,
        knobs.cache.scope(),
        knobs.nvidia.scope(),
        contextlib.redirect_stdout(io.StringIO()) as log,
    ):
        knobs.cache.dir, knobs.nvidia.dump_ptxas_log = cache, True
        made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.shape.options)
        seconds = time.perf_counter() - start
    # The assembler's words; the kernel's own come last.
    said = log.getvalue()
    return {
        "registers": int(re.findall(r"Used (\d+) registers", said)[-1]),
        "spilled_bytes": int(re.findall(r"(\d+) bytes spill stores", said)[-1]),
        "shared_bytes": int(made.metadata.shared),
        "seconds": round(seconds, 2),
    }, made.asm["ptx"]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dims", type=int, nargs="+", default=DIMS)
    parser.add_argument("--arches", type=int, nargs="+", default=list(ARCHES))
    parser.add_argument("--only", default="", metavar="NAME", help="kernels whose name begins with this")


def main() -> None:
    args = arguments(__doc__, _options)
    rows: dict[str, dict[str, Any]] = {}
    for launch in launches(args.dims):
        for arch in args.arches if launch.name.startswith(args.only) else ():
            row, _ = compile_for(launch, arch)
            rows[f"{launch.name} sm_{arch}"] = row
            sys.stderr.write(f"{launch.name} sm_{arch}: {row}\n")
    write(args.json, "compiled", {"kernels": rows})
    columns = ("registers", "spilled_bytes", "shared_bytes", "seconds")
    show(
        "compiled kernels", ("kernel", *columns), [(name, *(row[key] for key in columns)) for name, row in rows.items()]
    )


if __name__ == "__main__":
    main()
