"""The plan of a whole index, for nodes whose control store is their own.

SQLite works between processes of one machine, and nodes are on several: none of them opens the control store of the
index. Who starts nodes hands out a copy of it, a file that nobody writes to; each node copies that to its own disk, and
takes the plan from there that was applied last.
"""

from __future__ import annotations

import logging
from pathlib import Path

from hybridindex import filesystem
from hybridindex.api import STORE_FILE
from hybridindex.errors import HybridIndexError, MissingFileError
from hybridindex.partitioner.plan import Plan
from hybridindex.plans.current import PLAN_CURRENT, keep_current
from hybridindex.store.control import ControlStore

__all__ = ["PLANS_FILE", "hand_out", "take_plan"]

_log = logging.getLogger(__name__)

#: In the cluster's folder.
PLANS_FILE = "plans.sqlite"
#: In a node's share, beside its control store: what was taken last.
_TAKEN_FILE = "handed_plan"


def hand_out(index: Path, folder: Path) -> None:
    """Copies the control store of an index to a cluster's folder, in the place of an earlier copy, where there is one.
    What fails is logged, and the earlier copy stays."""
    beside = folder / f".{PLANS_FILE}"
    try:
        if filesystem.exists(index / STORE_FILE):
            filesystem.unlink(beside, missing_ok=True)
            with ControlStore.open(index / STORE_FILE) as store:
                store.copy_to(beside)
            filesystem.replace(beside, folder / PLANS_FILE)
    except HybridIndexError as error:
        _log.warning("nodes are not given the newest plan of the index: %s", error)


def take_plan(file: Path, share: Path) -> None:
    """Makes the plan that was handed out the current one of a node, unless it took that before: the node may have gone
    on from it. Before its daemon starts. What fails is logged.

    Args:
        file: the copy that was handed out; there may be none.
        share: of the node, with its control store.
    """
    try:
        with filesystem.scratch_folder("hix-plans-") as scratch:
            filesystem.copy_file(file, Path(scratch) / PLANS_FILE)
            with ControlStore.open(Path(scratch) / PLANS_FILE) as handed:
                _take(handed, share)
    except MissingFileError:
        pass
    except HybridIndexError as error:
        _log.warning("the plan of the index is not taken: %s", error)


def _take(handed: ControlStore, share: Path) -> None:
    newest = next(iter(handed.list_events(kind=PLAN_CURRENT, limit=1)), None)
    plan_id = None if newest is None else newest.payload.get("plan_id")
    if newest is None or not isinstance(plan_id, int):
        return
    taken, what = share / _TAKEN_FILE, f"{newest.at} {plan_id}"
    if filesystem.exists(taken) and filesystem.read_text(taken) == what:
        return
    stored = handed.load_plan(plan_id)
    with ControlStore.open(share / STORE_FILE) as own:
        keep_current(own, Plan.from_record(stored.record, handed.load_profile(stored.profile_id)), why="handed out")
    filesystem.replace_file(taken, what)
