"""A disk that is really full: writers fail clearly and lose nothing, a running daemon goes on and says so."""

from __future__ import annotations

import json
import shutil

import httpx
import numpy as np
import pytest

from hybridindex.cli.console import ExitCode
from hybridindex.client import Client
from hybridindex.errors import ServiceError
from hybridindex.service.auth import KeyFile
from hybridindex.store import ControlStore
from tests.clustered import clustered
from tests.durability.launcher import PLANS_SOON
from tests.durability.test_kill_build import build_words
from tests.durability.test_kill_plans import profile_words
from tests.durability.whole import restarted
from tests.small_disk import small_disk
from tests.storage_looks import looked_at


@pytest.fixture
def disk(tmp_path):
    """A small file system of its own."""
    with small_disk(tmp_path / "disk", 24) as folder:
        yield folder


def fill(folder, leave=0):
    """Takes all room but ``leave`` bytes."""
    with (folder / "filler").open("wb", buffering=0) as file:
        file.truncate(0)
        free = shutil.disk_usage(folder).free - leave
        while free > 0:
            try:
                free -= file.write(bytes(min(free, 1 << 16)))
            except OSError:
                break


def plan_words(path):
    return ("plan", path, "--slo-ms", 50, "--budget", "16MiB", "--coverage", 0.6, "--json")


def failure(child):
    """The one JSON object that it printed."""
    return json.loads(next(line for line in child.log.splitlines() if line.startswith("{")))["error"]


@pytest.mark.parametrize("leave", [0, 8 << 10])
def test_writers_fail_clearly_and_lose_nothing(launcher, files, index_path, fingerprints, disk, leave):
    path = shutil.copytree(index_path, disk / "idx")
    for words, code, says in (
        (build_words(files, path), ExitCode.BUILD_FAILED, "the previous generation is untouched"),
        (build_words(files, disk / "another"), ExitCode.BUILD_FAILED, "another"),
        (profile_words(files, path), ExitCode.NO_PROFILE, "the disk is full"),
        (plan_words(path), ExitCode.NO_PROFILE, "the disk is full"),
        (("repartition", path, "--coverage", 0.6, "--apply", "--json"), ExitCode.NO_PROFILE, "the disk is full"),
    ):
        fill(disk, leave)
        child = launcher.start(*words)
        assert child.wait() == code, child.log
        assert says in failure(child)["message"]
        assert "Traceback" not in child.log
        (disk / "filler").unlink()
        with restarted(path) as service:
            assert service.index.fingerprint == fingerprints[0]
            assert service.plan_id == 1
            assert len(service.store.list_profiles()) == 1
    assert not (disk / "another").exists()
    done = launcher.start(*plan_words(path))
    assert done.wait() == 0, done.log


def test_keys_stay_when_there_is_no_room(launcher, disk):
    path = disk / "keys.json"
    keys = KeyFile(path)
    key = keys.add("kept", "admin")
    path.with_name("keys.json.lock").touch()
    fill(disk)
    child = launcher.start("keys", "add", path, "coming", "--json")
    assert child.wait() != 0
    assert "No space left" in failure(child)["message"]
    (disk / "filler").unlink()
    assert [k.name for k in keys.read()] == ["kept"]
    assert keys.add("coming", "search") != key


def test_a_daemon_goes_on_and_says_so(launcher, index_path, disk, tmp_path):
    path = shutil.copytree(index_path, disk / "idx")
    uds = tmp_path / "s"
    child = launcher.start("serve", path, "--device", "cpu", "--no-tcp", "--uds", uds, "--json", *PLANS_SOON)
    child.wait_for('"urls"')
    queries = clustered(16, seed=3)
    with Client(f"unix:{uds}", timeout_s=300) as client:
        before = client.search(queries, 5)
        fill(disk)
        with pytest.raises(ServiceError, match="control store cannot be read or written"):
            client.repartition(apply=True, coverage=0.6)
        assert client.status()["plan_id"] == 1
        during = client.search(queries, 5)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(uds)), base_url="http://daemon") as http:
            health = looked_at(lambda: http.get("/healthz"), httpx.Response.json)
        assert health.status_code == 503
        wrong = {check["name"]: check["detail"] for check in health.json()["checks"] if not check["ok"]}
        assert "make room" in wrong["disk"]
        (disk / "filler").unlink()
        client.repartition(apply=True, coverage=0.6)
        assert client.status()["plan_id"] == 2
        after = client.search(queries, 5)
        client.drain()
    for other in (during, after):
        assert np.array_equal(before.ids, other.ids)
        assert np.array_equal(before.distances, other.distances)
    assert child.wait() == 0, child.log
    with restarted(path) as service:
        assert service.plan_id == 2


def test_a_limit_of_file_size_is_a_full_disk_to_a_build(launcher, files, index_path, fingerprints):
    child = launcher.start(*build_words(files, index_path), limits={"RLIMIT_FSIZE": 64 << 10})
    assert child.wait() == ExitCode.BUILD_FAILED, child.log
    assert "the previous generation is untouched" in failure(child)["message"]
    with restarted(index_path) as service:
        assert service.index.fingerprint == fingerprints[0]


def test_a_limit_of_file_size_is_a_full_disk_to_the_store(launcher, index_path):
    child = launcher.start(*plan_words(index_path), limits={"RLIMIT_FSIZE": 8 << 10})
    assert child.wait() == ExitCode.NO_PROFILE, child.log
    assert "control.sqlite" in failure(child)["message"]
    with restarted(index_path) as service:
        assert service.plan_id == 1
    with ControlStore.open(index_path / "control.sqlite") as store:
        store.check_writable()
