"""Whether other settings make the scan's kernels faster than those that they are launched with.

Times the launches of batches of :mod:`benchmarks.device.scan` with every setting of rows and columns that a program of
the light kernel holds, of its warps and of registers a thread, and with every number of queries from which a list goes
to the heavy one; each against the setting in use, launched in turn with it. Answers are not checked: a setting changes
no sum but its order. What is found belongs into :mod:`hybridindex.tiers.paged.triton_scanner`. Needs a GPU: elsewhere
there is nothing to time.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.common.measure import Attempts, arguments, show, write
from benchmarks.device.scan import BYTES, TURNS, ResidentLists, make_batch, make_lists, prepare, replay, seconds_of
from benchmarks.device.targets import SCAN_NPROBE
from hybridindex.index.codec import DeviceCodec
from hybridindex.paging import scratch_for_budget
from hybridindex.tiers.paged import triton_scanner as device_triton
from hybridindex.tiers.paged.codes import triton_code_scanner as device_codes
from hybridindex.tiers.paged.triton_scanner import Workspace

ROWS, COLS, WARPS = (8, 16, 32), (64, 128), (4, 8)
#: The most for four programs of 128 threads a multiprocessor, and for three.
REGISTERS = (128, 168)
#: Queries that make a list heavy; the last: none does.
HEAVY_FROM = (1, 2, 3, 5, 7, 9, 13, 1 << 30)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gigabytes", type=float, default=4.5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--dims", type=int, nargs="+", default=[384, 768])
    parser.add_argument("--repeats", type=int, default=20)


class _Reshaped:
    """A kernel whose launches take other constants than they were asked for."""

    def __init__(self, kernel: Any, **constants: int) -> None:
        self._kernel, self._constants = kernel, constants
        self.launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> Any:
            self.launches += 1
            return self._kernel[grid](*args, **(options | self._constants))

        return launch


@contextmanager
def reshaped(workspaces: Sequence[Workspace], **constants: int) -> Iterator[_Reshaped]:
    """They launch the kernel for few queries a list with ``constants`` meanwhile."""
    from hybridindex.tiers.paged import triton_kernels

    def forget() -> None:
        for workspace in workspaces:
            workspace._shapes.clear()

    kernel = triton_kernels.scan_light
    other = _Reshaped(kernel, **constants)
    triton_kernels.scan_light = other
    forget()
    try:
        yield other
    finally:
        triton_kernels.scan_light = kernel
        forget()


def sweep(lists: ResidentLists, n: int, nprobe: int, repeats: int, scratch_bytes: int) -> list[dict[str, Any]]:
    """One row a setting, the fastest first; a setting that does not compile or launch says why, at the end."""
    rng = np.random.default_rng(n)
    prepared = prepare(lists, [make_batch(lists, n, nprobe, rng) for _ in range(TURNS)], scratch_bytes)
    if not prepared:
        return []
    device = lists.arena.device

    def timed() -> float:
        return seconds_of(replay(prepared), device, repeats)

    found = []
    for rows, cols, warps, registers in itertools.product(ROWS, COLS, WARPS, REGISTERS):
        setting = {"rows": rows, "cols": cols, "warps": warps, "registers": registers}
        row: dict[str, Any] = {"codec": lists.codec.kind, "dim": lists.scan_dim, "batch": n, **setting,
                               "ms": None, "faster": None, "error": ""}  # fmt: skip
        found.append(row)
        before = timed()
        try:
            pieces = -(-lists.scan_dim // cols)
            with reshaped(prepared, ROWS=rows, COLS=cols, PIECES=pieces, num_warps=warps, maxnreg=registers):
                taken = timed()
        except Exception as error:  # noqa: BLE001 - one setting less
            row["error"] = repr(error)[:200]
            continue
        row |= {"ms": taken * 1e3, "faster": before / taken}
    return sorted(found, key=lambda row: -(row["faster"] or 0.0))


@contextmanager
def heavy_from(codec: DeviceCodec, members: int) -> Iterator[None]:
    """Scans of ``codec`` take a list of so many queries to the heavy kernel meanwhile."""
    table: dict[Any, int] = device_triton._HEAVY_FROM if codec.form is None else device_codes._HEAVY_FROM
    key = codec.kind if codec.form is None else codec.form.bits
    before = table[key]
    table[key] = members
    try:
        yield
    finally:
        table[key] = before


def sweep_heavy(lists: ResidentLists, n: int, nprobe: int, repeats: int, scratch_bytes: int) -> list[dict[str, Any]]:
    """As :func:`sweep`, of the numbers of queries from which a list is heavy."""
    rng = np.random.default_rng(n)
    batches = [make_batch(lists, n, nprobe, rng) for _ in range(TURNS)]
    in_use = prepare(lists, batches, scratch_bytes)
    found = []
    for members in HEAVY_FROM if in_use else ():
        row: dict[str, Any] = {"codec": lists.codec.kind, "bits": lists.codec.form and lists.codec.form.bits,
                               "dim": lists.scan_dim, "batch": n, "heavy_from": members,
                               "ms": None, "faster": None, "error": ""}  # fmt: skip
        found.append(row)
        try:
            with heavy_from(lists.codec, members):
                prepared = prepare(lists, batches, scratch_bytes)
            before = seconds_of(replay(in_use), lists.arena.device, repeats)
            taken = seconds_of(replay(prepared), lists.arena.device, repeats)
        except Exception as error:  # noqa: BLE001 - one setting less
            row["error"] = repr(error)[:200]
            continue
        row |= {"ms": taken * 1e3, "faster": before / taken}
    return sorted(found, key=lambda row: -(row["faster"] or 0.0))


def _of_lists(lists: ResidentLists, args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Rows of each batch size."""
    scratch = scratch_for_budget(1 << 40)
    for n in args.batches:
        yield sweep(lists, n, SCAN_NPROBE, args.repeats, scratch)
        if n > 1:
            yield sweep_heavy(lists, n, SCAN_NPROBE, args.repeats, scratch)


def main() -> None:
    args = arguments(__doc__, _options)
    import torch

    if not torch.cuda.is_available():
        sys.stdout.write("no GPU: nothing to time\n")
        return
    from hybridindex.tiers.contract.devices import resolve_device

    device, info = resolve_device("cuda:0")
    rows: list[dict[str, Any]] = []
    attempts = Attempts()
    for kind, dim in itertools.product(BYTES, args.dims):
        with attempts(f"{kind}, {dim} dimensions"):
            for found in _of_lists(make_lists(device, kind, dim, "ip", int(args.gigabytes * 1e9)), args):
                rows += found
                told = {"device": info.label, "nprobe": SCAN_NPROBE, "rows": rows}
                write(args.json, "device_sweep", {**told, "failed": attempts.failed})
    columns = ("codec", "dim", "batch", "rows", "cols", "warps", "registers", "heavy_from", "ms", "faster", "error")
    show(f"settings of the scan on {info.label}, over those in use", columns,
         [tuple("-" if r.get(key) is None else r[key] for key in columns) for r in rows])  # fmt: skip
    attempts.end()


if __name__ == "__main__":
    main()
