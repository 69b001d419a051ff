"""Adding, replacing and deleting rows of an index that a daemon serves: bodies, answers, errors, roles, keys."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hybridindex as hx
from hybridindex.answer_codec import ROWS_TYPE, decode_rows, encode_rows
from hybridindex.client import AsyncClient, Client, RetryPolicy
from hybridindex.config import RouterConfig
from hybridindex.errors import (
    AccessDeniedError,
    BuildError,
    BusyWritingError,
    CorruptIndexError,
    DuplicateIdError,
    InvalidInputError,
    UnsupportedIndexError,
)
from hybridindex.index.changes.writer import IndexWriter
from hybridindex.service.auth import KeyFile, Keyring
from hybridindex.service.changes.rows import RowWriter
from hybridindex.service.config import Limits, ServiceConfig
from hybridindex.service.core import Service
from hybridindex.service.http.routes.answered_keys import AnsweredKeys
from hybridindex.service.http.routes.row_bodies import RowsBody
from hybridindex.service.http.wire import BodyError
from tests.clustered import DIM
from tests.examples import examples
from tests.service.conftest import ask, talk
from tests.service.http.test_app import is_problem
from tests.service.live import live

FAR = (100 + np.random.default_rng(0).standard_normal((6, DIM))).astype(np.float32)
COUNT = 2500


def rows_of(client, vectors):
    return client.search(vectors, 1, 24).ids[:, 0].tolist()


def test_what_a_client_writes_it_finds(make_service, index_path):
    service = make_service()
    with live(service) as port, Client(f"http://127.0.0.1:{port}") as client:
        ids = client.add(FAR[:4])
        assert ids.dtype == np.int64
        assert ids.tolist() == [2500, 2501, 2502, 2503]
        assert rows_of(client, FAR[:4]) == ids.tolist()
        assert client.add(FAR[4], [7_000_000_000]).tolist() == [7_000_000_000]
        assert client.upsert(FAR[5] + 50, [2500]) == 1
        assert rows_of(client, FAR[5:6] + 50) == [2500]
        assert client.upsert(np.stack([FAR[0], FAR[5]]), [2500, 9]) == 2
        assert client.upsert(FAR[5] - 300, [8_000_000_000]) == 0
        assert client.delete([2501, 7_000_000_000]) == 2
        assert not np.isin(rows_of(client, FAR[:5]), [2501, 7_000_000_000]).any()
        changes = client.status()["changes"]
        assert changes["writes"]
        assert changes["writer"]
        assert changes["live"] == COUNT + 4
        assert changes["number"] == 6
        assert changes["log_bytes"] > 0
        text = ask_metrics(port)
        assert "hybridindex_rows_added_total 6.0" in text
        assert "hybridindex_rows_replaced_total 3.0" in text
        assert "hybridindex_rows_deleted_total 2.0" in text
        assert f"hybridindex_rows_live {COUNT + 4:.1f}" in text
    service.close()
    with hx.open(index_path) as index:
        assert index.n_live == COUNT + 4


def ask_metrics(port):
    import httpx

    return httpx.get(f"http://127.0.0.1:{port}/metrics").text


def test_the_asynchronous_client(service):
    async def converse(port):
        async with AsyncClient(f"http://127.0.0.1:{port}") as client:
            ids = await client.add(FAR)
            assert await client.upsert(FAR, ids) == len(FAR)
            assert await client.delete(ids[:2]) == 2
            assert (await client.compact())["compacted"]
            assert (await client.compact(wait=False)) == {"started": True}
            return (await client.search(FAR[2:], 1)).ids[:, 0].tolist() == ids[2:].tolist()

    with live(service) as port:
        assert asyncio.run(converse(port))


def npy(array) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("request_", "ids"),
    [
        ({"json": {"vectors": FAR[:2].tolist()}}, [2500, 2501]),
        ({"json": {"vectors": FAR[0].tolist(), "ids": None, "attributes": None}}, [2500]),
        ({"json": {"vectors": FAR[:2].tolist(), "ids": [9000, 8000.0], "mode": "upsert"}}, None),
        ({"content": encode_rows(FAR[:2], None), "headers": {"content-type": ROWS_TYPE}}, [2500, 2501]),
        (
            {
                "content": encode_rows(FAR[:2], np.array([9000, 8000]), b'{"mode": "upsert"}'),
                "headers": {"content-type": ROWS_TYPE},
            },
            None,
        ),
        ({"content": npy(FAR[:2]), "headers": {"content-type": "application/x-npy"}}, [2500, 2501]),
        (
            {"content": npy(FAR[:2]), "headers": {"content-type": "application/x-npy"}, "params": {"mode": "add"}},
            [2500, 2501],
        ),
    ],
)
def test_every_form_of_a_body(service, request_, ids):
    async def conversation(http):
        answer = (await http.post("/v1/vectors", **request_)).json()
        found = await http.post("/v1/search", json={"queries": FAR[:1].tolist(), "k": 1})
        return answer, found.json()["ids"][0][0]

    answer, first = talk(service, conversation)
    assert answer["ids"] == ids
    assert answer["replaced"] == 0
    assert answer["number"] == 1
    assert first == (9000 if ids is None else 2500)


def binary(vectors, numbers=None, **more):
    body = encode_rows(np.asarray(vectors, dtype=np.float32), numbers, json.dumps(more).encode() if more else b"")
    return {"content": body, "headers": {"content-type": ROWS_TYPE}}


@pytest.mark.parametrize(
    ("request_", "status", "field", "words"),
    [
        ({"json": {}}, 400, "vectors", "is missing"),
        ({"json": {"vectors": []}}, 400, "vectors", "expected a list"),
        ({"json": {"vectors": [[1.0, 2.0]]}}, 400, "vectors", f"this index has dimension {DIM}"),
        ({"json": {"vectors": [0] * DIM, "mode": "put"}}, 400, "mode", "expected add or upsert"),
        ({"json": {"vectors": [0] * DIM, "mode": "upsert"}}, 400, "ids", "is missing"),
        ({"json": {"vectors": [0] * DIM, "mode": None}}, 400, "mode", "is null"),
        ({"json": {"vectors": [0] * DIM, "ids": [1, 2]}}, 400, "ids", "expected as many"),
        ({"json": {"vectors": [0] * DIM, "ids": [-1]}}, 400, "ids", "0 or more"),
        ({"json": {"vectors": [0] * DIM, "ids": [1.5]}}, 400, "ids", "integers"),
        ({"json": {"vectors": [0] * DIM, "k": 1}}, 400, "'k'", "is not known here"),
        ({"json": {"vectors": [1e200] * DIM}}, 400, "vectors", "NaN or infinity"),
        ({"json": {"vectors": [0] * DIM, "attributes": {"year": [1]}}}, 400, "attributes", "the index has none"),
        ({"json": {"vectors": [0] * DIM, "attributes": {"year": 1}}}, 400, "attributes", "object of lists"),
        ({"json": {"vectors": [0] * DIM}, "params": {"mode": "add"}}, 400, "'mode'", "query string"),
        ({"json": {"vectors": FAR[:2].tolist(), "ids": [5, 9000]}}, 409, "ids", "exist already: 5;"),
        ({"json": {"vectors": FAR[:2].tolist(), "ids": [9000, 9000]}}, 409, "ids", "given twice"),
        (binary(FAR[:, :5]), 400, "vectors", "this index has dimension"),
        (binary(FAR[:0]), 400, "vectors", "has 0 rows"),
        (binary(np.full((1, DIM), np.nan)), 400, "vectors", "holds NaN"),
        (binary(FAR[:1], np.array([-5])), 400, "ids", "is -5; expected ids of 0 or more"),
        (binary(FAR[:1], ids_=1), 400, "'ids_'", "is not known here"),
        (binary(FAR[:1], ids=[1]), 400, "'ids'", "is not known here"),
        ({"content": b"HIXR", "headers": {"content-type": ROWS_TYPE}}, 400, "body", "expected a header"),
        ({"content": b"HIXA" + bytes(20), "headers": {"content-type": ROWS_TYPE}}, 400, "body", "starts with"),
        (
            {"content": encode_rows(FAR, None) + b"x", "headers": {"content-type": ROWS_TYPE}},
            400,
            "body",
            "its header makes",
        ),
        ({"content": npy(FAR.astype("f8")), "headers": {"content-type": "application/x-npy"}}, 400, "vectors", "dtype"),
        (
            {"content": npy(FAR), "headers": {"content-type": "application/x-npy"}, "params": {"mode": "upsert"}},
            400,
            "ids",
            "is missing",
        ),
        (
            {"content": b"x", "headers": {"content-type": "text/plain"}},
            415,
            "Content-Type",
            "expected application/json",
        ),
    ],
)
def test_what_is_wrong_is_named_and_nothing_changes(service, request_, status, field, words):
    answer = ask(service, "POST", "/v1/vectors", **request_)
    is_problem(answer, status, field)
    assert words in answer.json()["detail"]
    assert service.index.ivf.live.number == 0


def test_limits_of_rows_and_bytes(make_service):
    service = make_service(limits={"max_rows": 4, "max_body_bytes": 2000})
    assert "expected 1..4" in ask(service, "POST", "/v1/vectors", **binary(FAR[:5])).json()["detail"]
    assert ask(service, "POST", "/v1/vectors", **binary(FAR[:4])).status_code == 200
    large = ask(service, "POST", "/v1/vectors", json={"vectors": FAR.tolist()})
    assert large.status_code == 413


def test_rows_have_attributes_in_every_form(make_service, index_path):
    pa = pytest.importorskip("pyarrow")
    when = np.array(["2024-05-01T12:00:00"] * COUNT, dtype="datetime64[us]")
    table = {"year": np.arange(COUNT), "score": np.ones(COUNT), "when": when, "tags": [["a", "b"]] * COUNT}
    with hx.open(index_path) as index:
        index.set_attributes(pa.table(table))
    service = make_service()
    given = {"year": [9000, None], "score": [1, 2.5], "when": ["2025-01-01", "2025-01-01T00:00:00+02:00"]}
    with live(service) as port, Client(f"http://127.0.0.1:{port}") as client:
        client.add(FAR[:2], [9000, 9001], {**given, "tags": [["x"], []]})
        assert client.search(FAR[:1], 5, 24, where="year = 9000").ids[0].tolist() == [9000, -1, -1, -1, -1]
        assert 9001 in client.search(FAR[1:2], 5, 24, where="score > 2").ids
        assert client.search(FAR[:2], 1, 24, where="\"when\" >= '2025-01-01'").ids[:, 0].tolist() == [9000, 9000]
        arrow = pa.table({"year": [9002], "when": pa.array([np.datetime64("2030-01-01T00:00:00", "us")])})
        client.upsert(FAR[2], [9002], arrow)
        assert 9002 in client.search(FAR[2:3], 1, 24, where="year = 9002 AND \"when\" > '2029-01-01'").ids
        for wrong, words in (
            ({"colour": ["red", "red"]}, "the index has no attribute 'colour'; it has"),
            ({"year": ["x", "y"]}, "'year' that is no int"),
            ({"year": [1]}, "attributes have 1 rows and vectors 2"),
            ({"when": ["tomorrow", None]}, "expected a date of ISO 8601"),
        ):
            with pytest.raises(InvalidInputError, match=words):
                client.add(FAR[3:5], attributes=wrong)
        assert client.delete(where="year >= 9000") == 2
        assert client.status()["changes"]["added"] == 1


def test_a_damaged_file_is_said_and_not_called_an_error_of_the_daemon(make_service, index_path, caplog):
    pa = pytest.importorskip("pyarrow")
    with hx.open(index_path) as index:
        index.set_attributes(pa.table({"year": np.arange(COUNT)}))
    service = make_service()
    with live(service) as port, Client(f"http://127.0.0.1:{port}") as client:
        client.add(FAR[:1], [9000], {"year": [1]})
        [file] = index_path.rglob("attributes-*.arrow")
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        caplog.clear()
        with pytest.raises(CorruptIndexError, match="hybridindex verify and the log name it"):
            client.compact()
        assert file.name in caplog.text
        assert client.search(FAR[:1], 1, 24).ids.tolist() == [[9000]]


# The same change twice


def test_a_change_of_one_key_is_made_once(make_service):
    service = make_service()
    with live(service) as port, Client(f"http://127.0.0.1:{port}") as client:
        first = client.add(FAR, idempotency_key="import-1")
        assert client.add(FAR, idempotency_key="import-1").tolist() == first.tolist()
        assert client.status()["changes"]["added"] == len(FAR)
        with pytest.raises(InvalidInputError, match="came with another request before"):
            client.add(FAR[:2], idempotency_key="import-1")
        with pytest.raises(InvalidInputError, match="came with another request before"):
            client.delete([1], idempotency_key="import-1")
        assert client.delete([1, 2], idempotency_key="gone") == 2
        assert client.delete([1, 2], idempotency_key="gone") == 2
        assert client.upsert(FAR[:1], [9], idempotency_key="other") == 1
        with pytest.raises(DuplicateIdError):
            client.add(FAR[:1], [9], idempotency_key="fails")
        client.delete([9])
        # It changed nothing, so it is made now.
        assert client.add(FAR[:1], [9], idempotency_key="fails").tolist() == [9]
        with pytest.raises(InvalidInputError, match="visible ASCII"):
            client.add(FAR, idempotency_key="a b")


def test_keys_are_a_client_s_own_and_replays_say_so(service, tmp_path):
    keys = KeyFile(tmp_path / "keys.json")
    tokens = [keys.add(name, "write") for name in ("a", "b")]

    async def conversation(http):
        found = []
        for token in (tokens[0], tokens[1], tokens[0]):
            headers = {"authorization": f"Bearer {token}", "idempotency-key": "k"}
            answer = await http.post("/v1/vectors", json={"vectors": FAR[0].tolist()}, headers=headers)
            found.append((answer.json()["ids"], answer.headers.get("idempotency-replayed")))
        wrong = await http.post("/v1/vectors", json={}, headers={**headers, "idempotency-key": "k" * 129})
        is_problem(wrong, 400, None)
        return found

    assert talk(service, conversation, keyring=Keyring(keys.path)) == [
        ([2500], None),
        ([2501], None),
        ([2500], "true"),
    ]


def test_two_attempts_at_once_are_one_change(service):
    async def conversation(http):
        async def send():
            return await http.post("/v1/vectors", headers={"idempotency-key": "k"}, json={"vectors": FAR.tolist()})

        return [answer.json()["ids"] for answer in await asyncio.gather(*(send() for _ in range(5)))]

    found = talk(service, conversation)
    assert found == [found[0]] * 5
    assert service.rows.state(service.index)["added"] == len(FAR)


def test_the_table_of_keys_is_bounded():
    now = [0.0]

    async def converse():
        keys = AnsweredKeys(lambda: now[0], most=3, most_bytes=100)

        async def ask_once(key, answer=b"x"):
            async def change():
                calls.append(key)
                return answer

            return await keys.once("me", key, "digest", change)

        calls: list[str] = []
        for key in "abcd":
            assert await ask_once(key) == (b"x", False)
        assert len(keys) == 3
        assert await ask_once("d") == (b"x", True)
        assert await ask_once("a") == (b"x", False)
        await ask_once("large", b"x" * 200)
        await ask_once("next")
        assert len(keys) == 1
        now[0] = 86_401.0
        assert await ask_once("next") == (b"x", False)
        return calls

    assert asyncio.run(converse()) == ["a", "b", "c", "d", "a", "large", "next", "next"]


# Who may, and who cannot


def test_roles(make_service, tmp_path):
    keys = KeyFile(tmp_path / "keys.json")
    made = {role: keys.add(role, role) for role in ("search", "write", "admin")}
    service = make_service()
    with live(service, Keyring(keys.path)) as port:
        url = f"http://127.0.0.1:{port}"
        with Client(url, key=made["search"]) as client:
            for call in (lambda: client.add(FAR), lambda: client.upsert(FAR[0], [1]), lambda: client.delete([1])):
                with pytest.raises(AccessDeniedError, match="role write"):
                    call()
            with pytest.raises(AccessDeniedError, match="role admin"):
                client.compact()
        with Client(url, key=made["write"]) as client:
            ids = client.add(FAR)
            assert rows_of(client, FAR) == ids.tolist()
            assert client.delete(ids) == len(FAR)
            for refused in (client.compact, client.reload, client.repartition, client.drain):
                with pytest.raises(AccessDeniedError, match="role admin"):
                    refused()
        with Client(url, key=made["admin"]) as client:
            client.add(FAR)
            assert client.compact()["compacted"]


def test_a_daemon_that_takes_no_changes_says_so(make_service):
    service = make_service(write=False)
    with live(service) as port, Client(f"http://127.0.0.1:{port}") as client:
        for call in (lambda: client.add(FAR), lambda: client.delete([1]), client.compact):
            with pytest.raises(AccessDeniedError, match="its setting write is false"):
                call()
        assert client.status()["changes"]["writes"] is False
        assert 'hybridindex_writes_refused_total{reason="off"} 3.0' in ask_metrics(port)


def test_codecs_without_single_rows_are_refused_by_name(tmp_path):
    rows = np.random.default_rng(0).standard_normal((600, 16)).astype(np.float32)
    hx.build(rows, tmp_path / "i", nlist=4, codec="pqfs8").close()
    service = Service.open(tmp_path / "i", ServiceConfig(router=RouterConfig(devices=())))
    try:
        with live(service) as port, Client(f"http://127.0.0.1:{port}") as client:
            with pytest.raises(UnsupportedIndexError, match="INDEX has codec 'pqfs8'"):
                client.add(rows[:2])
            for wait in (True, False):
                with pytest.raises(UnsupportedIndexError):
                    client.compact(wait=wait)
            assert client.delete([1, 2]) == 2
    finally:
        service.close()


HOLDS = """
import sys, hybridindex as hx
with hx.open(sys.argv[1], write=True):
    print("open", flush=True)
    sys.stdin.read()
"""


def test_another_writer_is_named_and_after_it_this_one_writes(make_service, index_path, monkeypatch):
    for module in ("write", "writer"):
        monkeypatch.setattr(f"hybridindex.index.changes.{module}.WAIT_S", 0.05)
    service = make_service()
    with live(service) as port, Client(f"http://127.0.0.1:{port}") as client:
        other = subprocess.Popen(
            [sys.executable, "-c", HOLDS, index_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "open\n"
            with pytest.raises(BuildError, match=f"INDEX is being written by process {other.pid}, since 20"):
                client.add(FAR)
            assert client.status()["changes"]["writer"] is False
        finally:
            other.communicate("")
        client_ids = until_written(client)
        assert rows_of(client, FAR) == client_ids.tolist()
        late = subprocess.run(
            [sys.executable, "-c", HOLDS, index_path], input="", capture_output=True, text=True, check=False
        )
        assert "is being written by process" in late.stderr


def until_written(client):
    for _ in range(100):
        try:
            return client.add(FAR)
        except BuildError:
            threading.Event().wait(0.1)
    raise AssertionError("it cannot write")


def test_backpressure_has_a_time_to_come_back(make_service, monkeypatch):
    service = make_service()

    def full(*_args, **_options):
        raise BusyWritingError(f"too much came to {service.index.path}; try again", retry_after_s=0.25)

    with live(service) as port, Client(f"http://127.0.0.1:{port}", retry=RetryPolicy(attempts=1)) as client:
        with monkeypatch.context() as busy:
            busy.setattr(IndexWriter, "_refuse_while_full", full)
            with pytest.raises(BusyWritingError, match="too much came to INDEX") as raised:
                client.add(FAR)
            assert raised.value.retry_after_s == 0.25
            slept: list[float] = []

            def sleep(seconds):
                slept.append(seconds)
                busy.undo()

            with Client(f"http://127.0.0.1:{port}", sleep=sleep) as patient:
                assert len(patient.add(FAR)) == len(FAR)
            assert slept[0] >= 0.25
        assert 'hybridindex_writes_refused_total{reason="backpressure"} 2.0' in ask_metrics(port)


def test_at_the_end_nothing_new_begins_and_the_claim_is_given_up(make_service, index_path):
    service = make_service()
    assert ask(service, "POST", "/v1/vectors", json={"vectors": FAR.tolist()}).status_code == 200
    service.drain()
    is_problem(ask(service, "POST", "/v1/vectors", json={"vectors": FAR.tolist()}), 503, None)
    is_problem(ask(service, "POST", "/v1/compact"), 503, None)
    service.close()
    with hx.open(index_path, write=True) as index:
        assert index.n_added == len(FAR)


def test_encoded_rows_come_back():
    body = encode_rows(FAR, np.arange(6), b"{}")
    found = decode_rows(body)
    assert (found.vectors == FAR).all()
    assert found.ids is not None
    assert found.ids.tolist() == list(range(6))
    assert found.more == b"{}"
    for at in range(0, len(body), 37):
        with pytest.raises(InvalidInputError):
            decode_rows(body[:at])


@examples(200)
@given(
    st.binary(max_size=300),
    st.sampled_from([ROWS_TYPE, "application/x-npy", "application/json", ""]),
    st.dictionaries(st.sampled_from(["mode", "n"]), st.text(max_size=6)),
    st.booleans(),
)
def test_bodies_of_any_bytes_are_read_or_refused_by_name(body, kind, options, begun):
    if begun:
        body = encode_rows(FAR[:1], np.array([5]))[: len(body)] + body
    try:
        found = RowsBody(Limits(), DIM).read(body, kind, options)
    except BodyError:
        return
    assert found.vectors.shape[1] == DIM


def test_a_node_takes_rows_up_to_a_part_of_its_memory(index_path, queries):
    with hx.open(index_path) as index:
        manifest = index.ivf.manifest
    writer = RowWriter(index_path, served=lambda: manifest)
    writer.memory_bytes = 4 << 30
    try:
        writer.add(queries[:1])
        assert writer._index.writer.most_bytes == 1 << 30
    finally:
        writer.close()
