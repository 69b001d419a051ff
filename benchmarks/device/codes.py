"""The device scan of codes beside that of the rows that they stand for, over lists of the same sizes.

Lists of random rows, and of random codes, lie on scattered pages as :mod:`benchmarks.device.scan` makes and times them;
that describes the columns. A search by codes finds candidates (``k``), whose rows the host compares; that is not in
these times. Answers are checked first: each query's candidates and their estimates are those of the reference in numpy,
to the bit. *over rows*: the time of the rows' kernels over that of the codes', at the same batch and probes.

Then, for batches, from how many queries of a list its codes are best multiplied by the matrix units: *heavy_from*, and
how much *faster* than what is in use.

    python -m benchmarks.device.codes --json codes.json

Without a GPU, and with ``--quick``, a few megabytes show that it runs; such timings say nothing of a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.common.measure import Attempts, arguments, show, write
from benchmarks.device.scan import (
    BYTES,
    Batch,
    RepeatableWorkspace,
    ResidentLists,
    make_lists,
    measure,
    place,
)
from benchmarks.device.sweep import sweep_heavy
from benchmarks.device.targets import SCAN_NPROBE, SCAN_TARGETS
from hybridindex.index.codec import DeviceCodec
from hybridindex.index.rabitq.encode import decode_blocks
from hybridindex.index.rabitq.estimate import estimates, prepare_queries
from hybridindex.index.rabitq.rotation import signs
from hybridindex.index.rabitq.spec import BLOCK_ROWS, ROUNDS, SUPPORTED_BITS, CodeFormat, pad_dim
from hybridindex.paging import CODE_PAGE_BYTES, PageGeometry, scratch_for_budget
from hybridindex.tiers.contract.positions import POSITION_BITS
from hybridindex.tiers.paged.codes.torch_code_scanner import TorchCodeScanner
from hybridindex.tiers.paged.codes.triton_code_scanner import CodeWorkspace, TritonCodeScanner
from hybridindex.tiers.paged.page_scanner import PageScanner
from hybridindex.types import F32, I64

ROWS = "bf16"
COLUMNS = (
    ("codec", "codec"),
    ("dim", "dim"),
    ("batch", "batch"),
    ("nprobe", "nprobe"),
    ("k", "k"),
    ("unique bytes", "unique_bytes"),
    ("scan ms", "scan_ms"),
    ("kernels ms", "kernels_ms"),
    ("GB/s", "gbps"),
    ("of a sum", "of_a_sum"),
    ("over rows", "over_rows"),
    ("wrong", "wrong"),
    ("of", "checked"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomCodes:
    """What a scanner asks of an index's codes."""

    signs: F32
    centroid_sq: F32


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedLists(ResidentLists):
    """Of codes, on the device alone."""

    rabitq: RandomCodes
    candidates: int

    @property
    def form(self) -> CodeFormat:
        assert self.codec.form is not None
        return self.codec.form

    @property
    def k(self) -> int:
        return self.candidates

    def scanner(self, scratch_bytes: int) -> PageScanner:
        missing = TritonCodeScanner.unsupported(self.arena)
        made: type[PageScanner] = TorchCodeScanner if missing else TritonCodeScanner
        return made(*self.scanner_arguments(scratch_bytes))

    def repeatable(self, scratch_bytes: int) -> tuple[PageScanner, RepeatableWorkspace]:
        scanner = TritonCodeScanner(*self.scanner_arguments(scratch_bytes))
        scanner.workspace = workspace = RepeatableCodeWorkspace(self.arena, self.codec, scratch_bytes)
        return scanner, workspace

    def products(self, probes: I64) -> F32:
        """In place of those with centroids, of which there are none."""
        return np.sin(probes, dtype=np.float32)

    def scan(self, scanner: PageScanner, queries: F32, probes: I64) -> tuple[F32, I64]:
        return scanner.scan(queries, probes, self.products(probes), self.k)

    def wrong(self, queries: F32, probes: I64, found: tuple[F32, I64]) -> int:
        wrong = 0
        products = self.products(probes)
        per_page = self.arena.geometry.rows_per_page // BLOCK_ROWS
        blocks = self.arena.data.view(-1, self.form.block_bytes)
        for row, probed in enumerate(probes):
            coded = prepare_queries(queries[row : row + 1], self.rabitq.signs, self.form)
            said, places = [], []
            for column, list_id in enumerate(probed.tolist()):
                pages, size = self.residency.list_pages[list_id], int(self.list_sizes[list_id])
                assert pages is not None
                where = (pages.astype(np.int64)[:, None] * per_page + np.arange(per_page)).ravel()
                data = blocks[where[: -(-size // BLOCK_ROWS)]].cpu().numpy().reshape(-1)
                own, square = products[row, column : column + 1], float(self.rabitq.centroid_sq[list_id])
                said.append(estimates(coded, decode_blocks(data, size, self.form), own, square, self.form)[0])
                places.append((list_id << POSITION_BITS) + np.arange(size))
            every, at = np.concatenate(said), np.concatenate(places)
            best = np.lexsort((at, every))[: self.k]
            right = np.array_equal(found[0][row, : len(best)], every[best])
            right = right and np.array_equal(found[1][row, : len(best)], at[best])
            wrong += not (right and (found[1][row, len(best) :] == -1).all())
        return wrong

    def dense_seconds(self, batches: list[Batch], repeats: int) -> float | None:
        return None


class RepeatableCodeWorkspace(RepeatableWorkspace, CodeWorkspace):
    """Of codes."""


def make_codes(rows: ResidentLists, bits: int, candidates: int, seed: int = 0) -> CodedLists:
    """Random codes, as many in each list as it has rows."""
    import torch

    dim, device = rows.scan_dim, rows.arena.device
    form = CodeFormat(
        bits=bits,
        dim=dim,
        padded_dim=pad_dim(dim),
        metric=rows.metric,
        seed=seed,
        rounds=ROUNDS,
        f_scale=2.0**-8,
        g_scale=2.0**-6,
    )
    code_size = form.block_bytes // BLOCK_ROWS
    geometry = PageGeometry.for_code_size(code_size, CODE_PAGE_BYTES, group_rows=BLOCK_ROWS)
    arena, residency = place(rows.list_sizes, device, geometry, seed)
    generator = torch.Generator(device).manual_seed(seed)
    plane_bytes = form.block_bytes - form.factor_bytes
    for part in torch.split(arena.data.view(-1, form.block_bytes), 1 << 16):
        part[:, :plane_bytes].random_(0, 256, generator=generator)
        factors = torch.rand((len(part), form.factor_bytes // 2), generator=generator, device=device)
        halves = factors[:, :32].half().view(torch.uint8)
        part[:, plane_bytes : plane_bytes + 64] = halves
        if form.metric == "l2":
            part[:, plane_bytes + 64 :] = factors[:, 32:48].contiguous().view(torch.uint8)
    rng = np.random.default_rng(seed)
    return CodedLists(
        metric=rows.metric,
        scan_dim=dim,
        list_sizes=rows.list_sizes,
        codec=DeviceCodec(kind="rabitq", dim=dim, code_size=code_size, by_residual=False, form=form),
        arena=arena,
        residency=residency,
        rabitq=RandomCodes(
            signs=signs(form.padded_dim, seed), centroid_sq=rng.random(rows.nlist, dtype=np.float32) + np.float32(0.5)
        ),
        candidates=candidates,
    )


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", default="", help="cuda:N, or cpu for the stand-in; the first GPU where there is one"
    )
    parser.add_argument("--gigabytes", type=float, default=4.5, help="resident bytes of rows on a GPU")
    parser.add_argument("--metric", choices=("ip", "l2"), default="ip")
    parser.add_argument("--dims", type=int, nargs="+", default=[384, 768])
    parser.add_argument("--candidates", type=int, default=100, help="that a search by codes finds")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="a few megabytes, to show that it runs")


def main() -> None:
    args = arguments(__doc__, _options)
    import torch

    from hybridindex.tiers.contract.devices import resolve_device

    device, info = resolve_device(args.device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    quick = args.quick or info.stand_in
    nbytes, repeats = (1 << 20, 2) if quick else (int(args.gigabytes * 1e9), args.repeats)
    if quick:
        sys.stdout.write("a few megabytes, to show that this runs; no figure here says anything\n")
    rows: list[dict[str, Any]] = []
    heavy: list[dict[str, Any]] = []
    attempts = Attempts()

    def save(*, complete: bool = False) -> None:
        result = {"device": info.label, "stand_in": info.stand_in, "quick": quick, "complete": complete,
                  "candidates": args.candidates, "rows": rows, "heavy": heavy, "failed": attempts.failed}  # fmt: skip
        write(args.json, "device_codes", result)

    scratch = scratch_for_budget(1 << 40)
    shapes = list(itertools.product(SCAN_TARGETS, (64, SCAN_NPROBE)))
    for dim in args.dims:
        with attempts(f"rows, d={dim}"):
            base = make_lists(device, ROWS, dim, args.metric, nbytes)
            before = {(n, nprobe): measure(base, n, nprobe, repeats, scratch) for n, nprobe in shapes}
            rows += before.values()
            save()
            for bits in SUPPORTED_BITS:
                with attempts(f"{bits} bits, d={dim}"):
                    lists = make_codes(base, bits, args.candidates)
                    for (n, nprobe), other in before.items():
                        row = measure(lists, n, nprobe, repeats, scratch)
                        key = "kernels_ms" if row["kernels_ms"] and other["kernels_ms"] else "scan_ms"
                        rows.append(row | {"codec": f"rabitq{bits}", "over_rows": other[key] / row[key]})
                        save()
                    for n in (n for n in SCAN_TARGETS if n > 1 and rows[-1]["scanner"] == "triton"):
                        heavy += sweep_heavy(lists, n, SCAN_NPROBE, repeats, scratch)
                        save()
                    del lists
            del base
    save(complete=not attempts.failed)
    show(
        f"device scan of codes and of the rows that they stand for ({BYTES[ROWS]} bytes a dimension) on {info.label}, "
        f"{rows[0]['scanner'] if rows else 'no'} scanner",
        tuple(name for name, _ in COLUMNS),
        [tuple("-" if r.get(key) is None else r[key] for _, key in COLUMNS) for r in rows],
    )
    if heavy:
        names = ("codec", "bits", "dim", "batch", "heavy_from", "ms", "faster", "error")
        show("queries that make a list heavy", names,
             [tuple("-" if r.get(key) is None else r[key] for key in names) for r in heavy])  # fmt: skip
    attempts.end()
    if any(r["wrong"] for r in rows):
        raise SystemExit("wrong answers")


if __name__ == "__main__":
    main()
