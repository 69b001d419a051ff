"""The search without cleverness: plain loops over everything, and a burst's times one number at a time."""

from __future__ import annotations

import itertools

from hybridindex.studies.schedule.placements import placements
from hybridindex.studies.schedule.resources import retrieval_servers
from hybridindex.studies.schedule.stages.decoding import decodings
from hybridindex.studies.schedule.stages.stage_costs import StageCosts, stage_names


def powers(most):
    return [2**i for i in range(20) if 2**i <= most]


def burst_s(groups, burst):
    """Seconds until a burst is through groups of (batch, latency, interval)."""

    def first(n):
        return 0.0

    arrive, largest = first, 1
    for group in groups:
        arrive, largest = _behind(group, arrive, largest), max(largest, *(run[0] for run in group))
    return arrive(max(burst, largest))


def _behind(group, arrive, together):
    def out(n):
        inputs = max(n, *(run[0] for run in group))
        work, need = 0.0, n
        for batch, latency, interval in reversed(group):
            need = max(need, batch)
            work += latency + (need / batch - 1) * interval
        tail, cluster = 0.0, min(together, inputs)
        for batch, latency, interval in group:
            cluster = max(cluster, batch)
            tail += latency + (cluster / batch - 1) * interval
        return max(arrive(group[0][0]) + work, arrive(inputs) + tail)

    return out


def frontier(schema, resources):
    """(ttft, qps per chip) of every schedule that no other beats."""
    servers = retrieval_servers(schema, resources)
    costs = StageCosts(schema, resources.chip, resources.server, servers)
    points = []
    iterative = powers(resources.largest_batch) if schema.retrieval_frequency > 1 else [0]
    for placement, again in itertools.product(placements(stage_names(schema)), iterative):
        counts = [[0] if group == ("retrieval",) else powers(resources.chips) for group in placement]
        for chips in itertools.product(*counts):
            for decode_chips in powers(resources.chips):
                if sum(chips) + decode_chips <= resources.chips:
                    options = decodings(costs, decode_chips, iterative_batch=again)
                    limit = resources.largest_tpot_s
                    rates = [d.requests_per_s for d in options if limit is None or d.tpot_s <= limit]
                    if rates:
                        least = servers * resources.server.chips if resources.whole_servers else 0
                        cost = max(least, sum(chips) + decode_chips) + servers * resources.server_cost_chips
                        found = _pipelines(costs, resources, placement, chips, again)
                        points += [(ttft, min(rate, max(rates)) / cost) for ttft, rate in found]
    best: list[tuple[float, float]] = []
    for ttft, value in sorted(points, key=lambda p: (p[0], -p[1])):
        if not best or value > best[-1][1] * (1 + 1e-12):  # what rounding makes different is not
            if best and ttft <= best[-1][0] * (1 + 1e-12):
                best.pop()
            best.append((ttft, value))
    return best


def _pipelines(costs, resources, placement, chips, again):
    sizes = list(range(len(powers(resources.largest_batch))))
    ways = []
    for group, n in zip(placement, chips, strict=True):
        runs = [costs.runs(stage, n, sizes) for stage in group]
        ways.append([choice for choice in itertools.product(*runs) if _fits(choice, resources.chip)])
    for choice in itertools.product(*ways):
        rate = min(1.0 / _period(costs, group, n, again) for group, n in zip(choice, chips, strict=True))
        shaped = [[(run.batch, run.latency_s, run.interval_s) for run in group] for group in choice]
        yield burst_s(shaped, 1), rate


def _fits(group, chip):
    rewrites = any(run.stage == "rewrite decode" for run in group)
    needs = sum(run.memory_bytes for run in group if not (rewrites and run.stage == "rewrite prefix"))
    return needs <= 0.95 * chip.memory_bytes


def _period(costs, group, chips, again):
    seconds = sum(run.interval_s / run.batch for run in group)
    for run in group:
        if again and run.stage == "retrieval":
            seconds += (costs.schema.retrieval_frequency - 1) * costs.retrieval_s(again) / again
        if again and run.stage == "prefix":
            interval = min(c.interval_s for c in costs.costs("prefix", chips, again))
            seconds += (costs.schema.retrieval_frequency - 1) * interval / again
    return seconds
