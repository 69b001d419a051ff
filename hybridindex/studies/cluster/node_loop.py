"""Nodes in virtual time: the engine loop of :mod:`hybridindex.studies.simulator.engine_loop` on each, and scans that
they ask of each other.

A node takes all that waits, its own requests and what others ask. It receives and quantizes its own requests, sends
each other node one scan for all of them, and scans the lists that are here, for both at once. A scan that is asked for
waits for the asked engine, as requests do. A request ends with the last of its parts.

By codes a node scans its own requests whole, compares the candidates whose rows are here, and asks others to compare
the rest. What is asked for then does not wait for an engine; it takes its time from it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, field, fields

import numpy as np

from hybridindex.partitioner.models.scan_models import ScanWork
from hybridindex.router.remote.scan_codec import found_bytes, scan_bytes
from hybridindex.studies.cluster.system import ClusterSystem
from hybridindex.studies.cluster.visits import Visits
from hybridindex.types import F64, I64

__all__ = ["PARTS", "ClusterRun", "serve"]

#: Parts of the engines' and devices' time, in the order of :attr:`ClusterRun.spent_s`. ``fixed``: of batches and scans
#: that others ask, whatever they scan.
PARTS = (
    "coarse quantization",
    "host scans",
    "device scans",
    "exact distances",
    "fixed costs of batches",
    "requests, messages and merging",
)
_COARSE, _HOST, _DEVICE, _COMPARE, _FIXED, _MESSAGES = range(len(PARTS))
#: Random numbers drawn at once.
_DRAWN = 4096
_ARRIVES, _STARTS, _COMPARES = 0, 1, 2
_COLUMNS = [column.name for column in fields(ScanWork)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClusterRun:
    """The searches, in order of arrival."""

    #: (n,) float64 seconds at which each answer was there.
    done_s: F64
    #: (n_nodes,) float64 seconds in which each engine was busy; (n_nodes, n_devices) each device.
    engine_s: F64
    device_s: F64
    #: (6,) float64 seconds of all nodes together, by :data:`PARTS`. Devices: of the slowest of each batch.
    spent_s: F64
    #: (b,) int64 queries of each batch of own requests, in order of start.
    batches: I64
    #: Scans or comparisons that nodes asked of each other, and queries in them.
    n_scans: int
    n_asked: int


@dataclass(slots=True, eq=False)
class _Task:
    """An own request, or a scan that ``asked_by`` wants, which both wait for an engine; or a comparison of
    ``candidates`` that it wants."""

    requests: list[int]
    #: Without any, an own request has nothing to scan here.
    visits: list[int]
    asked_by: int = -1
    candidates: int = 0


@dataclass(slots=True, eq=False)
class _Node:
    number: int
    ends: list[float]
    device_free: list[float]
    waiting: list[_Task] = field(default_factory=list)
    free_s: float = -math.inf
    line_free_s: float = 0.0
    n_batches: int = 0
    starts: bool = False
    busy_s: float = 0.0


def serve(arrivals: F64, system: ClusterSystem, visits: Visits, *, seed: int) -> ClusterRun:
    """Serves ``arrivals`` (n,) ascending seconds with their ``visits``. The same arguments give the same run."""
    loop = _Loop(arrivals, system, visits, seed)
    loop.run()
    return ClusterRun(
        done_s=np.array(loop.done_s) + system.inputs.network.client_s,
        engine_s=np.array([node.busy_s for node in loop.nodes]),
        device_s=loop.device_s,
        spent_s=np.array(loop.spent_s),
        batches=np.array(loop.batches, dtype=np.int64),
        n_scans=loop.n_scans,
        n_asked=loop.n_asked,
    )


class _Loop:
    def __init__(self, arrivals: F64, system: ClusterSystem, visits: Visits, seed: int) -> None:
        given, model = system.inputs, system.model
        self._rules, self._network, self._model = given.rules, given.network, model
        self._visits, self._bytes = visits, system.pool.list_bytes.astype(np.float64)
        self._dim, self._k = given.analysis.profile.dim, given.analysis.profile.k
        self._request_cost = system.pool.request_cost
        self._hybrid = [bool((one >= 0).any()) for one in system.list_device]
        self._first, self._start = visits.first.tolist(), visits.start.tolist()
        self._cut, self._node_of = visits.on_devices.tolist(), visits.node.tolist()
        self._work, self._elsewhere = visits.host_work.tolist(), visits.elsewhere.tolist()
        self._asked: list[list[tuple[int, int]]] = []
        self._compared_here: list[int] = []
        if (compared := visits.compared) is not None:
            others = list(zip(compared.node.tolist(), compared.candidates.tolist(), strict=True))
            self._asked = [others[a:b] for a, b in itertools.pairwise(compared.first.tolist())]
            self._compared_here = compared.here.tolist()
        probes = (visits.on_devices - visits.start[:-1]).astype(np.float64)
        work, one = visits.host_work, np.ones_like(visits.host_work)
        alone = self._predict(one, probes, probes, work, work, work, visits.elsewhere)
        self._alone_s = np.where(work > 0, alone, 0.0).tolist()
        self._rng = np.random.default_rng(seed)
        self._draws: list[float] = []
        self._wakes: list[float] = []
        self._stages: dict[int, tuple[float, float, float]] = {}
        self._host_ratios, self._coarse_ratios = model.host.ratios.tolist(), model.coarse_ratios.tolist()
        self._list_major = model.host.family == "list_major"
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, int, _Node, _Task | None]] = []
        self.nodes = [
            _Node(number, [0.0] * self._rules.max_in_flight, [0.0] * given.n_devices)
            for number in range(system.n_nodes)
        ]
        self.done_s = [0.0] * len(arrivals)
        self.device_s = np.zeros((system.n_nodes, given.n_devices))
        self.spent_s = [0.0] * len(PARTS)
        self.batches: list[int] = []
        self.n_scans = self.n_asked = 0
        for request, (at, own) in enumerate(zip(arrivals.tolist(), visits.own.tolist(), strict=True)):
            node = self.nodes[own]
            here = [v for v in range(self._first[request], self._first[request + 1]) if self._node_of[v] == own]
            # Requests arrive in order: the list is a heap as it is.
            self._events.append((at, _ARRIVES, next(self._numbers), node, _Task([request], here)))

    def run(self) -> None:
        while self._events:
            now, what, _, node, task = heapq.heappop(self._events)
            if what == _STARTS:
                free_s = max(node.free_s, self._slot_s(node))
                if free_s > now:  # comparisons came meanwhile
                    self._push(free_s, _STARTS, node, None)
                    continue
                node.starts = False
                self._begin(node, now)
            elif what == _COMPARES:
                assert task is not None
                self._compare(node, now, task)
            else:
                assert task is not None
                node.waiting.append(task)
            if not node.starts and node.waiting:
                at = now
                if what == _ARRIVES and now > node.free_s:
                    if not self._wakes:
                        self._wakes = self._rng.choice(self._rules.wake_s, _DRAWN).tolist()
                    at += self._wakes.pop()
                node.starts = True
                self._push(max(at, node.free_s, self._slot_s(node)), _STARTS, node, None)

    def _push(self, at_s: float, what: int, node: _Node, task: _Task | None) -> None:
        heapq.heappush(self._events, (at_s, what, next(self._numbers), node, task))

    def _slot_s(self, node: _Node) -> float:
        return node.ends[node.n_batches % len(node.ends)]

    def _begin(self, node: _Node, now: float) -> None:
        """What waits, up to the cap. The engine and a slot are free."""
        waiting, cap = node.waiting, self._rules.max_batch
        last = size = 0
        while last < len(waiting) and (not last or cap is None or size + len(waiting[last].requests) <= cap):
            size += len(waiting[last].requests)
            last += 1
        if last:
            node.waiting = waiting[last:]
            self._batch(node, now, waiting[:last], size)

    def _batch(self, node: _Node, now: float, tasks: list[_Task], size: int) -> None:
        model, rules, network, spent = self._model, self._rules, self._network, self.spent_s
        own = [task for task in tasks if task.asked_by < 0]
        n_asked = len(tasks) - len(own)
        hybrid = self._hybrid[node.number]
        routing = model.hybrid_routing if hybrid else model.host_routing
        coarse_s = self._of_size(len(own))[0] if own else 0.0
        _, merge_s, at_rest_s = self._of_size(size)
        coarse_s *= routing.scale
        here = sum(self._compared_here[task.requests[0]] for task in own) if self._asked else 0
        compare_s = self._comparing_s(len(own), here) * routing.scale if here else 0.0
        merge_s = merge_s * routing.scale if hybrid else 0.0
        own_s = routing.fixed_s * (bool(own) + bool(n_asked)) + routing.per_query_s * size
        visits = [visit for task in tasks for visit in task.visits]
        unions = None
        if len(visits) > 1 and (self._list_major or hybrid or (rules.early_dispatch and len(tasks) > 1)):
            unions = _Unions(self, tasks)
        host_s = self._host(visits, size, unions) * routing.scale
        rest_s = min(at_rest_s * routing.scale, host_s)
        if not self._draws:
            self._draws = self._rng.random(_DRAWN).tolist()
        draw = self._draws.pop()
        if rules.scatter:
            level = int(draw * len(self._host_ratios))
            host_ratio, coarse_ratio = self._host_ratios[level], self._coarse_ratios[level]
            host_s, rest_s, coarse_s, own_s, compare_s = (
                host_s * host_ratio, rest_s * host_ratio,
                coarse_s * coarse_ratio, own_s * coarse_ratio, compare_s * coarse_ratio,
            )  # fmt: skip
        received_s = len(own) * network.request_s / 2
        split = now + received_s + coarse_s + compare_s
        device_end = longest = 0.0
        if hybrid and visits:
            took = self._devices(visits, unions) * routing.scale
            self.device_s[node.number] += took
            for device in np.flatnonzero(took).tolist():
                seconds = float(took[device])
                node.device_free[device] = max(split, node.device_free[device]) + seconds
                device_end, longest = max(device_end, node.device_free[device]), max(longest, seconds)
        waiting = routing.serial / routing.scale * min(host_s, longest)
        early = rules.early_dispatch and len(tasks) > 1 and host_s > 0
        asking = [[task] for task in own] if early else [own]
        n_sent = sum(map(self._n_asked, asking)) if self._asked else self._ask(node, split, own)
        asking_s = n_sent * network.ask_s
        messages_s = asking_s + n_asked * network.serve_s + received_s
        engine_s = own_s + host_s + waiting + messages_s
        scanned = split + engine_s
        tail = merge_s + rules.answer_s
        if device_end:
            device_end += waiting + tail
        host_end = scanned + tail
        node.free_s = scanned + rules.between_s
        end = max(host_end, device_end) if host_s or not device_end else device_end
        parts = unions.early_ends() if early and unions is not None else None
        for place, task in enumerate(tasks):
            done = end
            if parts is not None:
                of_device = device_end if any(self._cut[v] < self._start[v + 1] for v in task.visits) else 0.0
                done = max(split + parts[place] * engine_s + tail if parts[place] else split, of_device)
            elif early and not task.visits:
                done = split
            self._answer(node, task, done)
            # Questions leave after the scan: what asking takes is paid on their way.
            if self._asked and early:
                asking_of_task_s = parts[place] * asking_s if parts is not None else 0.0
                self._ask_to_compare(node, done - tail - compare_s / len(own) - asking_of_task_s, [task])
        if self._asked and not early:
            self._ask_to_compare(node, end - tail - compare_s - asking_s, own)
        node.ends[node.n_batches % len(node.ends)] = scanned if n_sent else end - rules.answer_s
        node.n_batches += 1
        node.busy_s += node.free_s - now
        if own:
            self.batches.append(len(own))
        for part, seconds in (
            (_COARSE, coarse_s), (_COMPARE, compare_s), (_HOST, host_s - rest_s + waiting), (_DEVICE, longest),
            (_FIXED, own_s + rest_s), (_MESSAGES, received_s + messages_s),
        ):  # fmt: skip
            spent[part] += seconds

    def _of_size(self, size: int) -> tuple[float, float, float]:
        """Of a batch: seconds of its coarse stage, of merging, and of the host's scan whatever it scans."""
        if size not in self._stages:
            coarse, merge = self._model.coarse, self._model.merge
            coarse_s = 0.0 if coarse is None else float(coarse.predict(size))
            merge_s = 0.0 if merge is None else float(merge.predict(size))
            self._stages[size] = coarse_s, merge_s, self._predicted(size, 0, 0, 0.0, 0.0, 0.0, 1.0)
        return self._stages[size]

    def _host(self, visits: list[int], size: int, unions: _Unions | None) -> float:
        """Seconds of the host's scan."""
        if size == 1:
            return self._alone_s[visits[0]] if visits else 0.0
        work = [self._work[v] for v in visits]
        total = sum(work)
        if not total:
            return 0.0
        probes = [self._cut[v] - self._start[v] for v in visits]
        unique = total if unions is None else unions.host_bytes
        hits = min(self._elsewhere[v] for v in visits)
        return self._predicted(size, sum(probes), max(probes), total, max(work), unique, hits)

    def _predicted(self, *columns: float) -> float:
        """Seconds of one scan; ``columns``: of a :class:`ScanWork`, but for ``masked``."""
        return float(self._predict(*np.array(columns, dtype=np.float64).reshape(-1, 1))[0])

    def _predict(self, *columns: F64) -> F64:
        """(m,) seconds of scans."""
        work = dict(zip(_COLUMNS, (*columns, np.zeros_like(columns[0])), strict=True))
        return self._model.host.model.predict(ScanWork(**work))

    def _devices(self, visits: list[int], unions: _Unions | None) -> F64:
        """(n_devices,) seconds."""
        device = self._model.device
        assert device is not None, "a cluster without a model of devices has no list there"
        work = self._visits.device_work[visits].sum(axis=0)
        return device.predict(work, work if unions is None else unions.device_bytes(len(work)))

    def _ask(self, node: _Node, at_s: float, tasks: list[_Task]) -> int:
        """Sends each other node what it scans of a batch; the number of scans."""
        scans: dict[int, _Task] = {}
        for task in tasks:
            request = task.requests[0]
            for visit in range(self._first[request], self._first[request + 1]):
                other = self._node_of[visit]
                if other != node.number:
                    scan = scans.setdefault(other, _Task([], [], node.number))
                    scan.requests.append(request)
                    scan.visits.append(visit)
        for other, scan in sorted(scans.items()):
            width = max(self._start[v + 1] - self._start[v] for v in scan.visits)
            sent = self._send(node, at_s + self._network.ask_s / 2, scan_bytes(len(scan.requests), self._dim, width))
            self._push(sent, _ARRIVES, self.nodes[other], scan)
            self.n_asked += len(scan.requests)
        self.n_scans += len(scans)
        return len(scans)

    def _comparing_s(self, n: int, candidates: int) -> float:
        """Seconds in which so many candidates of ``n`` queries are compared on a host."""
        rerank = self._model.rerank
        assert rerank is not None, "checked where the inputs were made"
        return float(rerank.predict(n, np.array([float(candidates)]))[0])

    def _n_asked(self, group: list[_Task]) -> int:
        """Nodes that compare candidates of these requests for others."""
        return len({other for task in group for other, _ in self._asked[task.requests[0]]})

    def _ask_to_compare(self, node: _Node, at_s: float, group: list[_Task]) -> None:
        """Sends each other node the candidates of these requests whose rows it has."""
        asked: dict[int, _Task] = {}
        widest: dict[int, int] = {}
        for task in group:
            for other, candidates in self._asked[task.requests[0]]:
                one = asked.setdefault(other, _Task([], [], node.number))
                one.requests.append(task.requests[0])
                one.candidates += candidates
                widest[other] = max(widest.get(other, 0), candidates)
        for other, one in sorted(asked.items()):
            nbytes = scan_bytes(len(one.requests), self._dim, widest[other])
            sent = self._send(node, at_s + self._network.ask_s / 2, nbytes)
            self._push(sent, _COMPARES, self.nodes[other], one)
            self.n_asked += len(one.requests)
        self.n_scans += len(asked)

    def _compare(self, node: _Node, now: float, task: _Task) -> None:
        """At once, on a thread of its own: the engine has the processor as much later."""
        scale = (self._model.hybrid_routing if self._hybrid[node.number] else self._model.host_routing).scale
        seconds = self._comparing_s(len(task.requests), task.candidates) * scale
        took = self._network.serve_s + seconds
        node.free_s = max(node.free_s, now) + took
        node.busy_s += took
        self.spent_s[_COMPARE] += seconds
        self.spent_s[_MESSAGES] += self._network.serve_s
        self._answer(node, task, now + took)

    def _answer(self, node: _Node, task: _Task, at_s: float) -> None:
        if task.asked_by >= 0:
            at_s = self._send(node, at_s, found_bytes(len(task.requests), self._k)) + self._network.ask_s / 2
        done = self.done_s
        for request in task.requests:
            done[request] = max(done[request], at_s)

    def _send(self, node: _Node, at_s: float, nbytes: int) -> float:
        """When a message is there."""
        node.line_free_s = max(node.line_free_s, at_s) + nbytes / self._network.bytes_per_s
        return node.line_free_s + self._network.hop_s


class _Unions:
    """What tasks of a batch scan together: a list that several probe is read once, first for the lightest task."""

    def __init__(self, loop: _Loop, tasks: list[_Task]) -> None:
        self._loop, self._tasks = loop, tasks
        work = [sum(loop._work[v] for v in task.visits) for task in tasks]
        self._order = sorted(range(len(tasks)), key=work.__getitem__)
        visits = [v for place in self._order for v in tasks[place].visits]
        lists = [loop._visits.lists[loop._start[v] : loop._cut[v]] for v in visits]
        self._lists, self._at, self._wanted = np.unique(np.concatenate(lists), return_index=True, return_counts=True)
        self.host_bytes = float(loop._bytes[self._lists].sum())

    def early_ends(self) -> list[float]:
        """For each task the part of the host scan after which all of its lists were scanned, 0 without any."""
        loop, tasks = self._loop, self._tasks
        sizes = [sum(loop._cut[v] - loop._start[v] for v in tasks[place].visits) for place in self._order]
        work = loop._bytes[self._lists] * (1.0 + loop._request_cost * self._wanted)
        owner = np.searchsorted(np.cumsum(sizes), self._at, side="right")
        scanned = np.cumsum(np.bincount(owner, weights=work, minlength=len(tasks)))
        ends = np.empty(len(tasks))
        ends[self._order] = np.where(sizes, scanned / max(float(scanned[-1]), 1e-300), 0.0)
        return list(ends.tolist())

    def device_bytes(self, n_devices: int) -> F64:
        """(n_devices,) float64 bytes of the distinct lists on each device."""
        loop = self._loop
        spans = [slice(loop._cut[v], loop._start[v + 1]) for task in self._tasks for v in task.visits]
        lists = np.concatenate([loop._visits.lists[span] for span in spans])
        device = np.concatenate([loop._visits.device[span] for span in spans])
        lists, first = np.unique(lists, return_index=True)
        return np.bincount(device[first], weights=loop._bytes[lists], minlength=n_devices).astype(np.float64)
