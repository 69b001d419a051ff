"""What to profile and how: one value, checked when it is made. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from hybridindex.config import RowsName, check_one_of
from hybridindex.errors import InvalidInputError, ProfileError
from hybridindex.profiler.access import DEFAULT_DECAY
from hybridindex.tiers.contract.validate import MAX_K
from hybridindex.types import F32, Profile

if TYPE_CHECKING:
    from hybridindex.tiers.host.host_scanner import HostScannerName

__all__ = [
    "DEFAULT_BATCHES",
    "DEFAULT_COVERAGES",
    "MAX_QUERIES",
    "MIN_QUERIES",
    "ProfileRequest",
]

#: Half of them order the lists, half estimate everything else.
MIN_QUERIES = 64
#: More are not read: at this size the sampling error of a share is below a quarter of a percent.
MAX_QUERIES = 65_536
DEFAULT_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DEFAULT_COVERAGES = (0.05, 0.1, 0.2, 0.4, 0.6)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """What :func:`hybridindex.profiler.run.profile_index` measures.

    Making one checks every field, and turns sequences into tuples and numpy's numbers into Python's. Raises
    InvalidInputError, which names the field.
    """

    #: Lists per query; None: the index's own. Give this or ``recall_target``.
    nprobe: int | None = None
    #: recall@k in (0, 1] against nprobe = nlist; the smallest nprobe that reaches it is used.
    recall_target: float | None = None
    #: Neighbours per query.
    k: int = 10
    #: Batch sizes to time. Those above half the queries are left out and noted.
    batches: Sequence[int] = DEFAULT_BATCHES
    #: Fractions of lists, hottest first, that are masked in part of the host scans.
    coverages: Sequence[float] = DEFAULT_COVERAGES
    #: Timed rounds; every round draws its queries anew.
    repeats: int = 10
    #: Host threads; None: faiss's own setting.
    threads: int | None = None
    host_scanner: HostScannerName = "auto"
    #: "mapped": of searches by codes with rows on disk; what reading them takes is measured, and rows are dropped from
    #: memory for it.
    rows: RowsName = "resident"
    #: Devices to time scans and copies on: "cuda:N", or "cpu" for the stand-in.
    devices: Sequence[str] = ()
    #: Hard limit of what measuring takes on a device, temporary buffers included. None: what the whole index needs, as
    #: far as the device has room beside others.
    device_budget_bytes: int | None = None
    #: Of the split into halves and of every draw.
    seed: int = 0
    #: About how long to measure; the smallest batches and two rounds are measured whatever they take.
    max_seconds: float = 60.0
    #: An earlier profile of this index, whose accesses are added with the weight ``history_decay``, 0..1.
    history: Profile | None = None
    history_decay: float = DEFAULT_DECAY
    #: Facts to keep beside the numbers, such as where the queries come from.
    notes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        nprobe, recall_target = self.nprobe, self.recall_target
        if nprobe is not None and recall_target is not None:
            raise InvalidInputError(f"nprobe {nprobe} and recall_target {recall_target} were both given; give one")
        if recall_target is not None and not 0.0 < (recall_target := _number("recall_target", recall_target)) <= 1.0:
            raise InvalidInputError(f"recall_target is {recall_target}; expected above 0 and up to 1, for example 0.95")
        if not 1 <= (k := _whole("k", self.k)) <= MAX_K:
            raise InvalidInputError(f"k is {k}; expected 1..{MAX_K}")
        if (repeats := _whole("repeats", self.repeats)) < 1:
            raise InvalidInputError(f"repeats is {repeats}; expected at least 1")
        threads = None if self.threads is None else _whole("threads", self.threads)
        if threads is not None and threads < 1:
            raise InvalidInputError(f"threads is {threads}; expected at least 1, or None for faiss's own setting")
        max_seconds = _number("max_seconds", self.max_seconds)
        if not (math.isfinite(max_seconds) and max_seconds > 0):
            raise InvalidInputError(f"max_seconds is {max_seconds}; expected a positive finite number of seconds")
        if (seed := _whole("seed", self.seed)) < 0:
            raise InvalidInputError(f"seed is {seed}; expected 0 or more")
        batches = tuple(_whole("batches", b) for b in _several("batches", self.batches, "whole numbers"))
        if not batches or min(batches) < 1:
            raise InvalidInputError(f"batches are {batches}; expected sizes from 1 up")
        coverages = tuple(_number("coverages", c) for c in _several("coverages", self.coverages, "fractions of lists"))
        if not all(0.0 <= c <= 1.0 for c in coverages):
            raise InvalidInputError(f"coverages are {coverages}; expected fractions of lists from 0 to 1")
        check_one_of("rows", self.rows, ("resident", "mapped"))
        devices = _several("devices", self.devices, "names like 'cuda:0'")
        if not all(isinstance(name, str) for name in devices):
            raise InvalidInputError(f"devices are {devices!r}; expected a list of names like 'cuda:0'")
        budget = None if self.device_budget_bytes is None else _whole("device_budget_bytes", self.device_budget_bytes)
        if budget is not None and budget < 1:
            raise InvalidInputError(
                f"device_budget_bytes is {budget}; expected 1 or more, or None for what the index needs"
            )
        # NaN is not within bounds.
        if not 0.0 <= (decay := _number("history_decay", self.history_decay)) <= 1.0:
            raise InvalidInputError(f"history_decay is {decay}; expected 0 to 1, the weight of earlier accesses")
        checked = {
            "nprobe": None if nprobe is None else _whole("nprobe", nprobe),
            "recall_target": recall_target,
            "k": k,
            "repeats": repeats,
            "threads": threads,
            "max_seconds": max_seconds,
            "seed": seed,
            "batches": tuple(sorted(set(batches))),
            "coverages": coverages,
            "devices": devices,
            "device_budget_bytes": budget,
            "history_decay": decay,
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def for_index(self, n_queries: int, nlist: int, nprobe: int) -> ProfileRequest:
        """The request with what an index decides.

        That is the index's own ``nprobe`` where none is asked for, and only batch sizes that the held-back half of
        the queries can fill.

        Raises:
            ProfileError: too few queries.
            InvalidInputError: nprobe is not in 1..nlist, or no batch size is left.
        """
        if n_queries < MIN_QUERIES:
            raise ProfileError(
                f"{n_queries} calibration queries; at least {MIN_QUERIES} are needed, a few thousand are better: "
                "half of them choose the hot lists, the other half estimates hit rates"
            )
        if self.nprobe is not None and not 1 <= self.nprobe <= nlist:
            raise InvalidInputError(f"nprobe is {self.nprobe}; expected 1 to nlist, {nlist}")
        n_held = min(n_queries - n_queries // 2, MAX_QUERIES // 2)
        usable = tuple(b for b in self.batches if b <= n_held)
        if not usable:
            raise InvalidInputError(
                f"batches are {self.batches}; {n_queries} queries leave {n_held} held back to draw them from"
            )
        own = self.nprobe is None and self.recall_target is None
        return replace(self, nprobe=nprobe if own else self.nprobe, batches=usable)

    def key(self, *facts: str, queries: F32) -> str:
        """A digest of this request, of ``facts`` and of the queries: what a checkpoint belongs to."""
        asked = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("history", "notes")}
        past = None if self.history is None else [self.history.created_at, self.history.id]
        digest = xxhash.xxh3_128(json.dumps([asked, past, list(facts), list(queries.shape)]).encode())
        digest.update(np.ascontiguousarray(queries).data)
        return digest.hexdigest()


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InvalidInputError(f"{name} holds {value!r}; expected whole numbers")
    return int(value)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise InvalidInputError(f"{name} holds {value!r}; expected numbers")
    return float(value)


def _several(name: str, values: Any, what: str) -> tuple[Any, ...]:
    # A string is a sequence too, of letters.
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InvalidInputError(f"{name} is {values!r}; expected a list of {what}")
    return tuple(values)
