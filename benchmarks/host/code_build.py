"""How long ``compress`` takes to add RaBitQ codes to an index, and how much memory.

Synthetic vectors in an index of float32 rows. ``compress`` runs in a process of its own, as the command does: reading
rows, coding, writing, and finding the numbers of candidates. Memory: the largest anonymous memory of that process,
sampled, above what it held when the index was open. Mapped files are no part of it: the system takes their pages back
when it needs them. Their share is in the largest resident size, which is shown beside it.

Targets: one million vectors of 384 dimensions in 60 s, more in proportion of their bytes; memory bounded: for the
largest count at most 1.5 times that for the smallest, a quarter of it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common.clusters import import_lists, make_clusters
from benchmarks.common.measure import arguments, show, write

#: Seconds for this many bytes of float32, and for fewer: finding candidates takes as long for few vectors.
TARGET_S, TARGET_BYTES = 60.0, 1_000_000 * 384 * 4
MEMORY_GROWTH = 1.5
_SAMPLE_S = 0.02


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--counts", type=int, nargs="+", default=[250_000, 1_000_000])
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--bits", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--codec", default="flat", choices=("flat", "sq8"))
    parser.add_argument("--quick", action="store_true", help="few vectors: does it work")


def build_codes(path: Path, bits: int) -> dict[str, float]:
    """Adds codes to the index at ``path``: seconds, and bytes of memory. For a process of its own."""
    import hybridindex
    from hybridindex.index.compress import compress

    with hybridindex.open(path, verify="quick") as index:
        over = threading.Event()
        before = highest = _anonymous_bytes()

        def sample() -> None:
            nonlocal highest
            while not over.wait(_SAMPLE_S):
                highest = max(highest, _anonymous_bytes())

        sampling = threading.Thread(target=sample)
        sampling.start()
        start = time.perf_counter()
        spec = compress(index.ivf, bits=bits)
        seconds = time.perf_counter() - start
        over.set()
        sampling.join()
    return {
        "seconds": seconds,
        "memory_bytes": highest - before,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        "code_bytes": spec.file_bytes,
    }


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no line RssAnon")


def judge(rows: list[dict[str, Any]], dim: int) -> list[dict[str, Any]]:
    """Rows with their targets; memory is judged for the largest count against the smallest of the same bits."""
    judged = []
    for row in rows:
        same = [other for other in rows if other["bits"] == row["bits"]]
        least, most = (pick(same, key=lambda other: other["count"]) for pick in (min, max))
        target = TARGET_S * max(1.0, row["count"] * dim * 4 / TARGET_BYTES)
        bounded = None
        if row is most and least is not most:
            bounded = row["memory_bytes"] <= MEMORY_GROWTH * least["memory_bytes"]
        judged.append({**row, "target_s": target, "met": row["seconds"] <= target, "bounded": bounded})
    return judged


def main() -> None:
    args = arguments(__doc__, _options)
    if args.quick:
        args.counts, args.bits = [2_000, 8_000], [1]
    rows = []
    for count in args.counts:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "index"
            data = make_clusters(args.dim, count * args.dim * 4)
            import_lists(data.vectors, data.lists, data.centres, args.codec, "ip", path).close()
            nlist = len(data.centres)
            del data
            for bits in args.bits:
                fresh = multiprocessing.get_context("spawn")
                with ProcessPoolExecutor(1, mp_context=fresh) as process:
                    found = process.submit(build_codes, path, bits).result()
                rows.append({"count": count, "nlist": nlist, "bits": bits, **found})
    rows = judge(rows, args.dim)
    show(
        f"codes beside {args.codec} rows of {args.dim} dimensions",
        ("vectors", "lists", "bits", "codes MiB", "s", "target", "met", "memory MiB", "bounded", "peak RSS MiB"),
        [
            (
                f"{r['count']:,}",
                r["nlist"],
                r["bits"],
                f"{r['code_bytes'] / 2**20:.1f}",
                f"{r['seconds']:.1f}",
                f"{r['target_s']:.1f}",
                "yes" if r["met"] else "NO",
                f"{r['memory_bytes'] / 2**20:.0f}",
                "-" if r["bounded"] is None else "yes" if r["bounded"] else "NO",
                f"{r['peak_rss_bytes'] / 2**20:.0f}",
            )
            for r in rows
        ],
    )
    write(args.json, "code_build", {"dim": args.dim, "codec": args.codec, "rows": rows})


if __name__ == "__main__":
    main()
