"""Bounds that no continuation of a half-built pipeline exceeds. A search drops pipelines by them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hybridindex.studies.schedule.stages.decoding import Decoding
from hybridindex.types import F64, I64

__all__ = ["Bounds", "Ceiling", "Worth"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds of every way to run some groups of stages."""

    #: Least seconds until one batch is done.
    latency_s: float
    #: Chips -> most requests/s.
    rates: dict[int, float]

    @staticmethod
    def of_all(several: Iterable[Bounds], most_chips: int) -> Bounds:
        """Bounds of consecutive groups: their chips add up, the slowest limits the rate."""
        latency_s, rates = 0.0, {0: math.inf}
        for one in several:
            latency_s += one.latency_s
            joint: dict[int, float] = {}
            for (a, rate_a), (b, rate_b) in itertools.product(rates.items(), one.rates.items()):
                if a + b <= most_chips:
                    joint[a + b] = max(joint.get(a + b, 0.0), min(rate_a, rate_b))
            rates = joint
        return Bounds(latency_s=latency_s, rates=rates)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ceiling:
    """The most throughput per cost of a partly built pipeline."""

    #: (k,) chips of a continuation, decoding included, and (k,) most requests/s of it.
    chips: F64
    rates: F64
    most_chips: int
    least_chips: int
    servers_cost: float
    latency_s: float

    def value(self, chips: F64, rate: F64) -> F64:
        """(n,) most throughput per cost for (n,) ``chips`` and (n,) requests/s of what is built; -1 where no
        continuation fits."""
        total = chips[:, None] + self.chips
        value = np.minimum(rate[:, None], self.rates) / (np.maximum(total, self.least_chips) + self.servers_cost)
        return np.asarray(np.where(total <= self.most_chips, value, -1.0).max(1, initial=-1.0))


class Worth:
    """Throughput per cost of pipelines up to the first token with the best decoding after them."""

    def __init__(
        self, decodings: Sequence[Decoding], *, most_chips: int, least_chips: int, servers_cost: float
    ) -> None:
        """
        Args:
            least_chips: chips that are counted at least, used or not.
            servers_cost: cost of all retrieval servers, in chips.
        """
        self.decodings = tuple(decodings)
        self._most_chips, self._least_chips, self._servers_cost = most_chips, least_chips, servers_cost
        self._chips = np.array([d.chips for d in decodings], dtype=np.float64)
        self._rates = np.array([d.requests_per_s for d in decodings])

    def of(self, chips: F64, rate: F64) -> tuple[F64, I64]:
        """(n,) requests/s per cost, -1 where no decoding fits; and (n,) index of the decoding."""
        total = chips[:, None] + self._chips
        value = np.minimum(rate[:, None], self._rates) / (np.maximum(total, self._least_chips) + self._servers_cost)
        value = np.where(total <= self._most_chips, value, -1.0)
        best = value.argmax(1)
        return value[np.arange(len(value)), best], best

    def ceiling(self, rest: Bounds) -> Ceiling:
        """The ceiling of pipelines that still lack ``rest`` and a decoding."""
        pairs = sorted(
            (more + int(chips), -min(rest_rate, float(rate)))
            for more, rest_rate in rest.rates.items()
            for chips, rate in zip(self._chips, self._rates, strict=True)
            if more + chips <= self._most_chips
        )
        kept: list[tuple[int, float]] = []
        for chips, negative in pairs:
            if not kept or -negative > kept[-1][1]:
                kept.append((chips, -negative))
        return Ceiling(
            chips=np.array([chips for chips, _ in kept], dtype=np.float64),
            rates=np.array([rate for _, rate in kept], dtype=np.float64),
            most_chips=self._most_chips,
            least_chips=self._least_chips,
            servers_cost=self._servers_cost,
            latency_s=rest.latency_s,
        )
