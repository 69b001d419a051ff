"""What an index holds after each of its changes, and answers compared with every state that a search may have seen.

The product's log and merges are not asked: of each change only what was wanted of it is known.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import numpy as np

from hybridindex.index.ivf import IVFIndex
from hybridindex.types import F32, I64
from tests.simulation.answers import Answers
from tests.simulation.virtual.scheduler import ViolationError

__all__ = ["States"]

#: Ids (n,) and vectors (n, dim) of one list.
_Rows = tuple[I64, F32]


class _StateAnswers(Answers):
    """Of one state. Rows that were added to list ``i`` are those of list ``nlist + i``, which no node lacks."""

    def __init__(self, index: IVFIndex, frozen: dict[int, _Rows], added: dict[int, _Rows], slack: float) -> None:
        super().__init__(index, slack=slack)
        nlist, nothing = index.nlist, (np.empty(0, np.int64), np.empty((0, index.dim), np.float32))

        def rows(number: int) -> _Rows:
            return frozen[number] if number < nlist else added.get(number - nlist, nothing)

        self._decoded = cast(
            "IVFIndex",
            SimpleNamespace(metric=index.metric, list_ids=lambda i: rows(i)[0], decode_list=lambda i: rows(i)[1]),
        )

        came = np.array([len(rows(nlist + i)[0]) for i in range(nlist)])
        #: (nlist,) rows that are there, and with those that are gone.
        self._there = came + [len(frozen[i][0]) for i in range(nlist)]
        self._sizes = came + index.list_sizes
        self._is_empty = self._there == 0
        self._any_gone = bool((self._there < self._sizes).any())

    def _never_lost(self, probes: I64) -> I64:
        return probes + self._index.nlist

    def reached(self, queries: F32, k: int, nprobe: int) -> I64:
        """Lists that a search for transformed queries may scan. Where too many rows are gone, those are taken, nearest
        first, that have as many rows as there were in ``nprobe`` lists; or all, where these have hardly more."""
        every = np.arange(self._index.nlist)
        nearest = self._index.quantize(queries, self._index.nlist)[0]
        if not self._any_gone:
            return np.unique(nearest[:, :nprobe])
        if self._there.sum() <= self._sizes.sum() * nprobe // self._index.nlist + 4 * self._index.nlist:
            return every
        wanted = np.maximum(self._sizes[nearest[:, :nprobe]].sum(axis=1), k)
        before = np.cumsum(self._there[nearest], axis=1) - self._there[nearest]
        return np.unique(nearest[(before < wanted[:, None]) | (np.cumsum(nearest >= 0, axis=1) <= nprobe)])

    def _may_probe(self, nprobe: int) -> tuple[int, int]:
        # Where too many rows are gone, lists that have rows are taken until these have as many as there were.
        there = int((~self._is_empty).sum())
        return (min(nprobe, there), there) if self._any_gone else (nprobe, nprobe)

    def _probed(self, query: F32, n: int) -> list[I64]:
        found = super()._probed(query, n)
        if self._is_empty[found[0]].any():
            every = self._index.quantize(query, self._index.nlist)[0][0]
            found.append(every[~self._is_empty[every]][None, :n])
        return found


class States:
    """Of one index of codec ``flat``. State ``n`` is that after ``n`` changes."""

    def __init__(self, index: IVFIndex, answers: Answers) -> None:
        """``answers``: of the index as it was built."""
        assert index.codec == "flat"
        self._index, self._pool = index, answers.pool
        self._frozen = {i: (index.list_ids(i), index.decode_list(i)) for i in range(index.nlist)}
        self._added: dict[int, _Rows] = {}
        #: List of each id that is there.
        self._list_of = {int(i): number for number, rows in self._frozen.items() for i in rows[0]}
        self._built = answers
        self._states = list[_StateAnswers]()
        self._add()
        self._before: tuple[dict[int, _Rows], dict[int, _Rows], dict[int, int]] | None = None

    @property
    def newest(self) -> int:
        """Number of the last change that was begun."""
        return len(self._states) - 1

    def reached(self, first: int, last: int, rows: I64, k: int, nprobe: int) -> I64:
        """Lists that a search for queries of the pool may scan, in any of these states."""
        queries = self._index.transform(self._pool[rows])
        found = [state.reached(queries, k, nprobe) for state in self._states[first : last + 1]]
        return np.unique(np.concatenate(found))

    def __len__(self) -> int:
        """Rows of the newest state."""
        return len(self._list_of)

    def __contains__(self, each: int) -> bool:
        return each in self._list_of

    def nearest(self, query: int, n: int) -> list[int]:
        """Ids of the newest state nearest to a query of the pool."""
        parts = [*self._frozen.values(), *self._added.values()]
        ids, rows = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
        # No product of a temporary array: numpy then looks at the C stack, which crashes in greenlets of Python 3.13.
        apart = rows - self._pool[query]
        found: list[int] = ids[np.argsort(np.einsum("ij,ij->i", apart, apart))[:n]].tolist()
        return found

    def begin(self, gone: list[int], ids: list[int], rows: F32) -> None:
        """A change is being made: of ``gone`` and ``ids`` all rows go, then ``rows`` come with ``ids``. From now on a
        search may see it."""
        self._before = dict(self._frozen), dict(self._added), dict(self._list_of)
        for each in {*gone, *ids} & set(self._list_of):
            number = self._list_of.pop(each)
            for part in (self._frozen, self._added):
                if number in part:
                    kept = part[number][0] != each
                    part[number] = part[number][0][kept], part[number][1][kept]
        if ids:
            lists = self._index.quantize(self._index.transform(rows), 1)[0][:, 0].tolist()
            for number, each, row in zip(lists, ids, rows, strict=True):
                there = self._added.get(number, (np.empty(0, np.int64), np.empty((0, rows.shape[1]), np.float32)))
                self._added[number] = np.append(there[0], each), np.concatenate([there[1], row[None]])
                self._list_of[each] = number
        self._add()

    def _add(self) -> None:
        self._states.append(_StateAnswers(self._index, dict(self._frozen), dict(self._added), self._built.slack))

    def withdraw(self) -> None:
        """The last change was not made."""
        assert self._before is not None
        self._frozen, self._added, self._list_of = self._before
        self._states.pop()

    def check(self, first: int, last: int, check: Callable[[Answers], None]) -> None:
        """Raises ViolationError: an answer is of none of the states from ``first`` to ``last``."""
        if last > self.newest:
            raise ViolationError(f"searches see change {last}, and {self.newest} were made")
        problem: ViolationError | None = None
        for number in range(first, last + 1):
            try:
                # That of the index as it was built remembers what it found right in other runs.
                check(self._states[number] if number else self._built)
                return
            except ViolationError as error:
                problem = problem or error
        raise ViolationError(f"of no state from change {first} to {last}: {problem}") from problem
