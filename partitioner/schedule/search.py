"""The exhaustive search for schedules: placements x chips x batch sizes, and the baselines (RAGO, sections 6 and 7).

Every schedule of the space is considered; most are dropped early, when a part of them is no better in any respect than
a part that was kept, or cannot reach the frontier any more. Both are exact: the frontier is that of trying everything
(the tests try everything on small cases).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.partitioner.hardware import Chip, Server
from hybridindex.partitioner.schedule.pareto import undominated
from hybridindex.partitioner.schedule.pipeline import SIZES, Run, Subsystem, Ways, before, no_stage, through
from hybridindex.partitioner.schedule.roofline import MEMORY_SHARE, powers_of_two
from hybridindex.partitioner.schedule.schema import RAGSchema
from hybridindex.partitioner.schedule.stages import RETRIEVAL, Decoding, StageCosts, stage_names
from hybridindex.types import F64, I64

__all__ = ["Frontier", "Resources", "Schedule", "llm_extension", "llm_only", "long_context", "search"]

#: Part of a server's memory that the database may take.
_SERVER_MEMORY_SHARE = 0.95
#: Layers that attend to the whole long context: one of four (RAGO, section 5.2); the others to the last 128 tokens.
_GLOBAL_LAYERS, _LOCAL_TOKENS = 0.25, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a schedule may use."""

    chip: Chip
    #: At most, in all.
    chips: int
    server: Server
    #: For retrieval; None: one for every ``server.chips`` chips, more where the database needs them.
    servers: int | None = None
    #: Largest batch of a stage up to the first token; a power of two up to 128.
    largest_batch: int = 128
    #: Divide the throughput by chips alone, as the paper does, or also by what the servers cost, in chips.
    server_cost_chips: float = 0.0
    #: Slower decoding is left out.
    largest_tpot_s: float | None = None

    def __post_init__(self) -> None:
        if self.chips < 2:
            raise InvalidInputError(f"chips is {self.chips}; expected at least 2: prefix and decoding stand apart")
        if self.servers is not None and self.servers < 1:
            raise InvalidInputError(f"servers is {self.servers}; expected at least 1")
        if not 1 <= self.largest_batch < 1 << SIZES:
            raise InvalidInputError(f"largest_batch is {self.largest_batch}; expected 1 to {(1 << SIZES - 1)}")
        if not (0.0 <= self.server_cost_chips < float("inf")):
            raise InvalidInputError(f"server_cost_chips is {self.server_cost_chips}; expected 0 or more")
        if self.largest_tpot_s is not None and not self.largest_tpot_s > 0:
            raise InvalidInputError(f"largest_tpot_s is {self.largest_tpot_s}; expected above 0")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """One point: what runs where, and what it gives."""

    subsystems: tuple[Subsystem, ...]
    decoding: Decoding
    servers: int
    #: Until the last of a burst as large as the largest batch has its first token.
    ttft_s: float
    requests_per_s: float
    #: Chips, and servers where they are charged.
    cost_chips: float

    @property
    def chips(self) -> int:
        return sum(s.chips for s in self.subsystems) + self.decoding.chips

    @property
    def qps_per_chip(self) -> float:
        return self.requests_per_s / self.cost_chips

    @property
    def placement(self) -> str:
        """Stages that share chips in brackets."""
        return " | ".join("+".join(run.stage for run in s.runs) for s in self.subsystems) + " | decode"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frontier:
    """Schedules that no other beats in both time to first token and throughput per chip; fastest first."""

    schedules: tuple[Schedule, ...]
    servers: int

    @property
    def best_throughput(self) -> Schedule:
        return self.schedules[-1]

    @property
    def best_ttft(self) -> Schedule:
        return self.schedules[0]

    def within(self, ttft_s: float) -> Schedule | None:
        """The most throughput per chip with that time to first token; None: none is so fast."""
        return next((s for s in reversed(self.schedules) if s.ttft_s <= ttft_s), None)


def search(schema: RAGSchema, resources: Resources, *, placements: str = "all", same_batch: bool = False) -> Frontier:
    """The Pareto frontier.

    Args:
        placements: "all", "collocated" (all stages up to the prefix share chips) or "disaggregated" (none do).
        same_batch: the same batch size for all stages up to the first token: no micro-batches.

    Raises:
        InvalidInputError: no schedule fits; the message says what does not.
    """
    if placements not in ("all", "collocated", "disaggregated"):
        raise InvalidInputError(f"placements is {placements!r}; expected all, collocated or disaggregated")
    servers = _servers(schema, resources)
    costs = StageCosts(schema, resources.chip, resources.server, servers)
    chosen = [p for p in _placements(stage_names(schema)) if _of_kind(p, placements)]
    return _frontier(_Search(costs, resources, servers, chosen, same_batch=same_batch))


def llm_extension(schema: RAGSchema, resources: Resources) -> Frontier:
    """The paper's baseline: everything up to the first token shares chips with the prefix, as many as decoding has."""
    servers = _servers(schema, resources)
    costs = StageCosts(schema, resources.chip, resources.server, servers)
    one = next(p for p in _placements(stage_names(schema)) if _of_kind(p, "collocated"))
    return _frontier(_Search(costs, resources, servers, [one], halves=True))


def llm_only(schema: RAGSchema, resources: Resources) -> Frontier:
    """The LLM without retrieval: it sees the question alone."""
    return _without_retrieval(replace(schema, prompt_tokens=schema.question_tokens), resources, attended=1.0)


def long_context(schema: RAGSchema, resources: Resources) -> Frontier:
    """The LLM with the whole text as its prompt, one of four layers attending to all of it (section 5.2)."""
    prompt = schema.context_tokens + schema.question_tokens
    local = min(1.0, 2.0 * _LOCAL_TOKENS / prompt)
    attended = _GLOBAL_LAYERS + (1.0 - _GLOBAL_LAYERS) * local
    # What the cache holds: all tokens in global layers, the last ones in the others.
    kept = int(_GLOBAL_LAYERS * prompt + (1.0 - _GLOBAL_LAYERS) * min(prompt, _LOCAL_TOKENS))
    return _without_retrieval(replace(schema, prompt_tokens=prompt), resources, attended=attended, cached=kept)


def _without_retrieval(
    schema: RAGSchema, resources: Resources, *, attended: float, cached: int | None = None
) -> Frontier:
    plain = replace(
        schema, document_encoder=None, query_rewriter=None, query_reranker=None, retrieval_frequency=1,
    )  # fmt: skip
    costs = StageCosts(plain, resources.chip, resources.server, 0, context=attended, cached_tokens=cached)
    return _frontier(_Search(costs, resources, 0, [(("prefix",),)]))


# The space

Placement = tuple[tuple[str, ...], ...]


def _placements(names: Sequence[str]) -> Iterator[Placement]:
    """Every way to let neighbours share chips. Retrieval has servers of its own; a group around it waits for it."""
    on_chips = [name for name in names if name != RETRIEVAL]
    at = names.index(RETRIEVAL)
    for cuts in itertools.product((False, True), repeat=len(on_chips) - 1):
        groups: list[list[str]] = [[on_chips[0]]]
        for name, cut in zip(on_chips[1:], cuts, strict=True):
            if cut:
                groups.append([])
            groups[-1].append(name)
        placed: list[tuple[str, ...]] = []
        seen = 0
        for group in groups:
            if seen == at:
                placed.append((RETRIEVAL,))
            elif seen < at < seen + len(group):
                group.insert(at - seen, RETRIEVAL)
            seen += len([name for name in group if name != RETRIEVAL])
            placed.append(tuple(group))
        yield tuple(placed)


def _of_kind(placement: Placement, kind: str) -> bool:
    on_chips = [group for group in placement if group != (RETRIEVAL,)]
    if kind == "collocated":
        return len(on_chips) == 1
    return kind == "all" or all(len([s for s in group if s != RETRIEVAL]) == 1 for group in on_chips)


def _servers(schema: RAGSchema, resources: Resources) -> int:
    least = max(1, int(np.ceil(schema.database_bytes / (_SERVER_MEMORY_SHARE * resources.server.memory_bytes))))
    if resources.servers is None:
        return max(least, resources.chips // resources.server.chips)
    if resources.servers < least:
        raise InvalidInputError(
            f"servers is {resources.servers}; the database of {schema.database_bytes / 1e9:,.0f} GB needs at least "
            f"{least} servers of {resources.server.memory_bytes / 1e9:,.0f} GB"
        )
    return resources.servers


class _Search:
    """One search: the options of every subsystem, and what decoding gives on how many chips."""

    def __init__(
        self,
        costs: StageCosts,
        resources: Resources,
        servers: int,
        placements: Sequence[Placement],
        *,
        same_batch: bool = False,
        halves: bool = False,
        prune: bool = True,
    ) -> None:
        self.costs, self.resources, self.servers = costs, resources, servers
        self.placements, self.halves, self.prune = placements, halves, prune
        sizes = costs.log2_batches(resources.largest_batch)
        #: Batch sizes that stages may have together.
        equal = [[b] for b in sizes]
        # Equal batches first: they find most of the frontier, and what they find rules out much of the rest.
        self.batchings = equal if same_batch else [*equal, sizes]
        self.again = costs.schema.retrieval_frequency - 1

    def iterative_batches(self) -> list[int]:
        """Batch sizes of retrievals during decoding; 0 where there are none."""
        return powers_of_two(self.resources.largest_batch) if self.again else [0]

    def decodings(self, iterative_batch: int) -> list[Decoding]:
        """The most throughput on each number of chips, within the time per token."""
        best = []
        limit = self.resources.largest_tpot_s
        for chips in powers_of_two(self.resources.chips - 1):
            # Later prefixes run where the first ones do; here as many chips as decoding has stand for them.
            ways = self.costs.decodings(chips, iterative_batch, chips)
            fit = [d for d in ways if limit is None or d.tpot_s <= limit]
            if fit:
                best.append(fit[0])
        return best

    def groups(
        self, placement: Placement, sizes: Sequence[int], iterative_batch: int, decode: _Decode, best: _Incumbents
    ) -> list[_Group]:
        """The ways of every group of a placement that may still be on the frontier, on any number of chips."""
        most = self.resources.chips - sum(group != (RETRIEVAL,) for group in placement)
        runs = [
            {
                chips: [self.costs.runs(stage, chips, sizes) for stage in group]
                for chips in ([0] if group == (RETRIEVAL,) else powers_of_two(most))
            }
            for group in placement
        ]
        bounds = [self._bounds(group, by_chips, iterative_batch) for group, by_chips in zip(placement, runs, strict=True)]
        found = []
        for number, (group, by_chips) in enumerate(zip(placement, runs, strict=True)):
            rest = _Bounds.of_all(bounds[:number] + bounds[number + 1 :], self.resources.chips)
            ways = [
                (chips, choices, self._ways(group, chips, choices, iterative_batch, rest, decode, best))
                for chips, choices in by_chips.items()
                if all(choices)
            ]
            found.append(_Group(group, ways, _Bounds.of_all(bounds[number + 1 :], self.resources.chips)))
        return found

    def _bounds(self, group: tuple[str, ...], runs: dict[int, list[list[Run]]], iterative_batch: int) -> _Bounds:
        fit = {chips: choices for chips, choices in runs.items() if all(choices)}
        latency = min((sum(min(r.latency_s for r in stage) for stage in choices) for choices in fit.values()), default=0.0)
        periods = {
            chips: sum(
                min(r.interval_s / r.batch for r in stage) + self._later_s(name, chips, iterative_batch)
                for name, stage in zip(group, choices, strict=True)
            )
            for chips, choices in fit.items()
        }
        return _Bounds(latency, {chips: 1.0 / period for chips, period in periods.items()})

    def _ways(
        self,
        group: tuple[str, ...],
        chips: int,
        runs: list[list[Run]],
        iterative_batch: int,
        rest: _Bounds,
        decode: _Decode,
        best: _Incumbents,
    ) -> Ways:
        ways = no_stage()
        later = [self._later_s(stage, chips, iterative_batch) for stage in group]
        for depth in range(len(group) - 1, -1, -1):
            ways = before(runs[depth], ways)
            ways = replace(ways, period_s=ways.period_s + later[depth])
            if not self.prune:
                continue
            # What the stages in front will add at least.
            latency = rest.latency_s + sum(min(r.latency_s for r in choices) for choices in runs[:depth])
            front = sum(min(r.interval_s / r.batch for r in choices) for choices in runs[:depth]) + sum(later[:depth])
            bound = decode.bound(np.full(len(ways), float(chips)), 1.0 / (ways.period_s + front), rest)
            ways = ways.take(np.flatnonzero(~best.beat(ways.ttft_s() + latency, bound)))
            ways = ways.take(undominated(ways.columns()))
        return ways

    def _later_s(self, stage: str, chips: int, iterative_batch: int) -> float:
        """Seconds that the retrievals and prefixes during decoding take of a stage, for one request."""
        if not iterative_batch:
            return 0.0
        if stage == RETRIEVAL:
            return self.again * self.costs.retrieval_s(iterative_batch) / iterative_batch
        if stage == "prefix":
            costs = self.costs.costs("prefix", chips, iterative_batch)
            return self.again * min((c.interval_s for c in costs), default=0.0) / iterative_batch
        return 0.0


@dataclass(frozen=True, slots=True)
class _Bounds:
    """What no way to run some groups surpasses."""

    #: Seconds until one batch is through, at least.
    latency_s: float
    #: Chips -> requests/s, at most.
    rates: dict[int, float]

    @staticmethod
    def of_all(several: Sequence[_Bounds], most_chips: int) -> _Bounds:
        """Of groups one after the other: their chips add up, the slowest decides."""
        rates = {0: float("inf")}
        for one in several:
            joint: dict[int, float] = {}
            for (a, rate_a), (b, rate_b) in itertools.product(rates.items(), one.rates.items()):
                if a + b <= most_chips:
                    joint[a + b] = max(joint.get(a + b, 0.0), min(rate_a, rate_b))
            rates = joint
        return _Bounds(sum(one.latency_s for one in several), rates)


@dataclass(frozen=True, slots=True)
class _Group:
    """Stages that share chips, and every way to run them: by number of chips, the runs of each stage and their ways."""

    stages: tuple[str, ...]
    by_chips: list[tuple[int, list[list[Run]], Ways]]
    #: Of the groups behind it.
    behind: _Bounds

    def __len__(self) -> int:
        return sum(len(ways) for _, _, ways in self.by_chips)

    def options(self) -> Iterator[tuple[int, Ways, int]]:
        """(chips, ways, row), numbered in this order."""
        for chips, _, ways in self.by_chips:
            for row in range(len(ways)):
                yield chips, ways, row

    def subsystem(self, number: int) -> Subsystem:
        """The option of that number."""
        for chips, runs, ways in self.by_chips:
            if number < len(ways):
                chosen = tuple(choices[i] for choices, i in zip(runs, ways.choices[number], strict=True))
                return Subsystem(chips=chips, runs=chosen, period_s=float(ways.period_s[number]))
            number -= len(ways)
        raise AssertionError(number)


class _Decode:
    """What a pipeline that gives some requests per second on some chips is worth, with the best decoding behind it."""

    def __init__(self, search: _Search, decodings: Sequence[Decoding]) -> None:
        self.decodings = decodings
        self._chips = np.array([d.chips for d in decodings], dtype=np.float64)
        self._rates = np.array([d.requests_per_s for d in decodings])
        self._limit, self._halves = float(search.resources.chips), search.halves
        self._server_cost = search.servers * search.resources.server_cost_chips

    def worth(self, chips: F64, rate: F64) -> tuple[F64, I64]:
        """(n,) requests/s per cost, -1 where no decoding fits; and which decoding."""
        total = chips[:, None] + self._chips
        value = np.minimum(rate[:, None], self._rates) / (total + self._server_cost)
        fits = total <= self._limit
        if self._halves:
            fits &= chips[:, None] == self._chips
        value = np.where(fits, value, -1.0)
        best = value.argmax(1)
        return value[np.arange(len(value)), best], best

    def bound(self, chips: F64, rate: F64, rest: _Bounds) -> F64:
        """(n,) requests/s per cost that no pipeline surpasses of which this much is built and ``rest`` is to come.

        The best over all numbers of chips for the rest and for decoding: exact but for time to first token.
        """
        best = np.full(len(chips), -1.0)
        for more, rest_rate in rest.rates.items():
            total = chips[:, None] + more + self._chips
            value = np.minimum(np.minimum(rate, rest_rate)[:, None], self._rates) / (total + self._server_cost)
            fits = total <= self._limit
            if self._halves:
                fits &= chips[:, None] + more == self._chips
            best = np.maximum(best, np.where(fits, value, -1.0).max(1))
        return best


@dataclass(slots=True)
class _Parts:
    """Pipelines as far as they are built: one row each."""

    chips: F64
    period: F64
    largest: I64
    #: (n, SIZES)
    times: F64
    #: (n, groups so far) which option of each group.
    choices: I64

    def take(self, rows: I64) -> _Parts:
        return _Parts(self.chips[rows], self.period[rows], self.largest[rows], self.times[rows], self.choices[rows])


class _Incumbents:
    """The frontier so far."""

    def __init__(self) -> None:
        self.ttft = np.empty(0)
        self.value = np.empty(0)
        self.schedules: list[Schedule] = []

    def beat(self, ttft: F64, value: F64) -> np.ndarray:  # type: ignore[type-arg]
        """(n,) bool: a known schedule is at least as good in both."""
        if not len(self.ttft):
            return np.zeros(len(ttft), dtype=bool)
        # Sorted by time: the best value among those at most as slow.
        at = np.searchsorted(self.ttft, ttft, side="right") - 1
        return np.asarray((at >= 0) & (self.value[np.maximum(at, 0)] >= value))

    def add(self, schedules: Sequence[Schedule]) -> None:
        everything = [*self.schedules, *schedules]
        order = sorted(everything, key=lambda s: (s.ttft_s, -s.qps_per_chip))
        kept: list[Schedule] = []
        for schedule in order:
            if not kept or schedule.qps_per_chip > kept[-1].qps_per_chip:
                kept.append(schedule)
        self.schedules = kept
        self.ttft = np.array([s.ttft_s for s in kept])
        self.value = np.array([s.qps_per_chip for s in kept])


def _frontier(space: _Search) -> Frontier:
    best = _Incumbents()
    for iterative_batch in space.iterative_batches():
        decode = _Decode(space, decodings) if (decodings := space.decodings(iterative_batch)) else None
        if decode is None:
            continue
        for sizes in space.batchings:
            for placement in space.placements:
                groups = space.groups(placement, sizes, iterative_batch, decode, best)
                if all(groups):
                    _extend(space, groups, decode, best)
    if not best.schedules:
        raise InvalidInputError(_why_none(space))
    return Frontier(schedules=tuple(best.schedules), servers=space.servers)


def _extend(space: _Search, groups: Sequence[_Group], decode: _Decode, best: _Incumbents) -> None:
    """Builds every pipeline of one placement, group by group, and adds its frontier to ``best``."""
    parts = _Parts(
        np.zeros(1), np.zeros(1), np.zeros(1, dtype=np.int64), np.zeros((1, SIZES)), np.empty((1, 0), dtype=np.int64)
    )
    for depth, group in enumerate(groups):
        found: list[_Parts] = []
        for number, (own_chips, ways, way) in enumerate(group.options()):
            chips = parts.chips + own_chips
            period = np.maximum(parts.period, ways.period_s[way])
            largest = np.maximum(parts.largest, ways.log2_largest[way])
            times = through(ways, way, parts.times)
            keep = chips < space.resources.chips
            if space.prune:
                ttft = times[np.arange(len(times)), largest] + group.behind.latency_s
                keep &= ~best.beat(ttft, decode.bound(chips, 1.0 / period, group.behind))
            rows = np.flatnonzero(keep)
            if rows.size:
                choice = np.full((rows.size, 1), number, dtype=np.int64)
                found.append(
                    _Parts(
                        chips[rows], period[rows], largest[rows], times[rows], np.hstack([parts.choices[rows], choice])
                    )
                )
        if not found:
            return
        parts = _Parts(*(np.concatenate([getattr(f, name) for f in found]) for name in _Parts.__slots__))
        if space.prune and depth + 1 < len(groups):
            parts = parts.take(undominated(np.column_stack([parts.chips, parts.period, parts.largest, parts.times])))
    ttft = parts.times[np.arange(len(parts.times)), parts.largest]
    value, which = decode.worth(parts.chips, 1.0 / parts.period)
    rows = np.flatnonzero((value > 0) & ~best.beat(ttft, value))
    rows = rows[undominated(np.column_stack([ttft[rows], -value[rows]]))]
    best.add(
        [
            Schedule(
                subsystems=(chosen := tuple(g.subsystem(i) for g, i in zip(groups, parts.choices[row].tolist(), strict=True))),
                decoding=(decoding := decode.decodings[which[row]]),
                servers=space.servers,
                ttft_s=float(ttft[row]),
                requests_per_s=min(1.0 / float(parts.period[row]), decoding.requests_per_s),
                cost_chips=sum(s.chips for s in chosen)
                + decoding.chips
                + space.servers * space.resources.server_cost_chips,
            )
            for row in rows
        ]
    )


def _why_none(space: _Search) -> str:
    schema, chip, chips = space.costs.schema, space.resources.chip, space.resources.chips
    models = [m for m in (schema.document_encoder, schema.query_rewriter, schema.query_reranker, schema.generative_llm) if m]
    largest = max(models, key=lambda m: m.parameters)
    need = largest.weight_bytes() / (MEMORY_SHARE * chip.memory_bytes)
    limit = space.resources.largest_tpot_s
    tpot = f", at most {limit * 1e3:g} ms per token" if limit is not None else ""
    return (
        f"no schedule fits {chips} chips of {chip.name}{tpot}: {largest.name} alone takes the memory of {need:.1f} of "
        "them, for its prefix and again for decoding; give more chips, a smaller model, or more time per token"
    )
