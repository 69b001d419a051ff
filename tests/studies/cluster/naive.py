"""A cluster simulated step by step in plain Python: sets of lists, one clock, no tables and no arrays of work.

For hosts whose threads share queries, without scatter, wake-ups and devices. It knows the true order of things: at each
step the earliest of all arrivals, messages and free engines happens.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hybridindex.partitioner.models.scan_models import ScanWork


def simulate(
    arrivals,
    own,
    where,
    probes,
    list_bytes,
    *,
    model,
    network,
    dim,
    k,
    request_cost,
    n_nodes,
    most,
    compared=None,
    early=True,
):
    """Seconds at which each request is answered.

    Args:
        where: (n, p) node that scans each probe.
        most: largest batch.
        early: answers leave when their own lists were scanned.
        compared: of searches by codes: for each request the candidates that each node compares, by node.
    """
    n = len(arrivals)
    part = [
        {
            node: [int(each) for each, at in zip(probes[i], where[i], strict=True) if at == node and each >= 0]
            for node in range(n_nodes)
        }
        for i in range(n)
    ]
    # Per node: what comes (time, number, kind, requests, who asked), and when engine, slots and line are free.
    coming: list[list[Any]] = [[] for _ in range(n_nodes)]
    for i in range(n):
        coming[own[i]].append((arrivals[i], i, "own", [i], None))
    free, line = [-math.inf] * n_nodes, [0.0] * n_nodes
    slots = [[0.0, 0.0] for _ in range(n_nodes)]
    turn = [0] * n_nodes
    done = np.zeros(n)
    number = n
    #: Comparisons under way to a node (time, who compares, requests, seconds).
    comparing: list[Any] = []

    def send(node, at, nbytes):
        line[node] = max(line[node], at) + nbytes / network.bytes_per_s
        return line[node] + network.hop_s

    def compare_seconds(counts):
        """Of the candidates of several requests."""
        if not sum(counts):
            return 0.0
        rerank = model.rerank
        each = rerank.overhead_s + rerank.per_query_s * len(counts) + rerank.per_candidate_s * sum(counts)
        return each * model.host_routing.scale

    def ask_to_compare(node, at, rows):
        """Other nodes compare what they have of these requests; how many are asked."""
        others = sorted({other for i in rows for other in compared[i] if other != node})
        for other in others:
            mine = [i for i in rows if other in compared[i]]
            counts = [compared[i][other] for i in mine]
            there = send(node, at + network.ask_s / 2, 4 * len(mine) * (dim + 2 * max(counts)))
            comparing.append((there, other, mine, network.serve_s + compare_seconds(counts)))
        return len(others)

    def scan_seconds(groups):
        lists = [group for group in groups if group]
        if not lists:
            return 0.0
        sizes = [float(sum(list_bytes[x] for x in group)) for group in lists]
        union = set().union(*lists)
        columns = (
            len(groups), sum(map(len, lists)), max(map(len, lists)), sum(sizes), max(sizes),
            float(sum(list_bytes[x] for x in union)), 0.0, 0.0,
        )  # fmt: skip
        names = (
            "batch",
            "probes",
            "max_probes",
            "work_bytes",
            "max_work_bytes",
            "unique_bytes",
            "min_hit_rate",
            "masked",
        )
        row = {name: np.array([value], dtype=float) for name, value in zip(names, columns, strict=True)}
        return float(model.host.model.predict(ScanWork(**row))[0]) * model.host_routing.scale

    def ends(groups_of_task):
        """Part of the scan after which each task is done: whose lists are lightest is first."""
        order = sorted(
            range(len(groups_of_task)), key=lambda t: sum(float(list_bytes[x]) for g in groups_of_task[t] for x in g)
        )
        wanted: dict[int, int] = {}
        for groups in groups_of_task:
            for group in groups:
                for x in group:
                    wanted[x] = wanted.get(x, 0) + 1
        total = sum(list_bytes[x] * (1 + request_cost * w) for x, w in wanted.items())
        seen: set[int] = set()
        passed, found = 0.0, [0.0] * len(groups_of_task)
        for t in order:
            mine = {x for group in groups_of_task[t] for x in group}
            passed += sum(list_bytes[x] * (1 + request_cost * wanted[x]) for x in mine - seen)
            seen |= mine
            found[t] = passed / total if mine else 0.0
        return found

    while True:
        # The node that starts first.
        starts = []
        for node in range(n_nodes):
            if coming[node]:
                at = max(min(item[0] for item in coming[node]), free[node], slots[node][turn[node] % 2])
                starts.append((at, node))
        if comparing and (not starts or min(comparing)[0] < min(starts)[0]):
            comparing.sort()
            at, node, rows, seconds = comparing.pop(0)
            free[node] = max(free[node], at) + seconds
            back = send(node, at + seconds, 12 * len(rows) * k) + network.ask_s / 2
            for i in rows:
                done[i] = max(done[i], back)
            continue
        if not starts:
            return done + network.client_s
        now, node = min(starts)
        ready = sorted(item for item in coming[node] if item[0] <= now)
        batch: list[Any] = []
        size = 0
        for item in ready:
            if batch and size + len(item[3]) > most:
                break
            batch.append(item)
            size += len(item[3])
        coming[node] = [item for item in coming[node] if item not in batch]
        owned = [item[3][0] for item in batch if item[2] == "own"]
        begin = max(now, free[node], slots[node][turn[node] % 2])
        received = len(owned) * network.request_s / 2
        coarse = float(model.coarse.predict(len(owned))) * model.host_routing.scale if owned else 0.0
        exact = compare_seconds([compared[i].get(node, 0) for i in owned]) if compared else 0.0
        split = begin + received + coarse + exact
        asked: dict[int, list[int]] = {}
        for i in owned:
            for other in range(n_nodes):
                if other != node and part[i][other]:
                    asked.setdefault(other, []).append(i)
        for other in sorted(asked):
            rows = asked[other]
            width = max(len(part[i][other]) for i in rows)
            nbytes = 4 * len(rows) * (dim + 2 * width)
            there = send(node, split + network.ask_s / 2, nbytes)
            coming[other].append((there, number, "asked", rows, node))
            number += 1
        groups = [[part[i][node] for i in item[3]] for item in batch]
        scan = scan_seconds([group for task in groups for group in task])
        leaves = early and len(batch) > 1 and scan
        n_asked = len(asked)
        if compared:
            alike = [[i] for i in owned] if leaves else [owned]
            n_asked = sum(len({other for i in rows for other in compared[i] if other != node}) for rows in alike)
        messages = n_asked * network.ask_s + (len(batch) - len(owned)) * network.serve_s + received
        kinds = len({item[2] for item in batch})
        took = kinds * model.host_routing.fixed_s + model.host_routing.per_query_s * size + scan + messages
        parts = ends(groups) if leaves else [1.0] * len(batch)
        for item, share in zip(batch, parts, strict=True):
            at = split + share * took
            if item[2] == "asked":
                at = send(node, at, 12 * len(item[3]) * k) + network.ask_s / 2
            for i in item[3]:
                done[i] = max(done[i], at)
            if compared and leaves:
                ask_to_compare(node, at - exact / len(owned) - share * n_asked * network.ask_s, item[3])
        if compared and not leaves:
            # Asking is a part of what the engine took, and comes after the scan.
            ask_to_compare(node, split + took - exact - n_asked * network.ask_s, owned)
        free[node] = slots[node][turn[node] % 2] = split + took
        turn[node] += 1
