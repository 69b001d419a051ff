"""What the device tier is meant to reach, and what a run reached of it: one verdict per target.

Judges read the results of the parts as they stand in their files, whole or cut short: what is missing is said. On a
stand-in device nothing is claimed, whatever was measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.common.measure import show

__all__ = [
    "BANDWIDTH_TARGET",
    "BESIDE_TARGET",
    "BOUND_TARGET",
    "EXACT_TARGET",
    "FASTER_FROM",
    "KERNEL_TARGETS",
    "P99_TARGET",
    "PLAN_TARGET",
    "SCAN_NPROBE",
    "SCAN_SHAPES",
    "SCAN_TARGETS",
    "SCHEDULERS_TARGET_MS",
    "SPEEDUP_ETA",
    "SPEEDUP_TARGET",
    "SWAP_TARGET_US",
    "Verdict",
    "judge",
    "show_verdicts",
]

#: Batch size -> least share of what a sum over the same bytes reaches, at :data:`SCAN_NPROBE`: a whole scan by the
#: clock, and its kernels alone.
SCAN_TARGETS = {1: 0.4, 8: 0.7, 64: 0.7}
KERNEL_TARGETS = {1: 0.5, 8: 0.7, 64: 0.7}
SCAN_NPROBE = 256
#: What differs from the main shapes -> batch sizes; :mod:`benchmarks.device.scan` describes them.
SCAN_SHAPES = {
    "main": (1, 8, 64),
    "l2": (1, 8, 64),
    "100 rows a list": (1, 8, 64),
    "10,000 rows a list": (1, 8, 64),
    "384 dimensions": (1, 8, 64),
    "reuse 1": (64,),
    "reuse 4": (64,),
    "reuse 18": (64,),
    "request log": (8, 64),
}
#: Of a distance, over the sum of its terms.
EXACT_TARGET = 1e-6
#: Batch sizes from which ours is to be faster than faiss-gpu.
FASTER_FROM = 8
#: Of a plain pinned copy.
BANDWIDTH_TARGET = 0.9
#: Times faster than loading the whole shard again.
PLAN_TARGET = 5.0
#: Wait of a lease while a snapshot is replaced.
SWAP_TARGET_US = 100.0
#: Of another process's rate alone, while lists move.
BESIDE_TARGET = 0.95
#: Of what the host's measured times and the bandwidth of a sum on the device allow.
BOUND_TARGET = 0.8
#: Times faster than the host alone (TeleRAG), where so much of the work is on the device.
SPEEDUP_TARGET, SPEEDUP_ETA = 7.0, 0.9
#: p99 of searches while a plan changes, over undisturbed.
P99_TARGET = 1.5
#: Milliseconds of both schedulers at 128 queries and 8 devices.
SCHEDULERS_TARGET_MS = 5.0

#: That a verdict names beside a ratio.
_SPEEDS = (("scan_gbps", "by the clock"), ("gbps", "in kernels"), ("sum_gbps", "of a sum"))

_STAND_IN = "stand-in: claims nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One row of the last table. ``met`` is None where nothing is claimed; ``note`` says why."""

    part: str
    what: str
    target: str
    measured: str
    met: bool | None
    note: str = ""


def judge(parts: Mapping[str, Mapping[str, Any]], status: Mapping[str, str]) -> list[Verdict]:
    """Verdicts of all parts that are in ``status`` (name -> how it ended), of what ``parts`` holds of them."""
    found = []
    for name, ended in status.items():
        result = parts.get(name)
        if result is None:
            found.append(_nothing(name, "all of it", "", ended))
            continue
        judged = list(_JUDGES[name](result))
        for verdict in judged or [_nothing(name, "all of it", "", "no row was finished")]:
            verdict = _with(verdict, part=name)
            if result["stand_in"]:
                verdict = _with(verdict, met=None, note=f"{_STAND_IN}; {verdict.note}".rstrip("; "))
            elif not result["complete"]:
                # What was not tried could have missed; a miss is a miss.
                verdict = _with(
                    verdict, met=verdict.met and None, note=f"cut short: {ended}; {verdict.note}".rstrip("; ")
                )
            found.append(verdict)
    return found


def show_verdicts(verdicts: Sequence[Verdict]) -> None:
    """Prints the table."""
    words = {True: "yes", False: "NO", None: "-"}
    show(
        "what was to be shown, and what was",
        ("part", "what", "target", "measured", "met", "note"),
        [(v.part, v.what, v.target, v.measured, words[v.met], v.note) for v in verdicts],
    )


def _with(verdict: Verdict, **changes: Any) -> Verdict:
    return Verdict(**(asdict(verdict) | changes))


def _nothing(part: str, what: str, target: str, why: str) -> Verdict:
    return Verdict(part=part, what=what, target=target, measured="nothing", met=None, note=why)


def _scan(result: Mapping[str, Any]) -> Iterator[Verdict]:
    rows = result.get("rows", [])
    wrong, checked = (sum(r[key] for r in rows) for key in ("wrong", "checked"))
    yield Verdict(
        part="device_scan",
        what="answers against float64",
        target="none wrong",
        measured=f"{wrong} of {checked}",
        met=not wrong if checked else None,
    )
    for shape, batches in SCAN_SHAPES.items():
        for batch in batches:
            own = [r for r in rows if r["shape"] == shape and r["batch"] == batch]
            where = f"{shape}, batch {batch}"
            for what, key, targets in (
                ("scan", "scan_of_a_sum", SCAN_TARGETS),
                ("kernels", "of_a_sum", KERNEL_TARGETS),
            ):
                yield _worst("device_scan", f"{what} over a sum of the bytes: {where}", own, key, targets[batch],
                             name=_shape, form="{:.0%}")  # fmt: skip
            # Torch multiplies no bytes.
            yield _worst("device_scan", f"kernels over a dense product and topk: {where}",
                         [r for r in own if r["codec"] != "sq8"], "over_dense", 1.0,
                         name=_shape, form="{:.2g} x")  # fmt: skip


def _shape(row: Mapping[str, Any]) -> str:
    speeds = [f"{row[key]:.0f} GB/s {name}" for key, name in _SPEEDS if row.get(key) is not None]
    shape = f"{row['codec']} d={row['dim']} nprobe {row['nprobe']} reuse {row['reuse']:.1f}"
    return ", ".join([shape, *speeds])


def _worst(
    part: str,
    what: str,
    rows: Sequence[Mapping[str, Any]],
    key: str,
    least: float,
    *,
    name: Callable[[Mapping[str, Any]], str],
    form: str,
) -> Verdict:
    """``rows`` have at least ``least`` under ``key``: the lowest of them decides and is named."""
    target = ">= " + form.format(least)
    valued = [r for r in rows if r.get(key) is not None]
    if not valued:
        return _nothing(part, what, target, "not measured here")
    low = min(valued, key=lambda row: row[key])
    reached = sum(row[key] >= least for row in valued)
    note = f"the lowest of {len(valued)}, {reached} reach it: {name(low)}"
    if left := len(rows) - len(valued):
        note += f"; {left} without a figure"
    met = bool(low[key] >= least)
    return Verdict(part=part, what=what, target=target, measured=form.format(low[key]), note=note,
                   met=met if not (met and left) else None)  # fmt: skip


def _copy(result: Mapping[str, Any]) -> Iterator[Verdict]:
    for source, arena in itertools.product(("pinned memory", "mapped file"), ("fresh", "used")):
        pinned = source == "pinned memory"
        what = f"prefetch from {source} to a {arena} arena, of a plain pinned copy"
        rows = result.get("prefetch", ())
        row = next((r for r in rows if (r["lists from"], r["arena"]) == (source, arena)), None)
        target = f">= {BANDWIDTH_TARGET:.0%}" if pinned else "reported"
        if row is None:
            yield _nothing("device_copy", what, target, "not measured here")
            continue
        ratio = row["of plain"][0]
        speeds = f"{row['GB/s']:.3g} GB/s of {row['plain GB/s']:.3g}"
        note = f"{row['runs a list']:.1f} runs of pages a list, {row['pin_reason']}".rstrip(", ")
        yield Verdict(part="device_copy", what=what, target=target, measured=f"{ratio:.0%}, {speeds}",
                      met=ratio >= BANDWIDTH_TARGET if pinned else None, note=note)  # fmt: skip
    what, target = "plan change of a tenth, over a reload", f">= {PLAN_TARGET:g} x"
    if changed := result.get("plan_change"):
        faster = changed["times faster"][0]
        yield Verdict(
            part="device_copy", what=what, target=target, measured=f"{faster:.1f} x", met=faster >= PLAN_TARGET
        )
    else:
        yield _nothing("device_copy", what, target, "not measured here")


def _swap(result: Mapping[str, Any]) -> Iterator[Verdict]:
    for row in result.get("rows", []):
        pause, compaction = row["pause_us"]["p99"], row["compaction_pause_us"]
        note = f"max {row['pause_us']['max']:.0f}, p99 of nothing {row['nothing_us']['p99']:.0f}"
        if compaction is not None:
            note += f", {row['compactions']} compacted: median {compaction['median']:.0f}"
        least = compaction["median"] if compaction is not None else 0.0
        met: bool | None = max(pause, least) <= SWAP_TARGET_US
        if not met and row["nothing_us"]["p99"] > SWAP_TARGET_US >= max(row["pause_us"]["median"], least):
            met, note = None, f"the machine's own noise is larger; {note}"
        yield Verdict(
            part="device_swap",
            what=f"wait of a lease while lists are replaced, {row['nlist']} lists",
            target=f"<= {SWAP_TARGET_US:g} us",
            measured=f"median {row['pause_us']['median']:.0f}, p99 {pause:.0f} us",
            met=met,
            note=note,
        )


def _beside(result: Mapping[str, Any]) -> Iterator[Verdict]:
    if not result.get("rows"):
        yield _nothing("device_beside", "rate of another process", f">= {BESIDE_TARGET:.0%}", result["sharing"])
    for row in result.get("rows", []):
        for work, target in (("moving", BESIDE_TARGET), ("scanning", None)):
            rate = row[work][0]
            if not row["moved GB/s" if work == "moving" else "batches/s"]:
                yield _nothing("device_beside", f"{row['load']} loop while {work}", "", "nothing was done meanwhile")
                continue
            yield Verdict(
                part="device_beside",
                what=f"rate of a {row['load']} loop in another process while {work}",
                target="reported" if target is None else f">= {target:.0%}",
                measured=f"{rate:.1%}",
                met=None if target is None else rate >= target,
                note=f"{result['sharing']}, A/A {row['alone'][0]:.3f}",
            )
    if scans := result.get("scans"):
        yield Verdict(
            part="device_beside",
            what="p99 of scans while lists move as fast as they can, over alone",
            target="reported",
            measured=f"{scans['p99_ratio']:.2f} x, {scans['p99_ms']['moving']:.3g} ms",
            met=None,
            note=f"{scans['moved GB/s']:.3g} GB/s moved, A/A {scans['noise']:.2f}, {result['sharing']}",
        )


def _router(result: Mapping[str, Any]) -> Iterator[Verdict]:
    rows = result.get("lookahead", [])

    def name(row: Mapping[str, Any]) -> str:
        shape = f"nprobe {row['nprobe']}, budget {row['share']:.0%}, eta {row['eta']:.2f}"
        gbps = row["device_bytes"] / row["device_scan_ms"] / 1e6 if row["device_scan_ms"] else 0.0
        own = f"{row['of_own_bound']:.0%} of what the device's own time allows"
        return f"{shape}, {gbps:.0f} GB/s by the device, {result['sum_gbps']:.0f} of a sum, {own}"

    yield _worst("device_router", "speed-up by lookahead, of what a sum's bandwidth allows", rows, "of_bound",
                 BOUND_TARGET, name=name, form="{:.0%}")  # fmt: skip
    high = [r | {"faster": r["times_faster"][0]} for r in rows if r["eta"] >= SPEEDUP_ETA]
    what = f"speed-up by lookahead where eta >= {SPEEDUP_ETA:g}"
    if high or not rows:
        yield _worst("device_router", what, high, "faster", SPEEDUP_TARGET, name=name, form="{:.2g} x")
    else:
        why = f"no budget reached it: eta {max(r['eta'] for r in rows):.2f} at most"
        yield _nothing("device_router", what, f">= {SPEEDUP_TARGET:g} x", why)
    cache = result.get("cache", [])
    for without, with_cache in zip(cache[::2], cache[1::2], strict=False):
        moved = with_cache["moved_bytes_per_session"] / max(1.0, without["moved_bytes_per_session"])
        gained = with_cache["hit_rate"] - without["hit_rate"]
        yield Verdict(part="device_router", what=f"cache on over off, budget {without['share']:.0%}", target="pays",
                      measured=f"moved x {moved:.2f}, hit rate {gained:+.3f}",
                      met=(gained > 0 and moved <= 1.01) or (gained >= 0 and moved < 1))  # fmt: skip
    yield _nothing("device_router", "grouping, assignment: on over off", "pay",
                   "several devices, counted on real queries: benchmarks.host.schedulers")  # fmt: skip
    what, target = "p99 of searches while a plan changes", f"<= {P99_TARGET:g} x"
    if change := result.get("plan_change"):
        yield Verdict(part="device_router", what=what, target=target, measured=f"{change['p99_ratio']:.2f} x",
                      met=change["p99_ratio"] <= P99_TARGET if change["changes"] else None,
                      note=f"{change['changes']} changes, A/A {change['noise']:.2f}")  # fmt: skip
    else:
        yield _nothing("device_router", what, target, "not measured here")


def _schedulers(result: Mapping[str, Any]) -> Iterator[Verdict]:
    for row in result.get("times", []):
        if (row["queries"], row["devices"]) == (128, 8):
            yield Verdict(part="schedulers", what="both schedulers, 128 queries, 8 devices",
                          target=f"<= {SCHEDULERS_TARGET_MS:g} ms", measured=f"{row['both']:.2f} ms",
                          met=row["both"] <= SCHEDULERS_TARGET_MS,
                          note="made-up queries; TeleRAG: 37 and 220 ms")  # fmt: skip


def _faiss_gpu(result: Mapping[str, Any]) -> Iterator[Verdict]:
    rows = result.get("rows", [])
    what = "our scan over faiss-gpu's"
    if not rows:
        yield _nothing("faiss_gpu", what, "> 1 x", result["reason"] or "no row was finished")
        return
    wrong, checked = (sum(r[key] for r in rows) for key in ("wrong", "checked"))
    differ = f"{wrong} of {checked} differ"
    yield Verdict(part="faiss_gpu", what="distances of both", target="the same", measured=differ, met=not wrong)
    for row in rows:
        judged = row["batch"] >= FASTER_FROM and row["codec"] == "f32"
        ratio = row["faster"][0]
        speeds = f"{row['scan_gbps']:.0f} GB/s, faiss {row['faiss_gbps']:.0f}"
        yield Verdict(part="faiss_gpu", what=f"{what}: {row['faiss']} {row['metric']}, batch {row['batch']}",
                      target="> 1 x" if judged else "reported", measured=f"{ratio:.2f} x",
                      met=ratio > 1 if judged else None,
                      note=f"{speeds}, ids {row['same_ids']:.1%} the same, A/A {row['noise'][0]:.2f}")  # fmt: skip


def _heavy(result: Mapping[str, Any]) -> Iterator[Verdict]:
    rows = result.get("rows", [])
    for dim in dict.fromkeys(r["dim"] for r in rows):
        worst = max((r for r in rows if r["dim"] == dim), key=lambda r: r["error"])
        heavy = (
            "not by our kernels" if worst["heavy"] is None else f"{worst['heavy']:.0%} by the kernel for many queries"
        )
        yield Verdict(part="heavy", what=f"error of distances against float64, d={dim}", target=f"<= {EXACT_TARGET:g}",
                      measured=f"{worst['error']:.2g}", met=worst["error"] <= EXACT_TARGET,
                      note=f"{worst['codec']} {worst['metric']}, {worst['signs']}, {heavy}")  # fmt: skip


def _coarse(result: Mapping[str, Any]) -> Iterator[Verdict]:
    for row in result.get("rows", []):
        middle, low, high = row["ratio"]
        faster = f"{middle:.2f} times as fast ({low:.2f} to {high:.2f})"
        yield Verdict(part="device_coarse", what=f"lists of {row['batch']} queries among {row['lists']:,}",
                      target="as the host, to the bit", measured=f"{row['different']} differ",
                      met=row["different"] == 0,
                      note=f"{faster}, {row['settled']:.1%} settled")  # fmt: skip


def _living(result: Mapping[str, Any]) -> Iterator[Verdict]:
    added = result.get("added", {}).get("rows", [])
    filtered = [(f"filters that leave {row['share']:.0%}", row) for row in result.get("filters", [])]
    for what, row in [*filtered, *(("added rows", row) for row in added)]:
        yield Verdict(part="device_living", what=f"{what}, batch {row['batch']}", target="reported", met=None,
                      measured=f"{row['times_faster'][0]:.2f} times as fast as the host",
                      note=f"A/A {row['noise'][0]:.2f}")  # fmt: skip


def _ceilings(result: Mapping[str, Any]) -> Iterator[Verdict]:
    for key, what in (("sum_gbps", "a sum"), ("device_copy_gbps", "a copy within the device")):
        if key in result:
            yield Verdict(part="ceilings", what=what, target="reported", measured=f"{result[key]:.0f} GB/s", met=None)
    if "launch_us" in result:
        launch = f"{result['launch_us']:.1f} us"
        yield Verdict(part="ceilings", what="one launch", target="reported", measured=launch, met=None)
    if copies := result.get("host_to_device"):
        best = max(copies, key=lambda row: row["queued GB/s"])
        yield Verdict(part="ceilings", what="host to device", target="reported", met=None,
                      measured=f"{best['queued GB/s']:.1f} GB/s", note=f"by {best['bytes']:,} bytes")  # fmt: skip


def _machine(result: Mapping[str, Any]) -> Iterator[Verdict]:
    gpus = [f"{gpu.get('name')}, driver {gpu.get('driver_version')}" for gpu in result["gpus"]]
    yield Verdict(part="machine", what="GPU", target="named", measured="; ".join(gpus) or "nothing", met=None,
                  note="" if gpus else f"nvidia-smi: {result['status']}")  # fmt: skip


def _extension(result: Mapping[str, Any]) -> Iterator[Verdict]:
    built = result["status"] == "complete"
    yield Verdict(part="extension", what="native extension", target="loads", met=built,
                  measured=result["found"] if built else "nothing", note="" if built else result["status"])  # fmt: skip


def _tests(result: Mapping[str, Any]) -> Iterator[Verdict]:
    counts = result["counts"]
    met: bool | None = result["status"] == "complete"
    if met and not counts.get("passed"):
        met = None
    elif not met and not counts.get("failed"):
        # Cut short, or not collected: none is known to fail.
        met = None
    yield Verdict(part="gpu_tests", what="tests for a GPU", target="none fails", met=met,
                  measured=", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing",
                  note=result["status"])  # fmt: skip


def _sanitizer(result: Mapping[str, Any]) -> Iterator[Verdict]:
    errors, ended = result["errors"], result["status"]
    # Where it counted none, it must have seen the end.
    met = False if errors else True if errors == 0 and ended == "complete" else None
    yield Verdict(part="sanitizer", what="errors that compute-sanitizer finds", target="none", met=met,
                  measured="nothing" if errors is None else str(errors),
                  note=f"{ended}; scanned {'; '.join(result['scanned']) or 'nothing'}")  # fmt: skip


def _counters(result: Mapping[str, Any]) -> Iterator[Verdict]:
    rows = result["kernels"]
    if not rows:
        yield _nothing("counters", "counters of the kernels", "reported", f"ncu: {result['status']}")
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        own = [row for row in rows if row["kernel"] == kernel]
        keys = [key for key in own[0] if key != "kernel"]
        ranges = (f"{key} {min(r[key] for r in own if key in r):.3g} to {max(r[key] for r in own if key in r):.3g}"
                  for key in keys)  # fmt: skip
        yield Verdict(part="counters", what=f"{kernel}, {len(own)} launches", target="reported",
                      measured=", ".join(ranges), met=None, note=f"ncu: {result['status']}")  # fmt: skip


_JUDGES: dict[str, Callable[[Mapping[str, Any]], Iterator[Verdict]]] = {
    "device_scan": _scan,
    "device_swap": _swap,
    "schedulers": _schedulers,
    "device_copy": _copy,
    "device_beside": _beside,
    "device_router": _router,
    "device_beside_mps": _beside,
    "faiss_gpu": _faiss_gpu,
    "heavy": _heavy,
    "device_coarse": _coarse,
    "device_living": _living,
    "ceilings": _ceilings,
    "machine": _machine,
    "extension": _extension,
    "gpu_tests": _tests,
    "movement_tests": _tests,
    "sanitizer": _sanitizer,
    "counters": _counters,
}
