"""Divides the bytes of devices between several indexes, by what they buy.

Each index has its own curve: prefixes of its hot order, with rows beside codes too, their bytes, and what search does
with them. Chosen is one point on each curve, all together within the budget, so that, in this order,

1. as many indexes as possible keep what they are asked for: their SLO at their rate, or a coverage that is fixed;
2. as many requests/s as possible are sustained;
3. the sum of rate times response is least (an index without a rate counts as one request/s);
4. most of the scan work is on devices, weighted by rate;
5. the bytes are fewest.

An index beside an LLM gets no more than its SLO needs: the LLM has use for the rest. Curves are predicted as if each
index were alone on the host's threads, and beside the LLM. What is left is shared equally, for sessions.
:func:`hybridindex.partitioner.plan.make_plan` places lists, from a :class:`Share`'s request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridindex.partitioner.analysis import Analysis
from hybridindex.partitioner.request import PlanRequest, split_bytes
from hybridindex.partitioner.solver import Problem, fewest, problem_of

__all__ = ["Choice", "Share", "choices_of", "divide"]

#: Kept or not, requests/s sustained, minus rate times response, rate times hit rate.
Worth = tuple[float, float, float, float]
#: Bytes, what they are worth, and the choice of each index.
_Point = tuple[int, Worth, tuple[int, ...]]

#: Prefixes tried on each curve, half on a linear grid and half on a logarithmic one.
_PREFIXES = 48
#: Combinations that are kept after each index. Two indexes need fewer; of more, only the best are compared.
_COMBINATIONS = 2048
_NOTHING: Worth = (0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One prefix of one index."""

    #: Lists, and lists whose rows lie beside codes.
    count: int
    rows: int
    #: Of all devices, scratch included, with which every plan can place it.
    nbytes: int
    #: Of its pages alone.
    page_bytes: int
    #: What is asked for.
    keeps: bool
    #: None: the rate is not sustained.
    response_s: float | None
    hit_rate: float
    worth: Worth


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one index gets, and what it is predicted to do with it."""

    #: Bytes of each device.
    budgets: tuple[int, ...]
    #: What its plan has to be asked for.
    request: PlanRequest
    #: The point on its curve.
    choice: Choice
    #: Fewest bytes of all devices that keep what it is asked for; None: none do.
    needs_bytes: int | None


def divide(asked: Sequence[tuple[Analysis, PlanRequest]], budgets: Sequence[int]) -> tuple[Share, ...]:
    """A share of ``budgets``, bytes of each device, for each index; their sums stay within them.

    Args:
        asked: what is known of each index, and what is asked of it; its own budgets do not count.
    """
    total = sum(budgets)
    curves = [choices_of(analysis, request, budgets) for analysis, request in asked]
    chosen = _best(curves, total)
    left = total - sum(curve[pick].nbytes for curve, pick in zip(curves, chosen, strict=True))
    # What no list needs is for sessions and the cache.
    each = left // max(1, sum(request.scannable for _, request in asked))
    shares = []
    for (_, request), curve, pick in zip(asked, curves, chosen, strict=True):
        choice = curve[pick]
        own = split_bytes(choice.nbytes + each * request.scannable, budgets)
        shares.append(
            Share(
                budgets=own,
                request=request.within(own, fill_bytes=choice.page_bytes),
                choice=choice,
                needs_bytes=next((c.nbytes for c in curve if c.keeps), None),
            )
        )
    return tuple(shares)


def choices_of(analysis: Analysis, request: PlanRequest, budgets: Sequence[int]) -> list[Choice]:
    """The curve of one index: prefixes by ascending bytes, each worth more than all before. The first takes nothing.

    ``budgets`` only say in which proportion the devices are used.
    """
    request = request.within(budgets)
    problem = problem_of(analysis.configured_for(request), request)
    paths = problem.paths if request.coverage is None else problem.paths[:1]
    choices: list[Choice] = []
    for choice in sorted((c for path in paths for c in _along(problem.along(path), request)), key=_nbytes):
        if not choices or (choice.nbytes > choices[-1].nbytes and choice.worth > choices[-1].worth):
            choices.append(choice)
    return choices


def _nbytes(choice: Choice) -> int:
    return choice.nbytes


def _along(problem: Problem, request: PlanRequest) -> list[Choice]:
    """Prefixes of one path that find room, ascending."""
    curve, path = problem.curve, problem.path
    slo_s = max(request.search_slo_s, 1e-12)
    choices: list[Choice] = []
    places = _places(problem, request, slo_s)
    most = places[-1]
    for place in places:
        pages = int(path.pages[place])
        largest = int(np.diff(path.pages)[:place].max(initial=0))
        nbytes = request.least_bytes(pages, largest, curve.geometry.page_bytes)
        if nbytes is None:
            continue
        step = problem.prefix_step(place, slo_s)
        lists, _ = path.pieces(np.arange(place, dtype=np.int64))
        rate, hit_rate = step.rate_qps, float(curve.of_lists(curve.order[lists]).hit_rate.mean())
        keeps = place == most if request.coverage is not None else step.accepted and request.search_slo_s > 0
        weight = 1.0 if rate is None else rate
        sustained = 0.0 if rate is None else rate
        if not step.sustained:
            sustained = min(sustained, problem.max_qps(problem.work_at(place), step.device_bytes, math.inf))
        answers = -weight * step.response_s if step.response_s is not None else 0.0
        choices.append(
            Choice(
                count=step.count,
                rows=step.rows,
                nbytes=nbytes,
                page_bytes=pages * curve.geometry.page_bytes,
                keeps=keeps,
                response_s=step.response_s,
                hit_rate=hit_rate,
                worth=(float(keeps), sustained, answers, weight * hit_rate),
            )
        )
    return choices


def _places(problem: Problem, request: PlanRequest, slo_s: float) -> list[int]:
    """Prefixes to try, ascending, of which the first is empty."""
    most, needed = problem.path.useful, None
    if request.coverage is not None:
        most = min(problem.curve.nlist, math.ceil(request.coverage * problem.curve.nlist - 1e-9))
    else:
        needed = fewest(problem, slo_s)
        if needed is not None and request.llm is not None:
            most = needed
    if most < 1 or not request.scannable:
        return [0]
    half = _PREFIXES // 2
    grid = np.concatenate(([0], np.geomspace(1, most, half), np.linspace(0, most, half)))
    return sorted({int(count) for count in np.round(grid)} | ({needed} if needed is not None else set()))


def _best(curves: Sequence[Sequence[Choice]], total: int) -> tuple[int, ...]:
    """The choice of each index: the best combination within ``total`` bytes. Exact for two indexes; for more, as good
    as equal shares at least."""
    points: list[_Point] = [(0, _NOTHING, ())]
    for curve in curves:
        points = _combined(points, curve)
    best = next(point for point in reversed(points) if point[0] <= total)
    equal: _Point = (0, _NOTHING, ())
    for curve in curves:
        pick = max(i for i, choice in enumerate(curve) if choice.nbytes <= total // len(curves))
        equal = _joined(equal, curve[pick], pick)
    return equal[2] if equal[1] > best[1] else best[2]


def _joined(point: _Point, choice: Choice, pick: int) -> _Point:
    a, b, c, d = point[1]
    e, f, g, h = choice.worth
    return point[0] + choice.nbytes, (a + e, b + f, c + g, d + h), (*point[2], pick)


def _combined(points: list[_Point], curve: Sequence[Choice]) -> list[_Point]:
    """Combinations by ascending bytes, each worth more than all before."""
    all_points = [_joined(point, choice, pick) for point in points for pick, choice in enumerate(curve)]
    all_points.sort(key=lambda point: (point[0], *(-part for part in point[1])))
    kept: list[_Point] = []
    for point in all_points:
        if not kept or point[1] > kept[-1][1]:
            kept.append(point)
    if len(kept) <= _COMBINATIONS:
        return kept
    places = set(np.linspace(0, len(kept) - 1, _COMBINATIONS).astype(int).tolist())
    # The first that keeps another SLO must not be lost.
    places |= {i for i in range(1, len(kept)) if kept[i][1][0] > kept[i - 1][1][0]}
    return [kept[i] for i in sorted(places)]
