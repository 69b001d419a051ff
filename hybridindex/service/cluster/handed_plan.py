"""The plan of a whole index, for nodes whose control store is their own.

SQLite works between processes of one machine, and nodes are on several: none of them opens the control store of the
index. Who starts nodes hands out a copy of it, a file that nobody writes to; each node copies that to its own disk, and
takes the plan from there that was applied last.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from hybridindex import filesystem
from hybridindex.api import STORE_FILE, open_index
from hybridindex.errors import HybridIndexError, InvalidInputError, MissingFileError, ProfileError
from hybridindex.partitioner.plan import Plan
from hybridindex.plans.current import PLAN_CURRENT, apply_offline, keep_current, save_plan, stored_as
from hybridindex.plans.precision import choose_view
from hybridindex.plans.stored import load_plan, refuse_other_machine
from hybridindex.store.control import ControlStore

__all__ = ["PLANS_FILE", "apply_stored", "hand_out", "note_taken", "store_plan", "take_plan", "try_to_hand_out"]

_log = logging.getLogger(__name__)

#: In the cluster's folder.
PLANS_FILE = "plans.sqlite"
#: In a node's share, beside its control store: what was taken last.
_TAKEN_FILE = "handed_plan"


def apply_stored(index: Path, choice: str, *, force: bool) -> int:
    """Makes a stored plan, an id or "latest", the current one of an index; its id.

    Raises:
        InfeasiblePlanError: it cannot meet its SLO, and ``force`` is false.
        InvalidInputError: it is no id. ProfileError, ProfileMismatchError: there is no such plan, or it is of another
        index.
    """
    with open_index(index) as opened, opened.store() as store:
        view = choose_view(opened.ivf, store, choice)
        found = load_plan(view, choice, store)
        if found is None:
            raise InvalidInputError(f"plan is {choice!r}; expected a plan id or 'latest'")
        return apply_offline(view, store, found[0], force=force)


def hand_out(index: Path, folder: Path) -> None:
    """Copies the control store of an index to a cluster's folder, in the place of an earlier copy, where there is one.

    Raises:
        FileError, StoreError: it cannot be copied, and the earlier copy stays.
    """
    beside = folder / f".{PLANS_FILE}"
    if filesystem.exists(index / STORE_FILE):
        filesystem.unlink(beside, missing_ok=True)
        with ControlStore.open(index / STORE_FILE) as store:
            store.copy_to(beside)
        filesystem.replace(beside, folder / PLANS_FILE)


def try_to_hand_out(index: Path, folder: Path) -> None:
    """As :func:`hand_out`; what fails is logged."""
    try:
        hand_out(index, folder)
    except HybridIndexError as error:
        _log.warning("nodes are not given the newest plan of the index: %s", error)


def take_plan(file: Path, share: Path) -> None:
    """Makes the plan that was handed out the current one of a node, unless it took that before: the node may have gone
    on from it. Before its daemon starts. What fails is logged, also that the plan is of another kind of machine: the
    node keeps its own.

    Args:
        file: the copy that was handed out; there may be none.
        share: of the node, with its control store.
    """
    try:
        handed, taken = _read(file), share / _TAKEN_FILE
        if handed is None or (filesystem.exists(taken) and filesystem.read_text(taken) == handed.event):
            return
        refuse_other_machine(handed.plan_id, handed.plan)
        with ControlStore.open(share / STORE_FILE) as own:
            keep_current(own, handed.plan, why="handed out")
        note_taken(share, handed.event)
    except MissingFileError:
        pass
    except HybridIndexError as error:
        _log.warning("the plan of the index is not taken: %s", error)


def store_plan(file: Path, share: Path) -> tuple[int, str]:
    """Stores the plan that was handed out, for the daemon of a node to apply. Its id there; and which event made it the
    current one of the index, for :func:`note_taken`.

    Raises:
        ProfileError: no plan was handed out. FileError, StoreError: it cannot be read or stored.
    """
    try:
        handed = _read(file)
    except MissingFileError:
        handed = None
    if handed is None:
        raise ProfileError("no plan of the index was handed out: none was applied")
    with ControlStore.open(share / STORE_FILE) as own:
        plan_id = stored_as(own, handed.plan)
        if plan_id is None:
            plan_id = save_plan(own, handed.plan)[1]
    return plan_id, handed.event


def note_taken(share: Path, event: str) -> None:
    """A node that starts does not take the plan of this event again."""
    filesystem.replace_file(share / _TAKEN_FILE, event)


class _Handed(NamedTuple):
    #: Names when it became the current plan of the index.
    event: str
    #: In the store of the index.
    plan_id: int
    plan: Plan


def _read(file: Path) -> _Handed | None:
    """None: no plan of the index was applied."""
    with filesystem.scratch_folder("hix-plans-") as scratch:
        filesystem.copy_file(file, Path(scratch) / PLANS_FILE)
        with ControlStore.open(Path(scratch) / PLANS_FILE) as handed:
            newest = next(iter(handed.list_events(kind=PLAN_CURRENT, limit=1)), None)
            plan_id = None if newest is None else newest.payload.get("plan_id")
            if newest is None or not isinstance(plan_id, int):
                return None
            stored = handed.load_plan(plan_id)
            plan = Plan.from_record(stored.record, handed.load_profile(stored.profile_id))
            return _Handed(f"{newest.at} {plan_id}", plan_id, plan)
