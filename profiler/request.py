"""What to measure: the arguments of a profile, checked and resolved once. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import xxhash

from hybridindex.errors import InvalidInputError, ProfileError
from hybridindex.tiers.contract.validate import MAX_K
from hybridindex.types import F32

__all__ = ["DEFAULT_BATCHES", "DEFAULT_COVERAGES", "MAX_QUERIES", "MIN_QUERIES", "ProfileRequest", "check_request"]

#: Half of them order the lists, half estimate everything else.
MIN_QUERIES = 64
#: More are not read: at this size the sampling error of a share is below a quarter of a percent.
MAX_QUERIES = 65_536
DEFAULT_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DEFAULT_COVERAGES = (0.05, 0.1, 0.2, 0.4, 0.6)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """Checked arguments of :func:`hybridindex.profiler.run.profile_index`."""

    #: None: chosen by ``recall_target``.
    nprobe: int | None
    recall_target: float | None
    k: int
    #: Ascending, distinct, each at most the number of held-back queries.
    batches: tuple[int, ...]
    #: Batch sizes that were asked for and exceed it.
    batches_too_large: tuple[int, ...]
    coverages: tuple[float, ...]
    repeats: int
    threads: int | None
    devices: tuple[str, ...]
    seed: int
    max_seconds: float

    def key(self, *facts: str, queries: F32) -> str:
        """A digest of this request, of ``facts`` and of the queries: what a checkpoint belongs to."""
        digest = xxhash.xxh3_128(json.dumps([asdict(self), list(facts), list(queries.shape)]).encode())
        digest.update(np.ascontiguousarray(queries).data)
        return digest.hexdigest()


def check_request(
    *,
    n_queries: int,
    nlist: int,
    default_nprobe: int,
    nprobe: int | None,
    recall_target: float | None,
    k: int,
    batches: Sequence[int] | None,
    coverages: Sequence[float],
    repeats: int,
    threads: int | None,
    devices: Sequence[str],
    seed: int,
    max_seconds: float,
) -> ProfileRequest:
    """Checks every argument, then fills in defaults.

    Raises:
        ProfileError: too few queries.
        InvalidInputError: another argument is wrong.
    """
    if n_queries < MIN_QUERIES:
        raise ProfileError(
            f"{n_queries} calibration queries; at least {MIN_QUERIES} are needed, a few thousand are better: "
            "half of them choose the hot lists, the other half estimates hit rates"
        )
    if nprobe is not None and recall_target is not None:
        raise InvalidInputError(f"nprobe {nprobe} and recall_target {recall_target} were both given; give one")
    if nprobe is not None and not 1 <= (nprobe := _whole("nprobe", nprobe)) <= nlist:
        raise InvalidInputError(f"nprobe is {nprobe}; expected 1 to nlist, {nlist}")
    if recall_target is not None and not 0.0 < (recall_target := _number("recall_target", recall_target)) <= 1.0:
        raise InvalidInputError(f"recall_target is {recall_target}; expected above 0 and up to 1, for example 0.95")
    if not 1 <= _whole("k", k) <= MAX_K:
        raise InvalidInputError(f"k is {k}; expected 1..{MAX_K}")
    if _whole("repeats", repeats) < 1:
        raise InvalidInputError(f"repeats is {repeats}; expected at least 1")
    if threads is not None and _whole("threads", threads) < 1:
        raise InvalidInputError(f"threads is {threads}; expected at least 1, or None for faiss's own setting")
    max_seconds = _number("max_seconds", max_seconds)
    if not (math.isfinite(max_seconds) and max_seconds > 0):
        raise InvalidInputError(f"max_seconds is {max_seconds}; expected a positive finite number of seconds")
    if _whole("seed", seed) < 0:
        raise InvalidInputError(f"seed is {seed}; expected 0 or more")
    asked = DEFAULT_BATCHES if batches is None else _several("batches", batches, "whole numbers")
    if not asked or min(_whole("batches", b) for b in asked) < 1:
        raise InvalidInputError(f"batches are {asked}; expected sizes from 1 up")
    shares = tuple(_number("coverages", c) for c in _several("coverages", coverages, "fractions of lists"))
    if not all(0.0 <= c <= 1.0 for c in shares):
        raise InvalidInputError(f"coverages are {shares}; expected fractions of lists from 0 to 1")
    names = _several("devices", devices, "names like 'cuda:0'")
    if not all(isinstance(name, str) for name in names):
        raise InvalidInputError(f"devices are {names!r}; expected a list of names like 'cuda:0'")
    n_held = min(n_queries - n_queries // 2, MAX_QUERIES // 2)
    usable = tuple(sorted({int(b) for b in asked if b <= n_held}))
    if not usable:
        raise InvalidInputError(f"batches are {asked}; {n_queries} queries leave {n_held} held back to draw them from")
    return ProfileRequest(
        nprobe=nprobe if nprobe is not None or recall_target is not None else default_nprobe,
        recall_target=recall_target,
        k=int(k),
        batches=usable,
        batches_too_large=tuple(sorted({int(b) for b in asked if b > n_held})),
        coverages=shares,
        repeats=int(repeats),
        threads=None if threads is None else int(threads),
        devices=names,
        seed=int(seed),
        max_seconds=max_seconds,
    )


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
