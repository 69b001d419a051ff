"""What the device and its bus do at best: a sum that only reads, a copy on the device, copies from the host by size.

- *sum*: torch's sum of float32. *device copy*: bytes read and bytes written, both counted.
- *host to device*: page-locked memory to the device, 4 KiB to 1 GiB: one copy until it is there, and many queued one
  behind the other.
- *launch*: one operation of torch on 256 numbers, from the call until the device is idle again, by the clock.

Nothing of ours runs here; other parts hold their own times against these. On the stand-in all sizes are small and claim
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.common.measure import Attempts, arguments, show, write
from benchmarks.device.scan import seconds_of

__all__ = ["Floor", "host_copies", "measure_floor"]

_SIZES = tuple(4 << 10 << 2 * step for step in range(10))
#: Most copies in a row, and the most bytes of them all.
_QUEUED, _QUEUED_BYTES = 64, 256 << 20
_REPEATS = 20
#: Of the sum and the copy on the device: far more than a cache holds. And of the stand-in's.
_LARGE, _SMALL = 4 << 30, 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The least time of a scan, by figures that none of our kernels takes part in."""

    sum_bytes_per_s: float
    launch_s: float

    def seconds(self, unique_bytes: float) -> float:
        """Of a scan that reads so many bytes once; 0 where there is nothing to read."""
        return self.launch_s + unique_bytes / self.sum_bytes_per_s if unique_bytes else 0.0


def measure_floor(device: Any) -> Floor:
    """Of this device, now."""
    import torch

    words = torch.ones((_LARGE if device.type == "cuda" else _SMALL) // 4, dtype=torch.float32, device=device)
    seconds = seconds_of(lambda _: words.sum(), device, _REPEATS)
    return Floor(sum_bytes_per_s=4 * len(words) / seconds, launch_s=launch_seconds(device))


def launch_seconds(device: Any) -> float:
    """Seconds of one small operation, until the device is idle again."""
    import torch

    x = torch.ones(256, device=device)
    return _median(device, lambda: x.add_(1.0), 200)


def device_copy(device: Any) -> float:
    """Bytes a second, read and written, of a copy within the device."""
    import torch

    source = torch.ones((_LARGE if device.type == "cuda" else _SMALL) // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * len(source) / seconds_of(lambda _: target.copy_(source), device, _REPEATS)


def host_copies(device: Any, most_bytes: int = _SIZES[-1]) -> list[dict[str, Any]]:
    """Copies of page-locked memory (plain on the stand-in) to the device, one row a size."""
    import torch

    on_gpu = device.type == "cuda"
    sizes = [size for size in _SIZES if size <= (most_bytes if on_gpu else min(most_bytes, _SMALL))]
    source = torch.ones(sizes[-1], dtype=torch.uint8, pin_memory=on_gpu)
    target = torch.empty(sizes[-1], dtype=torch.uint8, device=device)
    rows = []
    for size in sizes:
        count = max(1, min(_QUEUED, _QUEUED_BYTES // size))

        def copy(times: int, size: int = size) -> None:
            for _ in range(times):
                target[:size].copy_(source[:size], non_blocking=on_gpu)

        alone = _median(device, lambda copy=copy: copy(1), _REPEATS)  # type: ignore[misc]
        queued = _median(device, lambda copy=copy, count=count: copy(count), _REPEATS) / count  # type: ignore[misc]
        rows.append({"bytes": size, "alone us": alone * 1e6, "alone GB/s": size / alone / 1e9,
                     "queued": count, "queued GB/s": size / queued / 1e9})  # fmt: skip
    return rows


def _median(device: Any, run: Callable[[], object], repeats: int) -> float:
    """Seconds by the clock until the device is idle again."""
    import torch

    taken = []
    for turn in range(-3, repeats):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if turn >= 0:
            taken.append(time.perf_counter() - start)
    return float(np.median(taken))


def main() -> None:
    args = arguments(__doc__)
    import torch

    from hybridindex.tiers.contract.devices import resolve_device

    device, info = resolve_device("cuda:0" if torch.cuda.is_available() else "cpu")
    figures: dict[str, float] = {}
    copies: list[dict[str, Any]] = []
    attempts = Attempts()

    def save(*, complete: bool = False) -> None:
        result = {"device": info.label, "stand_in": info.stand_in, "complete": complete, **figures,
                  "host_to_device": copies, "failed": attempts.failed}  # fmt: skip
        write(args.json, "ceilings", result)

    with attempts("sum"):
        floor = measure_floor(device)
        figures |= {"sum_gbps": floor.sum_bytes_per_s / 1e9, "launch_us": floor.launch_s * 1e6}
    save()
    with attempts("copy within the device"):
        figures["device_copy_gbps"] = device_copy(device) / 1e9
    save()
    with attempts("host to device"):
        copies += host_copies(device)
    save(complete=not attempts.failed)
    show(f"{info.label} at best", tuple(figures), [tuple(figures.values())])
    if copies:
        show(f"host to {info.label}", tuple(copies[0]), [tuple(row.values()) for row in copies])
    attempts.end()


if __name__ == "__main__":
    main()
