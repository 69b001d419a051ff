"""Parts of ``benchmarks.host.updates`` that compare systems: durable adds, and one row with maintenance behind it."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.clusters import make_clusters
from benchmarks.common.measure import show
from benchmarks.rivals.updating import PEERS, Data, Side, SideError

__all__ = ["Scale", "add", "checkpoint", "verdict"]

NOT_ASKED = "not asked for"
OURS, AGAIN = "hybridindex", "hybridindex, again"
#: Milliseconds and bytes of one row with maintenance.
CHECKPOINT_MS, CHECKPOINT_BYTES = 50.0, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured."""

    dim: int = 256
    #: Rows before anything is added, of slow peers too, and rows in a batch.
    count: int = 500_000
    few: int = 50_000
    batch: int = 1_000
    rounds: int = 7
    #: Of a turn at most, in seconds and in rows.
    turn_s: float = 4.0
    turn_rows: int = 15_000
    threads: int = 16
    single_s: float = 3.0
    #: Checkpoints of each side.
    repeats: int = 31
    #: Seconds of a window, windows of each kind, and rows of one change, of searches beside writes.
    window_s: float = 12.0
    windows: int = 8
    change: int = 100
    capacity_s: float = 30.0
    #: Steps of a turnover, of recall and of bytes.
    steps: int = 20
    queries: int = 1_000
    peers: tuple[str, ...] = ()
    #: Whether systems are measured without durability, too.
    not_durable: bool = True
    python: Path | None = None
    cache: Path = Path("build/cache")
    scratch: Path = Path("/tmp")


def verdict(value: float, target: float, floor: float, *, least: bool = False) -> str:
    """met, missed or inconclusive; ``floor``: relative noise. ``least``: the target is a lower bound."""
    ratio = target / value if least else value / target
    if ratio <= 1 / (1 + floor):
        return "met"
    return "missed" if ratio > 1 + floor else "inconclusive"


@contextmanager
def _sides(scale: Scale, names: tuple[str, ...]) -> Iterator[tuple[dict[str, Side], dict[str, str]]]:
    """Those of these names that are there, and why others are not."""
    clusters = make_clusters(
        scale.dim, (scale.count + scale.count // 5) * 4 * scale.dim, nlist=int(4 * np.sqrt(scale.count))
    )
    named = [peer for peer in PEERS if peer.name in names]
    chosen = [peer for peer in named if not scale.peers or peer.system in scale.peers]
    with tempfile.TemporaryDirectory(dir=scale.scratch) as folder, ExitStack() as stack:
        # PostgreSQL runs as another user.
        Path(folder).chmod(0o755)
        data = Data.written(clusters, Path(folder), scale.count, scale.few, scale.cache / "updates")
        del clusters
        sides: dict[str, Side] = {}
        absent = {peer.name: NOT_ASKED for peer in named if peer not in chosen}
        for peer in chosen:
            sys.stderr.write(f"{peer.name} ...\n")
            try:
                sides[peer.name] = Side(peer, data, Path(folder), scale.python)
                stack.callback(sides[peer.name].close)
            except SideError as error:
                absent[peer.name] = str(error)
        yield sides, absent


def _rounds(sides: dict[str, Side], absent: dict[str, str], rounds: int, do: str, **asked: Any) -> dict[str, list[Any]]:
    """Answers of each side to the same turn, in an order that changes; a side that fails is left out from then on."""
    answers: dict[str, list[Any]] = {name: [] for name in sides}
    rng = np.random.default_rng(0)
    for number in range(rounds + 1):
        for name in rng.permutation(list(answers)).tolist():
            if name in absent:
                continue
            try:
                answer = sides[name].turn(do, **asked)
            except SideError as error:
                absent[name] = str(error)
                continue
            # The first is not measured: it wakes threads, and fills caches.
            if number:
                answers[name].append(answer)
    return {name: found for name, found in answers.items() if found}


def _spread(rates: list[float]) -> dict[str, Any]:
    low, middle, high = np.percentile(rates, [25, 50, 75])
    return {"rows_per_s": middle, "quartiles": (low, high)}


def _compared(rates: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Rows per second of each, and how many times as many are ours: medians of rounds, with quartiles."""
    found = {}
    for name, each in rates.items():
        n = min(len(each), len(rates[OURS]))
        ratios = np.array(rates[OURS][:n]) / np.array(each[:n])
        low, middle, high = np.percentile(ratios, [25, 50, 75])
        found[name] = {**_spread(each), "ours_over_it": middle, "ours_over_it_quartiles": (low, high)}
    return found


def add(scale: Scale) -> dict[str, Any]:
    """Rows per second of durable adds: batches, and rows one by one from threads."""
    names = tuple(peer.name for peer in PEERS if peer.durable or scale.not_durable)
    with _sides(scale, names) as (sides, absent):
        batches = _rounds(
            sides, absent, scale.rounds, "add", batch=scale.batch, seconds=scale.turn_s, most=scale.turn_rows
        )
        single = _rounds(sides, absent, scale.rounds, "single", threads=scale.threads, seconds=scale.single_s)
        counts = {name: side.count for name, side in sides.items()}
        durability = {name: side.durability if side.peer.durable else "none" for name, side in sides.items()}
    batch_rates = {name: [each["rows"] / sum(each["seconds"]) for each in found] for name, found in batches.items()}
    single_rates = {name: [max(each["rows"], 1e-9) / each["wall"] for each in found] for name, found in single.items()}
    for name, why in absent.items():
        sys.stderr.write(f"not measured: {name}: {why}\n")
    if OURS in absent:
        raise SideError(absent[OURS])
    result: dict[str, Any] = {
        "dim": scale.dim,
        "batch": scale.batch,
        "threads": scale.threads,
        "absent": absent,
        "began_with": counts,
        "durability": durability,
    }
    for kind, rates, answers in (("batches", batch_rates, batches), ("single", single_rates, single)):
        rows = _compared(rates)
        for name, row in rows.items():
            last = answers[name][-1]
            # Rows that no list and no graph has yet; latency of one.
            row |= {key: last[key] for key in ("pending", "p50_ms", "p99_ms", "errors") if key in last}
        low, high = rows[AGAIN]["ours_over_it_quartiles"] if AGAIN in rows else (1.0, 1.0)
        floor = max(abs(low - 1), abs(high - 1))
        rivals = {peer.name for peer in PEERS if peer.is_rival} & rows.keys()
        worst = min(rivals, key=lambda name: rows[name]["ours_over_it"], default=None)
        result[kind] = {
            "rows": rows,
            "floor": floor,
            "fastest_peer": worst,
            "verdict": None if worst is None else verdict(rows[worst]["ours_over_it"], 1.0, floor, least=True),
        }
        show(
            f"durable adds, {scale.count:,} rows x {scale.dim}: "
            + (f"batches of {scale.batch}" if kind == "batches" else f"one row each, {scale.threads} threads"),
            ("system", "rows/s", "quartiles", "ours over it", "quartiles", "began with", "durable by"),
            [
                (
                    name,
                    f"{row['rows_per_s']:,.0f}",
                    " to ".join(f"{each:,.0f}" for each in row["quartiles"]),
                    f"{row['ours_over_it']:.2f}",
                    " to ".join(f"{each:.2f}" for each in row["ours_over_it_quartiles"]),
                    f"{counts[name]:,}",
                    durability[name],
                )
                for name, row in sorted(rows.items(), key=lambda item: -item[1]["rows_per_s"])
            ]
            + [("ahead of every durable peer", result[kind]["verdict"], "", "", f"floor {floor:.2f}", "", "")],
        )
    return result


def checkpoint(scale: Scale) -> dict[str, Any]:
    """One row, and maintenance behind it: milliseconds, and bytes written."""
    names = (OURS, AGAIN, "LanceDB IVF_FLAT")
    with _sides(scale, names) as (sides, absent):
        # LanceDB may take seconds for one.
        answers = _rounds(sides, absent, scale.repeats, "one", repeats=1)
    if OURS in absent:
        raise SideError(absent[OURS])
    rows = {}
    for name, found in answers.items():
        ms = [each["ms"][0] for each in found]
        low, middle, high, most = np.percentile(ms, [25, 50, 75, 100])
        rows[name] = {
            "ms": middle,
            "ms_quartiles": (low, high),
            "ms_most": most,
            "given_bytes": float(np.median([each["given"][0] for each in found])),
            "device_bytes": float(np.median([each["device"][0] for each in found])),
            "device_bytes_most": max(each["device"][0] for each in found),
        }
    ours = rows[OURS]
    floor = abs(rows[AGAIN]["ms"] / ours["ms"] - 1) if AGAIN in rows else 0.0
    nbytes = max(ours["given_bytes"], ours["device_bytes"])
    said = {
        "ms": verdict(ours["ms_quartiles"][1], CHECKPOINT_MS, floor),
        "bytes": verdict(nbytes, CHECKPOINT_BYTES, 0.0),
    }
    show(
        f"one row and maintenance, {scale.count:,} rows x {scale.dim}",
        ("system", "ms", "quartiles", "most", "KiB written", "KiB to the device"),
        [
            (
                name,
                f"{row['ms']:.2f}",
                " to ".join(f"{each:.2f}" for each in row["ms_quartiles"]),
                f"{row['ms_most']:.1f}",
                f"{row['given_bytes'] / 1024:,.1f}",
                f"{row['device_bytes'] / 1024:,.1f}",
            )
            for name, row in rows.items()
        ]
        + [("targets", said["ms"], f"<= {CHECKPOINT_MS:g} ms", "", said["bytes"], "<= 1 MiB")],
    )
    return {"rows": rows, "floor": floor, "absent": absent, "verdict": said}
