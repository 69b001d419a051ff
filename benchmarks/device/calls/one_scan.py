"""A few scans of each codec and nothing else: what a sanitizer or a profiler looks at.

Lists of random rows as :mod:`benchmarks.device.scan` makes them, and of RaBitQ codes as :mod:`benchmarks.device.codes`;
a batch of 1, and one of 16 that all probe the same lists, so that the kernels for few and for many queries
a list run both.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

import numpy as np

from benchmarks.common.measure import arguments
from benchmarks.device.codes import make_codes
from benchmarks.device.scan import BYTES, ResidentLists, make_batch, make_lists
from hybridindex.index.rabitq.spec import SUPPORTED_BITS


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=int, default=1, help="resident MiB of each codec")
    parser.add_argument("--dim", type=int, default=96)
    parser.add_argument("--list-rows", type=int, default=50)
    parser.add_argument("--nprobe", type=int, default=8)


def scan(lists: ResidentLists, nprobe: int) -> None:
    """Both batches."""
    rng = np.random.default_rng(0)
    scanner = lists.scanner(16 << 20)
    for n, shape in ((1, "main"), (16, "reuse 16")):
        lists.scan(scanner, *make_batch(lists, n, nprobe, rng, shape))


def main() -> None:
    args = arguments(__doc__, _options)
    import torch

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    for kind in BYTES:
        lists = make_lists(device, kind, args.dim, "ip", args.mib << 20, list_rows=args.list_rows)
        for metric in ("ip", "l2"):
            scan(replace(lists, metric=metric), args.nprobe)
            sys.stdout.write(f"scanned {kind}, {metric}\n")
            sys.stdout.flush()
        if kind == "bf16":
            for bits in SUPPORTED_BITS:
                scan(make_codes(lists, bits, 20), args.nprobe)
                sys.stdout.write(f"scanned rabitq{bits}, ip\n")


if __name__ == "__main__":
    main()
