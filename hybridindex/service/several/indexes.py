"""The indexes of one daemon: one service each. An index that cannot be opened does not keep the others from serving."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from hybridindex.errors import HybridIndexError, InvalidInputError, ProfileError, ServiceError, StoreError, without_path
from hybridindex.plans.planner import devices_of, plan_next
from hybridindex.plans.precision import choose_view, view_of
from hybridindex.plans.replan import PlanChanges
from hybridindex.plans.stored import plan_summary
from hybridindex.refresh.config import RefreshConfig
from hybridindex.service.config import ServiceConfig
from hybridindex.service.core import Service
from hybridindex.service.describe import describe
from hybridindex.service.searches import Traces
from hybridindex.service.serving import MakeRefresher, PlanChoice, Prepared, precision_asked, prepare
from hybridindex.service.several.config import IndexConfig, name_of
from hybridindex.service.several.shares import SharedBudget, kept
from hybridindex.service.status import Check, Health, health_of

__all__ = ["Indexes"]

_log = logging.getLogger(__name__)


class Indexes:
    """What one daemon serves, by name; the first is what routes without a name mean."""

    def __init__(
        self,
        services: Mapping[str, Service | None],
        config: ServiceConfig,
        *,
        problems: Mapping[str, str] | None = None,
        shared: SharedBudget | None = None,
    ) -> None:
        """``services``: None for one that could not be opened; ``problems`` then says why."""
        self.services = {name: service for name, service in services.items() if service is not None}
        self.names = tuple(services)
        self.config = config
        self.problems = dict(problems or {})
        self.shared = shared
        #: One account of all that requests cost.
        self.memory = next(iter(self.services.values())).memory
        for service in self.services.values():
            service.memory = self.memory

    @classmethod
    def of(cls, served: Service | Indexes) -> Indexes:
        """A single service, under the name of its folder."""
        if isinstance(served, Indexes):
            return served
        return cls({name_of(served.index.path): served}, served.config)

    @classmethod
    def open(
        cls,
        indexes: Mapping[str, IndexConfig],
        config: ServiceConfig,
        *,
        make_refresher: MakeRefresher | None = None,
        planning: RefreshConfig | None = None,
        traces: Traces | None = None,
        problems: Mapping[str, str] | None = None,
    ) -> Indexes:
        """Opens all, divides the device budget between those that have a plan, and starts their routers. A single one
        has the whole budget, or its plan's own.

        Args:
            problems: name -> why an index cannot be served, where that is known already.

        Raises:
            InvalidInputError: several indexes on devices without ``device_budget_bytes``.
            HybridIndexError: none of them can be opened.
        """
        if len(indexes) > 1 and config.router.devices and config.router.device_budget_bytes is None:
            raise InvalidInputError(
                "device_budget_bytes is missing; several indexes share it: expected bytes per device, e.g. 2GiB"
            )

        def begin(prepared: Prepared, told: ServiceConfig) -> Service:
            return Service.begin(prepared, told, make_refresher=make_refresher, planning=planning, traces=traces)

        opened = _Opening(indexes, config, begin, problems)
        try:
            return opened.run()
        except BaseException:
            opened.close()
            raise

    # All of them

    @property
    def first(self) -> Service | None:
        """None: it could not be opened."""
        return self.services.get(self.names[0])

    @property
    def several(self) -> bool:
        return len(self.names) > 1

    @property
    def n_waiting(self) -> int:
        """Queries."""
        return sum(service.admission.n_waiting for service in self.services.values())

    @property
    def draining(self) -> bool:
        return any(service.admission.draining for service in self.services.values())

    @property
    def ready(self) -> bool:
        """All that could be opened."""
        return all(service.ready for service in self.services.values())

    def drain(self) -> None:
        for service in self.services.values():
            service.drain()

    def stop_changes(self) -> None:
        for service in self.services.values():
            service.stop_changes()

    def close(self) -> None:
        """Closing twice is harmless."""
        self.stop_changes()
        for service in self.services.values():
            service.close()

    def health(
        self, storage: Mapping[str, list[Check]], key_problem: str | None = None, *, keys: bool = False
    ) -> Health:
        """Of all; ``storage``: what was found, by name. See :func:`hybridindex.service.status.health_of`."""
        if not self.several:
            only = self.names[0]
            return health_of(self.services[only], storage[only], key_problem, keys=keys)
        checks = []
        for name in self.names:
            if (service := self.services.get(name)) is None:
                checks.append(Check(name=name, ok=False, detail=self.problems[name]))
                continue
            found = health_of(service, storage[name], key_problem, keys=keys)
            checks += [check for check in found.checks if check.name == "keys" and name == next(iter(self.services))]
            checks += [replace(check, name=f"{name}: {check.name}") for check in found.checks if check.name != "keys"]
        return Health(checks=tuple(checks))

    def listing(self) -> dict[str, Any]:
        """``GET /v1/indexes``: without paths. Blocks."""
        shared = self.shared
        return {
            "device_budget_bytes": None if shared is None else list(shared.budgets),
            "indexes": [self._row(name) for name in self.names],
        }

    def _row(self, name: str) -> dict[str, Any]:
        service = self.services.get(name)
        row: dict[str, Any] = dict.fromkeys(
            ("count", "dim", "metric", "codec", "generation", "fingerprint", "slo_ms", "plan_id", "plan", "share_bytes")
        )
        row |= {"name": name, "ready": False, "note": self.problems.get(name)}
        if service is None:
            return row
        index, plan = service.index, service.router.plan
        share = None if self.shared is None else self.shared.share_of(name)
        row |= {part: getattr(index, part) for part in ("count", "dim", "metric", "codec", "fingerprint")}
        row |= {"generation": index.ivf.generation, "slo_ms": service.slo_ms, "ready": service.ready}
        row |= {"note": service.note or None, "share_bytes": None if share is None else list(share)}
        if plan is not None:
            row |= {"plan_id": service.committed_plan_id(), "plan": describe(plan_summary(plan))}
        return row


class _Opening:
    """The indexes of one daemon on their way."""

    def __init__(
        self,
        indexes: Mapping[str, IndexConfig],
        config: ServiceConfig,
        begin: Callable[[Prepared, ServiceConfig], Service],
        problems: Mapping[str, str] | None,
    ) -> None:
        self._indexes, self._config, self._begin_service = indexes, config, begin
        self._problems = dict(problems or {})
        self._prepared: dict[str, Prepared] = {}
        self._services: dict[str, Service] = {}
        self._error: HybridIndexError = ServiceError("; ".join(self._problems.values()))

    def run(self) -> Indexes:
        """Raises HybridIndexError: none can be opened."""
        for name in [name for name in self._indexes if name not in self._problems]:
            with self._noted(name):
                self._prepared[name] = self._prepare(self._indexes[name])
        shared = self._share()
        if shared is not None:
            begun = shared.begin({name: (each.choice, each.store) for name, each in self._prepared.items()})
            for name, choice in begun.items():
                self._prepared[name].choice = choice
        for name, each in self._prepared.items():
            if (plan := each.choice.plan) is None:
                continue
            if each.choice.plan_id is None:
                each.choice = kept(each.choice, plan, each.store, "asked for at the start")
            if not plan.feasible and self._config.router.devices:
                _log.warning("index %s does not keep its SLO: %s", name, plan.reason)
        started = list(self._prepared)
        for name in started:
            with self._noted(name):
                self._services[name] = service = self._begin(name, shared)
                if shared is not None:
                    shared.add(name, service)
        if not self._services:
            raise self._error
        if shared is not None and len(self._services) < len(started):
            # The others get the bytes of what failed.
            shared.divide_again(shared.budgets)
        served = {name: self._services.get(name) for name in self._indexes}
        return Indexes(served, self._config, problems=self._problems, shared=shared)

    @contextlib.contextmanager
    def _noted(self, name: str) -> Iterator[None]:
        """An index that cannot be opened is left out, unless it is the only one."""
        try:
            yield
        except HybridIndexError as error:
            if len(self._indexes) == 1:
                raise
            path = self._indexes[name].path
            assert path is not None
            _log.error("index %s (%s) cannot be served: %s", name, path, error)
            self._problems[name] = without_path(str(error), path)
            self._error = error

    def _prepare(self, told: IndexConfig) -> Prepared:
        assert told.path is not None
        prepared = prepare(told.path, told.within(self._config))
        try:
            prepared.choice = self._asked(prepared, told)
        except BaseException:
            prepared.close()
            raise
        return prepared

    def _asked(self, prepared: Prepared, told: IndexConfig) -> PlanChoice:
        """The plan for the SLO and rate that the index is told, made anew where it has another one's."""
        choice, config = prepared.choice, self._config.router
        nothing_asked, named = told.slo_ms is None and told.rate_qps is None, told.within(self._config).plan
        if nothing_asked or not config.devices or named == "none":
            return choice
        changes = PlanChanges(slo_ms=told.slo_ms, rate_qps=told.rate_qps)
        ivf, store = prepared.index.ivf, prepared.store
        try:
            if choice.plan is None:
                view = choose_view(ivf, store, named, precision_asked(config))
            else:
                view = view_of(ivf, choice.plan.index_fingerprint) or ivf
            devices = devices_of(view, len(config.devices), config.device_budget_bytes)
            plan = plan_next(view, store, choice.plan, changes, devices)
        except StoreError:
            if not choice.pending:
                raise
            return choice
        except (ProfileError, InvalidInputError) as error:
            if choice.plan is not None:
                raise
            return replace(choice, note=f"{choice.note}; {error}" if choice.note else str(error))
        return PlanChoice(plan=plan, origin="made anew")

    def _share(self) -> SharedBudget | None:
        config = self._config.router
        given = config.device_budget_bytes
        if len(self._indexes) < 2 or not config.devices or given is None:
            return None
        budgets = given if isinstance(given, tuple) else (given,) * len(config.devices)
        return SharedBudget(budgets, config.lookahead_bytes)

    def _begin(self, name: str, shared: SharedBudget | None) -> Service:
        config = self._indexes[name].within(self._config)
        if shared is not None:
            config = replace(config, router=replace(config.router, device_budget_bytes=shared.share_of(name)))
        return self._begin_service(self._prepared.pop(name), config)

    def close(self) -> None:
        """Everything that was opened."""
        for service in self._services.values():
            service.close()
        for prepared in self._prepared.values():
            prepared.close()
        self._prepared.clear()
