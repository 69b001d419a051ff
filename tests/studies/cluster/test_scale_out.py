"""Clusters in virtual time: against a plain simulation, the simulator of one machine, and the cover that serves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hybridindex.errors import InvalidInputError
from hybridindex.partitioner.analysis import Analysis, analyse
from hybridindex.partitioner.nodes.cover import choose_nodes
from hybridindex.partitioner.nodes.node_plan import matrix_of
from hybridindex.studies.cluster import ClusterInputs, Network, build_cluster, explain, scale_out, serve
from hybridindex.studies.simulator import EngineRules, bursty, poisson, simulate
from hybridindex.studies.simulator.engine_loop import retrieve
from hybridindex.studies.simulator.stage_table import stage_table
from hybridindex.studies.simulator.system import System
from tests.partitioner.synthetic import make_profile, with_candidates
from tests.studies.cluster import naive

#: Asking costs nearly nothing.
FREE = Network(hop_s=0.0, bytes_per_s=1e15, ask_s=0.0, serve_s=0.0, request_s=0.0, client_s=0.0)


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    """256 lists of 40 MB in all, 500 held-back queries; a query takes the host about half a millisecond."""
    return analyse(make_profile(n=1000, noise=0.05, device_per_byte_s=2e-11))


@pytest.fixture(scope="module")
def heavy() -> Analysis:
    """4 GB in lists of 15 MB: a query takes the host 50 ms."""
    return analyse(make_profile(n=1000, noise=0.05, device_per_byte_s=2e-11, mean_size=30_000))


@pytest.fixture(scope="module")
def codes() -> Analysis:
    """64 bytes a row are scanned, of rows of 2 KiB; 200 candidates a query, which take a host 80 us."""
    made = make_profile(n=1000, noise=0.05, device_per_byte_s=2e-11, code_size=64, mean_size=2400)
    return analyse(with_candidates(replace(made, codec="rabitq1"), 2048))


def of_rows(analysis: Analysis, part: float, **more) -> ClusterInputs:
    """``part`` of the rows fits a node."""
    return replace(given(analysis, **more), node_bytes=int(part * 2048 * int(analysis.profile.list_sizes.sum())))


def given(analysis: Analysis, part: float = 0.6, **more) -> ClusterInputs:
    """``part`` of the index fits a node."""
    nbytes = int(part * int(analysis.profile.list_bytes.sum()))
    return ClusterInputs(analysis=analysis, **{"slo_s": 0.01, "rate": 500.0, "node_bytes": nbytes, **more})


@pytest.mark.parametrize(("n_nodes", "rate"), [(1, 1500.0), (2, 1000.0), (3, 6000.0), (5, 9000.0)])
@pytest.mark.parametrize("most", [16, 1000])
def test_it_is_what_happens_step_by_step(analysis, n_nodes, rate, most):
    inputs = given(
        analysis,
        1.0 if n_nodes < 2 else 0.7,
        replicas=1 if n_nodes < 3 else 2,
        rules=EngineRules(max_batch=most, scatter=False),
        network=Network(hop_s=3e-4, bytes_per_s=2e7, ask_s=1e-4, serve_s=7e-5, request_s=6e-5, client_s=2e-4),
    )
    system = build_cluster(inputs, n_nodes)
    arrivals = bursty(rate, 1500, burstiness=3.0, period_s=0.05, seed=5).arrivals
    visits = system.visits(len(arrivals))
    found = serve(arrivals, system, visits, seed=0)
    probes = system.pool.probes[np.arange(len(arrivals)) % len(system.pool)]
    where = np.full(probes.shape, -1)
    for i in range(len(arrivals)):
        for visit in range(visits.first[i], visits.first[i + 1]):
            lists = visits.lists[visits.start[visit] : visits.start[visit + 1]]
            where[i][np.isin(probes[i], lists)] = visits.node[visit]
    expected = naive.simulate(
        arrivals, visits.own, where, probes, system.plan.list_bytes, model=analysis.latency, network=inputs.network,
        dim=analysis.profile.dim, k=analysis.profile.k, request_cost=system.pool.request_cost, n_nodes=n_nodes,
        most=most,
    )  # fmt: skip
    assert found.done_s == pytest.approx(expected, rel=1e-9)
    assert (found.done_s > arrivals).all()
    assert (found.n_scans > 0) == (n_nodes > 1)
    assert 1 < found.batches.max() <= most


@pytest.mark.parametrize(("n_nodes", "rate"), [(1, 1500.0), (2, 3000.0), (5, 9000.0)])
@pytest.mark.parametrize("most", [16, 1000])
@pytest.mark.parametrize("early", [True, False])
def test_a_search_by_codes_is_what_happens_step_by_step(codes, n_nodes, rate, most, early):
    network = Network(hop_s=3e-4, bytes_per_s=2e7, ask_s=1e-4, serve_s=7e-5, request_s=6e-5, client_s=2e-4)
    rules = EngineRules(max_batch=most, scatter=False, early_dispatch=early)
    inputs = of_rows(codes, 1.0 if n_nodes == 1 else 0.7, replicas=1, rules=rules, network=network)
    system = build_cluster(inputs, n_nodes)
    arrivals = bursty(rate, 1500, burstiness=3.0, period_s=0.05, seed=5).arrivals
    visits = system.visits(len(arrivals))
    found = serve(arrivals, system, visits, seed=0)
    asked = visits.compared
    assert asked is not None
    compared = [{int(own): int(here)} for own, here in zip(visits.own, asked.here, strict=True)]
    for i, each in enumerate(compared):
        for place in range(asked.first[i], asked.first[i + 1]):
            each[int(asked.node[place])] = int(asked.candidates[place])
    probes = system.pool.probes[np.arange(len(arrivals)) % len(system.pool)]
    where = np.broadcast_to(visits.own[:, None], probes.shape)
    expected = naive.simulate(
        arrivals, visits.own, where, probes, codes.profile.list_bytes, model=codes.latency, network=network,
        dim=codes.profile.dim, k=codes.profile.k, request_cost=system.pool.request_cost, n_nodes=n_nodes, most=most,
        compared=compared, early=early,
    )  # fmt: skip
    assert found.done_s == pytest.approx(expected, rel=1e-9)
    assert (found.n_scans > 0) == (n_nodes > 1)
    assert 1 < found.batches.max() <= most


@pytest.mark.parametrize("hop_s", [0.0, 3e-4, -1e-4])
def test_a_lone_search_by_codes_pays_once_for_what_it_asks(codes, hop_s):
    arrivals = np.arange(300.0)
    seconds = []
    for network in (FREE, replace(FREE, ask_s=2e-4, serve_s=5e-4, hop_s=hop_s)):
        system = build_cluster(of_rows(codes, 0.6, replicas=1, network=network, rules=EngineRules(scatter=False)), 2)
        visits = system.visits(300)
        seconds.append(serve(arrivals, system, visits, seed=0).done_s)
    asked = visits.compared
    assert asked is not None
    asks = np.diff(asked.first)
    assert set(asks) == {0, 1}
    # Where asking is free, what is compared here may take longer than what is compared there: 80 us for all.
    at_most = asks * (7e-4 + 2 * hop_s) + 1e-9
    assert (seconds[1] - seconds[0] <= at_most).all()
    assert (seconds[1] - seconds[0] > at_most - 1e-4 * asks - 2e-9).all()


@pytest.mark.parametrize("n_nodes", [2, 4, 16])
def test_candidates_are_compared_where_their_rows_are(codes, n_nodes):
    system = build_cluster(of_rows(codes, 1.2 if n_nodes == 2 else 0.6), n_nodes)
    visits, on = system.visits(600), matrix_of(system.plan.holders, n_nodes)
    asked, access = visits.compared, codes.curve.rows
    assert asked is not None
    assert access is not None
    counts = np.zeros((len(system.pool), codes.profile.nlist))
    counts[access.probe_query, access.probe_list] = access.probe_candidates
    mine = counts[np.arange(600) % len(system.pool)]
    assert asked.here.tolist() == (mine * on.T[visits.own]).sum(axis=1).tolist()
    every = asked.here + np.bincount(
        np.repeat(np.arange(600), np.diff(asked.first)), weights=asked.candidates, minlength=600
    )
    assert every.tolist() == mine.sum(axis=1).tolist()
    assert visits.fan_out == len(asked.node) / 600
    assert visits.local == pytest.approx(asked.here / every)
    # Each node scans the codes of all that its requests probe.
    assert visits.node.tolist() == visits.own.tolist()
    assert (
        visits.host_work.sum() == codes.profile.list_bytes[system.pool.probes[np.arange(600) % len(system.pool)]].sum()
    )
    # A node is asked for no more than what it has.
    for request in range(600):
        for place in range(asked.first[request], asked.first[request + 1]):
            assert asked.node[place] != visits.own[request]
            assert asked.candidates[place] <= (mine[request] * on[:, asked.node[place]]).sum()


@pytest.mark.parametrize("load", [0.3, 0.8])
def test_one_node_of_codes_is_the_machine(codes, load):
    inputs = of_rows(codes, 1.0, n_devices=2, budget_bytes=(1 << 20) + (4 << 20), network=FREE)
    cluster = build_cluster(inputs, 1)
    # The machine's table knows the median of all queries, and a cluster the candidates of each.
    rows, rerank = codes.curve.rows, cluster.model.rerank
    assert rows is not None
    assert rerank is not None
    model = replace(cluster.model, rerank=replace(rerank, candidates=float(rows.every.mean())))
    table = stage_table(cluster.pool, model, cluster.list_device[0], 2, resident_bytes=0)
    alone = System(name="one", table=table, rules=inputs.rules)
    workload = poisson(load * table.capacity(), 8000, seed=2)
    one = simulate(alone, workload, slo_s=0.01, seed=3)
    visits = cluster.visits(8000)
    latency = serve(workload.arrivals, cluster, visits, seed=3).done_s - workload.arrivals
    assert 0 < one.hit_rate < 1
    assert visits.hit_rate.mean() == pytest.approx(one.hit_rate)
    for percentile, expected in ((50, one.search.p50), (90, one.search.p90), (99, one.search.p99)):
        assert np.percentile(latency, percentile) == pytest.approx(expected, rel=0.03)


def test_nodes_that_scan_codes_scan_them_once_for_a_query(codes):
    """Wherever the rows are, so that nodes together scan as much as one alone."""
    network = replace(FREE, ask_s=2e-4, serve_s=2e-4, hop_s=1e-4)
    inputs = of_rows(codes, 0.6, network=network, slo_s=0.05)
    found = scale_out(inputs, (4,), lambda rate: poisson(rate, 1000, seed=1))[0]
    assert found.costs is not None
    assert found.fan_out > 0.5
    assert 0 < found.costs.compare_s < found.costs.host_s
    assert found.node_bytes > 10 * inputs.code_bytes / 4
    alone = scale_out(of_rows(codes, 1.0, network=network, slo_s=0.05), (1,), lambda rate: poisson(rate, 1000, seed=1))[
        0
    ]
    assert alone.costs is not None
    assert found.costs.host_s == pytest.approx(alone.costs.host_s, rel=0.2)
    assert found.rate > 2 * alone.rate


def test_a_profile_of_codes_without_candidates_is_refused(codes):
    bare = replace(codes.profile, access=replace(codes.profile.access, list_candidates=None, held_candidates=None))
    with pytest.raises(InvalidInputError, match="does not say in which lists their candidates are"):
        given(analyse(bare))


def test_the_same_number_of_nodes_twice_divides_by_nothing(analysis):
    found = scale_out(given(analysis, 1.0), (1, 2), lambda rate: poisson(rate, 300, seed=1))
    assert explain([*found, found[1]]) == explain(found)


@pytest.mark.parametrize("part", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("load", [0.3, 0.8])
def test_one_node_is_the_machine(analysis, part, load):
    budget = (1 << 20) + int(part * int(analysis.profile.list_bytes.sum()))
    inputs = given(analysis, 1.0, n_devices=2 if part else 0, budget_bytes=budget if part else 0, network=FREE)
    cluster = build_cluster(inputs, 1)
    table = stage_table(cluster.pool, cluster.model, cluster.list_device[0], 2, resident_bytes=0)
    alone = System(name="one", table=table, rules=inputs.rules)
    workload = poisson(load * table.capacity(), 8000, seed=2)
    one = simulate(alone, workload, slo_s=0.01, seed=3)
    visits = cluster.visits(8000)
    found = serve(workload.arrivals, cluster, visits, seed=3)
    latency = found.done_s - workload.arrivals
    assert (one.hit_rate > 0) == (part > 0)
    assert visits.hit_rate.mean() == pytest.approx(one.hit_rate)
    assert visits.fan_out == 0
    assert found.batches.mean() == pytest.approx(one.mean_batch, rel=0.03)
    for percentile, expected in ((50, one.search.p50), (90, one.search.p90), (99, one.search.p99)):
        assert np.percentile(latency, percentile) == pytest.approx(expected, rel=0.03)
    busy = retrieve(workload.arrivals, table, inputs.rules, seed=3).engine_s.sum()
    assert found.engine_s[0] == pytest.approx(busy, rel=0.03)


@pytest.mark.parametrize("by_locality", [True, False])
@pytest.mark.parametrize("n_nodes", [2, 4, 16])
def test_nodes_are_asked_as_the_cluster_asks_them(analysis, n_nodes, by_locality):
    system = build_cluster(given(analysis, 1.2 if n_nodes == 2 else 0.6, by_locality=by_locality), n_nodes)
    visits = system.visits(600)
    probes = system.pool.probes[np.arange(600) % len(system.pool)]
    on, asked, local = matrix_of(system.plan.holders, n_nodes), 0, []
    for own in range(n_nodes):
        mine = np.flatnonzero(visits.own == own)
        assert by_locality or len(mine) == pytest.approx(600 / n_nodes, abs=1)
        found = choose_nodes(
            probes[mine], here=on[:, own], holders=system.plan.holders, usable=(1 << n_nodes) - 1, own=own
        )
        for i, row in zip(mine, found, strict=True):
            asked += len({node for node in row.tolist() if node >= 0})
            nbytes = system.plan.list_bytes[probes[i]]
            local.append(nbytes[row < 0].sum() / nbytes.sum())
    assert visits.fan_out == pytest.approx(asked / 600)
    assert visits.local.mean() == pytest.approx(np.mean(local))


def test_clients_that_choose_ask_nodes_that_hold_more_and_all_of_them(analysis):
    found = {}
    for by_locality in (True, False):
        system = build_cluster(given(analysis, 0.3, by_locality=by_locality), 8)
        found[by_locality] = system.visits(2000)
    chosen, anywhere = found[True], found[False]
    assert chosen.fan_out < 0.95 * anywhere.fan_out
    assert chosen.local.mean() > 1.1 * anywhere.local.mean()
    counts = np.bincount(chosen.own, minlength=8)
    assert counts.min() > 50
    assert counts.max() < 750


def test_no_work_is_lost_between_nodes(analysis):
    inputs = given(analysis, n_devices=2, budget_bytes=4 << 20)
    system = build_cluster(inputs, 5)
    visits = system.visits(700)
    probes = system.pool.probes[np.arange(700) % len(system.pool)]
    scanned = np.where(probes >= 0, system.plan.list_bytes[probes], 0).sum()
    assert visits.host_work.sum() + visits.device_work.sum() == scanned
    assert 0.1 < visits.hit_rate.mean() < 1
    for node in range(5):
        held = matrix_of(system.plan.holders, 5)[:, node]
        assert held[visits.lists[np.repeat(visits.node, np.diff(visits.start)) == node]].all()
        assert not (system.list_device[node][~held] >= 0).any()


def test_more_nodes_carry_more_while_scans_are_most_of_the_work(heavy):
    inputs = given(heavy, 1.0, slo_s=1.0, rate=20.0, replicas=1)
    found = scale_out(inputs, (1, 2, 8), lambda rate: poisson(rate, 1000, seed=1))
    rates = [one.rate for one in found]
    assert rates == sorted(rates)
    assert rates[2] > 6 * rates[0]
    told = explain(found)
    assert told.startswith("The next node still pays at 8 nodes, where each brings ")
    assert "of the rate of one node alone" in told


def test_the_next_node_stops_paying_where_messages_are_most_of_the_work(analysis):
    def found(nodes, **more):
        inputs = given(analysis, more.pop("part", 0.3), slo_s=0.02, replicas=1, **more)
        return scale_out(inputs, nodes, lambda rate: poisson(rate, 1000, seed=1))

    (dear,) = found((4,), network=replace(FREE, ask_s=2e-3, serve_s=2e-3))
    (free,) = found((4,), network=FREE)
    (alone,) = found((1,), part=1.0)
    assert 0 < dear.rate < free.rate
    assert dear.costs is not None
    assert dear.costs.messages_s > 3 * dear.costs.host_s
    assert dear.fan_out == free.fan_out > 1
    told = explain([dear, alone])
    assert told.startswith("The next node stops paying between 1 and 4 nodes")
    assert "mostly by requests, messages and merging" in told
    assert "still pays" in explain([alone, free])


def test_a_slow_network_is_felt_in_latency_and_not_in_work(analysis):
    near, far = (
        scale_out(
            given(analysis, network=replace(FREE, hop_s=hop_s), rate=200.0),
            (4,),
            lambda rate: poisson(rate, 2000, seed=1),
        )[0]
        for hop_s in (0.0, 2e-3)
    )
    assert near.outcome is not None
    assert far.outcome is not None
    assert far.outcome.search.p90 == pytest.approx(near.outcome.search.p90 + 4e-3, rel=0.1)
    assert far.outcome.search.p50 < far.outcome.search.p90
    assert far.costs is not None
    assert far.rate == pytest.approx(near.rate, rel=0.2)


def test_the_same_seed_gives_the_same_answer_and_another_one_another(analysis):
    first, again, other = (
        scale_out(given(analysis, seed=seed), (4,), lambda rate: poisson(rate, 1000, seed=1), find_rate=seed == 1)[0]
        for seed in (1, 1, 2)
    )
    assert first.to_data() == again.to_data()
    assert first.outcome is not None
    assert other.outcome is not None
    assert first.outcome.search.mean != other.outcome.search.mean


def test_too_little_memory_is_said_and_64_nodes_of_8_devices_are_served(analysis):
    inputs = given(analysis, 0.6, n_devices=8, budget_bytes=2 << 20)
    short, most = scale_out(inputs, (2, 64), lambda rate: poisson(rate, 1000, seed=1), find_rate=False)
    assert "bytes of memory are missing" in short.refused
    assert short.outcome is None
    assert not short.meets(0.1)
    assert most.meets(0.9)
    assert most.outcome is not None
    assert len(most.outcome.device_use) == 8
    assert min(most.outcome.device_use) > 0
    assert most.compliant is None
    assert "not known" in explain([short, most])


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"slo_s": 0.0}, "slo_s"),
        ({"rate": -1.0}, "rate"),
        ({"node_bytes": 0}, "node_bytes"),
        ({"replicas": 0}, "replicas"),
        ({"n_devices": 9}, "n_devices"),
        ({"rules": EngineRules(max_batch=0)}, "max_batch"),
    ],
)
def test_inputs_out_of_range_are_named(analysis, more, named):
    with pytest.raises(InvalidInputError, match=f"^{named} is"):
        given(analysis, **more)


@pytest.mark.parametrize("nodes", [(0,), (4, 65), ()])
def test_numbers_of_nodes_that_are_none(analysis, nodes):
    with pytest.raises(InvalidInputError, match="give numbers from 1 to 64"):
        scale_out(given(analysis), nodes, lambda rate: poisson(rate, 100, seed=1))


def test_a_network_has_no_negative_costs():
    with pytest.raises(InvalidInputError, match="bytes_per_s"):
        Network(bytes_per_s=0.0)
    with pytest.raises(InvalidInputError, match="hop_s"):
        Network(hop_s=-1.0)
    assert Network(hop_s=-1e-5, ask_s=2e-5).hop_s < 0
