"""A daemon as a process of its own: what it acknowledged is there after it was killed."""

from __future__ import annotations

import signal
import threading

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.client import Client, RetryPolicy
from hybridindex.errors import BuildError, HybridIndexError, ServiceError
from tests.clustered import DIM
from tests.router.slow_copies import until
from tests.service.test_daemon import daemon


def rows(seed: int, n: int) -> np.ndarray:
    return (30 * np.random.default_rng(seed).standard_normal((n, DIM))).astype(np.float32)


def test_what_was_acknowledged_survives_a_kill_in_the_middle(index_path):
    kept: dict[int, np.ndarray] = {}

    def write(url: str, writer: int) -> None:
        with Client(url, retry=RetryPolicy(attempts=1)) as client:
            for step in range(10_000):
                new, first = rows(1000 * writer + step, 4), 1_000_000 * (writer + 1) + 4 * step
                try:
                    ids = client.add(new, np.arange(first, first + 4))
                    client.delete(ids[:1])
                except (ServiceError, HybridIndexError):
                    return
                kept.update(zip(ids[1:].tolist(), new[1:], strict=True))

    with daemon(index_path, "--port", 0) as (process, urls):
        threads = [threading.Thread(target=write, args=(urls[0], each)) for each in range(3)]
        # Its log would fill the pipe.
        threads.append(threading.Thread(target=process.stderr.read))
        for thread in threads:
            thread.start()
        until(lambda: len(kept) >= 60)
        with Client(urls[0]) as client:
            assert client.compact()["compacted"]
        with pytest.raises(BuildError, match=f"is being written by process {process.pid}, since"):
            monopolise(index_path)
        process.send_signal(signal.SIGKILL)
        for thread in threads:
            thread.join(60)
    with daemon(index_path, "--port", 0) as (process, urls), Client(urls[0]) as client:
        probe, nlist = np.stack(list(kept.values())), client.status()["index"]["nlist"]
        found = [client.search(probe[i : i + 1000], 1, nlist).ids[:, 0] for i in range(0, len(probe), 1000)]
        assert (np.concatenate(found) == list(kept)).all()
        client.add(rows(5, 2))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    with hx.open(index_path, write=True) as index:
        assert index.n_live >= 2500 + len(kept) + 2


def monopolise(path):
    from hybridindex.index.changes import writer

    before, writer.WAIT_S = writer.WAIT_S, 0.05
    try:
        hx.open(path, verify="quick", write=True).close()
    finally:
        writer.WAIT_S = before
