"""Import paths of version 0.1 that moved. They work until 0.3 and warn.

Covers public names: those in ``__all__`` of a module that the documentation of 0.1 named. Python asks this finder only
for modules that nobody else finds, so current paths never come here.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["MOVED", "RENAMED", "install"]

#: Old module, or package with all that is in it -> where it is now.
MOVED = {
    "hybridindex.answers": "hybridindex.answer_codec",
    "hybridindex.facade": "hybridindex.api",
    "hybridindex.llm_profiles": "hybridindex.plans.llm_profiles",
    "hybridindex.loadgen": "hybridindex.profiler.open_loop",
    "hybridindex.partitioner.hardware": "hybridindex.studies.hardware",
    "hybridindex.partitioner.schedule": "hybridindex.studies.schedule",
    "hybridindex.partitioner.what_if": "hybridindex.studies.what_if",
    "hybridindex.simulator": "hybridindex.studies.simulator",
}
_SIMULATOR, _SCHEDULE = "hybridindex.studies.simulator", "hybridindex.studies.schedule"
#: Module of a moved package that has another name there -> that name.
RENAMED = {
    f"{_SIMULATOR}.drift": f"{_SIMULATOR}.moving_load",
    f"{_SIMULATOR}.follow": f"{_SIMULATOR}.follow_drift",
    f"{_SIMULATOR}.llm": f"{_SIMULATOR}.llm_server",
    f"{_SIMULATOR}.lookahead": f"{_SIMULATOR}.lookahead_replay",
    f"{_SIMULATOR}.machine": f"{_SIMULATOR}.other_machine",
    f"{_SIMULATOR}.queries": f"{_SIMULATOR}.query_pool",
    f"{_SIMULATOR}.retrieval": f"{_SIMULATOR}.engine_loop",
    f"{_SIMULATOR}.serve": f"{_SIMULATOR}.system",
    f"{_SIMULATOR}.served": f"{_SIMULATOR}.engine_fit",
    f"{_SIMULATOR}.stages": f"{_SIMULATOR}.stage_table",
    f"{_SCHEDULE}.decoding": f"{_SCHEDULE}.costs.decoding",
    f"{_SCHEDULE}.explain": f"{_SCHEDULE}.stage_report",
    f"{_SCHEDULE}.iterative": f"{_SCHEDULE}.costs.decode_slowdown",
    f"{_SCHEDULE}.pipeline": f"{_SCHEDULE}.stage_pipeline",
    f"{_SCHEDULE}.retrieval": f"{_SCHEDULE}.costs.tree_scan",
    f"{_SCHEDULE}.roofline": f"{_SCHEDULE}.costs.roofline",
    f"{_SCHEDULE}.search": f"{_SCHEDULE}.frontier_search",
    f"{_SCHEDULE}.stages": f"{_SCHEDULE}.costs.stage_costs",
}


class _OldPaths(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if new_path(fullname) is None:
            return None
        # Any of them may be asked for modules below it.
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        new = new_path(module.__name__)
        assert new is not None, "find_spec refuses other names"
        # The caller's line: Python leaves out its own frames of the import, and these two are ours.
        warnings.warn(f"{module.__name__} is now {new}; the old path ends with 0.3", DeprecationWarning, stacklevel=2)
        found = import_module(new)
        module.__doc__ = found.__doc__
        module.__dict__.update({name: value for name, value in vars(found).items() if not name.startswith("__")})
        module.__dict__["__all__"] = list(getattr(found, "__all__", ()))


def new_path(name: str) -> str | None:
    """Where the module ``name`` of version 0.1 is now; None for any other name."""
    for old, new in MOVED.items():
        if name == old or name.startswith(f"{old}."):
            path = new + name[len(old) :]
            return RENAMED.get(path, path)
    return None


def install() -> None:
    """Lets Python find the old paths. Once is enough; more often does no harm."""
    if not any(isinstance(finder, _OldPaths) for finder in sys.meta_path):
        sys.meta_path.append(_OldPaths())
