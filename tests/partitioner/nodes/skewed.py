"""An index with skewed accesses, requests for nodes that hold it, and what holds of every plan."""

from __future__ import annotations

import numpy as np
import pytest

from hybridindex.partitioner.nodes.node_plan import NodePlan, NodeRequest, matrix_of

TOPICS, LISTS, N_PROBES = 96, 16, 8
NLIST = TOPICS * LISTS


def log(n: int, seed: int = 0) -> np.ndarray:
    """(n, p) probes of queries about a topic each, some far more often: lists of the topic, in no order of ids."""
    rng = np.random.default_rng(seed)
    weight = 1 / np.arange(1, TOPICS + 1)
    topics = np.random.default_rng(99).permutation(NLIST).reshape(TOPICS, LISTS)
    chosen = topics[rng.choice(TOPICS, n, p=weight / weight.sum())]
    return np.array([rng.choice(row, N_PROBES, replace=False) for row in chosen])


def work_of(probes: np.ndarray, list_bytes: np.ndarray) -> np.ndarray:
    work: np.ndarray = np.bincount(probes.ravel(), minlength=len(list_bytes)) * list_bytes / len(probes)
    return work


SIZES = np.random.default_rng(3).lognormal(9, 0.4, NLIST).astype(np.int64)
SAMPLE = log(3000)
WORK = work_of(SAMPLE, SIZES)


def request(n_nodes: int, replicas: int, times: float = 1.2, **other) -> NodeRequest:
    """Nodes that hold ``times`` as much as ``replicas`` copies of the index in all."""
    return NodeRequest(
        node_bytes=(int(SIZES.sum() * replicas * times / n_nodes),) * n_nodes, replicas=replicas, **other
    )


def check(plan: NodePlan) -> None:
    """Memory is not exceeded, copies are on nodes that take lists, and numbers agree with a count of their own."""
    on = matrix_of(plan.holders, plan.request.n_nodes)
    for node, nbytes in enumerate(plan.request.node_bytes):
        held = [which for which in range(plan.nlist) if int(plan.holders[which]) >> node & 1]
        assert plan.list_bytes[held].sum() == plan.node_bytes[node] <= nbytes
    assert (on.sum(axis=1) == plan.copies).all()
    assert not int(np.bitwise_or.reduce(plan.holders)) >> plan.request.n_nodes
    if plan.work[plan.copies > 0].sum() > 1e-200:
        assert plan.work_share.sum() == pytest.approx(1)
