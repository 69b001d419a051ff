"""Checks a profile field by field before anything is written."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import fields
from datetime import datetime, timedelta
from typing import Any, Final

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.types import Profile

__all__ = ["check_profile", "check_scalar", "check_time", "is_storable_text"]

_INT64: Final = 1 << 63


def check_profile(profile: Profile, *, stored: Collection[str] = ()) -> None:
    """Raise InvalidInputError naming the first field that the store cannot hold or that contradicts another.

    ``stored``: groups of samples that are not looked at, because the store holds them.
    """
    check_time(profile.created_at, "profile.created_at")
    for name in ("index_fingerprint", "metric", "codec", "scanner", "omp_wait_policy"):
        check_scalar(getattr(profile, name), f"profile.{name}", str)
    for name in ("dim", "count", "nlist", "nprobe", "k", "threads", "seed"):
        check_scalar(getattr(profile, name), f"profile.{name}", int)
    check_scalar(profile.load_average, "profile.load_average", float)
    if not profile.index_fingerprint or not profile.hardware.fingerprint:
        raise InvalidInputError("profile: index_fingerprint and hardware.fingerprint must not be empty")
    for group in {"stages", "transfers", "recall"}.difference(stored):
        for i, sample in enumerate(getattr(profile, group)):
            for field in fields(sample):
                check_scalar(getattr(sample, field.name), f"profile.{group}[{i}].{field.name}", _kind_of(field.name))
    lists: tuple[int, ...] = (profile.nlist,)
    _check_array(profile.list_bytes, "list_bytes", np.int64, lists)
    _check_array(profile.list_sizes, "list_sizes", np.int64, lists)
    _check_array(profile.access.list_accesses, "access.list_accesses", np.float64, lists)
    if profile.access.list_candidates is not None:
        _check_array(profile.access.list_candidates, "access.list_candidates", np.float64, lists)
        shape = np.shape(profile.access.held_probes)
        _check_array(profile.access.held_candidates, "access.held_candidates", np.float32, shape)
    for name in ("fit_probes", "held_probes"):
        probes = getattr(profile.access, name)
        _check_array(probes, f"access.{name}", np.int32, (len(probes) if np.ndim(probes) else 0, profile.nprobe))


def _kind_of(field: str) -> type:
    if field in ("stage", "device"):
        return str
    if field in ("seconds", "coverage", "min_hit_rate", "recall", "ndcg"):
        return float
    return bool if field == "pinned" else int


def check_scalar(value: object, where: str, kind: type) -> None:
    """Raise unless ``value`` is a ``kind`` (numpy scalars are not) that a column holds: finite, 64 bits, no NUL."""
    if kind is str:
        if not isinstance(value, str) or not is_storable_text(value):
            raise InvalidInputError(f"{where}: {value!r} must be text without NUL and lone surrogates")
    elif kind is bool:
        if not isinstance(value, bool):
            raise InvalidInputError(f"{where}: {value!r} must be True or False")
    elif kind is int:
        if not isinstance(value, int) or isinstance(value, bool) or not -_INT64 <= value < _INT64:
            raise InvalidInputError(f"{where}: {value!r} must be a Python int of 64 bits")
    elif not isinstance(value, float | int) or isinstance(value, bool) or not math.isfinite(value):
        raise InvalidInputError(f"{where}: {value!r} must be a finite Python float")


def is_storable_text(value: str) -> bool:
    """Whether a text column takes it: PostgreSQL has no NUL, and UTF-8 no lone surrogates."""
    return "\x00" not in value and not any("\ud800" <= c <= "\udfff" for c in value)


def check_time(value: object, where: str) -> None:
    """Raise unless ``value`` is ISO 8601 text in UTC."""
    try:
        offset = datetime.fromisoformat(value).utcoffset() if isinstance(value, str) else None
    except ValueError:
        offset = None
    if offset != timedelta(0):
        raise InvalidInputError(f"{where}: {value!r} must be ISO 8601 text in UTC, like 2030-01-31T12:00:00+00:00")


def _check_array(array: Any, name: str, dtype: type[np.generic], shape: tuple[int, ...]) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != np.dtype(dtype) or array.shape != shape:
        got = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise InvalidInputError(f"profile.{name}: {got} given, {np.dtype(dtype)} {shape} is needed")
