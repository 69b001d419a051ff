"""A load on an index whose control store is damaged: searching needs none."""

from __future__ import annotations

import numpy as np
import pytest

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
    assert "no report will show this load: control store" in found.err


def test_a_plan_that_is_named_has_to_be_there(cli, load, index_path):
    (index_path / "control.sqlite").write_bytes(b"no database" * 100)
    found = cli(*load, "--plan", 1)
    assert found.code == ExitCode.NO_PROFILE
    assert "control store" in found.err


def test_a_load_of_the_host_alone_is_kept_for_reports(cli, load, index_path):
    assert cli(*load, "--plan", "none").code == 0
    with ControlStore.open(index_path / "control.sqlite") as store:
        (plan,) = store.list_plans()
        (event,) = latest_benches(store, plan.index_fingerprint, plan.id)
    assert event.payload["plan_id"] is None
