"""Where nodes look for a plan of the index: in the control store of the index, if they are given it."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

import hybridindex as hx
from hybridindex.client import Client
from hybridindex.cluster import NodeOptions
from hybridindex.errors import InvalidInputError, ProfileError, StoreError
from hybridindex.plans import stored
from hybridindex.plans.current import current_plan, make_current, save_plan
from hybridindex.profiler.hardware import hardware_info
from hybridindex.service.cluster.handed_plan import PLANS_FILE, hand_out, take_plan
from hybridindex.store import ControlStore
from tests.cluster.searches import NPROBE, K, Load, wait_until
from tests.cluster.writing import KEY, NLIST, N, running
from tests.clustered import clustered

DEVICES = ("--device", "cpu", "--budget", "1MiB")


@pytest.fixture
def path(tmp_path):
    """An index with a plan that was applied."""
    with hx.build(clustered(N, seed=1), tmp_path / "idx", nlist=NLIST, metric="l2") as index:
        index.profile(clustered(80, seed=7), nprobe=6, max_seconds=1, devices=0)
        plan = index.plan(slo_ms=500, device_budget_bytes=1 << 18, coverage=0.3)
        with index.store() as store:
            plan, number = save_plan(store, plan)
            make_current(store, plan, number, verified=False, why="applied")
    return tmp_path / "idx"


def status_of(it):
    with Client(it.nodes[0].url, key=KEY) as client:
        return client.status()


def test_nodes_of_one_machine_serve_the_plan_of_the_index(path, tmp_path):
    options = NodeOptions(memory_bytes=1, data=tmp_path, serve=DEVICES).with_store_of(path)
    with running(path, tmp_path, n_nodes=1, replicas=1, options=options.serve) as it:
        said = status_of(it)
        assert said["plan_id"] == 1
        assert said["note"] is None


def test_a_node_with_a_store_of_its_own_says_what_it_lacks(path, tmp_path):
    with running(path, tmp_path, n_nodes=1, replicas=1, options=DEVICES) as it:
        said = status_of(it)
        assert "given a plan by: hybridindex cluster apply INDEX" in said["note"]


def test_a_node_takes_the_plan_that_was_handed_out(path, tmp_path):
    hand_out(path, tmp_path)
    with running(path, tmp_path, n_nodes=1, replicas=1, options=DEVICES, plans=tmp_path / PLANS_FILE) as it:
        said = status_of(it)
        assert (said["plan_id"], said["note"]) == (1, None)
        assert [device["usable"] for device in said["devices"]] == [True]
        apply_another(path)
        hand_out(path, tmp_path)
        it.nodes[0].restart()
        said = status_of(it)
        assert (said["plan_id"], said["note"]) == (2, None)


def resident_lists(node):
    with Client(node.url, key=KEY) as client:
        return client.status()["residency"]["lists"]


@pytest.mark.parametrize("shares_store", [False, True], ids=["a-store-of-its-own", "the-store-of-the-index"])
def test_nodes_take_another_plan_while_they_serve(path, tmp_path, shares_store):
    options = NodeOptions(memory_bytes=1, data=tmp_path, serve=DEVICES)
    if shares_store:
        options = options.with_store_of(path)
    plans = None if shares_store else tmp_path / PLANS_FILE
    hand_out(path, tmp_path)
    with (
        running(path, tmp_path, n_nodes=2, replicas=1, memory=0.6, options=options.serve, plans=plans) as it,
        hx.open(path) as index,
        index.router(devices=()) as one_machine,
        it.router(by_locality=False) as router,
    ):

        def planned():
            """Lists of the plan that each node holds."""
            lists = index.current_plan().resident_lists
            return [int(held[lists].sum()) for held in helds]

        helds = []
        for node in it.nodes:
            with hx.open(node._share) as share:
                helds.append(share.ivf.share.held)
        few = planned()
        assert min(few) > 0
        wait_until(lambda: [*map(resident_lists, it.nodes)] == few)
        pids = [node.pid for node in it.nodes]
        with Load(router, lambda queries: one_machine.search(queries, K, NPROBE)) as load:
            for plan_id, coverage in ((2, 0.9), (3, 0.2), (4, 0.8)):
                apply_another(path, coverage)
                hand_out(path, tmp_path)
                load.more()
                for node in it.nodes:
                    told = node.apply_plan("latest", force=False, bandwidth_share=None)
                    assert (told["applied"], told["plan_id"]) == (True, plan_id)
            load.more()
        load.check()
        assert load.errors == []
        assert sum(planned()) > sum(few) + 10
        wait_until(lambda: [*map(resident_lists, it.nodes)] == planned())
        assert [node.pid for node in it.nodes] == pids
        with pytest.raises(InvalidInputError, match="bandwidth_share"):
            it.nodes[0].apply_plan("latest", force=False, bandwidth_share=2.0)
        it.nodes[0].restart()
        said = status_of(it)
        assert (said["plan_id"], said["note"]) == (4, None)


def test_a_node_without_a_plan_opens_its_devices_with_one(path, tmp_path):
    file = tmp_path / PLANS_FILE
    with running(path, tmp_path, n_nodes=1, replicas=1, options=DEVICES, plans=file) as it:
        [node] = it.nodes
        with pytest.raises(ProfileError, match="no plan of the index was handed out"):
            node.apply_plan("latest", force=False, bandwidth_share=None)
        hand_out(path, tmp_path)
        file.write_bytes(file.read_bytes()[:5000])
        with pytest.raises(StoreError):
            node.apply_plan("latest", force=False, bandwidth_share=None)
        assert status_of(it)["plan_id"] is None
        hand_out(path, tmp_path)
        assert node.apply_plan("latest", force=False, bandwidth_share=None)["plan_id"] == 1
        assert resident_lists(node) > 0
        os.kill(node.pid, signal.SIGKILL)  # what it took stays current
        wait_until(lambda: node.n_starts == 2 and node._answers())
        assert (status_of(it)["plan_id"], status_of(it)["note"]) == (1, None)


def apply_another(path, coverage=0.6):
    with hx.open(path) as index, index.store() as store:
        plan, number = save_plan(store, index.plan(slo_ms=500, device_budget_bytes=1 << 20, coverage=coverage))
        make_current(store, plan, number, verified=False, why="applied")


def test_a_plan_is_taken_once_and_none_leaves_the_node_s_own(path, tmp_path, caplog, monkeypatch):
    share, file = tmp_path / "share", tmp_path / PLANS_FILE
    share.mkdir()

    def coverage():
        with hx.open(path) as index, ControlStore.open(share / "control.sqlite") as own:
            plan = current_plan(own, index)
            return None if plan is None else round(plan.coverage, 1)

    take_plan(file, share)  # nothing was handed out
    assert coverage() is None
    hand_out(tmp_path / "no-index", tmp_path)
    assert not file.exists()
    hand_out(path, tmp_path)
    take_plan(file, share)
    assert coverage() == 0.3
    # The node goes on from it, by a refresh for instance.
    with hx.open(path) as index, ControlStore.open(share / "control.sqlite") as own:
        plan, number = save_plan(own, index.plan(slo_ms=500, device_budget_bytes=1 << 18, coverage=0.4))
        make_current(own, plan, number, verified=True, why="committed")
    hand_out(path, tmp_path)
    take_plan(file, share)
    assert coverage() == 0.4
    apply_another(path)
    hand_out(path, tmp_path)
    take_plan(file, share)
    assert coverage() == 0.6
    # One of another kind of machine would close the devices: the node keeps its own.
    apply_another(path, 0.7)
    hand_out(path, tmp_path)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(stored, "hardware_info", lambda: replace(hardware_info(), fingerprint="another"))
        take_plan(file, share)
    assert "this is machine another" in caplog.text
    assert coverage() == 0.6
    caplog.clear()
    file.write_bytes(b"nonsense")
    take_plan(file, share)
    assert "the plan of the index is not taken" in caplog.text
    assert coverage() == 0.6
    assert sorted(each.name for each in tmp_path.iterdir()) == ["idx", PLANS_FILE, "share"]


def test_a_store_that_was_chosen_stays():
    def with_store(*serve):
        return NodeOptions(memory_bytes=1, data=Path("data"), serve=serve).with_store_of(Path("/i/idx")).serve

    assert with_store("--threads", "2") == ("--threads", "2", "--store", "/i/idx/control.sqlite")
    for serve in (("--store", "postgresql://h/d"), ("--store=postgresql://h/d",), ("--config", "serve.toml")):
        assert with_store(*serve) == serve
        assert NodeOptions(memory_bytes=1, data=Path("data"), serve=serve).chooses_store
