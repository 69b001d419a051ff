"""One side of ``benchmarks.device.mover``: loads lists onto a device that does nothing.

A script of its own, run with the package and the benchmarks of the checkout on its Python's path. Lines of JSON come in
and go out. Lists are chosen, given pages, sent and published as the mover does it, on this thread; the copy stream
starts no copy and says that all are done.
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


class Done:
    """The mark of a copy that is over."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None

    def seconds(self) -> float:
        return 0.0


class IdleStream:
    """Starts nothing."""

    def launch(self, *_: Any) -> Done:
        return Done()

    send = launch

    def drain(self) -> None:
        return None


def main(root: str, settings: str) -> None:
    import torch

    import hybridindex as hx
    from benchmarks.device.copy import make_index
    from hybridindex.paging import PageGeometry
    from hybridindex.tiers.contract.residency import ResidencyStore
    from hybridindex.tiers.paged.arena import PageArena
    from hybridindex.tiers.paged.copier import Copier
    from hybridindex.tiers.paged.loading import ListLoad, LoadPath
    from hybridindex.tiers.paged.pinned import PinnedMemory

    home = Path(hx.__file__).resolve()
    assert home.is_relative_to(Path(root).resolve()), f"{sys.executable} imports {home}, not the checkout {root}"
    torch.set_num_threads(1)
    asked: dict[str, Any] = json.loads(settings)
    with tempfile.TemporaryDirectory() as folder:
        index = make_index(Path(folder), asked["mib"] << 20, asked["list_kb"] * 1000)
        geometry = PageGeometry.for_code_size(index.page_row_bytes)
        lists = np.random.default_rng(0).permutation(np.flatnonzero(index.list_sizes)).tolist()
        counts = geometry.pages_of_bytes(index.piece_bytes)
        n_pages = int(counts.sum())
        paths = []
        # By case: whether every second page is taken, and whether lists lie in page-locked memory.
        for used, locked in ((False, True), (True, True), (False, False), (True, False)):
            arena = PageArena(torch.device("cpu"), geometry, 2 * n_pages)
            if used:
                pages = arena.pages.allocate(2 * n_pages)
                assert pages is not None
                arena.pages.free(pages[::2].copy())
            pinned = PinnedMemory(geometry, page_locked=False) if locked else None
            if pinned is not None:
                held = pinned.hold(lists, counts[lists].tolist(), index.piece_codes, lambda: False)
                assert len(held.pinned) == len(lists)
            path = LoadPath(
                index=index,
                arena=arena,
                copier=Copier(arena, IdleStream()),  # type: ignore[arg-type]
                pinned=pinned,
                ordinal=0,
                usable=lambda: True,
            )
            store = ResidencyStore(index.n_pieces, lambda _, pages, arena=arena: arena.pages.free(pages))  # type: ignore[misc]
            paths.append((path, store))
        nbytes = int(index.piece_bytes[lists].sum())
        print(json.dumps({"version": hx.__version__, "lists": len(lists), "bytes": nbytes}), flush=True)
        for line in sys.stdin:
            turn = json.loads(line)
            path, store = paths[turn["batch"]]
            seconds, digest = [], 0
            for _ in range(turn["calls"]):
                began = time.perf_counter()
                load = ListLoad(lists, store, path, cancelled=lambda: False, depth=3)
                while load.step():
                    pass
                seconds.append(time.perf_counter() - began)
                digest = zlib.crc32(np.array(sorted(load.future.result().loaded)).tobytes(), digest)
                store.publish({}, drops=lists)
            print(json.dumps({"seconds": seconds, "digest": digest}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
