"""A process whose plan follows its load: ``follow.py INDEX ARMED``. The load moves, and an update is made of it.

``ARMED`` is touched when the load begins to move: what comes before is no part of the update.
"""

from __future__ import annotations

import sys
from pathlib import Path

import hybridindex as hx
from hybridindex.plans.stored import load_plan
from tests.refresh.world import CONFIG, LATE_S, World


def follow(path: Path, armed: Path) -> str:
    """The outcome of the update."""
    with hx.open(path) as index, index.store() as store:
        found = load_plan(index, "current", store)
        assert found is not None
        world = World(index, found[1], store, CONFIG)
        world.refresher.start()
        world.serve(4, seed=3)
        armed.touch()
        for number in range(20):
            world.serve(1, seed=4 + number, moved=True, latency_s=LATE_S if number < 6 else 0.01)
            last = world.refresher.status().last_update
            if last is not None and last.outcome is not None:
                break
        world.refresher.close()
        world.router.close()
    assert last is not None
    return str(last.outcome)


if __name__ == "__main__":
    print(follow(Path(sys.argv[1]), Path(sys.argv[2])))
