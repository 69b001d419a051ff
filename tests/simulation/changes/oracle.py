"""What must be found: the rows of each writer after each of its changes, and what a view of the index may show of them.

A writer changes rows of its own alone, one change after the other. So a view is right when it shows, of each writer,
the rows after one of the changes that may be seen: the last one that was acknowledged when the view was asked for, or a
later one, as a whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hybridindex.types import F32, I64
from tests.simulation.virtual.scheduler import ViolationError

__all__ = ["AUTO", "Dump", "Owner", "Row", "Rows", "Seen", "check_answer", "mismatch", "of_owners", "unnamed_first"]

#: Numbers that the index gives by itself begin here: a row that nobody deletes has the number before.
AUTO = 1_000_000
_TOLERANCE = 2e-4


class Row(NamedTuple):
    """As it is stored."""

    code: bytes
    #: (d,) float32, decoded.
    vector: F32
    #: Its attribute; None: it has none.
    tag: int | None


class Rows:
    """All rows of one writer after one of its changes. Immutable."""

    def __init__(self, rows: dict[int, Row], unnamed: Sequence[Row] = ()) -> None:
        self.rows = rows
        #: Rows that came with numbers of the index's own, before these are known.
        self.unnamed = tuple(unnamed)

    @cached_property
    def ids(self) -> I64:
        """(n,) int64; negative for rows without a known number."""
        return np.array([*self.rows, *range(-len(self.unnamed), 0)], dtype=np.int64)

    @cached_property
    def vectors(self) -> F32:
        every = [row.vector for row in (*self.rows.values(), *self.unnamed)]
        return np.array(every, dtype=np.float32).reshape(len(every), -1)

    @cached_property
    def tags(self) -> npt.NDArray[np.float64]:
        """(n,) float64, NaN where there is none."""
        every = [row.tag for row in (*self.rows.values(), *self.unnamed)]
        return np.array([np.nan if tag is None else tag for tag in every], dtype=np.float64)


@dataclass(slots=True)
class Owner:
    """One writer's changes."""

    number: int
    #: After each change that may be seen, or may come back.
    versions: list[Rows]
    #: What was acknowledged last.
    current: int = 0
    #: What a power cut leaves at least.
    floor: int = 0
    #: After changes that failed, and when: a power cut may bring them, until something is synced in their place.
    ghosts: list[tuple[int, Rows]] = field(default_factory=list)

    @property
    def now(self) -> Rows:
        return self.versions[self.current]

    def begin(self, rows: Rows) -> None:
        """A change is under way."""
        assert self.current == len(self.versions) - 1
        self.versions.append(rows)

    def acknowledge(self, rows: Rows) -> None:
        self.versions[-1] = rows
        self.current = len(self.versions) - 1

    def fail(self, *, is_sure: bool, at: int) -> None:
        """Nothing has changed; ``is_sure``: certainly not."""
        self.ghosts.append((at, self.versions[-1]))
        if is_sure:
            self.versions.pop()

    def sync(self, *, before: int) -> None:
        """All that is current is on disk, by a change that began then."""
        self.floor = self.current
        self.ghosts = [each for each in self.ghosts if each[0] > before]

    def settle(self, rows: Rows) -> None:
        """This is what there is, as was looked up."""
        at = next((i for i, each in enumerate(self.versions) if each is rows), None)
        if at is None:  # a ghost
            self.versions, self.current = [*self.versions[: self.current + 1], rows], self.current + 1
            return
        self.current = at
        self.floor = min(self.floor, at)
        del self.versions[at + 1 :]

    def rename(self, rows: Rows, named: Rows) -> Rows:
        """Numbers became known."""
        self.versions = [named if each is rows else each for each in self.versions]
        return named

    def tidy(self) -> None:
        """Forgets what cannot come back."""
        del self.versions[: self.floor]
        self.current -= self.floor
        self.floor = 0


class Dump(NamedTuple):
    """Every row of a view: (n,) ids, (n, code_size) codes, tags."""

    ids: I64
    codes: npt.NDArray[np.uint8]
    tags: list[int | None]


def of_owners(dump: Dump, owners: Sequence[Owner]) -> tuple[list[dict[int, Row]], dict[int, Row]]:
    """Rows by owner, and those of nobody. The index may give a number again that it gave to a row that is gone."""
    n_owners = len(owners)
    named = {
        (each, row.code): owner.number
        for owner in owners
        for rows in [*owner.versions[owner.floor :], *(ghost for _, ghost in owner.ghosts)]
        for each, row in rows.rows.items()
        if each >= AUTO - 1
    }
    if len(np.unique(dump.ids)) < len(dump.ids):
        twice = [each for each, count in zip(*np.unique(dump.ids, return_counts=True), strict=True) if count > 1]
        raise ViolationError(f"DOUBLED: ids {twice[:5]} are there {len(twice)} times too often")
    owned: list[dict[int, Row]] = [{} for _ in range(n_owners)]
    others: dict[int, Row] = {}
    nothing = np.empty(0, dtype=np.float32)
    for each, code, tag in zip(dump.ids.tolist(), dump.codes, dump.tags, strict=True):
        row = Row(code.tobytes(), nothing, tag)
        owner = named.get((each, row.code), -1) if each >= AUTO - 1 else each % n_owners
        (others if owner < 0 else owned[owner])[each] = row
    return owned, others


def unnamed_first(choices: Sequence[Rows], others: dict[int, Row]) -> list[Rows]:
    """Those first of which rows without a known number are there: without these, they are as the ones before."""
    codes = {row.code for row in others.values()}
    return sorted(choices, key=lambda choice: not any(row.code in codes for row in choice.unnamed))


def mismatch(found: dict[int, Row], expected: Rows, others: dict[int, Row]) -> str:
    """Why a writer's rows are not these; empty: they are."""
    lost = [each for each in expected.rows if each not in found]
    back = [each for each in found if each not in expected.rows]
    wrong = [
        each
        for each, row in expected.rows.items()
        if each in found and (found[each].code != row.code or found[each].tag != row.tag)
    ]
    if expected.unnamed:
        codes = {row.code for row in others.values()}
        lost += [-1 for row in expected.unnamed if row.code not in codes]
    parts = [("LOST", lost), ("BACK", back), ("WRONG", wrong)]
    return "; ".join(f"{name} {len(ids)}: {sorted(ids)[:4]}" for name, ids in parts if ids)


class Seen(NamedTuple):
    """What a search found: (n, k)."""

    ids: I64
    distances: F32


def check_answer(
    seen: Seen,
    queries: F32,
    choices: Iterable[Sequence[Rows]],
    *,
    inner_product: bool,
    allowed: I64 | None = None,
    below: int | None = None,
) -> None:
    """Raises ViolationError: the answer is that of no combination of the writers' rows.

    Args:
        queries: (n, d) float32, as they are scanned.
        choices: of each writer, the rows that may be seen.
        allowed: ids; None: all.
        below: rows whose tag is less.
    """
    problems = []
    choices = [list(each) for each in choices]
    for combination in itertools.product(*choices):
        problem = _differs(seen, queries, combination, inner_product, allowed, below)
        if not problem:
            return
        problems.append(problem)
    n = [len(each) for each in choices]
    raise ViolationError(f"a search shows none of {n} states: {'; '.join(dict.fromkeys(problems))}")


def _differs(
    seen: Seen, queries: F32, rows: Sequence[Rows], inner_product: bool, allowed: I64 | None, below: int | None
) -> str:
    some = [each for each in rows if len(each.ids)]
    if not some:
        return "something is found where nothing is" if (seen.ids >= 0).any() else ""
    ids, vectors = np.concatenate([each.ids for each in some]), np.concatenate([each.vectors for each in some])
    if allowed is not None or below is not None:
        left = np.ones(len(ids), dtype=np.bool_) if allowed is None else np.isin(ids, allowed)
        if below is not None:
            left &= np.concatenate([each.tags for each in some]) < below
        ids, vectors = ids[left], vectors[left]
    order = np.argsort(ids)
    ids, vectors = ids[order], vectors[order]
    exact = queries @ vectors.T if inner_product else ((queries[:, None] - vectors[None]) ** 2).sum(axis=2)
    k, sign = seen.ids.shape[1], -1.0 if inner_product else 1.0
    n = min(k, len(ids))
    for found, distances, own in zip(seen.ids, seen.distances, exact, strict=True):
        if (found[:n] < 0).any() or (found[n:] >= 0).any():
            return f"LOST or BACK: {int((found >= 0).sum())} rows are found; expected {n}"
        if not n:
            continue
        found, distances = found[:n], distances[:n]
        if len(np.unique(found)) < n:
            return "DOUBLED: an id is found twice"
        allowance = _TOLERANCE * (1 + np.abs(distances))
        best = np.sort(sign * own)[:n] * sign
        if (np.abs(best - distances) > allowance).any():
            return "WRONG: other distances than the nearest have"
        at = np.minimum(np.searchsorted(ids, found), len(ids) - 1)
        known = ids[at] == found
        if (np.abs(own[at] - distances) > allowance)[known].any():
            return "WRONG: a row at another row's distance"
        if not known.all() and ((found[~known] < AUTO).any() or (ids >= 0).all()):
            return f"BACK: {found[~known][:4].tolist()} are found"
    return ""
