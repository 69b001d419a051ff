"""The command line over a daemon of two indexes, each by its own folder; and the division without a daemon."""

from __future__ import annotations

import json

import pytest

import hybridindex as hx
from hybridindex.cli.dividing import divide_indexes
from hybridindex.client import Client, RetryPolicy
from hybridindex.errors import InfeasiblePlanError, InvalidInputError, ServiceError
from hybridindex.service.daemon_address import find_daemon
from tests.clustered import DIM, clustered
from tests.service.several.conftest import BUDGET, OTHER_DIM
from tests.service.test_daemon import daemon

WORDS = ("--device", "cpu", "--budget", BUDGET, "--port", 0)


def test_commands_find_the_index_of_their_folder(launcher, folders, tmp_path):
    def said(*words):
        child = launcher.start(*words, "--json")
        assert child.wait() == 0, child.log
        return json.loads(next(line for line in child.log.splitlines() if line.startswith("{")))

    file = tmp_path / "hybridindex.toml"
    file.write_text(f'[indexes.src]\npath = "{folders["code"].name}"\nrate_qps = 5\n')
    with daemon(folders["docs"], *WORDS, "--config", file) as (process, urls):
        found = find_daemon(folders["code"])
        assert (found.index, found.urls) == ("src", tuple(urls))
        assert find_daemon(folders["docs"]).index == "docs"
        for name, dim in (("docs", DIM), ("code", OTHER_DIM)):
            assert said("status", folders[name])["index"]["dim"] == dim
        with Client(urls[0], index="src", retry=RetryPolicy(attempts=20)) as client:
            assert client.search(clustered(3, OTHER_DIM), 5).ids.shape == (3, 5)
            assert client.plan()["plan"]["rate_qps"] == 5
        answer = said("repartition", folders["code"], "--coverage", "0.5", "--apply", "--force")
        assert answer["placed"]["lists"] == 8
        assert answer["shares"].keys() == {"docs", "src"}
        assert said("explain", folders["code"], "current")["n_resident"] == 8
        assert said("explain", folders["docs"], "current")["n_resident"] == 8
        second = launcher.start("serve", folders["code"], "--port", 0)
        assert second.wait() == 8
        divided = launcher.start("divide", folders["docs"], folders["code"], "--budget", BUDGET, "--apply")
        assert divided.wait() == 8
        assert "divides its budget itself" in " ".join(divided.log.split())
        said("drain", folders["code"])
        assert process.wait(300) == 0
    assert find_daemon(folders["docs"]) is None


def test_a_division_by_hand_is_what_a_daemon_serves(folders, open_indexes):
    dry = divide_indexes(folders, (BUDGET,), None, lookahead_bytes=0, apply=False, force=False)
    assert [row["n_resident"] for row in dry["indexes"]] == [8, 4]
    assert [row["plan_id"] for row in dry["indexes"]] == [None, None]
    assert dry["left_bytes"][0] >= 0
    done = divide_indexes(folders, (BUDGET,), None, lookahead_bytes=0, apply=True, force=True)
    assert done["applied"]
    indexes = open_indexes()
    for row, (name, service) in zip(done["indexes"], indexes.services.items(), strict=True):
        assert row["name"] == name
        assert service.plan_id == row["plan_id"]
        assert list(indexes.shared.share_of(name)) == row["share_bytes"]
    with pytest.raises(ServiceError, match="divides its budget itself"), launched(folders["docs"]):
        divide_indexes(folders, (BUDGET,), None, lookahead_bytes=0, apply=True, force=True)


def launched(folder):
    from hybridindex.service.daemon_address import DaemonAddress

    class Held:
        def __enter__(self):
            self.address = DaemonAddress(folder)
            self.address.announce(("http://127.0.0.1:1",), index="docs")

        def __exit__(self, *error):
            self.address.leave()

    return Held()


def test_an_index_without_any_plan_is_named(folders):
    (folders["code"] / "control.sqlite").unlink()
    with pytest.raises(InvalidInputError, match="index code has no plan to take SLO and rate from"):
        divide_indexes(folders, (BUDGET,), None, lookahead_bytes=0, apply=False, force=False)


def test_slos_that_do_not_hold_are_not_applied(folders):
    with hx.open(folders["docs"]) as index, index.store() as store:
        plan = index.plan(0.001, BUDGET, store.load_profile(index_fingerprint=index.fingerprint))
        index.apply_plan(plan, force=True)
    with pytest.raises(InfeasiblePlanError):
        divide_indexes(folders, (BUDGET,), None, lookahead_bytes=0, apply=True, force=False)
    found = divide_indexes(folders, (BUDGET,), None, lookahead_bytes=0, apply=True, force=True)
    assert [row["verdict"] for row in found["indexes"]] == ["infeasible", "feasible"]
