"""Which generation of the index serves, and how another one takes its place while searches go on.

A generation serves with a router of its own, so no answer mixes two. Device memory is for one arena: while the old one
is given back and the new one is filled, the host serves the new generation. Answers are the same. Sessions keep the
generation in which they were opened, on the host, until they end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from hybridindex.api import Index
from hybridindex.errors import (
    HybridIndexError,
    InvalidInputError,
    OverloadedError,
    PlanningError,
    ProfileError,
    ReloadError,
    StoreError,
    without_path,
)
from hybridindex.index import Manifest, open_index, remove_replaced
from hybridindex.index.rabitq.codes import are_whole
from hybridindex.index.rabitq.spec import RabitqSpec
from hybridindex.index.storage.generation import generation_name
from hybridindex.plans.current import keep_current, make_current, save_plan
from hybridindex.plans.inherit import try_to_inherit
from hybridindex.plans.planner import devices_of, request_other_content
from hybridindex.plans.precision import view_to_plan, views_of
from hybridindex.refresh.planning import Planning
from hybridindex.router.session import Session
from hybridindex.service.config import ServiceConfig
from hybridindex.service.serving import (
    CURE,
    MakeRefresher,
    PlanChoice,
    ServedIndex,
    Serving,
    choose_plan,
    close_serving,
    look_at,
    open_serving,
    precision_asked,
    same_questions,
)
from hybridindex.service.sessions import SessionTable
from hybridindex.service.warmup import warm_up
from hybridindex.store.control import ControlStore

__all__ = ["Generations"]

_log = logging.getLogger(__name__)

#: Longest wait for searches that were admitted before a swap; each is bounded by its deadline.
_DRAIN_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """How a session was opened."""

    serving: Serving
    options: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class ReloadCounts:
    """What became of reloads."""

    done: int = 0
    failed: int = 0
    under_way: bool = False
    #: Of the last one, where it failed; without paths.
    last_error: str | None = None


class Generations:
    """Owner of what serves. :meth:`reload` on one thread at a time; other methods on any."""

    def __init__(
        self,
        first: Serving,
        config: ServiceConfig,
        store: ControlStore,
        sessions: SessionTable,
        *,
        planning: Planning,
        make_refresher: MakeRefresher | None,
        stopping: Callable[[], bool],
    ) -> None:
        """``stopping``: whether the service ends, and nothing new may begin."""
        self._current = first
        self.config = config
        self._store = store
        self._sessions = sessions
        self._planning = planning
        self._make_refresher = make_refresher
        self._stopping = stopping
        #: A plan that was named by its id is for the first generation.
        self._resumed = ServiceConfig().plan if config.plan.isdecimal() else config.plan
        self._idle = threading.Condition()
        #: Generations whose sessions have not ended.
        self._retired: list[Serving] = []
        self._opened: WeakKeyDictionary[Session, _Opened] = WeakKeyDictionary()
        #: What the last reload found: it is not tried again by itself.
        self._found: tuple[Manifest, RabitqSpec | None] | None = None
        self.counts = ReloadCounts()
        #: The plan with which devices may be opened, where others take bytes of them, too.
        self.refit: Callable[[PlanChoice], PlanChoice] = lambda choice: choice
        #: Called with the generation when another one serves.
        self.on_generation: list[Callable[[int], None]] = []

    # What serves

    @property
    def current(self) -> Serving:
        return self._current

    def set_budget(self, config: ServiceConfig) -> None:
        """What serves from now on, and what is opened later, keeps to the device bytes of ``config``."""
        self.config, budgets = config, config.router.device_budget_bytes
        router = self._current.router
        if router.devices and isinstance(budgets, tuple):
            router.set_device_budget(budgets)

    def enter(self) -> Serving:
        """What serves now; it stays open until :meth:`leave`."""
        with self._idle:
            self._current.users += 1
            return self._current

    def leave(self, serving: Serving) -> None:
        with self._idle:
            serving.users -= 1
            if not serving.users:
                self._idle.notify_all()

    def open_session(self, client: str, **options: Any) -> str:
        """A session of what serves now; see :meth:`hybridindex.router.Router.session`. Its name."""
        serving = self.enter()
        try:
            return self._sessions.open(lambda: self._session(serving, {**options, "owner": client}), client)
        finally:
            self.leave(serving)

    def _session(self, serving: Serving, options: dict[str, Any]) -> Session:
        if serving.note and serving.router.plan is None:
            # A plan was asked for: clients that name a window for it are served all the same, and nothing moves.
            options = {**options, "window_ms": None}
        session = serving.router.session(**options)
        self._opened[session] = _Opened(serving=serving, options=options)
        return session

    def of_session(self, session: Session) -> Serving:
        """What it was opened in."""
        return self._opened[session].serving

    def retired(self) -> list[tuple[int, int]]:
        """Older generations that sessions still use: number and sessions of each."""
        with self._idle:
            retired = list(self._retired)
        return [(serving.generation, self._n_sessions(serving)) for serving in retired]

    def _n_sessions(self, serving: Serving) -> int:
        return sum(self._opened[session].serving is serving for session in self._sessions.sessions())

    # Replacement

    def changed(self) -> bool:
        """Whether the directory has another generation than the one that serves, or codes for it, and no reload has
        met them."""
        try:
            found = self._look()
        except HybridIndexError:
            return False
        return found not in (self._serves(), self._found)

    def _serves(self) -> tuple[Manifest, RabitqSpec | None]:
        """What :meth:`_look` found of what serves."""
        now = self._current
        return now.index.ivf.manifest, now.codes

    def _look(self) -> tuple[Manifest, RabitqSpec | None]:
        return look_at(self._current.index.path, self.config.router)

    def reload(self, reason: str, *, stay: bool = False) -> dict[str, Any]:
        """Opens the current generation of the directory, and lets it serve; for one that serves already, opens codes
        that were made or put back since, or devices that had no plan at the start. Blocks while it opens and lists
        move.

        Args:
            stay: the generation that serves goes on, whatever is in the directory.

        Raises:
            ReloadError: what serves goes on serving, and why.
            OverloadedError: the daemon is about to stop.
        """
        self.counts.under_way = True
        found: Manifest | None = None
        try:
            if stay:
                found, codes = self._serves()
            else:
                found, codes = self._found = self._look()
            reopen = (found, codes) != self._serves() or (not stay and self._restored(codes))
            answer = self._reload(found, reason, reopen=reopen)
        except OverloadedError:
            raise
        except Exception as error:
            self._note_failure(error, found)
            raise ReloadError(self.counts.last_error) from error
        finally:
            self.counts.under_way = False
        self.counts.last_error = None
        self.counts.done += answer["reloaded"]
        return answer

    def _note_failure(self, error: Exception, found: Manifest | None) -> None:
        served = self._current.generation
        which = "the index" if found is None else f"generation {found.generation}"
        what = str(error) if isinstance(error, HybridIndexError) else "an internal error"
        words = f"{which} cannot serve: {what}; generation {served} goes on serving"
        _log.error("reload: %s", words, exc_info=not isinstance(error, HybridIndexError))
        self.counts.failed += 1
        self.counts.last_error = without_path(words, self._current.index.path)
        self._record("reload_failed", {"why": self.counts.last_error})

    def _restored(self, codes: RabitqSpec | None) -> bool:
        """Whether codes of what serves, which could not be used when it was opened, can be now."""
        ivf = self._current.index.ivf
        if codes is None or ivf.rabitq is not None:
            return False
        return are_whole(ivf.path / generation_name(ivf.generation), ivf.manifest, ivf.list_sizes)

    def _reload(self, found: Manifest, reason: str, *, reopen: bool) -> dict[str, Any]:
        before = self._current
        origin, reloaded = "none", reopen
        if reopen:
            origin = self._open_next(found)
        elif before.note:
            choice = self._take_up_plan()
            origin, reloaded = choice.origin, choice.plan is not None
        now = self._current
        answer = {
            "reloaded": reloaded,
            "reason": reason,
            "generation_before": before.generation,
            "generation": now.generation,
            "fingerprint": now.index.fingerprint,
            "count": now.index.count,
            "plan_id": now.plan_id,
            "plan_origin": origin if reloaded else None,
            "note": now.note or None,
            "removed_generations": self.remove_replaced(),
        }
        if reloaded:
            _log.info(
                "generation %d serves, in place of %d (%s); its plan: %s%s",
                now.generation, before.generation, reason, origin, f"; {now.note}" if now.note else "",
            )  # fmt: skip
            self._record("index_reloaded", {name: answer[name] for name in ("generation_before", "plan_id", "reason")})
        return answer

    def _take_up_plan(self) -> PlanChoice:
        """Opens devices that had no plan at the start, where there is one now."""
        now = self._current
        choice = now.deferred or choose_plan(now.index, self._resumed, self.config, self._store)
        if choice.plan is None:
            now.note, now.pending = choice.note, choice.pending
            return choice
        try:
            self._open_devices(choice)
        except HybridIndexError as error:
            self._current.note = f"the devices could not be opened, the host serves: {error}"
            raise
        finally:
            now.pending = False
        return choice

    def open_deferred(self) -> None:
        """Opens devices that waited for another index. Blocks while lists move; as :meth:`reload`.

        Raises:
            OverloadedError: it is still busy.
        """
        now = self._current
        choice, now.deferred = now.deferred, None
        if choice is not None:
            try:
                self._open_devices(choice)
            except OverloadedError:
                raise
            except HybridIndexError as error:
                self._note_devices(error)

    def take_up_store(self) -> None:
        """After the store was opened, which may be another one: the plan in force becomes its current one. Where it
        could not say which plan to start with, it is asked again. Blocks while lists move; as :meth:`reload`, on one
        thread at a time.

        Raises:
            OverloadedError: an update of the plan runs; ask again when it has ended.
            HybridIndexError: the store cannot be read or written.
        """
        now = self._current
        if now.router.plan is None:
            # What is noted may be of the store before.
            if now.pending or now.note:
                self._take_up_stored_plan()
            return
        if now.refresher is None:
            _, now.plan_id = keep_current(self._store, now.router.plan, why="the control store was opened again")
        elif not now.refresher.keep_plan():
            raise OverloadedError("an update of the plan is under way", retry_after_s=5)
        _log.info("the control store is open: the plan that serves is now its current plan")

    def _take_up_stored_plan(self) -> None:
        try:
            choice = self._take_up_plan()
        except (StoreError, OverloadedError):
            raise
        except HybridIndexError:
            # The next try would end as this one: a plan that is applied, or a reload, opens them.
            _log.exception("the control store is open, but the devices could not be opened: the host serves")
        else:
            if choice.plan is not None:
                _log.info("the control store is open: plan %s serves", choice.plan_id)

    def _open_next(self, found: Manifest) -> str:
        """Opens a generation beside the one that serves, and swaps them; where its plan comes from."""
        before = self._current
        same_questions(before.index.ivf.manifest, found)
        first = self.open_beside(ServedIndex(open_index(before.index.path)))
        self._swap(first)
        try:
            self._retire(before)
            self._open_devices_again(first, before)
        except HybridIndexError as error:
            self._note_devices(error)
        return first.choice.origin

    def open_beside(self, index: ServedIndex) -> Serving:
        """What can serve another generation, warm, on the host; nobody is sent there yet. Closes the index where that
        fails.

        Raises:
            InvalidInputError: clients could not go on with it. OverloadedError: the daemon is about to stop.
        """
        before, config = self._current, self.config
        try:
            same_questions(before.index.ivf.manifest, index.ivf.manifest)
            _, codes = look_at(index.path, config.router, index.ivf.generation)
            choice = self._plan_of(index, before)
            first = open_serving(
                index, choice, config, self._store, self._make_refresher, on_host=bool(config.router.devices)
            )
            first.codes = codes
            try:
                warm_up(first.router, index.dim, index.nlist, stop=self._stopping)
                if self._stopping():
                    raise OverloadedError("the daemon is about to stop", retry_after_s=1)
            except BaseException:
                close_serving(first, index=False)
                raise
        except BaseException:
            index.close()
            raise
        return first

    def serve_beside(self, first: Serving) -> Serving:
        """Lets what :meth:`open_beside` opened serve from now on; what served before, which is the caller's to retire.

        Raises:
            OverloadedError: the daemon is about to stop.
        """
        before = self._current
        if self._stopping():
            raise OverloadedError("the daemon is about to stop", retry_after_s=1)
        self._swap(first)
        return before

    def retire_for_others(self, old: Serving, replace: Callable[[Serving], None]) -> None:
        """Ends the searches and sessions of ``old`` here, and lets its devices go to what serves now. It goes on, on
        the host, for other nodes, which still ask for its lists, and is the caller's to close. Blocks.

        Args:
            replace: told what goes on in its place, where that is another router; it is asked from then on.
        """
        try:
            self._empty(old)
            for session in self._sessions.move(lambda session: self._moved(session, old, self._current)):
                session.close()
            if old.router.devices:
                same = PlanChoice(plan=old.router.plan, plan_id=old.plan_id)
                heir = open_serving(old.index, same, self.config, self._store, None, on_host=True)
                replace(heir)
                close_serving(old, index=False)
            self._open_devices_again(self._current, old)
        except HybridIndexError as error:
            self._note_devices(error)

    def _open_devices_again(self, first: Serving, before: Serving) -> None:
        """For a generation that serves on the host since it took the place of ``before``."""
        if not self.config.router.devices or self._stopping():
            return
        # The plan may have changed since.
        choice = first.choice
        if choice.origin == "carried over":
            choice = before.carried_over()
        elif choice.instead_of is not None and choice.instead_of is not before.router.plan:
            choice = self._made_anew(first.index, before) or choice
        self._open_devices(choice)

    def _note_devices(self, error: HybridIndexError) -> None:
        now = self._current
        _log.exception("the devices could not be opened for generation %d: the host serves", now.generation)
        now.note = f"the devices could not be opened, the host serves: {error}"

    def _plan_of(self, index: Index, before: Serving) -> PlanChoice:
        """The plan in force where the content is the same, else a stored plan, else one for the same request. Where
        codes came, the one that was applied last may be of them."""
        current, n_devices = before.router.plan, len(self.config.router.devices)
        same = current is not None and current.index_fingerprint in self._fingerprints(index)
        if same and (before.index.ivf.rabitq is not None or index.ivf.rabitq is None):
            return before.carried_over()
        try_to_inherit(index.ivf, self._store)
        choice = choose_plan(index, self._resumed, self.config, self._store)
        if choice.plan is not None and n_devices and choice.plan.n_devices != n_devices:
            words = f"plan {choice.plan_id} is for {choice.plan.n_devices} device(s), this daemon has {n_devices}"
            choice = PlanChoice(note=f"{words}; {CURE}")
        if current is not None and same:
            of_codes = choice.plan is not None and choice.plan.index_fingerprint != current.index_fingerprint
            return choice if of_codes else before.carried_over()
        if choice.pending or choice.plan is not None or current is None or not n_devices or self._resumed == "none":
            return choice
        return self._made_anew(index, before) or choice

    def _made_anew(self, index: Index, before: Serving) -> PlanChoice | None:
        """A plan for what the one in force was asked for; None: it cannot be made."""
        current = before.router.plan
        if current is None:
            return None
        try:
            view = view_to_plan(index.ivf, self._store, precision_asked(self.config.router))
            devices = devices_of(view, len(self.config.router.devices), self.config.router.device_budget_bytes)
            profile, request = request_other_content(view, self._store, current.request, devices)
            with self._planning.of(view) as planner:
                made = planner.solve(profile, request, None)
        except (ProfileError, InvalidInputError, PlanningError) as error:
            _log.info("the new generation has no plan, and none was made: %s", error)
            return None
        made, plan_id = save_plan(self._store, made)
        return PlanChoice(plan=made, plan_id=plan_id, origin="made anew", instead_of=current)

    def _fingerprints(self, index: Index) -> set[str]:
        """Of which plans may be that serve ``index`` here."""
        return {view.fingerprint for view in views_of(index.ivf, precision_asked(self.config.router))}

    def _open_devices(self, choice: PlanChoice) -> None:
        """Lets a router with the devices that ``choice`` is for serve the current generation."""
        try:
            choice = self.refit(choice)
        except OverloadedError:
            self._current.deferred = choice
            raise
        if choice.plan is None and self.config.router.device_budget_bytes is None:
            return
        before = self._current
        if before.router.devices:
            self._swap(open_serving(before.index, choice, self.config, self._store, None, on_host=True))
            self._retire(before)
            before = self._current
        serving = open_serving(before.index, choice, self.config, self._store, self._make_refresher)
        try:
            warm_up(serving.router, before.index.dim, before.index.nlist, stop=self._stopping)
            if serving.refresher is not None:
                try:
                    serving.refresher.start()
                except StoreError:
                    _log.exception("the plan serves, but that could not be recorded")
        except BaseException:
            close_serving(serving, index=False)  # it serves on, without devices
            raise
        self._swap(serving)
        self._retire(before)
        if choice.origin == "made anew" and serving.refresher is None and choice.plan is not None:
            assert choice.plan_id is not None
            try:
                make_current(self._store, choice.plan, choice.plan_id, verified=False, why="reload")
            except StoreError:
                _log.exception("the plan serves, but that could not be recorded")

    def _swap(self, serving: Serving) -> None:
        """From here on ``serving`` gets all new searches and sessions."""
        # Who listens to batches listens on.
        serving.router.on_batch.extend(self._current.router.on_batch)
        if serving.index is self._current.index:
            serving.codes = self._current.codes
        with self._idle:
            self._current = serving
        for tell in self.on_generation:
            try:
                tell(serving.generation)
            except Exception:  # noqa: BLE001 - it serves already, whoever was not told
                _log.exception("generation %d serves, but a listener failed", serving.generation)

    def _retire(self, old: Serving) -> None:
        """Waits for the searches in ``old``, lets its devices go, and closes it once its sessions have ended.

        Raises:
            HybridIndexError: its sessions, and so its devices, stay with it.
        """
        self._empty(old)
        same_index = old.index is self._current.index
        if not self._n_sessions(old):
            close_serving(old, index=not same_index)
            return
        # Its sessions go on: on the same index with the new router, else on the host.
        heir = self._current
        if not same_index:
            if not old.router.devices:
                with self._idle:
                    self._retired.append(old)
                return
            same = PlanChoice(plan=old.router.plan, plan_id=old.plan_id)
            try:
                heir = open_serving(old.index, same, self.config, self._store, None, on_host=True)
            except HybridIndexError:
                with self._idle:
                    self._retired.append(old)
                raise
        try:
            for session in self._sessions.move(lambda session: self._moved(session, old, heir)):
                session.close()
            close_serving(old, index=False)
        finally:
            if not same_index:
                # Only now: without sessions it would be closed at once, and with it the index that the old one reads.
                with self._idle:
                    self._retired.append(heir)

    def _empty(self, old: Serving) -> None:
        """Waits for the searches in what served before, and ends its refresher."""
        if old.refresher is not None:
            old.refresher.stop()
        old.router.settle()
        with self._idle:
            if not self._idle.wait_for(lambda: not old.users, _DRAIN_S):
                _log.error("%d searches of generation %d have not ended", old.users, old.generation)
        if old.refresher is not None:
            old.refresher.close()

    def _moved(self, session: Session, old: Serving, heir: Serving) -> Session | None:
        opened = self._opened[session]
        if opened.serving is not old:
            return None
        try:
            return self._session(heir, opened.options)
        except HybridIndexError:  # its options need a plan or a profile that this router has not
            return self._session(heir, {"owner": opened.options["owner"]})

    def close_unused(self) -> None:
        """Closes older generations whose sessions have ended."""
        with self._idle:
            over = [serving for serving in self._retired if not serving.users and not self._n_sessions(serving)]
            self._retired = [serving for serving in self._retired if serving not in over]
        for serving in over:
            close_serving(serving)
            _log.info("generation %d is closed: its last session has ended", serving.generation)

    def remove_replaced(self) -> list[int]:
        """Removes generations on disk that the one that serves replaced, unless they shall stay; their numbers."""
        # A node has others open while its cluster goes from one to another.
        if self.config.keep_replaced or self._current.member is not None:
            return []
        try:
            return remove_replaced(self._current.index.path, serving=self._current.generation)
        except HybridIndexError as error:
            _log.warning("replaced generations stay on disk (%s); remove them with: hybridindex gc INDEX", error)
            return []

    def _record(self, kind: str, facts: dict[str, Any]) -> None:
        now = self._current
        try:
            self._store.record_event(kind, {"index": now.index.fingerprint, "generation": now.generation, **facts})
        except StoreError as error:
            _log.warning("%s could not be recorded: %s", kind, error)

    def close(self) -> None:
        """Closes what serves and all older generations; sessions have to be closed before."""
        with self._idle:
            serving, self._retired = [*self._retired, self._current], []
        for each in serving:
            close_serving(each)
