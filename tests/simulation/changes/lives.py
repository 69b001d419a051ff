"""What the processes of one life do: writers, a janitor that compacts and rewrites the log, searches, and another."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import hybridindex as hx
from hybridindex.errors import BuildError, HybridIndexError
from hybridindex.index.changes.claim import claim_of
from hybridindex.index.ivf import IVFIndex
from hybridindex.router.router import Router
from tests.simulation.changes.devices import RouterView
from tests.simulation.changes.oracle import Rows, check_answer, mismatch, of_owners, unnamed_first
from tests.simulation.changes.processes import KilledError, Process, draws
from tests.simulation.changes.views import View, dump
from tests.simulation.changes.world import OTHER, Life
from tests.simulation.changes.writing import Writing
from tests.simulation.virtual.scheduler import SimThread, ViolationError, current

__all__ = ["live"]

#: Between looks at what another process wrote, and a little more.
_LOOK_S = 1.1
#: Of the virtual time of a life; what waits for ever ends it.
_LONGEST_S = 3600.0
#: Views of older generations that are kept.
_OLD_VIEWS = 2
#: A reader was away while the index was compacted twice.
_AWAY = "open the index again"


def live(life: Life) -> None:
    """The whole life, as the first thread of the simulation."""
    sim = life.sim
    life.victim = Process("writer")
    life.others = [Process("other")]
    for process, body in ((life.victim, _writer), (life.others[0], _other)):
        sim.start(process, SimThread(target=partial(_guarded, body, life, process), name=process.name))
    began = sim.now
    while len(sim.threads) > 1:
        if sim.now - began > _LONGEST_S:
            raise ViolationError(f"threads are left: {[each.name for each in sim.threads]}")
        sim.sleep(1.0)


def _guarded(body: Callable[..., None], life: Life, *args: Any) -> None:
    """A thread of a process that may be killed."""
    life.doing[current()] = "between"
    try:
        body(life, *args)
    except KilledError:
        pass
    except (HybridIndexError, OSError) as error:
        # A search, say, that reads a file the first time.
        if not life.faults.n:
            raise ViolationError(f"{life.doing[current()]}: {error!r}") from error
        life.world.outcome.done["threads ended by a fault"] += 1


def _writer(life: Life, process: Process) -> None:
    world, draw = life.world, draws("writer", life.world.seed, life.number)
    life.doing[current()] = "recovery"
    keep = draw.random() < 0.4
    world.is_synced = draw.random() < 0.9
    before = life.faults.n
    try:
        index = hx.open(
            world.path,
            verify=draw.choice(("full", "quick")),
            write=keep,
            durability="synced" if world.is_synced else "written",
        )
    except (HybridIndexError, OSError) as error:
        life.is_over = True
        if life.faults.n == before:
            raise ViolationError(f"LOST: the index does not open: {error!r}") from error
        return
    audit(life, index.ivf, settle=True)
    life.is_ready, life.is_kept = True, keep
    jobs: list[tuple[str, Callable[..., None], tuple[Any, ...]]] = [
        *(("change", _changes, (index, number, draw.randrange(20, 120))) for number in range(OTHER)),
        ("compaction", partial(_janitor, rewrites=False), (index,)),
        ("rewrite", partial(_janitor, rewrites=True), (index,)),
        ("search", _searches, (index,)),
    ]
    if life.devices is not None:
        jobs.append(("devices", _devices, (index,)))
    threads = []
    life.n_busy = OTHER
    for name, body, args in jobs:
        threads.append(SimThread(target=partial(_guarded, body, life, *args), name=name))
        life.sim.start(process, threads[-1])
    for thread in threads:
        thread.join()
    life.is_over = True
    life.doing[current()] = "end"
    if not life.has_to_open_again:
        try:
            audit(life, index.ivf, settle=False)
        except BuildError as error:
            if _AWAY not in str(error) or not life.writes_elsewhere:
                raise
    if life.devices is not None and life.devices.router is not None:
        life.devices.end(index)
        life.devices.close()
    index.close()


def _changes(life: Life, index: hx.Index, number: int, n: int) -> None:
    writing = Writing(life, number)
    try:
        for _ in range(n):
            if life.is_over:
                return
            life.doing[current()] = "change"
            try:
                writing.change(index)
            except BuildError as error:
                if _AWAY not in str(error) or not life.writes_elsewhere:
                    raise
                life.has_to_open_again = True
                life.world.outcome.done["away for two compactions"] += 1
                return
            life.doing[current()] = "between"
            life.sim.sleep(writing.draw.expovariate(50))
    finally:
        life.n_busy -= 1


def _janitor(life: Life, index: hx.Index, *, rewrites: bool) -> None:
    draw, done = draws("janitor", life.world.seed, life.number, rewrites), life.world.outcome.done
    pause_s = draw.choice((0.05, 0.3, 2.0))
    while life.n_busy > 0 and not life.is_over:
        life.sim.sleep(draw.expovariate(1 / pause_s))
        before = life.faults.n
        life.aim(20 if rewrites else 150)
        life.doing[current()] = "rewrite" if rewrites else "compaction"
        try:
            if rewrites:
                with claim_of(index.path).held(10):
                    done["rewrites"] += index.ivf.live.rewrite(least_bytes=0)
            elif (compaction := index.writer.compact()) is not None:
                done["compactions"] += 1
                done["lists split"] += compaction.n_split
                done["lists dissolved"] += compaction.n_dissolved
                done["rows moved"] += compaction.n_moved
                if life.world.setup.codes and index.ivf.rabitq is None and life.faults.n == before:
                    raise ViolationError(f"LOST: codes, by a compaction: {index.ivf.rabitq_problem}")
                if life.devices is not None and draw.random() < 0.5:
                    # As Index.compact does.
                    life.doing[current()] = "following"
                    index._following.look()
        except (HybridIndexError, OSError) as error:
            _explained(life, error, before)
        life.doing[current()] = "between"


def _explained(life: Life, error: Exception, before: int) -> None:
    """Raises ViolationError: there is no reason for it."""
    if life.faults.n > before or is_left_of_a_fault(error):
        life.world.outcome.done["failed"] += 1
    elif isinstance(error, BuildError) and life.writes_elsewhere:
        life.world.outcome.done["refused"] += 1
    else:
        raise ViolationError(f"{life.doing[current()]} failed without a reason: {error!r}") from error


def is_left_of_a_fault(error: Exception) -> bool:
    """Attributes that could not be read when an index was opened."""
    return "attributes.json cannot be read" in str(error)


def _searches(life: Life, index: hx.Index) -> None:
    draw, views = draws("search", life.world.seed, life.number), list[View]()
    life.doing[current()] = "search"
    while life.n_busy > 0 and not life.is_over:
        life.sim.sleep(draw.expovariate(30))
        ivf = index.ivf
        if not views or views[-1].index is not ivf:
            views = [*views, View(ivf)][-1 - _OLD_VIEWS :]
        search(life, draw, draw.choice(views))


def _devices(life: Life, index: hx.Index) -> None:
    """A router with devices: searches, some at once, and what else is done with it."""
    assert life.devices is not None
    draw = life.devices.draw
    life.sim.sleep(draw.choice((0.0, 0.0, 0.3)))
    while life.n_busy > 0 and not life.is_over:
        before = life.faults.n
        life.doing[current()] = "opening of a router"
        try:
            router = life.devices.open(index)
        except (HybridIndexError, OSError) as error:
            _explained(life, error, before)
            return
        view, closes = RouterView(router, life, draw), False
        while life.n_busy > 0 and not life.is_over and not closes:
            life.sim.sleep(draw.expovariate(25))
            life.doing[current()] = "devices"
            if draw.random() < 0.7:
                search(life, draw, view)
            else:
                before = life.faults.n
                try:
                    life.devices.act(view)
                except (HybridIndexError, OSError) as error:
                    _explained(life, error, before)
                if draw.random() < 0.5:
                    _burst(life, router, draw)
            closes = draw.random() < 0.02
        view.close()
        if closes:
            # Maybe in the middle of another generation's opening.
            life.devices.close()


def _burst(life: Life, router: Router, draw: random.Random) -> None:
    """Some searches at once, which share batches and overtake each other."""

    def one(life: Life, number: float) -> None:
        life.doing[current()] = "device search"
        own = draws("device search", number)
        for _ in range(own.randrange(1, 4)):
            search(life, own, RouterView(router, life, own))

    threads = [SimThread(target=partial(_guarded, one, life, draw.random())) for _ in range(draw.randrange(2, 7))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def search(life: Life, draw: random.Random, view: View | RouterView, *, begun: list[Rows] | None = None) -> None:
    """Searches and checks what is found; ``begun``: of another process, what was there when it looked."""
    is_elsewhere = begun is not None
    world, setup, before = life.world, life.world.setup, life.faults.n
    generator = np.random.default_rng(draw.randrange(1 << 30))
    queries = generator.standard_normal((draw.choice((1, 2)), setup.dim)).astype(np.float32)
    k = draw.choice((1, 5, 20, 700))
    allow = below = None
    if draw.random() < 0.2:
        allow = generator.integers(0, 400, 60)
    elif setup.attributes and draw.random() < 0.4:
        below = draw.randrange(100)
    # What another process wrote is seen after a while.
    late = None if is_elsewhere else OTHER
    if begun is None:
        begun = [owner.versions[0] if owner.number == late else owner.now for owner in world.owners]
    try:
        seen = view.search(queries, k, allow=allow, where=None if below is None else f"tag < {below}")
    except (HybridIndexError, OSError) as error:
        _explained(life, error, before)
        return
    if seen is None:
        return
    world.outcome.done["searches"] += 1
    if view.is_behind or (is_elsewhere and life.faults.n > before):
        return  # it goes on with what it knew, and looks again
    choices = []
    for owner, rows in zip(world.owners, begun, strict=True):
        at = next((i for i, each in enumerate(owner.versions) if each is rows), 0)
        every = owner.versions[at:]
        choices.append(every)
    try:
        queries = view.index.transform(queries)
        check_answer(seen, queries, choices, inner_product=setup.metric == "ip", allowed=allow, below=below)
    except ViolationError as error:
        where = "another process" if is_elsewhere else "the process that writes"
        where += ", its devices" if isinstance(view, RouterView) else ""
        error.add_note(
            f"{where}, generation {view.index.generation} at change {view.index.live.number}, k {k}, allow "
            f"{allow is not None}, below {below}; {[(each.current, len(each.versions)) for each in world.owners]}"
        )
        raise


def _other(life: Life, process: Process) -> None:
    """Another process: searches, and changes rows of its own where it may."""
    draw = draws("other", life.world.seed, life.number)
    if draw.random() < 0.4:
        return
    while not life.is_ready:
        if life.is_over:
            return
        life.sim.sleep(0.01)
    writing = Writing(life, OTHER)
    life.writes_elsewhere = not life.is_kept and draw.random() < 0.6
    index: hx.Index | None = None
    views: list[View] = []
    compacts = draw.random() < 0.3
    while not life.is_over:
        life.doing[current()] = "elsewhere"
        before = life.faults.n
        try:
            if index is None:
                index, views = hx.open(life.world.path, verify="quick"), []
            if life.writes_elsewhere and draw.random() < 0.7:
                for _ in range(draw.randrange(1, 6)):
                    writing.change(index)
                if compacts and draw.random() < 0.3:
                    index.compact()
            if not views or views[-1].index is not index.ivf:
                views = [*views, View(index.ivf)][-1 - _OLD_VIEWS :]
            view = draw.choice(views)
            # Last: whatever came before may have looked at the log.
            life.sim.sleep(_LOOK_S)
            if _has_ended(life):
                break
            began, begun = life.faults.n, [owner.now for owner in life.world.owners]
            view.index.live.current()
            if _AWAY in view.index.live._problem:
                index.close()
                index = None
                life.world.outcome.done["reopened elsewhere"] += 1
            elif not view.index.live._problem and life.faults.n == began:
                search(life, draw, view, begun=begun)
        except BuildError as error:
            if _AWAY not in str(error) and "another process" not in str(error) and life.faults.n == before:
                raise
            if index is not None:
                index.close()
                index = None
        if index is not None and draw.random() < 0.1:
            index.close()
            index = None
    if index is not None:
        index.close()


def _has_ended(life: Life) -> bool:
    return life.is_over


def audit(life: Life, index: IVFIndex, *, settle: bool) -> None:
    """Every row that there is; ``settle``: that is what the writers go on with."""
    world = life.world
    life.faults.muted += 1
    try:
        owners = world.owners
        begun = [len(owner.versions) for owner in owners]
        found = dump(index, index.live.read_now())
        owned, others = of_owners(found, owners)
        for owner, rows in zip(owners, owned, strict=True):
            now, later = owner.versions[owner.current], owner.versions[owner.current + 1 :]
            if settle:
                earlier = owner.versions[owner.floor : owner.current][::-1]
                choices = [now, *later, *earlier, *(rows for _, rows in owner.ghosts)]
            elif owner.number == OTHER:
                choices = owner.versions[min(begun[OTHER], len(owner.versions)) - 1 - len(later) :] or [now]
                choices = [*owner.versions[-8:], *choices]
            else:
                choices = [now, *later]
            problems = []
            for choice in unnamed_first(choices, others):
                named = named_of(choice, others)
                if not (problem := mismatch(rows | named, choice_of(choice, named), {})):
                    break
                problems.append(problem)
            else:
                raise ViolationError(
                    f"{problems[0]}, of writer {owner.number} in one of {len(choices)} states, generation "
                    f"{index.generation}, change {index.live.number}"
                )
            for each in named:
                others.pop(each)
            if settle:
                if named:
                    choice = owner.rename(choice, choice_of(choice, named))
                owner.settle(choice)
        if others:
            raise ViolationError(f"BACK: rows of nobody: {sorted(others)[:5]}")
    finally:
        life.faults.muted -= 1
    world.outcome.done["audits"] += 1


def named_of(choice: Rows, others: dict[int, Any]) -> dict[int, Any]:
    """Rows of nobody that are the unnamed ones of a change."""
    codes = {row.code for row in choice.unnamed}
    return {each: row for each, row in others.items() if row.code in codes} if codes else {}


def choice_of(choice: Rows, named: dict[int, Any]) -> Rows:
    """The same with the numbers that its unnamed rows were given."""
    if not choice.unnamed:
        return choice
    by_code = {row.code: row for row in choice.unnamed}
    if len(named) < len(choice.unnamed):
        return choice
    return Rows({**choice.rows, **{each: by_code[row.code] for each, row in named.items()}})
