"""A process that does everything is killed at moments of chance, again and again on the same index."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from hybridindex.service.auth import KeyFile, Keyring
from tests.durability.whole import restarted

SCRIPT = Path(__file__).with_name("cycle.py")
STAGES = {"build", "profile", "plan", "start", "move", "keys"}
#: Every point that matters has a test of its own beside this one; more kills look for those that nobody thought of.
KILLS = int(os.environ.get("HYBRIDINDEX_KILLS", "6"))
#: Longer than once around, on a machine of two cores.
LONGEST_S = 2.5


@pytest.mark.slow
def test_killed_at_any_time(launcher, files, index_path, fingerprints, tmp_path, record_property):
    path = tmp_path / "keys" / "keys.json"
    key = KeyFile(path).add("kept", "admin")
    random = np.random.default_rng(20)
    died_in: Counter[str] = Counter()
    for _ in range(KILLS):
        child = launcher.start(SCRIPT, index_path, files, path)
        child.wait_for("build")
        time.sleep(random.uniform(0, LONGEST_S))
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL, child.log
        died_in[[word for word in child.log.split() if word in STAGES][-1]] += 1
        with restarted(index_path, devices=()) as service:
            fingerprint = service.index.fingerprint
            assert fingerprint in fingerprints
            for profile in service.store.list_profiles():
                service.store.load_profile(profile.id)
            plans = service.store.list_plans(index_fingerprint=fingerprint)
        if plans:
            with restarted(index_path) as service:
                assert service.plan_id in {plan.id for plan in plans}
                wanted = service.router.plan.resident_lists
                assert (service.router.residency.list_device[wanted] >= 0).all()
        ring = Keyring(path)
        assert ring.identify(f"Bearer {key}").name == "kept"
    record_property("died_in", dict(died_in))
    print(dict(died_in))
