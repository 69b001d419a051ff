"""One side of ``benchmarks.device.host_work``: makes whole device scans of which the GPU's part does nothing.

A script of its own, run with the package and the benchmarks of the checkout on its Python's path. Lines of JSON come in
and go out. Tables are made, and written where a GPU would take them from; launches do nothing; the answer is read from
where the selection would have put it, and is of rows that were probed.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


def main(root: str, settings: str) -> None:
    import torch

    import hybridindex as hx
    from benchmarks.device import scan as device_scan
    from hybridindex.index.codec import DeviceCodec
    from hybridindex.paging import PageGeometry, usual_page_bytes
    from hybridindex.tiers.paged.triton_scanner import TritonScanner, Workspace

    home = Path(hx.__file__).resolve()
    assert home.is_relative_to(Path(root).resolve()), f"{sys.executable} imports {home}, not the checkout {root}"
    # The stand-in copies by threads, which a GPU does not.
    torch.set_num_threads(1)
    asked: dict[str, Any] = json.loads(settings)
    dim, code_size = asked["dim"], 2 * asked["dim"]
    codec = DeviceCodec(kind="bf16", dim=dim, code_size=code_size, by_residual=False)
    sizes = device_scan.make_sizes(asked["rows"], 0)
    try:
        page_bytes = usual_page_bytes("bf16", code_size, sizes)
    except TypeError:  # a checkout whose pages did not depend on the lists
        page_bytes = usual_page_bytes("bf16")  # type: ignore[call-arg]
    geometry = PageGeometry.for_code_size(code_size, page_bytes)
    arena, residency = device_scan.place(sizes, torch.device("cpu"), geometry, 0)
    lists = device_scan.ResidentLists(
        metric="ip", scan_dim=dim, list_sizes=sizes, codec=codec, arena=arena, residency=residency
    )

    class Idle(Workspace):
        """Launches and copies nothing to the device."""

        #: What the selection would have written.
        answer: npt.NDArray[np.int64]

        def _run(self, *_: Any) -> None:
            pass

        def _fetch(self, at: int, count: int) -> npt.NDArray[np.int64]:
            assert self._keys[at : at + count].numel() == count == self.answer.size
            return self.answer.copy()

        def _end_fetch(self, staged: Any, count: int) -> npt.NDArray[np.int64]:
            keys = super()._end_fetch(staged, count)
            keys[:] = self.answer
            return keys

    scanner = TritonScanner(lists, codec, arena, residency, 0, 64 << 20)  # type: ignore[arg-type]
    scanner.workspace = idle = Idle(arena, codec, 64 << 20)
    idle._ints = CopiedByADevice(idle._ints)  # type: ignore[assignment]
    print(json.dumps({"version": hx.__version__, "nlist": len(sizes)}), flush=True)
    batches: dict[int, list[Any]] = {}
    for line in sys.stdin:
        turn = json.loads(line)
        n = turn["batch"]
        if n not in batches:
            rng = np.random.default_rng(n)
            made = [device_scan.make_batch(lists, n, asked["nprobe"], rng) for _ in range(16)]
            batches[n] = [(queries, probes, *answer_of(probes, sizes, rng)) for queries, probes in made]
        seconds, digest = [], 0
        for number in range(turn["calls"] + 5):
            queries, probes, coarse, idle.answer = batches[n][number % 16]
            began = time.perf_counter()
            distances, ids = scanner.scan(queries, probes, coarse, 10)
            if number >= 5:
                seconds.append(time.perf_counter() - began)
            digest = zlib.crc32(ids.tobytes() + distances.tobytes(), digest)
        print(json.dumps({"seconds": seconds, "digest": digest}), flush=True)


class CopiedByADevice:
    """Words of the scratch, which a device copies to by itself."""

    def __init__(self, words: Any) -> None:
        self._words = words

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, at: slice) -> CopiedByADevice:
        return CopiedByADevice(self._words[at])

    def copy_(self, source: Any, *, non_blocking: bool) -> None:
        assert non_blocking
        assert len(source) == len(self._words)


def answer_of(probes: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], rng: np.random.Generator) -> tuple[Any, Any]:
    """Coarse distances, and keys of some rows that each query's lists have: 16 a query, in any order."""
    ends = np.cumsum(sizes[probes].sum(axis=1))
    slots = np.stack([rng.choice(np.arange(end - 2000, end), 16, replace=False) for end in ends])
    return np.zeros(probes.shape, np.float32), (rng.integers(1, 1 << 30, slots.shape) << 32 | slots).ravel()


if __name__ == "__main__":
    main(*sys.argv[1:])
