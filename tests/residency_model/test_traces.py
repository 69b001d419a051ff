"""Traces of the real code are runs of the model, and those of a product with a fault are not."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from tests.clustered import small_index
from tests.coded import with_codes
from tests.residency_model import mutants
from tests.residency_model.observe import observed
from tests.residency_model.replay import Rejected, replay
from tests.residency_model.scenes import (
    another_budget,
    another_plan,
    by_hand,
    fail_and_recover,
    late_copies,
    look_ahead,
    lose_and_recover,
    no_plan,
    router_of,
    run_together,
    scans_that_fail,
    search,
    small_blocks,
)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("idx") / "i") as index:
        yield index


@pytest.fixture(scope="module")
def codes(tmp_path_factory):
    with with_codes(small_index(tmp_path_factory.mktemp("coded") / "i"), bits=4) as index:
        yield index.by_codes()


@pytest.mark.parametrize("seed", range(2))
def test_codes_move_as_rows_do(codes, seed):
    with late_copies() as streams, observed() as trace:
        with router_of(codes, np.random.default_rng(seed)) as router, scans_that_fail(router, 7):
            run_together(router, seed, 8, search, look_ahead, another_plan, lose_and_recover(streams))
            assert router.precision.startswith("codes: ")
        replayed = replay(trace)
    assert replayed.happened >= {"take", "send", "land", "publish plan", "lease", "failed", "recover", "drain"}


@pytest.mark.parametrize("seed", range(2))
def test_plans_sessions_and_searches_at_once(index, seed):
    with observed() as trace:
        with router_of(index, np.random.default_rng(seed)) as router:
            run_together(router, seed, 12, search, search, look_ahead, look_ahead, another_plan)
        replayed = replay(trace)
    assert replayed.happened >= {"take", "send", "land", "publish", "publish plan", "lease", "read", "release", "hold"}


def test_arenas_that_grow_and_shrink(index):
    with small_blocks(), observed() as trace:
        with router_of(index, np.random.default_rng(0), lookahead_bytes=8 * 4096) as router:
            run_together(router, 0, 8, search, look_ahead, look_ahead, another_budget)
        replayed = replay(trace)
    assert replayed.happened >= {"grow", "shrink"}


@pytest.mark.parametrize("seed", range(2))
def test_devices_that_fail_and_come_back(index, seed):
    with observed() as trace:
        with router_of(index, np.random.default_rng(seed)) as router, scans_that_fail(router, 7):
            run_together(router, seed, 12, search, search, look_ahead, another_plan, fail_and_recover)
        replayed = replay(trace)
    assert replayed.happened >= {"failed", "publish scan", "recover"}


@pytest.mark.parametrize("seed", range(3))
def test_copies_that_are_late_and_devices_that_are_lost(index, seed):
    with late_copies() as streams, observed() as trace:
        with router_of(index, np.random.default_rng(seed)) as router:
            run_together(router, seed, 8, search, look_ahead, look_ahead, another_plan, lose_and_recover(streams))
        replayed = replay(trace)
    assert replayed.happened >= {"failed", "recover", "drain"}


def test_what_threads_do_rarely(index):
    with late_copies(), observed() as trace:
        with router_of(index, np.random.default_rng(0), plan=no_plan(index)) as router:
            by_hand(router)
        replay(trace)


#: Faults that show only where things happen in one order.
BY_HAND = {
    "forgets_a_lease",
    "publishes_on_a_failed_device",
    "loses_the_pages_of_a_second_copy",
    "frees_half_a_list_while_it_is_copied",
}


@pytest.mark.parametrize("name", mutants.ROUTERS)
def test_the_replay_rejects_a_router_with_a_fault(index, name, monkeypatch):
    fault, expected = mutants.ROUTERS[name]
    fault(monkeypatch)
    for seed in range(4):
        with late_copies() as streams, observed() as trace:
            # What the fault does to the scene is not what is tested.
            with contextlib.suppress(AssertionError):
                if name in BY_HAND:
                    with router_of(index, np.random.default_rng(0), plan=no_plan(index)) as router:
                        by_hand(router)
                else:
                    with router_of(index, np.random.default_rng(seed)) as router:
                        steps = (search, look_ahead, look_ahead, another_plan, lose_and_recover(streams))
                        run_together(router, seed, 5, *steps)
            found = rejected(trace)
        if found:
            assert found in expected
            return
    pytest.fail("it was not found")


def rejected(trace):
    """Why the replay rejects it; None where it does not."""
    try:
        replay(trace)
    except Rejected as error:
        return error.what
    return None
