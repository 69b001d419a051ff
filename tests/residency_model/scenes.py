"""What routers, refreshes and services go through while they are observed."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from hybridindex.errors import HybridIndexError
from hybridindex.router import Router
from hybridindex.router.devices import opening
from hybridindex.tiers.paged import device_tier
from hybridindex.tiers.paged.copier import Copier
from hybridindex.tiers.paged.device_tier import PagedMemory
from tests.clustered import NLIST, clustered, hand_made_plan
from tests.router.slow_copies import until
from tests.stuck import Stuck
from tests.tiers.late_stream import LateStream

__all__ = [
    "another_budget",
    "another_plan",
    "by_hand",
    "fail_and_recover",
    "late_copies",
    "look_ahead",
    "lose_and_recover",
    "no_plan",
    "plan_of",
    "router_of",
    "run_together",
    "scans_that_fail",
    "search",
    "small_blocks",
]

#: Of each device: room for a third of the lists.
BUDGET = 256 << 10


def plan_of(index: Any, rng: np.random.Generator, n_devices: int) -> Any:
    """Some lists on each device."""
    where = rng.choice([-1, -1, -1, *range(n_devices)], size=NLIST)
    return _with_small_pages(hand_made_plan(index, where, n_devices=n_devices, budget=_budget_of(index)))


def no_plan(index: Any) -> Any:
    """Every list stays on the host."""
    return _with_small_pages(hand_made_plan(index, np.full(NLIST, -1), n_devices=2, budget=_budget_of(index)))


def _budget_of(index: Any) -> int:
    return BUDGET if index.rows is index else BUDGET // 3


def _with_small_pages(plan: Any) -> Any:
    plan.request.page_bytes = 4096
    return plan


def router_of(index: Any, rng: np.random.Generator, n_devices: int = 2, **options: Any) -> Router:
    """``index``: or a view of its codes, which are searched."""
    plan = options.pop("plan") if "plan" in options else plan_of(index, rng, n_devices)
    budget = _budget_of(index)
    return Router(index.rows, plan=plan, devices=["cpu"] * n_devices, device_budget_bytes=budget, threads=1, **options)


@contextmanager
def late_copies():
    """Stand-in devices whose copies happen as late as they may; their streams."""
    streams = []

    def opened(arena, *, staging_bytes):
        stream = LateStream()
        streams.append(stream)
        # A page a buffer, so that lists are sent in parts.
        return Copier(arena, stream, staging_bytes=3 * arena.geometry.page_bytes)

    with mock.patch.object(device_tier, "open_copier", opened):
        yield streams


def search(router: Any, rng: np.random.Generator) -> None:
    router.search(clustered(int(rng.integers(1, 6)), seed=int(rng.integers(99))), 5, 8)


def look_ahead(router: Any, rng: np.random.Generator) -> None:
    with router.session() as session:
        for _ in range(int(rng.integers(1, 3))):
            query = clustered(1, seed=int(rng.integers(99)))
            landed = session.lookahead(query, nprobe=6)
            if rng.random() < 0.7:
                landed.result(300)
            session.search(query, 5, 8)


def another_plan(router: Any, rng: np.random.Generator) -> None:
    router.apply_plan(
        plan_of(router._served.index, rng, len(router.devices)), bandwidth_share=float(rng.choice([1.0, 0.5]))
    )


def another_budget(router: Any, rng: np.random.Generator) -> None:
    """Arenas grow and shrink page by page."""
    router.set_device_budget([int(rng.choice([BUDGET // 3, BUDGET]))] * len(router.devices))
    another_plan(router, rng)


@contextmanager
def small_blocks() -> Iterator[None]:
    with mock.patch.object(opening, "PagedMemory", partial(PagedMemory, block_bytes=4096)):
        yield


def fail_and_recover(router: Any, rng: np.random.Generator) -> None:
    """A device that fails, as a scan or a copy would find, searches, and its trial."""
    tier = router.devices[int(rng.integers(len(router.devices)))]
    tier.fail(RuntimeError("injected"))
    search(router, rng)
    tier.recover().result(300)


@contextmanager
def scans_that_fail(router: Any, every: int):
    """Every so often a scan of the first device raises."""
    kind, number = router.devices[0]._scanner_kind, itertools.count(1)
    real = kind.scan

    def scan(self: Any, *args: Any, **options: Any) -> Any:
        if self._ordinal == 0 and next(number) % every == 0:
            raise RuntimeError("injected")
        return real(self, *args, **options)

    with mock.patch.object(kind, "scan", scan):
        yield


def lose_and_recover(streams: Sequence[LateStream]) -> Callable[[Any, np.random.Generator], None]:
    """A device that is lost while copies are on their way, searches, and its trial."""

    def step(router: Any, rng: np.random.Generator) -> None:
        number = int(rng.integers(len(streams)))
        if rng.random() < 0.5:
            streams[number].lost = True
        else:
            streams[number].break_after = int(rng.integers(2))
        search(router, rng)
        look_ahead(router, rng)
        streams[number].lost = False
        router.devices[number].recover().result(300)

    return step


def by_hand(router: Any) -> None:
    """What threads do rarely: two devices bring one list, a list is given up half way, a device fails under a copy."""
    store, (one, two) = router._served.residency, router.devices
    sizes = router._served.index.list_sizes
    longest, shortest = int(np.argmax(sizes)), int(np.argmin(np.where(sizes > 0, sizes, sizes.max())))

    with Stuck(Copier, "finish") as finish:
        loads = [tier.load([longest], store) for tier in (one, two)]
        assert finish.begun.wait(300)
        until(lambda: one.used_bytes and two.used_bytes)
    for load in loads:
        load.result(300)
    search(router, np.random.default_rng(0))
    router._served.lookahead._drop([longest])

    asked = itertools.count()
    one.load([longest], store, cancelled=lambda: next(asked) > 0).result(300)

    with Stuck(Copier, "finish") as finish:
        load = one.load([shortest], store)
        assert finish.begun.wait(300)
        one.fail(RuntimeError("injected"))
    load.result(300)
    one.recover().result(300)
    search(router, np.random.default_rng(0))


def run_together(router: Any, seed: int, steps: int, *what: Callable[[Any, np.random.Generator], None]) -> None:
    """Each of ``what`` on a thread of its own, ``steps`` times. Errors that the product has words for are answers."""
    errors: list[BaseException] = []

    def run(number: int, step: Callable[[Any, np.random.Generator], None]) -> None:
        rng = np.random.default_rng([seed, number])
        try:
            for _ in range(steps):
                try:
                    step(router, rng)
                except HybridIndexError:
                    continue
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(what)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads), "they wait for ever"
