"""A refresh that is killed: the plan that was committed last serves, the one before or the new one."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

import hybridindex as hx
from hybridindex.plans.current import current_plan_id
from hybridindex.store import ControlStore
from tests.clustered import clustered
from tests.durability.points import Point
from tests.durability.whole import restarted
from tests.moving_load import moving_queries
from tests.refresh.world import BUDGET, NLIST, NPROBE

UPDATE = "hybridindex.refresh.updater"
#: (point, whether the new plan serves afterwards)
POINTS = [
    (Point(name="renewed profile not stored", target=f"{UPDATE}:save_plan", when="before"), False),
    (Point(name="new plan stored", target=f"{UPDATE}:save_plan", when="after"), False),
    (Point(name="swap begun", target="hybridindex.router.router:Router.apply_plan", when="before"), False),
    (
        Point(
            name="lists half swapped", target="hybridindex.tiers.contract.residency:ResidencyStore.publish",
            when="after"
        ),
        False,
    ),
    (Point(name="swapped, not verified", target="hybridindex.router.router:Router.apply_plan", when="after"), False),
    (Point(name="verified, not committed", target=f"{UPDATE}:make_current", when="before"), False),
    (Point(name="commit not finished", target="hybridindex.store.plans:insert_event", when="after",
           having="plan_current"), False),
    (Point(name="committed", target=f"{UPDATE}:make_current", when="after"), True),
]  # fmt: skip
#: The refresher commits the row of what it finds serving, then stores what it makes.
BASE, NEW = 1, 2
SCRIPT = Path(__file__).with_name("follow.py")


@pytest.fixture(scope="session")
def _followed(tmp_path_factory):
    path = tmp_path_factory.mktemp("followed") / "idx"
    with hx.build(clustered(6000, seed=1), path, nlist=NLIST, metric="l2", nprobe=NPROBE) as index:
        queries = moving_queries(800, seed=2, moved=False)
        profile = index.profile(queries, NPROBE, devices=["cpu"], max_seconds=1)
        index.apply_plan(index.plan(50, BUDGET, profile, coverage=0.2))
    return path


@pytest.fixture
def followed(_followed, tmp_path):
    return shutil.copytree(_followed, tmp_path / "idx")


def test_the_update_commits_where_nothing_kills_it(launcher, followed, tmp_path):
    child = launcher.start(SCRIPT, followed, tmp_path / "armed")
    assert child.wait() == 0, child.log
    assert child.log.splitlines()[-1] == "committed"
    with restarted(followed, refresh=True) as service:
        assert service.plan_id == NEW


@pytest.mark.parametrize(("point", "new"), POINTS, ids=lambda v: v.name if isinstance(v, Point) else "")
def test_a_killed_refresh(launcher, followed, tmp_path, point, new):
    armed = tmp_path / "armed"
    child = launcher.start(SCRIPT, followed, armed, at=point.armed(armed))
    assert child.wait() == -signal.SIGKILL, child.log
    with ControlStore.open(followed / "control.sqlite") as store:
        fingerprint = store.list_plans()[0].index_fingerprint
        committed = current_plan_id(store, fingerprint)
    for refresh in (False, True):
        with restarted(followed, refresh=refresh) as service:
            assert service.plan_id == committed == (NEW if new else BASE)
            wanted = service.router.plan.resident_lists
            assert (service.router.residency.list_device[wanted] >= 0).all()
