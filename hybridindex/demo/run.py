"""The demo: from nothing to a served, planned and measured index on real text.

Steps that were done are kept beside the output and not done again: data, index, texts, profile. The load is not kept.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

import hybridindex as hx
from hybridindex import filesystem
from hybridindex.demo import cache
from hybridindex.demo.dataset import Dataset
from hybridindex.demo.designs import Design, compared_designs, served_designs
from hybridindex.demo.documents import write_demo_documents
from hybridindex.demo.load import load_dataset
from hybridindex.demo.projection import PROJECTION_RECIPE, Projection, check_hardware, project
from hybridindex.demo.same_answers import Lookaheads, SameAnswers, compare_answers, measure_lookahead
from hybridindex.errors import HybridIndexError, MissingDependencyError, how_to_install
from hybridindex.partitioner.plan import Plan
from hybridindex.profiler.open_loop import LoadResult, PoissonLoad, run_open_loop
from hybridindex.types import F32, Profile

__all__ = ["DemoResult", "PolicyLoad", "run_demo"]

#: progress(stage, done, total)
Progress = Callable[[str, int, int | None], None]

NLIST = 1300
N_CALIBRATION = 4000
#: Of the test half, for the second act.
N_COMPARED = 2000
RECALL = 0.95
BUDGET_BYTES = 64 << 20
SECONDS_PER_RATE = 3.0
#: The planned rate over the highest that the host alone sustains: headroom, as an operator would plan it. The scan
#: shares lists within a batch, so the host sustains the highest rates only in batches too large for any SLO.
OVERLOAD = 0.5
#: Fraction of lists placed where the host alone meets every SLO that the device could: so that the device has work.
FORCED_COVERAGE = 0.1
#: Factor by which speed may differ from the profile's before the demo says so.
STALE = 1.3
#: Offered load, as fractions of the planned rate; the last is the limit of the host alone.
LOADS = (0.4, 0.65, 0.8)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoad:
    """What one policy did at one rate."""

    #: "host", "hybrid", or on a GPU the name of a design that these are compared with.
    policy: str
    device_bytes: int
    result: LoadResult


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """What the demo made and measured. The index is open; the caller closes it."""

    index: hx.Index
    data: Dataset
    device: str
    profile: Profile
    plan: Plan
    load: tuple[PolicyLoad, ...]
    notes: tuple[str, ...]
    #: The second act, and the third; None: there is a GPU, and ``load`` was measured on it.
    same: SameAnswers
    lookahead: Lookaheads | None
    projection: Projection | None


def run_demo(output: Path, *, device: str, hardware: str, progress: Progress, say: Callable[[str], None]) -> DemoResult:
    """Runs the demo into ``output`` on ``device``: auto, cuda:N, or cpu for the stand-in. ``say`` is given sentences.
    ``hardware``: what the last act is projected for, such as h100; on a GPU it is measured.

    Raises:
        MissingDependencyError: a package is missing; nothing was done.
        HybridIndexError: a step failed; steps before it are kept.
    """
    check_hardware(hardware)
    _check_packages()
    filesystem.make_folder(output, parents=True, exist_ok=True)
    name, label = _choose_device(device)
    stand_in = "stand-in" in label
    data = load_dataset(output.parent / "cache", progress=progress)
    for note in data.notes:
        say(note)
    calibration, test = _queries(data)
    index = _index(data, output / "index", progress)
    write_demo_documents(data, index, output.parent / "cache", progress)
    profile = _profile(index, calibration, name, label, progress)
    plan = _plan(index, profile)
    say(plan.explain())
    notes = [*_forced_note(plan), *_stale_note(index, plan, test)]
    for note in notes:
        say(note)
    rows = np.concatenate(list(data.iter_centered()))
    designs, projection = served_designs(index, plan, name), None
    same = compare_answers(index, plan, name, test[:N_COMPARED], rows, progress)
    lookahead = measure_lookahead(index, plan, name, rows, progress)
    if stand_in:
        projection = _project(profile, hardware, output / "projection.json", progress)
    else:
        compared, words = compared_designs(index, plan, name, hardware)
        designs += compared
        notes.append(words)
    return DemoResult(
        index=index,
        data=data,
        device=label,
        profile=profile,
        plan=plan,
        same=same,
        lookahead=lookahead,
        projection=projection,
        load=tuple(_serve(index, designs, plan, test, progress)),
        notes=(*data.notes, *_stand_in_note(stand_in=stand_in), *notes),
    )


#: What the demo imports, and the extra that brings it.
_NEEDED = {"faiss": "cpu", "matplotlib": "report", "safetensors": "words", "tokenizers": "words", "torch": "device"}


def _check_packages() -> None:
    """Names all that is missing before anything is fetched."""
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        # Nothing else: faiss-cpu would take the place of a faiss-gpu that is there.
        extras = dict.fromkeys(_NEEDED[name] for name in missing)
        beside = f"; beside a GPU, in place of faiss-cpu: {how_to_install('gpu')}" if "faiss" in missing else ""
        raise MissingDependencyError(
            f"the demo needs {', '.join(missing)}: {how_to_install(*extras)}{beside}; or with uv, which installs "
            "everything, in a clone of the repository: uvx --from '.[demo,device]' hybridindex demo"
        )


def _choose_device(device: str) -> tuple[str, str]:
    from hybridindex.tiers.contract.devices import resolve_device

    if device == "auto":
        import torch

        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    return device, resolve_device(device)[1].label


def _stand_in_note(*, stand_in: bool) -> list[str]:
    if not stand_in:
        return []
    return [
        "No GPU found: the device is a stand-in in main memory, scanned by one core of this processor; the host tier "
        "has the others, with and without the plan. Placement, budgets and answers are real; its speed says nothing "
        "about a GPU."
    ]


def _forced_note(plan: Plan) -> list[str]:
    if plan.request.coverage is None:
        return []
    return [
        f"The host alone meets the SLO at this rate, and this device would not make a tighter one possible, so the "
        f"plan would place nothing. {plan.coverage:.0%} of the lists are placed anyway, to give the device work."
    ]


def _stale_note(index: hx.Index, plan: Plan, test: F32) -> list[str]:
    """Says so when the machine is not as fast as when it was profiled: predictions are then off by as much."""
    host = index.plan(1e6, 0, plan.analysis.profile, coverage=0.0)
    seconds = []
    with index.router(plan=host, threads=plan.analysis.profile.threads) as router:
        for start in range(0, 16 * 12, 16):
            before = time.perf_counter()
            router.search(test[start : start + 16])
            seconds.append(time.perf_counter() - before)
    ratio = float(np.median(seconds[4:])) * 1e3 / host.predicted_latency_ms(16)
    if 1 / STALE < ratio < STALE:
        return []
    return [
        f"Batches take {ratio:.2f} times what they took when this machine was profiled, so the plan's predictions are "
        "off by as much. To profile again, remove the index folder's control.sqlite."
    ]


def _queries(data: Dataset) -> tuple[F32, F32]:
    """Two halves of the log for calibration and test, each in the log's order, centred like the passages.

    They are disjoint as requests: a text asked twice may be in both, as in a real service.
    """
    log = data.centered(np.asarray(data.log_queries))
    order = np.random.default_rng(0).permutation(len(log))
    calibration, test = np.sort(order[: len(log) // 2]), np.sort(order[len(log) // 2 :])
    return np.ascontiguousarray(log[calibration[:N_CALIBRATION]]), np.ascontiguousarray(log[test])


def _index(data: Dataset, path: Path, progress: Progress) -> hx.Index:
    made_from = path.parent / "index.json"
    nlist = min(NLIST, data.count // 40)
    recipe = {"count": data.count, "dim": data.dim, "nlist": nlist, "mean": float(data.mean.sum())}
    try:
        if json.loads(filesystem.read_bytes(made_from)) == recipe:
            return hx.open(path)
    except (ValueError, HybridIndexError):
        pass  # missing, or damaged: build it again

    vectors = data.iter_centered()
    index = hx.build(vectors, path, nlist=nlist, metric="ip", codec="flat", replace=True, progress=progress)
    hx.remove_replaced(path)
    cache.write_json(made_from, recipe)
    return index


def _profile(index: hx.Index, calibration: F32, device: str, label: str, progress: Progress) -> Profile:
    """The newest of this machine, this device and as many threads, or one that is made now."""
    from hybridindex.profiler.hardware import hardware_info

    threads, machine = _host_threads(device), hardware_info().fingerprint
    with index.store() as store:
        for kept in reversed(store.list_profiles(index_fingerprint=index.fingerprint)):
            if (kept.hardware_fingerprint, kept.threads) == (machine, threads):
                profile = store.load_profile(kept.id)
                if {sample.device for sample in profile.stages if sample.device} == {label}:
                    return profile
    return index.profile(
        calibration, recall=RECALL, devices=[device], threads=threads, max_seconds=40, progress=progress
    )


def _host_threads(device: str) -> int:
    """A stand-in device gets a core of its own, as a GPU would be; else all are the host's."""
    from hybridindex.tiers.host.openmp import openmp_threads

    return max(1, len(os.sched_getaffinity(0)) - 1) if device == "cpu" else openmp_threads()


def _plan(index: hx.Index, profile: Profile) -> Plan:
    """A plan for half of what the host alone sustains, and an SLO halfway between the tightest that the host alone can
    meet at that rate and the tightest that the budget allows."""
    host = index.plan(1e6, 0, profile, coverage=0.0)
    rate = _two_digits(OVERLOAD * host.max_sustainable_qps)
    nearest = [
        plan.nearest_slo_ms if plan.nearest_slo_ms is not None else 20 * host.predicted_latency_ms(16)
        for plan in (index.plan(1e-3, budget, profile, rate_qps=rate) for budget in (0, BUDGET_BYTES))
    ]
    slo_ms = _two_digits(sum(nearest) / 2)
    plan = index.plan(slo_ms, BUDGET_BYTES, profile, rate_qps=rate)
    if plan.coverage == 0:
        plan = index.plan(slo_ms, BUDGET_BYTES, profile, rate_qps=rate, coverage=FORCED_COVERAGE)
    index.apply_plan(plan, force=True)
    return plan


def _project(profile: Profile, hardware: str, kept: Path, progress: Progress) -> Projection:
    """What was projected from this profile already, or is now."""
    made_from = {"recipe": PROJECTION_RECIPE, "hardware": hardware, "profiled": profile.created_at}
    with contextlib.suppress(ValueError, KeyError, TypeError, HybridIndexError):
        record = json.loads(filesystem.read_bytes(kept))
        if record["made_from"] == made_from:
            return Projection(**record["projection"])
    made = project(profile, hardware, progress)
    cache.write_json(kept, {"made_from": made_from, "projection": made.to_data()})
    return made


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")


def _serve(
    index: hx.Index, designs: Sequence[Design], plan: Plan, test: F32, progress: Progress
) -> Iterator[PolicyLoad]:
    """All designs at each rate, one after the other."""
    assert plan.rate_qps is not None
    for fraction in LOADS:
        rate = _two_digits(fraction * plan.rate_qps)
        for design in designs:
            with index.router(
                plan=design.plan, devices=list(design.devices), threads=plan.analysis.profile.threads
            ) as router:
                for _ in range(3):
                    router.search(test[:64])  # wakes threads and maps pages
                held = sum(tier.used_bytes for tier in router.devices)
                result = run_open_loop(
                    router,
                    test[64:],
                    PoissonLoad(rate=rate, duration_s=SECONDS_PER_RATE, slo_ms=plan.request.slo_ms),
                    progress=partial(_bar, progress, f"{design.name} {rate:g}/s"),
                )
            yield PolicyLoad(policy=design.name, device_bytes=held, result=result)


def _bar(progress: Progress, name: str, _stage: str, done: int, total: int | None) -> None:
    progress(name, done, total)
