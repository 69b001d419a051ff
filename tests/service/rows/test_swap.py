"""A daemon that compacts while clients write and search: nothing is lost or refused, and answers stay right."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time

import httpx
import numpy as np
import pytest

import hybridindex as hx
from hybridindex.client import Client
from hybridindex.config import RouterConfig
from hybridindex.errors import BuildError, ReloadError
from hybridindex.index.changes import compact
from hybridindex.service.config import ServiceConfig
from hybridindex.service.core import Service
from tests.clustered import DIM, clustered
from tests.router.slow_copies import until
from tests.service.live import live


def nearest(rows: dict[int, np.ndarray], queries, k):
    """Ids of the nearest rows by l2, by brute force."""
    ids = np.array(list(rows))
    x = np.stack([rows[each] for each in ids.tolist()]).astype(np.float64)
    distances = ((queries[:, None, :].astype(np.float64) - x[None]) ** 2).sum(axis=2)
    return ids[np.argsort(distances, axis=1)[:, :k]]


@pytest.fixture
def l2_service(make_index, tmp_path):
    """Of an index of its own, without devices."""
    made = make_index("flat", "l2", n=800, dim=DIM, nlist=8)
    path = made.path
    made.close()
    service = Service.open(path, ServiceConfig(router=RouterConfig(devices=())))
    try:
        yield service
    finally:
        service.close()


def test_compactions_under_load_lose_and_refuse_nothing(l2_service):
    service = l2_service
    done = threading.Event()
    problems: list[BaseException | str] = []
    rows: dict[int, np.ndarray] = {}
    with live(service) as port:
        url = f"http://127.0.0.1:{port}"

        def write(writer: int) -> None:
            """Each its own ids: adds, replaces and deletes, and looks for what it wrote at once."""
            rng = np.random.default_rng(writer)
            own: dict[int, np.ndarray] = {}
            next_id = 1_000_000 * (writer + 1)
            try:
                with Client(url) as client:
                    while not done.is_set():
                        new = (10 * rng.standard_normal((5, DIM))).astype(np.float32)
                        ids = np.arange(next_id, next_id + 5)
                        next_id += 5
                        assert (client.add(new, ids) == ids).all()
                        own.update(zip(ids.tolist(), new, strict=True))
                        if len(own) > 20:
                            some = rng.choice(list(own), 3, replace=False)
                            other = (10 * rng.standard_normal((3, DIM))).astype(np.float32)
                            assert client.upsert(other, some) == 3
                            own.update(zip(some.tolist(), other, strict=True))
                            gone = int(rng.choice(list(own)))
                            assert client.delete([gone]) == 1
                            del own[gone]
                        look = rng.choice(list(own), min(5, len(own)), replace=False)
                        found = client.search(np.stack([own[each] for each in look.tolist()]), 1, service.index.nlist)
                        if not (found.ids[:, 0] == look).all():
                            problems.append(f"{look} were written, and {found.ids[:, 0]} were found")
                            return
            except BaseException as error:  # noqa: BLE001 - told by the test's own thread
                problems.append(error)
            finally:
                with lock:
                    rows.update(own)

        lock = threading.Lock()
        writers = [threading.Thread(target=write, args=(each,)) for each in range(3)]
        for thread in writers:
            thread.start()
        with Client(url) as admin:
            sessions = []
            for _ in range(6):
                time.sleep(0.15)
                sessions.append((admin.session(), admin.status()["index"]["nlist"]))
                answer = admin.compact()
                assert answer["compacted"]
                if problems:
                    break
            time.sleep(0.2)
            done.set()
            for thread in writers:
                thread.join(60)
                assert not thread.is_alive()
            assert not problems
            until(lambda: admin.status()["index"]["generation"] == answer["generation"])
            status = admin.status()
            assert status["changes"]["compactions"] == 6
            assert status["changes"]["writer"]
            assert status["changes"]["live"] == 800 + len(rows)
            assert status["reload"]["failed"] == 0
            # What came is in the index that serves and in every session of an older generation.
            probe = np.stack([rows[each] for each in list(rows)[::7]])
            want = nearest(rows, probe, 1)
            nprobe = service.index.nlist
            assert (admin.search(probe, 1, nprobe).ids == want).all()
            for session, lists in sessions:
                assert (session.search(probe, 1, lists).ids == want).all()
                session.close()


def test_the_daemon_compacts_by_itself_and_lets_the_result_serve(l2_service, monkeypatch):
    monkeypatch.setattr(compact, "_WORTH_BYTES", 1)
    service = l2_service
    with live(service) as port, Client(f"http://127.0.0.1:{port}") as client:
        before = client.status()["index"]["generation"]
        new = (10 * np.random.default_rng(0).standard_normal((600, DIM))).astype(np.float32)
        ids = client.add(new)
        until(lambda: client.status()["index"]["generation"] > before)
        now = client.status()
        assert now["changes"]["compactions"] >= 1
        assert now["index"]["count"] == now["changes"]["live"] == 1400
        assert (client.search(new, 1, now["index"]["nlist"]).ids[:, 0] == ids).all()
        assert now["reload"]["mode"] == "manual"


def test_what_compactions_do_to_lists_is_told(l2_service):
    """By the report of those that were asked for, and the same by the daemon's status, which counts all."""
    service = l2_service
    rng = np.random.default_rng(3)
    with live(service) as port, Client(f"http://127.0.0.1:{port}") as client:
        said = {"compactions": 0, "split": 0, "dissolved": 0}

        def compact():
            answer = client.compact()
            assert answer["compacted"]
            said["compactions"] += 1
            said["split"] += answer["split"]
            said["dissolved"] += answer["dissolved"]
            changes = client.status()["changes"]
            assert {name: changes[name] for name in said} == said
            assert (changes["added"], changes["deleted"], changes["changed_share"]) == (0, 0, 0)

        client.delete([7])
        assert client.status()["changes"]["changed_share"] == 1 / 800
        compact()
        # A topic that grows, far from all others; and then goes.
        ids = client.add((50 + rng.standard_normal((2000, DIM))).astype(np.float32))
        assert client.status()["changes"]["changed_share"] == 2000 / 799
        compact()
        assert said["split"]
        client.delete(ids)
        compact()
        assert said["dissolved"]
        compact_again = client.compact()
        assert not compact_again["compacted"]
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        assert f"hybridindex_lists_split_total {said['split']:.1f}" in text
        assert f"hybridindex_lists_dissolved_total {said['dissolved']:.1f}" in text


def test_a_generation_that_cannot_serve_leaves_the_one_before_which_sees_all_changes(l2_service, monkeypatch):
    service = l2_service
    new = (10 * np.random.default_rng(0).standard_normal((20, DIM))).astype(np.float32)
    with live(service) as port, Client(f"http://127.0.0.1:{port}") as client:
        first = client.status()["index"]["generation"]
        ids = client.add(new[:10])
        with monkeypatch.context() as broken:

            def refuse(*_args, **_options):
                raise ReloadError("there is no memory")

            broken.setattr("hybridindex.service.reload.open_serving", refuse)
            answer = client.compact()
            assert answer["compacted"]
            assert not answer["serves"]
            more = client.add(new[10:])
            assert client.status()["index"]["generation"] == first
            assert (client.search(new, 1, 8).ids[:, 0] == [*ids, *more]).all()
        client.reload()
        assert client.status()["index"]["generation"] == answer["generation"]
        assert (client.search(new, 1, 8).ids[:, 0] == [*ids, *more]).all()


def test_rebuilt_indexes_take_changes_after_the_reload(l2_service):
    service = l2_service
    with live(service) as port, Client(f"http://127.0.0.1:{port}") as client:
        client.add(np.ones((1, DIM), dtype=np.float32), [5000])
        rows = np.random.default_rng(2).standard_normal((300, DIM)).astype(np.float32)
        hx.build(rows, service.index.path, nlist=4, metric="l2", replace=True).close()
        with pytest.raises(BuildError, match="was replaced"):
            client.add(np.ones((1, DIM), dtype=np.float32), [5001])
        client.reload()
        assert client.status()["changes"]["live"] == 300
        client.add(5 * np.ones((1, DIM), dtype=np.float32), [5001])
        assert client.search(5 * np.ones((1, DIM), dtype=np.float32), 1, 4).ids[0, 0] == 5001
        assert client.status()["changes"]["writer"]


def test_with_a_plan_and_devices_the_host_serves_what_was_compacted(make_service, queries):
    service = make_service()
    with live(service) as port, Client(f"http://127.0.0.1:{port}") as client:
        assert client.status()["plan_id"] is not None
        ids = client.add(100 + queries)
        assert (client.search(100 + queries, 1).ids[:, 0] == ids).all()
        answer = client.compact()
        assert answer["serves"]
        now = client.status()
        assert now["index"]["generation"] == answer["generation"]
        assert now["index"]["count"] == 2520
        assert (client.search(100 + queries, 1).ids[:, 0] == ids).all()
        more = client.add(200 + queries)
        assert (client.search(200 + queries, 1).ids[:, 0] == more).all()


def test_a_daemon_that_others_left_behind_reloads_by_itself(l2_service):
    service = l2_service
    path, row = service.index.path, clustered(800, seed=1)[0]
    # It looks at nothing meanwhile.
    changes = service.index.ivf.live
    changes._look_again_s = math.inf
    subprocess.run(
        [
            sys.executable,
            "-c",
            f"import hybridindex as hx\nwith hx.open({str(path)!r}) as index:\n"
            "    for each in (7, 10):\n        assert index.delete([each]) == 1; index.compact()",
        ],
        check=True,
        timeout=120,
    )
    changes._look_again_s = 0.0
    with live(service) as port, Client(f"http://127.0.0.1:{port}") as client:
        until(lambda: client.status()["index"]["generation"] == 3)
        assert 7 not in client.search(row, 5, 8).ids
        assert client.status()["changes"]["live"] == 798
