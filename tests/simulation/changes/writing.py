"""The changes that one writer makes, and what each must say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import hybridindex as hx
from hybridindex.errors import BuildError, BusyWritingError, DuplicateIdError, HybridIndexError
from tests.simulation.changes.oracle import AUTO, Row, Rows, mismatch, of_owners, unnamed_first
from tests.simulation.changes.processes import draws
from tests.simulation.changes.views import dump
from tests.simulation.virtual.scheduler import ViolationError

if TYPE_CHECKING:
    from tests.simulation.changes.world import Life

__all__ = ["Writing"]

#: Rows of a writer, more or less.
_MANY = 90


class Writing:
    """One writer's."""

    def __init__(self, life: Life, number: int) -> None:
        self._life, self._world = life, life.world
        self._owner = life.world.owners[number]
        self.draw = draws("writing", life.world.seed, life.number, number)
        self._generator = np.random.default_rng(self.draw.randrange(1 << 30))
        self._is_sure = True

    def change(self, index: hx.Index) -> None:
        """One change."""
        if not self._is_sure:
            self._look_up(index)
        draw, now = self.draw, self._owner.now.rows
        kinds = ("add", "add", "add unnamed", "upsert", "upsert", "delete", "delete", "add twice")
        kind = draw.choice(kinds) if len(now) < _MANY else draw.choice(("delete", "delete", "delete where", "upsert"))
        if draw.random() < 0.05:
            kind = "delete where"
        if kind == "delete where" and not self._world.setup.attributes:
            kind = "delete"
        getattr(self, f"_{kind.replace(' ', '_')}")(index)

    # Each kind

    def _add(self, index: hx.Index) -> None:
        ids = self._free(self._count())
        rows, given = self._rows(len(ids))
        after = Rows({**self._owner.now.rows, **dict(zip(ids, rows, strict=True))})
        found = self._make(index, "adds", after, lambda: index.add(given[0], np.array(ids), given[1]))
        if found is not None and found.tolist() != ids:
            raise ViolationError(f"add says {found.tolist()[:5]}; expected {ids[:5]}")

    def _add_unnamed(self, index: hx.Index) -> None:
        rows, given = self._rows(self._count())
        before = self._owner.now.rows

        def named(ids: Any) -> Rows:
            numbers = ids.tolist()
            there = {each for owner in self._world.owners for each in owner.now.rows}
            if min(numbers) < AUTO or len({*numbers}) < len(rows) or there & {*numbers}:
                raise ViolationError(f"add gives the numbers {numbers[:5]}, of which some are there")
            return Rows({**before, **dict(zip(numbers, rows, strict=True))})

        self._make(index, "adds", Rows(before, rows), lambda: index.add(given[0], None, given[1]), named)

    def _add_twice(self, index: hx.Index) -> None:
        ids = self._mine(1)
        if not ids:
            return
        _, given = self._rows(1)
        before = self._life.faults.n
        try:
            index.add(given[0], np.array(ids), given[1])
        except DuplicateIdError:
            self._world.outcome.done["refused ids"] += 1
        except (HybridIndexError, OSError) as error:
            self._explain(error, before)
        else:
            raise ViolationError(f"LOST: add took id {ids}, which is there")

    def _upsert(self, index: hx.Index) -> None:
        old, new = self._mine(self._count()), self._free(self.draw.randrange(3))
        ids = [*old, *new]
        self.draw.shuffle(ids)
        if not ids:
            return
        rows, given = self._rows(len(ids))
        after = Rows({**self._owner.now.rows, **dict(zip(ids, rows, strict=True))})
        found = self._make(index, "upserts", after, lambda: index.upsert(given[0], np.array(ids), given[1]))
        self._expect("upsert", found, len(old))

    def _delete(self, index: hx.Index) -> None:
        old = self._mine(self._count() + 1)
        ids = [*old, *self._free(self.draw.randrange(3))]
        after = Rows({each: row for each, row in self._owner.now.rows.items() if each not in set(old)})
        found = self._make(index, "deletes", after, lambda: index.delete(np.array(ids, dtype=np.int64)))
        self._expect("delete", found, len(old))

    def _delete_where(self, index: hx.Index) -> None:
        limit = self.draw.randrange(30)
        going = {
            each
            for each, row in self._owner.now.rows.items()
            if each != AUTO - 1 and row.tag is not None and row.tag < limit
        }
        after = Rows({each: row for each, row in self._owner.now.rows.items() if each not in going})
        where = f"owner = {self._owner.number} AND tag < {limit} AND tag >= 0"
        keeps = (
            AUTO - 1 in self._owner.now.rows and (tag := self._owner.now.rows[AUTO - 1].tag) is not None and tag < limit
        )
        if keeps:
            return
        found = self._make(index, "deletes", after, lambda: index.delete(where=where))
        self._expect("delete where", found, len(going))

    # What they share

    def _count(self) -> int:
        return self.draw.choice((1, 1, 1, 2, 3, 3, 8, 20, 50))

    def _mine(self, n: int) -> list[int]:
        mine = [each for each in self._owner.now.rows if each != AUTO - 1]
        if mine and self.draw.random() < 0.3:  # of one list, about
            rows = np.array([self._owner.now.rows[each].vector for each in mine])
            away = ((rows - rows[self.draw.randrange(len(rows))]) ** 2).sum(axis=1)
            return [mine[each] for each in np.argsort(away, kind="stable")[: min(n, 30)].tolist()]
        return self.draw.sample(mine, min(n, len(mine), 30))

    def _free(self, n: int) -> list[int]:
        from tests.simulation.changes.world import N_OWNERS, POOL

        now = self._owner.now.rows
        free = [each for each in range(self._owner.number, POOL, N_OWNERS) if each not in now]
        return self.draw.sample(free, min(n, len(free)))

    def _rows(self, n: int) -> tuple[list[Row], tuple[Any, Any]]:
        """Rows as they will be stored, and as they are given."""
        template = self._world.template
        vectors = self._generator.standard_normal((n, template.setup.dim)).astype(np.float32)
        if self.draw.random() < 0.5:  # for one list, about
            vectors = (0.2 * vectors + self._generator.standard_normal(template.setup.dim)).astype(np.float32)
        if not template.setup.attributes or self.draw.random() < 0.2:
            return template.rows(vectors, [None] * n), (vectors, None)
        tags = [int(each) for each in self._generator.integers(0, 100, n)]
        attributes = {"owner": [self._owner.number] * n, "tag": tags}
        return template.rows(vectors, [*tags]), (vectors, attributes)

    def _make(self, index: hx.Index, name: str, after: Rows, call: Any, named: Any = None) -> Any:
        """Makes a change; what it returns, None: it failed."""
        life, owner, faults = self._life, self._owner, self._life.faults
        n, unsure, began = faults.n, faults.unsure, life.sim.n_steps
        owner.begin(after)
        try:
            found = call()
        except (HybridIndexError, OSError) as error:
            self._is_sure = faults.unsure == unsure
            owner.fail(is_sure=self._is_sure, at=life.sim.n_steps)
            self._explain(error, n)
            if self._is_sure:
                self._look_up(index, f"{name} that failed with {error!r}")
            return None
        owner.acknowledge(after if named is None else named(found))
        self._world.outcome.changes += 1
        self._world.outcome.done[name] += 1
        if self._world.is_synced:
            for each in self._world.owners:
                each.sync(before=began)
        return found

    def _explain(self, error: Exception, before: int) -> None:
        life = self._life
        if life.faults.n > before or "attributes.json cannot be read" in str(error):
            self._world.outcome.done["failed"] += 1
        elif isinstance(error, BuildError) and not isinstance(error, BusyWritingError) and life.writes_elsewhere:
            self._world.outcome.done["refused"] += 1
            if "open the index again" in str(error):
                raise error
        else:
            raise ViolationError(f"a change failed without a reason: {error!r}") from error

    def _expect(self, what: str, found: Any, expected: int) -> None:
        if found is not None and found != expected:
            raise ViolationError(f"WRONG: {what} says {found}; expected {expected}")

    def _look_up(self, index: hx.Index, after: str = "a change that failed for good") -> None:
        """Whether a change that failed was made all the same."""
        life, owner, world = self._life, self._owner, self._world
        while life.faults.goes_on:
            life.sim.sleep(0.05)
            life.faults.pass_time()
        life.faults.muted += 1
        try:
            found = dump(index.ivf, index.ivf.live.read_now())
        finally:
            life.faults.muted -= 1
        from tests.simulation.changes.lives import choice_of, named_of

        owned, others = of_owners(found, world.owners)
        rows, problems = owned[owner.number], []
        for choice in unnamed_first(owner.versions[owner.current :], others):
            named = named_of(choice, others)
            chosen = choice_of(choice, named)
            if not (problem := mismatch(rows | named, chosen, {})):
                owner.settle(owner.rename(choice, chosen))
                self._is_sure = True
                return
            problems.append(problem)
        raise ViolationError(f"after {after}: {problems}")
