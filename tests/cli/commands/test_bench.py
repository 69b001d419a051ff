"""bench: its input is checked first, and what was measured is kept, whatever comes after."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from hybridindex.cli.commands import bench
from hybridindex.cli.console import ExitCode
from hybridindex.plans.benches import latest_benches
from hybridindex.store.control import ControlStore
from tests.clustered import clustered


@pytest.fixture
def load(index_path, tmp_path):
    np.save(tmp_path / "q.npy", clustered(8, seed=3))
    return ("bench", index_path, "-q", tmp_path / "q.npy", "--rate", 100, "--duration", 0.1)


@pytest.mark.parametrize("plan", ["none", "latest", "current"])
def test_a_store_that_cannot_be_opened_keeps_no_load_from_running(cli, load, index_path, plan):
    (index_path / "control.sqlite").write_bytes(b"no database" * 100)
    found = cli(*load, "--plan", plan, "--json")
    assert (found.code, found.json["devices"]) == (0, [])
    assert found.json["load"][0]["rate"] == 100
    assert ("no plan: the host searches" in found.err) == (plan != "none")
    assert "this load is not stored, and no report will show it: control store" in found.err


def test_a_plan_that_is_named_has_to_be_there(cli, load, index_path):
    (index_path / "control.sqlite").write_bytes(b"no database" * 100)
    found = cli(*load, "--plan", 1)
    assert found.code == ExitCode.NO_PROFILE
    assert "control store" in found.err


def stored(index_path):
    with ControlStore.open(index_path / "control.sqlite") as store:
        (plan,) = store.list_plans()
        return latest_benches(store, plan.index_fingerprint, plan.id)


def test_a_load_of_the_host_alone_is_kept_for_reports(cli, load, index_path):
    assert cli(*load, "--plan", "none").code == 0
    (event,) = stored(index_path)
    assert event.payload["plan_id"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--seed", -1), "seed is -1"),
        (("--rate", "inf"), "rate is inf"),
        (("--rate", 1e300), "requests"),
        (("--duration", "inf"), "duration_s is inf"),
        (("--slo-ms", "nan"), "slo_ms is nan"),
    ],
)
def test_what_cannot_be_offered_is_refused_before_anything_is_measured(cli, load, index_path, words, said):
    refused = cli(*load, "--plan", "none", *words, "--json")
    assert (refused.code, said in refused.json["error"]["message"]) == (ExitCode.BAD_INPUT, True)
    assert stored(index_path) == []


def test_a_query_that_cannot_be_searched_for_is_named(cli, load, index_path, tmp_path):
    queries = clustered(8, seed=3)
    queries[5, 1] = np.inf
    np.save(tmp_path / "q.npy", queries)
    assert "queries[5]" in cli(*load, "--plan", "none").err
    np.save(tmp_path / "q.npy", np.array(["a", "b"]))
    assert "dtype <U1" in cli(*load, "--plan", "none").err


def test_ctrl_c_keeps_the_rates_that_were_measured(cli, load, index_path, monkeypatch):
    real = bench.run_open_loop

    def interrupted_at_200(router, queries, offered, **more):
        if offered.rate == 200:
            raise KeyboardInterrupt
        return real(router, queries, offered, **more)

    monkeypatch.setattr(bench, "run_open_loop", interrupted_at_200)
    stopped = cli(*load, "--rate", 200, "--rate", 300, "--plan", "none", "--json")
    assert stopped.code == ExitCode.INTERRUPTED
    assert [row["rate"] for row in stopped.json["load"]] == [100]
    assert "1 of 3 rates were measured" in stopped.err
    (event,) = stored(index_path)
    assert [row["rate"] for row in event.payload["load"]] == [100]


def test_a_load_that_cannot_be_printed_is_stored(cli, load, index_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)  # as by >&-
    assert cli(*load, "--plan", "none", "--json").code == ExitCode.UNEXPECTED
    assert len(stored(index_path)) == 1
