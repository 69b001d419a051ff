"""One side of ``benchmarks.host.revisions``: builds an index with the checkout that its Python imports, and searches.

A script of its own, run by that checkout's Python: it imports nothing of ``benchmarks``. Lines of JSON come in and go
out.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np


def main(root: str, data: str, settings: str) -> None:
    import hybridindex as hx

    home = Path(hx.__file__).resolve()
    assert home.is_relative_to(Path(root).resolve()), f"{sys.executable} imports {home}, not the checkout {root}"
    asked: dict[str, Any] = json.loads(settings)
    vectors, log = np.load(Path(data) / "vectors.npy"), np.load(Path(data) / "log.npy")
    with (
        tempfile.TemporaryDirectory() as folder,
        hx.build(vectors, Path(folder) / "idx", nlist=asked["nlist"], metric="ip", codec=asked["codec"]) as index,
        index.router(threads=asked["threads"], **asked["router"]) as router,
    ):
        print(json.dumps({"version": hx.__version__}), flush=True)
        for line in sys.stdin:
            turn = json.loads(line)
            rng = np.random.default_rng(turn["seed"])
            pool = [log[rng.integers(0, len(log), turn["batch"])] for _ in range(turn["calls"])]
            seconds, digest = [], 0
            # Not timed: what slept while the process stood still wakes now.
            for queries in pool[:5]:
                router.search(queries, 10, asked["nprobe"])
            for queries in pool:
                began = time.perf_counter()
                found = router.search(queries, 10, asked["nprobe"])
                seconds.append(time.perf_counter() - began)
                digest = zlib.crc32(np.sort(found.ids, axis=1).tobytes(), digest)
            print(json.dumps({"seconds": seconds, "digest": digest}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
