"""Deleting rows of an index that a daemon serves."""

from __future__ import annotations

import asyncio
import errno
import threading

import numpy as np
import pytest

import hybridindex as hx
from hybridindex import filesystem
from hybridindex.client import AsyncClient, Client
from hybridindex.errors import AccessDeniedError, FileError, InvalidInputError
from hybridindex.processes import lock_file
from hybridindex.service.auth import KeyFile, Keyring
from tests.router.slow_copies import until
from tests.service.conftest import ask
from tests.service.live import live


def test_a_client_s_deletions_are_seen_at_once_and_last(make_service, index_path, queries):
    service = make_service()

    async def asynchronously(port):
        async with AsyncClient(f"http://127.0.0.1:{port}") as client:
            return await client.delete([1, 2, 10**9])

    with live(service) as port, Client(f"http://127.0.0.1:{port}") as client:
        near = np.unique(client.search(queries, 5, 6).ids)
        assert client.delete(near) == len(near)
        assert not np.isin(client.search(queries, 5, 6).ids, near).any()
        assert client.delete(near) == 0
        assert client.status()["index"]["deleted"] == len(near)
        assert asyncio.run(asynchronously(port)) == 2 - int(np.isin([1, 2], near).sum())
        with client.session() as session:
            session.lookahead(queries)
            assert not np.isin(session.search(queries, 5, 6).ids, near).any()
        with pytest.raises(InvalidInputError, match="the index has no attributes"):
            client.delete(where="year = 1")
        for wrong in ({}, {"ids": [1], "where": "year = 1"}):
            with pytest.raises(InvalidInputError, match="ids and where are both given, or missing"):
                client.delete(**wrong)
        with pytest.raises(InvalidInputError, match="ids is a list of dtype float64"):
            client.delete([0.5])
    with hx.open(index_path) as index:
        assert np.isin(near, index.ivf.live.current().deleted.ids).all()


def test_what_the_command_line_deletes_a_daemon_finds_no_more(make_service, index_path, queries):
    service = make_service()
    with live(service) as port, Client(f"http://127.0.0.1:{port}") as client:
        near = np.unique(client.search(queries, 5, 6).ids)
        with hx.open(index_path, verify="quick") as other:
            assert other.delete(near) == len(near)
        until(lambda: not np.isin(client.search(queries, 5, 6).ids, near).any())


def test_searchers_do_not_delete(make_service, tmp_path, queries):
    keys = KeyFile(tmp_path / "keys.json")
    searcher, admin = keys.add("app", "search"), keys.add("ops", "admin")
    service = make_service()
    with live(service, Keyring(keys.path)) as port:
        with Client(f"http://127.0.0.1:{port}", key=searcher) as client:
            near = client.search(queries, 5, 6).ids[0]
            with pytest.raises(AccessDeniedError):
                client.delete(near)
            assert np.isin(near, client.search(queries, 5, 6).ids).all()
        with Client(f"http://127.0.0.1:{port}", key=admin) as client:
            assert client.delete(near) == 5


def test_who_cannot_write_says_so_and_searches_go_on(service, index_path, queries, monkeypatch, caplog):
    for module in ("write", "writer"):
        monkeypatch.setattr(f"hybridindex.index.changes.{module}.WAIT_S", 0.01)
    with lock_file(index_path / "writer.lock", timeout_s=5):
        answer = ask(service, "POST", "/v1/vectors/delete", json={"ids": [1]})
    assert answer.status_code == 409
    assert answer.json()["type"].endswith("index-busy")

    def full(*_args):
        raise FileError("deletes.log cannot be written: no space left on device") from OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(filesystem.File, "sync", full)
    answer = ask(service, "POST", "/v1/vectors/delete", json={"ids": [1]})
    assert answer.status_code == 507
    assert str(index_path) not in answer.text
    assert "nothing was written" in caplog.text
    assert "no space left on device" in caplog.text
    monkeypatch.undo()
    assert service.index.n_deleted == 0
    assert ask(service, "POST", "/v1/vectors/delete", json={"ids": [1]}).json() == {
        "deleted": 1,
        "deleted_in_all": 1,
        "number": 1,
    }
    assert len(service.router.search(queries, 3).ids) == len(queries)


def test_searches_beside_deletions_over_http(make_service, queries):
    service = make_service()
    order = np.random.default_rng(0).permutation(2500)[:400]
    done = 0
    with live(service) as port, Client(f"http://127.0.0.1:{port}") as client:

        def look():
            with Client(f"http://127.0.0.1:{port}") as own:
                while done < len(order):
                    before = done
                    found.append(np.isin(own.search(queries, 10, 24).ids, order[:before]).any())

        found: list[bool] = []
        looking = [threading.Thread(target=look) for _ in range(2)]
        for thread in looking:
            thread.start()
        while done < len(order):
            client.delete(order[done : done + 20])
            done += 20
            until(lambda: found)  # a search may take longer than all deletions
        for thread in looking:
            thread.join(300)
    assert found
    assert not any(found)
