"""Devices of the process that writes: a router that holds some lists on them, follows compactions, and is searched.

Router, tiers and the thread that follows are the product's, on virtual time. Drawn are the placement, its changes, how
long scans and copies take, and which of them fail. Plans are made by hand: deciding what goes where is not tested here.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

import hybridindex as hx
from hybridindex.errors import HybridIndexError, ProfileError, ProfileMismatchError
from hybridindex.index.ivf import IVFIndex
from hybridindex.index.live.added import AddedLists
from hybridindex.partitioner.plan import Plan
from hybridindex.plans import following
from hybridindex.router.router import Router
from hybridindex.router.served import Served
from hybridindex.router.session import Session
from hybridindex.tiers.paged.added.added_pages import AddedLease, AddedPages
from hybridindex.tiers.paged.device_tier import DeviceTier
from hybridindex.types import F32, I32, I64, U8
from tests.clustered import hand_made_plan
from tests.simulation.changes.oracle import Seen
from tests.simulation.changes.processes import draws
from tests.simulation.machine import Machine
from tests.simulation.virtual.scheduler import Scheduler, ViolationError

if TYPE_CHECKING:
    from tests.simulation.changes.world import Life

__all__ = ["Devices", "RouterView", "devices_applied"]

#: Of the lives, those that have devices.
_SHARE = 0.5
#: Of virtual time, until nothing is read or copied any more.
_RESTS_S = 300.0
#: The list, the device, and which of its added rows: those of an origin, after so many losses, the first ones.
_Claim = tuple[int, int, object, int, int]


class Devices:
    """Of one life's writer: what of its router is drawn, counted and checked."""

    def __init__(self, sim: Scheduler, seed: int, number: int, done: Counter[str]) -> None:
        self.draw = draw = draws("devices", seed, number)
        self._sim, self._done = sim, done
        self.machine = Machine(sim, draw)
        self.n_devices = draw.choice((1, 2))
        self._budget = draw.choice((48 << 10, 256 << 10, 1 << 20))
        self._page_bytes = draw.choice((128, 512, 2048))
        self._has_plan = draw.random() < 0.85
        of = self.machine
        #: A scan that stalls reads pages that others give back meanwhile.
        self._faults = (of.scans_stall, of.scans_stall, of.copies_stall)
        if draw.random() < 0.3:
            self._faults = (of.scans_stall, of.scans_fail, of.copies_fail)
        self.router: Router | None = None
        #: What was brought to devices, by what these say that they hold.
        self._brought: dict[_Claim, AddedLists] = {}
        self._generation = 0

    # The router

    def open(self, index: hx.Index) -> Router:
        """It follows the index.

        Raises:
            HybridIndexError, OSError: the disk fails.
        """
        ivf = index.ivf
        self._generation = ivf.generation
        self.router = router = index.router(
            self.plan(ivf) if self._has_plan else None,
            ["cpu"] * self.n_devices,
            device_budget_bytes=self._budget,
            cache_fraction=self.draw.choice((0, 0.5)),
            max_batch=self.draw.choice((None, None, 2)),
            pin_host_lists=self.draw.choice((0, 0, 8 << 10)),
            threads=1,
            scrub_bytes_per_s=0,
            precision="rows",
        )
        self._done["routers with devices"] += 1
        return router

    def close(self) -> None:
        """Ends the router."""
        assert self.router is not None
        stats = self.router.stats()
        # A search has two queries at most.
        self._done["routers with shared batches"] += stats.largest_batch > 2
        self._done["parts of devices that the host took over"] += stats.device_fallbacks
        self.router.close()
        self.router = None

    def plan(self, ivf: IVFIndex) -> Plan:
        """Some lists on devices, the others on the host."""
        device = np.full(ivf.nlist, -1)
        share = self.draw.choice((0.3, 0.7, 1.0))
        for each in range(ivf.nlist):
            if self.draw.random() < share:
                device[each] = self.draw.randrange(self.n_devices)
        plan: Any = hand_made_plan(ivf, device, n_devices=self.n_devices, budget=self._budget)
        plan.request.page_bytes, plan.request.row_cache_bytes = self._page_bytes, None
        plan.analysis.profile.scanner = "native"
        return plan  # type: ignore[no-any-return]

    def plan_of_heir(self, newest: IVFIndex, plan: Plan, store: object) -> Plan:
        """As :func:`hybridindex.plans.following.plan_of_heir`. Raises ProfileError now and then: the router serves on
        with the generation that it has."""
        if self.draw.random() < 0.1:
            self._done["generations not followed"] += 1
            raise ProfileError("no plan was drawn")
        return self.plan(newest)

    def act(self, view: RouterView) -> None:
        """Something beside searches: another placement, lists for a session, a device that fails, a look at pages."""
        draw, router = self.draw, view.router
        match draw.randrange(5):
            case 0:
                # Another generation may serve meanwhile.
                with contextlib.suppress(ProfileMismatchError):
                    share = draw.choice((1.0, 0.3))
                    router.apply_plan(self.plan(router.index.rows), bandwidth_share=share, force=True)
                    self._done["placements"] += 1
            case 1:
                view.look_ahead()
                self._done["lookaheads"] += 1
            case 2:
                fault = draw.choice(self._faults)
                fault[draw.randrange(self.n_devices)] = self._sim.now + draw.choice((0.005, 0.03, 0.1, 0.3))
                self._done["faults of devices"] += 1
            case _:
                self.check_pages()
        if (now := router.index.generation) != self._generation:
            self._generation = now
            self._done["generations followed"] += 1

    # What is counted

    def note_brought(self, added: AddedLists, ordinal: int, lists: list[int]) -> None:
        """All added rows of some lists are about to be there."""
        for each in lists:
            claim = each, ordinal, added.origin, int(added.losses[each]), int(added.sizes[each])
            self._brought[claim] = added
            self._done["lists of added rows brought"] += 1

    def note_added_scan(self) -> None:
        """A device is about to scan added rows."""
        self._done["device scans of added rows"] += 1

    # What must hold

    def check_pages(self) -> None:
        """The pages of each device hold the rows that it says, and no id twice.

        Raises:
            ViolationError: they do not.
        """
        assert self.router is not None
        served = self.router._served
        added = served.engine.added_on_devices._pages.lease()
        try:
            with served.residency.lease() as lists:
                for tier in served.parts.paged:
                    if tier.failure is None and tier.usable:
                        self._check_tier(served, tier, lists.resident_lists(tier.ordinal), lists.pages_of, added)
        except HybridIndexError:
            if not served.searcher.closed:  # the pages of a generation that serves no more
                raise
        finally:
            added.release()
        self._done["looks at pages"] += 1

    def _check_tier(
        self, served: Served, tier: DeviceTier, lists: I64, pages_of: Callable[[I64], I32], added: AddedLease
    ) -> None:
        index = served.index.rows
        ids, where = [], f"device {tier.ordinal}, generation {index.generation}, list "
        for each in lists.tolist():
            content = _read(tier, pages_of(np.array([each])))
            if content is None:
                return
            if not np.array_equal(content[: index.list_codes(each).size], index.list_codes(each).reshape(-1)):
                raise ViolationError(f"WRONG: {where}{each}: its pages hold other rows than the generation")
            ids.append(index.list_ids(each))
        live, held, residency = index.live.current(), added.held, added.residency
        if live is not None and live.deleted is not None:
            ids = [some[~live.deleted.contains(some)] for some in ids]
        now = None if live is None else live.added
        current = np.zeros(index.nlist, dtype=np.bool_) if now is None else held.current(now)
        for each in residency.resident_lists(tier.ordinal).tolist():
            n = int(held.rows[each])
            then = self._brought.get((each, tier.ordinal, held.origin, int(held.losses[each]), n))
            if then is None:
                raise ViolationError(f"{where}{each}: {n} added rows are said to be there, and were never brought")
            if (content := _read(tier, residency.pages_of(np.array([each])))) is None:
                return
            for rows in [then] if now is None or not current[each] else [then, now]:
                expected = rows.reader.rows(each, 0, n).reshape(-1)
                if int(rows.sizes[each]) < n or not np.array_equal(content[: expected.size], expected):
                    raise ViolationError(f"WRONG: {where}{each}: its pages hold other rows than the {n} added ones")
            if now is not None and current[each]:
                ids.append(now.reader.ids(each)[:n])
        every = np.concatenate([np.empty(0, dtype=np.int64), *ids])
        if len(np.unique(every)) < len(every):
            raise ViolationError(f"DOUBLED: device {tier.ordinal} holds {len(every)} rows, some ids twice")

    def end(self, index: hx.Index) -> None:
        """Nobody searches any more: the devices come to rest, and their pages are those of lists and added rows.

        Raises:
            ViolationError: they are not.
        """
        assert self.router is not None
        index._following.close()
        self.machine.heal()
        served = self.router._served
        added = served.engine.added_on_devices
        ends = self._sim.now + _RESTS_S
        while not (
            all(each.done() for each in added._copying.values())
            and not served.residency.n_leases + added._pages._store.n_leases
            and all(not tier.failure and not tier._moves for tier in served.parts.paged)
        ):
            if self._sim.now > ends:
                raise ViolationError("devices do not come to rest")
            self._sim.sleep(0.5)
        self.router.check_invariants()
        self.check_pages()
        for tier in served.parts.paged:
            taken = tier.arena.pages.n_pages - tier.arena.pages.n_free - tier._copier.kept_pages
            counted = 0
            for residency in (served.residency.current, added._pages._store.current):
                counted += int(residency.page_counts[residency.resident_lists(tier.ordinal)].sum())
            if taken != counted and tier.arena.pages.n_pages:
                raise ViolationError(f"{taken} pages of device {tier.ordinal} are taken; its lists have {counted}")
        self._done["added rows on devices at the end"] += added.count
        self._done["devices at rest"] += 1


def _read(tier: DeviceTier, pages: I32) -> U8 | None:
    """The bytes of leased pages; None: the device failed meanwhile."""
    try:
        return tier.read_back(pages).result(_RESTS_S)
    except (HybridIndexError, RuntimeError):  # as the device is said to have failed
        if tier.failure is None:
            raise
        return None


class RouterView:
    """Searches through a router at all lists, as :class:`tests.simulation.changes.views.View` does on the host."""

    def __init__(self, router: Router, life: Life, draw: random.Random) -> None:
        self.router = router
        self._sim, self._done, self._draw = life.sim, life.world.outcome.done, draw
        self._session: Session | None = None
        #: Those that may have answered the last search.
        self._served: list[Served] = []

    @property
    def index(self) -> IVFIndex:
        return self.router.index.rows

    @property
    def is_behind(self) -> bool:
        """What answered last may not have seen all."""
        return any(served.index.rows.live._is_behind for served in self._served)

    def search(self, queries: F32, k: int, *, allow: I64 | None = None, where: str | None = None) -> Seen | None:
        """``queries``: not transformed. None: not of all lists, as another generation came, which has more."""
        router, draw = self.router, self._draw
        is_filtered = allow is not None or where is not None
        wanted: dict[str, Any] = {"allow_ids": allow, "where": where}
        if is_filtered and draw.random() < 0.3:
            wanted = {"row_filter": router.filter(**wanted)}
            self._sim.sleep(draw.expovariate(100))
        before = router._served
        most = before.searcher._most_nprobe
        if draw.random() < (0.7 if is_filtered else 0.1):
            # Lists are ranked, so that devices take part where a filter leaves few rows; and all of them are probed.
            wanted |= {"deadline_ms": 1e6, "min_nprobe": most}
        through = router if self._session is None else self._session
        found = through.search(queries, k, most, **wanted)
        self._served = [before, *router._others, router._served]
        if (found.hit_rate > 0).any():
            self._done["device searches"] += 1
            self._done["device searches with filters"] += is_filtered
        if router._most_nprobe > most:
            return None
        return Seen(found.ids, found.distances)

    def look_ahead(self) -> None:
        """A session brings lists, which it keeps for some time."""
        draw = self._draw
        if self._session is not None and draw.random() < 0.5:
            self._session.close()
            self._session = None
            return
        if self._session is None:
            self._session = self.router.session()
        queries = np.random.default_rng(draw.randrange(1 << 30)).standard_normal((1, self.index.dim))
        moving = self._session.lookahead(queries.astype(np.float32), nprobe=draw.randrange(1, 4))
        if draw.random() < 0.5:
            moving.result(_RESTS_S)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()


@contextlib.contextmanager
def devices_applied(life: Life) -> Iterator[None]:
    """Within the block the life has devices, or not, as its number draws."""
    world = life.world
    if draws("has devices", world.seed, life.number).random() >= _SHARE:
        yield
        return
    life.devices = devices = Devices(life.sim, world.seed, life.number, world.outcome.done)

    def publish(
        pages: AddedPages,
        added: AddedLists,
        ordinal: int,
        fresh: Mapping[int, I32],
        grown: Mapping[int, I32],
        done: Callable[..., list[I32]] = AddedPages.publish,
    ) -> list[I32]:
        devices.note_brought(added, ordinal, [*fresh, *grown])
        return done(pages, added, ordinal, fresh, grown)

    def added_scanner(tier: DeviceTier, *args: Any, made: Callable[..., Any] = DeviceTier.added_scanner) -> Any:
        devices.note_added_scan()
        return made(tier, *args)

    with (
        devices.machine.applied(),
        mock.patch.object(AddedPages, "publish", publish),
        mock.patch.object(DeviceTier, "added_scanner", added_scanner),
        mock.patch.object(following, "plan_of_heir", devices.plan_of_heir),
    ):
        yield
