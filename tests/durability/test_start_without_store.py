"""Commands and daemons search without the control store; a running daemon takes up its plan when it is back."""

from __future__ import annotations

import json
import shutil
import subprocess

import httpx
import numpy as np
import pytest

import hybridindex as hx
from hybridindex.cli.console import ExitCode
from hybridindex.client import Client
from tests.clustered import clustered
from tests.durability.launcher import PLANS_SOON
from tests.durability.test_full_disk import fill
from tests.durability.whole import restarted
from tests.small_disk import small_disk


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", 24) as folder:
        yield folder


def remount(disk, how):
    subprocess.run(["mount", "-o", f"remount,{how}", disk], check=True)


@pytest.fixture
def query_file(tmp_path):
    np.save(tmp_path / "queries.npy", clustered(16, seed=3))
    return tmp_path / "queries.npy"


def check_commands(launcher, path, query_file):
    """Commands that search answer, unless a plan is named that they cannot read."""
    for plan in ("none", "latest", "current", "1"):
        child = launcher.start("search", path, "-q", query_file, "--plan", plan, "--json")
        assert child.wait() == (ExitCode.NO_PROFILE if plan == "1" else 0), child.log
        assert "Traceback" not in child.log
        assert ("no plan: the host searches" in child.log) == (plan in ("latest", "current"))


def check_daemon(launcher, path, tmp_path, mend):
    """A daemon answers without its store, says so, and serves the plan after ``mend``."""
    uds, queries = tmp_path / "s", clustered(16, seed=3)
    with hx.open(path) as index:
        expected = index.search(queries, 5)
    child = launcher.start("serve", path, "--device", "cpu", "--no-tcp", "--uds", uds, "--json")
    child.wait_for('"urls"')
    with Client(f"unix:{uds}", timeout_s=300) as client:
        status = client.status()
        assert (status["plan_id"], status["devices"]) == (None, [])
        assert "is asked again" in status["note"]
        without = client.search(queries, 5)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(uds)), base_url="http://daemon") as http:
            health = http.get("/healthz")
        assert health.status_code == 503
        assert "control store" in {check["name"] for check in health.json()["checks"] if not check["ok"]}
        mend()
        child.wait_for("plan 1 serves")
        assert client.status()["plan_id"] == 1
        with_plan = client.search(queries, 5)
        client.drain()
    assert child.wait() == 0, child.log
    assert "Traceback" not in child.log
    for found in (without, with_plan):
        assert np.array_equal(found.ids, expected.ids)


def test_with_a_damaged_store(launcher, index_path, tmp_path, query_file):
    file, kept = index_path / "control.sqlite", tmp_path / "kept"
    file.rename(kept)
    file.write_bytes(b"no database" * 1000)
    check_commands(launcher, index_path, query_file)
    child = launcher.start("serve", index_path, "--plan", 1, "--no-tcp", "--uds", tmp_path / "s", "--json")
    assert child.wait() == ExitCode.NO_PROFILE
    error = json.loads(next(line for line in child.log.splitlines() if line.startswith("{")))["error"]
    assert str(file) in error["message"]
    check_daemon(launcher, index_path, tmp_path, lambda: kept.rename(file))


def test_on_a_full_disk(launcher, index_path, tmp_path, disk, query_file):
    path = shutil.copytree(index_path, disk / "idx")
    fill(disk)
    check_commands(launcher, path, query_file)
    check_daemon(launcher, path, tmp_path, (disk / "filler").unlink)


def test_on_a_file_system_that_is_read_only(launcher, index_path, tmp_path, disk, query_file):
    path = shutil.copytree(index_path, disk / "idx")
    remount(disk, "ro")
    check_commands(launcher, path, query_file)
    check_daemon(launcher, path, tmp_path, lambda: remount(disk, "rw"))


def test_a_plan_that_is_acknowledged_after_the_store_is_deleted_lasts(launcher, index_path, tmp_path):
    uds = tmp_path / "s"
    child = launcher.start("serve", index_path, "--device", "cpu", "--no-tcp", "--uds", uds, "--json", *PLANS_SOON)
    child.wait_for('"urls"')
    with Client(f"unix:{uds}", timeout_s=300) as client:
        (index_path / "control.sqlite").unlink()
        child.wait_for("its current plan")
        applied = client.repartition(apply=True, coverage=0.6)["plan_id"]
    child.end()  # by SIGKILL
    with restarted(index_path) as service:
        assert service.plan_id == applied
        assert service.router.plan.request.coverage == 0.6
