"""LLM measurements in the control store, merged when a plan needs a profile.

They are events, of kind :data:`~hybridindex.store.records.LLM_PROFILED`, and need no table: a measurement is a few
kilobytes of plain values that no query looks into.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hybridindex.errors import ProfileError, StoreError
from hybridindex.profiler.hardware import hardware_info
from hybridindex.profiler.llm.measure import merge_points
from hybridindex.store.records import LLM_PROFILED
from hybridindex.types import LLMLevel, LLMMeasurement, LLMProfile

if TYPE_CHECKING:
    from hybridindex.partitioner.plan import Plan
    from hybridindex.store.control import ControlStore

__all__ = [
    "find_llm_measurement",
    "list_llm_measurements",
    "llm_profile_from_data",
    "load_llm_profile",
    "save_llm_measurement",
    "step_times",
]

_log = logging.getLogger(__name__)

#: Newest measurements that are looked through.
_MAX_MEASUREMENTS = 1000


def save_llm_measurement(store: ControlStore, measurement: LLMMeasurement) -> int:
    """Stores it and returns its id."""
    return store.record_event(LLM_PROFILED, asdict(measurement))


def list_llm_measurements(store: ControlStore, *, named: str = "") -> list[tuple[int, LLMMeasurement]]:
    """Ids and measurements, in the order of saving. Those that are damaged are left out, which is logged.

    Raises:
        StoreError: the one whose id is ``named`` is damaged.
    """
    events, damaged = store.read_events(kind=LLM_PROFILED, limit=_MAX_MEASUREMENTS)
    found = []
    for event in reversed(events):
        try:
            found.append((event.id, _measurement_of(event.payload)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            damaged[event.id] = StoreError(f"control store {store.name}: a damaged row ({error!r})")
    for number, problem in damaged.items():
        if str(number) == named:
            raise StoreError(f"LLM measurement {number}: {problem}") from problem
        _log.warning("LLM measurement %d is left out: %s", number, problem)
    return found


def find_llm_measurement(store: ControlStore, model: str) -> LLMMeasurement | None:
    """The latest one of that model on a running server; None: there is none."""
    found = (m for _, m in reversed(list_llm_measurements(store)) if (m.model, m.method) == (model, "server"))
    return next(found, None)


def load_llm_profile(store: ControlStore, choice: str = "latest", *, hardware_fingerprint: str | None) -> LLMProfile:
    """What a plan takes: one measurement by id, or the latest one with the points of those like it.

    Args:
        hardware_fingerprint: None: measurements of any machine count.

    Raises:
        ProfileError: there is none, or it is of another machine.
        StoreError: the one that is named is damaged.
    """
    stored = list_llm_measurements(store, named=choice)
    if choice != "latest":
        stored = [(number, m) for number, m in stored if str(number) == choice]
    here = [m for _, m in stored if hardware_fingerprint in (None, m.hardware_fingerprint)]
    if not here:
        wanted = "no LLM measurement" if choice == "latest" else f"no LLM measurement {choice}"
        other = f"; {len(stored)} of another machine" if stored else ""
        raise ProfileError(
            f"control store {store.name}: it holds {wanted} of this machine{other}; run profile llm here"
        )
    return merge_points(here)


def step_times(store: ControlStore, plan: Plan | None) -> LLMProfile | None:
    """Whose measured steps are the windows of lookahead: the plan's LLM, or else the one that was measured last on this
    machine. None: none was, or the store cannot be read, which is logged: nothing that serves needs it."""
    if plan is not None and plan.request.llm is not None and plan.request.llm.generation_s:
        return plan.request.llm
    try:
        return load_llm_profile(store, hardware_fingerprint=hardware_info().fingerprint)
    except ProfileError:
        return None
    except StoreError as error:
        _log.info("no measured step is a window of lookahead: %s", error)
        return None


def llm_profile_from_data(data: Mapping[str, Any]) -> LLMProfile:
    """An LLM profile from JSON: its own fields, or a whole measurement with its ``profile``.

    Raises:
        KeyError, TypeError, ValueError: it is something else.
    """
    values = dict(data.get("profile", data))
    values["points"] = tuple((int(kv), float(rps)) for kv, rps in values.get("points", ()))
    values["generation_s"] = {str(step): float(s) for step, s in values.get("generation_s", {}).items()}
    return LLMProfile(**values)


def _measurement_of(data: Mapping[str, Any]) -> LLMMeasurement:
    """Raises KeyError, TypeError, ValueError, AttributeError: it is none."""
    values = dict(data)
    values["profile"] = llm_profile_from_data(values["profile"])
    values["levels"] = tuple(LLMLevel(**level) for level in values["levels"])
    values["prefill"] = tuple((int(n), float(s)) for n, s in values["prefill"])
    values["refused"] = tuple((int(b), str(why)) for b, why in values["refused"])
    return LLMMeasurement(**values)
