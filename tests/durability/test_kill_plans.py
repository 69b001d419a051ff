"""Profile, plan, move and swap, killed: the plan that serves afterwards is one that was stored whole, old or new."""

from __future__ import annotations

import json
import signal

import pytest

from hybridindex.client import Client, RetryPolicy
from hybridindex.errors import HybridIndexError
from hybridindex.store import ControlStore
from tests.durability.launcher import PLANS_SOON
from tests.durability.points import Point
from tests.durability.whole import restarted

#: (point, profiles stored afterwards)
PROFILE = [
    (Point(name="checkpoint half written", target="os:fsync", when="before", count=1), 1),
    (Point(name="checkpoint not yet in place", target="os:replace", when="before", having="checkpoint"), 1),
    (Point(name="first checkpoint in place", target="os:replace", when="after", having="checkpoint"), 1),
    (Point(name="profile's row, not its arrays", target="hybridindex.store.profiles:encode_array", when="before"), 1),
    (
        Point(name="arrays, not samples", target="hybridindex.store.profiles:_insert_samples", when="before", count=2),
        1,
    ),
    (Point(name="profile before its commit", target="hybridindex.store.profiles:insert_profile", when="after"), 1),
    (Point(name="profile committed", target="hybridindex.store.control:ControlStore.save_profile", when="after"), 2),
]


def profile_words(files, path):
    return (
        "profile", path, "-q", files / "calibration.npy", "--nprobe", 6, "--device", "cpu", "--max-seconds", 0.3,
        "--json",
    )  # fmt: skip


@pytest.mark.parametrize(("point", "stored"), PROFILE, ids=lambda v: v.name if isinstance(v, Point) else str(v))
def test_a_killed_profile(launcher, files, index_path, point, stored):
    child = launcher.start(*profile_words(files, index_path), at=point)
    assert child.wait() == -signal.SIGKILL, child.log
    with restarted(index_path) as service:
        assert service.plan_id == 1
        profiles = service.store.list_profiles(index_fingerprint=service.index.fingerprint)
        assert len(profiles) == stored
        for found in profiles:
            service.store.load_profile(found.id)
    again = launcher.start(*profile_words(files, index_path))
    assert again.wait() == 0, again.log
    with ControlStore.open(index_path / "control.sqlite") as store:
        assert len(store.list_profiles()) == stored + 1
    assert not list(index_path.glob("profile.checkpoint*"))


#: (point, plan that the next start serves)
PLAN = [
    (
        Point(name="before the plan's arrays", target="hybridindex.store.plans:encode_array", when="before"),
        1,
    ),
    (Point(name="plan before its commit", target="hybridindex.store.plans:insert_plan", when="after"), 1),
    (Point(name="plan committed", target="hybridindex.store.control:ControlStore.save_plan", when="after"), 1),
]


@pytest.mark.parametrize(("point", "serves"), PLAN, ids=lambda v: v.name if isinstance(v, Point) else str(v))
def test_a_killed_plan(launcher, index_path, point, serves):
    words = ("plan", index_path, "--slo-ms", 50, "--budget", "16MiB", "--coverage", 0.6, "--json")
    child = launcher.start(*words, at=point)
    assert child.wait() == -signal.SIGKILL, child.log
    with restarted(index_path) as service:
        assert service.plan_id == serves
    again = launcher.start(*words)
    assert again.wait() == 0, again.log
    stored = json.loads(again.log.splitlines()[-1])["plan_id"]
    with restarted(index_path, plan=str(stored)) as service:
        assert service.plan_id == stored
        assert service.router.residency.n_resident > 0


RESIDENCY = "hybridindex.tiers.contract.residency:ResidencyStore.publish"
RECORD = "hybridindex.store.control:ControlStore.record_event"
#: Points of `repartition --apply` in a running daemon: (point, plan that the next start serves)
MOVE = [
    (Point(name="new plan not stored", target="hybridindex.store.plans:insert_plan", when="before"), 1),
    (Point(name="new plan before its commit", target="hybridindex.store.plans:insert_plan", when="after"), 1),
    (Point(name="stored, nothing moved", target="hybridindex.router.router:Router.apply_plan", when="before"), 1),
    (Point(name="lists copied, not published", target=RESIDENCY, when="before"), 1),
    (Point(name="lists published", target=RESIDENCY, when="after"), 1),
    (Point(name="moved, not recorded", target=RECORD, when="before", having="plan_current"), 1),
    (Point(name="recorded, not answered", target=RECORD, when="after", having="plan_current"), 2),
]


@pytest.mark.parametrize(("point", "serves"), MOVE, ids=lambda v: v.name if isinstance(v, Point) else str(v))
def test_a_daemon_killed_while_it_changes_plans(launcher, index_path, tmp_path, point, serves):
    armed, uds = tmp_path / "armed", tmp_path / "s"
    point = point.armed(armed)
    words = ("serve", index_path, "--device", "cpu", "--no-tcp", "--uds", uds, "--json", *PLANS_SOON)
    child = launcher.start(*words, at=point)
    child.wait_for('"urls"')
    with Client(f"unix:{uds}", timeout_s=300) as client:
        assert client.status()["plan_id"] == 1
    armed.touch()
    with Client(f"unix:{uds}", timeout_s=300, retry=RetryPolicy(attempts=1)) as client, pytest.raises(HybridIndexError):
        client.repartition(apply=True, coverage=0.6)
    assert child.wait() == -signal.SIGKILL, child.log
    with restarted(index_path) as service:
        assert service.plan_id == serves
        wanted = service.router.plan.resident_lists
        assert (service.router.residency.list_device[wanted] >= 0).all()
    # The socket and the address file of the dead one are in nobody's way.
    next_one = launcher.start(*words)
    next_one.wait_for('"urls"')
    with Client(f"unix:{uds}", timeout_s=300) as client:
        assert client.status()["plan_id"] == serves
        client.drain()
    assert next_one.wait() == 0, next_one.log
