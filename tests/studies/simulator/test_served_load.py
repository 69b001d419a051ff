"""A real router under a load, as the simulator's fit wants to see it."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.service.served_load import serve_recorded
from hybridindex.errors import InvalidInputError
from hybridindex.router import Router
from tests.clustered import DIM, clustered, small_index

N = 120


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("served") / "idx") as built:
        yield built


def test_every_request_of_a_load_is_in_one_batch(index):
    queries = clustered(50, seed=2)
    told = []
    with Router(index, threads=1) as router:
        router.on_batch.append(told.append)
        found = serve_recorded(router, queries, np.repeat(np.arange(N // 4) * 1e-3, 4), first_query=7)
        assert router.on_batch == [told.append], "a recorder leaves with its load"
    served = found.served
    assert served.batches.sum() == N == len(served.arrivals)
    assert sorted(served.batches.tolist()) == sorted(report.n_requests for report in told)
    assert (np.diff(served.arrivals) >= 0).all()
    # A batch holds requests that were handed over before it was taken, and answers them afterwards.
    assert (served.arrivals <= served.started_s).all()
    assert (served.done_s >= served.started_s).all()
    assert (served.split_s <= served.engine_s).all()
    assert (served.split_s > 0).all()
    assert not served.device_s.any()
    assert (np.diff(served.started_s[served.first]) > 0).all()
    assert (found.late_s >= 0).all()
    assert found.hit_rate == 0
    assert served.first_query == 7


def test_a_search_that_fails_ends_the_load(index):
    with Router(index, threads=1) as router, pytest.raises(InvalidInputError, match="queries"):
        serve_recorded(router, np.full((3, DIM), np.nan, np.float32), np.zeros(3))
