"""``carried.py INDEX URL KEY``: forks a process that holds all that the library opens; the child is told, by name."""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import Callable

import numpy as np

import hybridindex as hx
from hybridindex.client import AsyncClient, Client
from hybridindex.errors import ForkedError


def check(calls: dict[str, Callable[[], object]]) -> None:
    for name, call in calls.items():
        try:
            call()
        except ForkedError:
            continue
        raise AssertionError(f"{name} answered in a fork")


def main(path: str, url: str, key: str) -> int:
    with hx.open(path) as index, index.router() as router, router.session() as session:
        queries = np.zeros((2, index.dim), np.float32)
        with Client(url, key=key, timeout_s=300) as client, client.session() as remote:
            before = client.search(queries, 3).ids
            mine = router.search(queries, 3).ids
            other = AsyncClient(url, key=key)
            child = os.fork()
            if child == 0:
                try:
                    check(
                        {
                            "router": lambda: router.search(queries),
                            "session": lambda: session.search(queries),
                            "client": lambda: client.search(queries),
                            "remote session": lambda: remote.search(queries),
                            "asynchronous client": lambda: asyncio.run(other.search(queries)),
                        }
                    )
                    os._exit(0)
                except BaseException:  # noqa: BLE001 - the log is all that is left of it
                    traceback.print_exc()
                    sys.stderr.flush()
                    os._exit(1)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert np.array_equal(client.search(queries, 3).ids, before)
            assert np.array_equal(router.search(queries, 3).ids, mine)
            remote.search(queries, 3)
            session.search(queries, 3)
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
