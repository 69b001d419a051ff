"""Whether what a crash left is whole: a restart opens it, every byte verified, and answers as the oracle does."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybridindex.config import RouterConfig
from hybridindex.index import verify
from hybridindex.refresh.refresher import Refresher
from hybridindex.service.config import ServiceConfig
from hybridindex.service.core import Service
from hybridindex.service.daemon_address import DaemonAddress
from tests.clustered import clustered
from tests.oracle import check_answer

__all__ = ["BUILD", "NLIST", "NPROBE", "check_router", "restarted"]

NLIST, NPROBE = 24, 6
BUILD: dict[str, Any] = {"metric": "l2", "nprobe": NPROBE}


def check_router(index, router) -> None:
    """Answers of a router over ``index`` are right, and so is what it holds."""
    queries = clustered(16, seed=3)
    result = router.search(queries, 5, NPROBE)
    ivf = index.ivf
    probes, _ = ivf.quantize(ivf.transform(queries), NPROBE)
    check_answer(ivf, queries, probes, 5, result.distances, result.ids)
    router.check_invariants()


@contextmanager
def restarted(path: Path, *, devices: tuple[str, ...] = ("cpu",), refresh: bool = False, plan: str = "current"):
    """The service as a daemon starts it after the crash; checked before it is given."""
    verify(path)
    address = DaemonAddress(path)
    try:
        service = Service.open(
            path,
            ServiceConfig(plan=plan, router=RouterConfig(devices=devices)),
            make_refresher=Refresher if refresh else None,
        )
        try:
            service.warm_up()
            service.store.check_invariants()
            check_router(service.index, service.router)
            yield service
        finally:
            service.close()
    finally:
        address.leave()
