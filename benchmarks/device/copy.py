"""How fast lists reach a device, and what a plan change costs there.

1. Prefetch: all lists of a synthetic index through ``DeviceTier.load`` into an arena of twice their size, from pinned
   memory and from the mapped file through the staging ring, against one plain pinned copy of as many bytes to the same
   device. The arena is *fresh*, and lists come in their order; or *used*: half of its pages, drawn at random, are
   others', so that the free ones lie scattered, and lists come in random order, as lookahead asks for them. Target for
   pinned lists, both times: 90 % of the plain copy's bandwidth.
2. Copies of page-locked memory to the device, 4 KiB to 1 GiB (:mod:`benchmarks.device.calls.ceilings`): the ceiling for
   pieces of such sizes.
3. Plan change: a tenth of the resident bytes replaced, against dropping and loading everything. Target: 5 times faster.

The sides run in turns, ratios are paired by round, and the plain copy against itself gives the A/A noise. On the
stand-in device all of it runs to its end at small sizes and claims nothing: there a copy is a memcpy.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.common.measure import Attempts, arguments, interleave, ratio_of_medians, show, write
from benchmarks.device.calls.ceilings import host_copies
from benchmarks.device.reclaim import pin_all, reclaim_into
from benchmarks.device.targets import BANDWIDTH_TARGET, PLAN_TARGET
from hybridindex.types import I32

if TYPE_CHECKING:
    from hybridindex.index.ivf import IVFIndex
    from hybridindex.tiers.contract.residency import ResidencyStore
    from hybridindex.tiers.paged.device_tier import DeviceTier
    from hybridindex.tiers.paged.pinned import PinReport


#: Lists whose places are looked at.
_LOOKED_AT = 200


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="cuda:N, cpu (stand-in), or auto")
    parser.add_argument("--mib", type=int, help="MiB of lists; default 2048 on a GPU, 32 on the stand-in")
    parser.add_argument("--list-kib", type=int, help="KiB of a list, on average; default 1024, 256 on the stand-in")
    parser.add_argument("--repeats", type=int, help="default 15 on a GPU, 5 on the stand-in")


def make_index(folder: Path, nbytes: int, list_bytes: int) -> IVFIndex:
    """An index of random float32 vectors whose codes take about ``nbytes``."""
    from hybridindex.index import build

    dim = 256
    n = nbytes // (4 * dim)
    nlist = max(32, nbytes // list_bytes)
    rng = np.random.default_rng(0)

    def chunks() -> Any:
        for start in range(0, n, 65_536):
            yield rng.standard_normal((min(65_536, n - start), dim), dtype=np.float32)

    # Few training points: only sizes matter here, not what is near what.
    return build(chunks(), folder / "idx", nlist=nlist, metric="l2", codec="flat", train_size=40 * nlist)


def plain_copy(tier: DeviceTier, nbytes: int) -> Callable[[], None]:
    """One copy of ``nbytes`` from page-locked memory (plain on the stand-in), until it is there."""
    import torch

    on_gpu = tier.device.type == "cuda"
    source = torch.ones(nbytes, dtype=torch.uint8, pin_memory=on_gpu)
    target = torch.zeros(nbytes, dtype=torch.uint8, device=tier.device)

    def run() -> None:
        target.copy_(source, non_blocking=on_gpu)
        if on_gpu:
            torch.cuda.current_stream(tier.device).synchronize()

    return run


def use_arena(tier: DeviceTier, seed: int = 0) -> I32:
    """Takes pages at random until half of the arena is others', who keep them; these pages."""
    pages = tier.arena.pages
    every = pages.allocate(pages.n_free)
    assert every is not None, "no page is free"
    mixed = np.random.default_rng(seed).permutation(every)
    pages.free(np.sort(mixed[len(mixed) // 2 :]))
    return mixed[: len(mixed) // 2]


def prefetch(
    index: IVFIndex, tier: DeviceTier, store: ResidencyStore, *, repeats: int, pinned: PinReport | None, used: bool
) -> dict[str, Any]:
    """Loads everything into an arena in which nothing of ours lies, against the plain copy of as many bytes."""
    from hybridindex.tiers.paged.arena import page_runs

    every = np.flatnonzero(index.list_sizes)
    lists = (np.random.default_rng(1).permutation(every) if used else every).tolist()
    runs: list[float] = []
    nbytes = int(index.list_bytes.sum())
    plain = plain_copy(tier, nbytes)
    load_s: list[float] = []

    def load() -> None:
        started = time.perf_counter()
        report = tier.load(lists, store).result()
        load_s.append(time.perf_counter() - started)
        assert len(report.loaded) == len(lists), "the arena does not hold the index"
        if not runs:
            pages = store.current.list_pages
            runs.append(float(np.mean([len(page_runs(pages[i])) for i in lists[:_LOOKED_AT]])))  # type: ignore[arg-type]
        store.publish({}, drops=lists)

    # Dropping belongs to neither side: loads are timed inside, in the same turns.
    timed = interleave({"plain": plain, "plain again": plain, "load": load}, repeats=repeats)
    loads = np.array(load_s[-repeats:])
    ratio = np.percentile(np.array(timed["plain"].seconds) / loads, [50, 25, 75])
    stats = tier.copy_stats
    return {
        "lists from": "pinned memory" if pinned is not None else "mapped file",
        "arena": "used" if used else "fresh",
        "bytes": nbytes,
        "lists": len(lists),
        "runs a list": runs[0],
        "GB/s": nbytes / float(np.median(loads)) / 1e9,
        "plain GB/s": nbytes / timed["plain"].median / 1e9,
        "of plain": ratio.tolist(),
        "A/A": ratio_of_medians(timed["plain again"], timed["plain"]),
        "on the bus GB/s": stats.nbytes / stats.busy_s / 1e9 if stats.busy_s else 0.0,
        "buffer waits": stats.waits,
        "pin_reason": pinned.reason if pinned is not None else "",
    }


def plan_change(index: IVFIndex, tier: DeviceTier, store: ResidencyStore, *, repeats: int) -> dict[str, Any]:
    """Replaces a tenth of the resident bytes by as many that were not resident, and reloads everything."""
    everything = np.random.default_rng(1).permutation(np.flatnonzero(index.list_sizes))
    reached = np.cumsum(index.list_bytes[everything]) / index.list_bytes.sum()
    # Eleven parts: one is out, one of the ten that are in changes places with it, forth and back.
    outside, inside, staying = (
        everything[part].tolist()
        for part in np.split(np.arange(len(everything)), np.searchsorted(reached, [1 / 11, 2 / 11]))
    )
    resident = inside + staying
    assert len(tier.load(resident, store).result().loaded) == len(resident)
    state = [inside, outside]

    def change() -> None:
        leaving, coming = state
        store.publish({}, drops=leaving)
        tier.load(coming, store).result()
        state.reverse()

    def reload_all() -> None:
        now = store.current.resident_lists().tolist()
        store.publish({}, drops=now)
        tier.load(now, store).result()

    timed = interleave({"change": change, "reload": reload_all, "reload again": reload_all}, repeats=repeats)
    return {
        "resident lists": len(resident),
        "changed lists": len(inside),
        "changed bytes": int(index.list_bytes[inside].sum()) / int(index.list_bytes[resident].sum()),
        "change ms": 1e3 * timed["change"].median,
        "reload ms": 1e3 * timed["reload"].median,
        "times faster": ratio_of_medians(timed["reload"], timed["change"]),
        "A/A": ratio_of_medians(timed["reload again"], timed["reload"]),
    }


def main() -> None:
    args = arguments(__doc__, _options)
    import torch

    from hybridindex.tiers.contract.devices import resolve_device
    from hybridindex.tiers.contract.residency import ResidencyStore
    from hybridindex.tiers.paged.device_tier import DeviceTier, PagedMemory
    from hybridindex.tiers.serving import page_bytes_of

    name = args.device if args.device != "auto" else "cuda:0" if torch.cuda.is_available() else "cpu"
    on_gpu = name != "cpu"
    mib = args.mib or (2048 if on_gpu else 32)
    list_kib = args.list_kib or (1024 if on_gpu else 256)
    repeats = args.repeats or (15 if on_gpu else 5)
    with (
        tempfile.TemporaryDirectory() as folder,
        make_index(Path(folder), mib << 20, list_kib << 10) as index,
    ):
        # Half of the used arena's pages are others'.
        wanted = 2 * (int(index.list_bytes.sum()) + index.nlist * 65_536)
        copies: list[dict[str, Any]] = []
        prefetched: list[dict[str, Any]] = []
        changed: dict[str, Any] = {}
        attempts = Attempts()
        label = ""

        def save(*, complete: bool = False) -> None:
            result = {"device": label, "stand_in": not on_gpu, "complete": complete,
                      "bandwidth_target": BANDWIDTH_TARGET, "plan_target": PLAN_TARGET, "prefetch": prefetched,
                      "host_to_device": copies, "plan_change": changed, "failed": attempts.failed}  # fmt: skip
            write(args.json, "device_copy", result)

        for pin in (True, False):
            memory, pinned = pin_all(index, page_locked=on_gpu) if pin else (None, None)
            sizes = PagedMemory(pinned=memory, page_bytes=page_bytes_of(index))
            with (
                attempts(f"copies, pinned: {pin}"),
                closing(
                    DeviceTier(index, name, 0, budget_bytes=wanted + (64 << 20), wanted_bytes=wanted, memory=sizes)
                ) as tier,
            ):
                store = ResidencyStore(index.nlist, reclaim_into(tier))
                label = tier.label
                with attempts(f"prefetch, pinned: {pin}"):
                    prefetched.append(prefetch(index, tier, store, repeats=repeats, pinned=pinned, used=False))
                save()
                if pin:
                    with attempts("plan change"):
                        store.publish({}, drops=store.current.resident_lists().tolist())
                        changed.update(plan_change(index, tier, store, repeats=repeats))
                        store.publish({}, drops=store.current.resident_lists().tolist())
                    save()
                with attempts(f"prefetch to a used arena, pinned: {pin}"):
                    use_arena(tier)
                    prefetched.append(prefetch(index, tier, store, repeats=repeats, pinned=pinned, used=True))
                save()
        with attempts("copies by size"):
            copies += host_copies(resolve_device(name)[0])
        save(complete=not attempts.failed)
    stand_in = not on_gpu
    claim = "stand-in: claims nothing" if stand_in else ""
    show(
        f"prefetch to {label}, {mib} MiB",
        ("lists from", "arena", "runs a list", "GB/s", "plain GB/s", "of plain", "A/A", f">= {BANDWIDTH_TARGET:g}"),
        [
            (
                row["lists from"],
                row["arena"],
                row["runs a list"],
                row["GB/s"],
                row["plain GB/s"],
                f"{row['of plain'][0]:.2f} x",
                f"{row['A/A'][0]:.3f}",
                claim
                or ("no target" if row["lists from"] == "mapped file" else _said(row["of plain"][0], BANDWIDTH_TARGET)),
            )
            for row in prefetched
        ],
    )
    if copies:
        show(f"plain copies to {label}", tuple(copies[0]), [tuple(row.values()) for row in copies])
    show(
        "plan change, a tenth of the resident bytes",
        ("change ms", "reload ms", "times faster", "A/A", f">= {PLAN_TARGET:g}"),
        [
            (
                row["change ms"],
                row["reload ms"],
                f"{row['times faster'][0]:.1f} x",
                f"{row['A/A'][0]:.3f}",
                claim or _said(row["times faster"][0], PLAN_TARGET),
            )
            for row in ([changed] if changed else [])
        ],
    )
    attempts.end()


def _said(reached: float, target: float) -> str:
    return "yes" if reached >= target else "NO"


if __name__ == "__main__":
    main()
