"""Two indexes behind one address: their own routes, one set of everything around them."""

from __future__ import annotations

import json
import re

import httpx
import numpy as np
import pytest

import hybridindex as hx
from hybridindex.client import Client, RetryPolicy
from hybridindex.errors import AccessDeniedError, InvalidInputError, OverloadedError, ServiceError, UnknownSessionError
from hybridindex.refresh.config import RefreshConfig
from hybridindex.refresh.refresher import Refresher
from hybridindex.service.auth import KeyFile, Keyring
from hybridindex.service.config import Limits
from hybridindex.service.intake.machine_memory import LEAST_REQUEST_MEMORY
from tests.clustered import DIM, clustered
from tests.router.slow_copies import until
from tests.service.conftest import ask, assert_same, talk
from tests.service.http.test_openapi_contract import failures
from tests.service.intake.test_request_memory import holding
from tests.service.live import live
from tests.service.several.conftest import BUDGET, OTHER_DIM
from tests.storage_looks import looked_at

QUERIES = {"docs": clustered(20, DIM, seed=3), "code": clustered(20, OTHER_DIM, seed=3)}


@pytest.fixture
def expected(folders):
    found = {}
    for name, path in folders.items():
        with hx.open(path) as index:
            found[name] = index.search(QUERIES[name], 5)
    return found


def test_both_are_searched_planned_and_reloaded_over_one_address(open_indexes, folders, expected):
    indexes = open_indexes()
    with live(indexes) as port:
        url = f"http://127.0.0.1:{port}"
        with Client(url) as first, Client(url, index="docs") as docs, Client(url, index="code") as code:
            for client, name in ((first, "docs"), (docs, "docs"), (code, "code")):
                assert_same(client.search(QUERIES[name], 5), expected[name])
                with client.session() as session:
                    session.lookahead(QUERIES[name])
                    assert_same(session.search(QUERIES[name], 5), expected[name])
                    assert session.stats()["searches"] == 1
                assert client.status()["index"]["dim"] == QUERIES[name].shape[1]
            with pytest.raises(InvalidInputError, match="dimension"):
                code.search(QUERIES["docs"], 5)
            listed = first.indexes()
            assert listed == code.indexes()
            assert listed["device_budget_bytes"] == [BUDGET]
            assert [row["name"] for row in listed["indexes"]] == ["docs", "code"]
            assert [row["plan"]["n_resident"] for row in listed["indexes"]] == [8, 4]
            assert sum(row["share_bytes"][0] for row in listed["indexes"]) <= BUDGET
            answer = code.repartition(coverage=0.5, apply=True, force=True)
            assert answer["placed"]["lists"] == 8
            assert code.plan()["plan_id"] == answer["plan_id"] == code.plans()["current"]
            assert first.plan()["plan"]["n_resident"] == 8
            assert_same(code.search(QUERIES["code"], 5), expected["code"])
            with hx.build(clustered(500, OTHER_DIM, seed=8), folders["code"], nlist=8, metric="l2", replace=True):
                pass
            assert code.reload()["reloaded"]
            assert [row["count"] for row in first.indexes()["indexes"]] == [2500, 500]
            assert not docs.reload()["reloaded"]
            assert_same(docs.search(QUERIES["docs"], 5), expected["docs"])
            with pytest.raises(InvalidInputError, match="index is 'a/b'"):
                Client(url, index="a/b")
            with Client(url, index="none") as unknown, pytest.raises(ServiceError, match="status 404"):
                unknown.status()


def test_a_session_is_of_one_index(open_indexes):
    indexes = open_indexes()
    with live(indexes) as port:
        url = f"http://127.0.0.1:{port}"
        with Client(url, index="docs") as docs, Client(url, index="code") as code, docs.session() as session:
            session._client = code
            with pytest.raises(UnknownSessionError):
                session.stats()
            session._client = docs


def test_the_document_has_the_routes_of_each_index(open_indexes):
    found = ask(open_indexes(), "GET", "/v1/openapi.json").json()["paths"]
    for path in [path for path in found if path.startswith("/v1/") and path != "/v1/openapi.json"]:
        if path in ("/v1/indexes", "/v1/drain") or path.startswith("/v1/indexes/"):
            continue
        for name in ("docs", "code"):
            assert f"/v1/indexes/{name}{path.removeprefix('/v1')}" in found

    def dimensions(path):
        body = json.dumps(found[path]["post"]["requestBody"])
        return set(re.findall(r'"maxItems": (\d+)', body))

    assert str(DIM) in dimensions("/v1/indexes/docs/search")
    assert str(OTHER_DIM) in dimensions("/v1/indexes/code/search")


def test_a_single_index_has_its_routes_and_the_document_has_them_once(service):
    name = service.index.path.name
    assert ask(service, "GET", f"/v1/indexes/{name}/status").json()["ready"]
    assert [row["name"] for row in ask(service, "GET", "/v1/indexes").json()["indexes"]] == [name]
    paths = ask(service, "GET", "/v1/openapi.json").json()["paths"]
    assert not [path for path in paths if path.startswith("/v1/indexes/")]


def test_the_routes_of_one_of_several_keep_to_their_document(open_indexes, tmp_path):
    keys = KeyFile(tmp_path / "keys.json")
    key = keys.add("ops", "admin")
    indexes = open_indexes(
        "docs",
        "code",
        make_refresher=lambda *parts: Refresher(*parts, RefreshConfig(planning="here", tick_s=3600)),
        limits=Limits(max_sessions=10_000, max_body_bytes=1 << 20),
    )
    with live(indexes, Keyring(keys.path)) as port:
        address = f"http://127.0.0.1:{port}/v1/openapi.json"
        document = httpx.get(address, headers={"authorization": f"Bearer {key}"}).json()
        chosen = ("/v1/indexes", "/v1/indexes/code/plan")
        document["paths"] = {path: document["paths"][path] for path in chosen}
        found, statuses = failures(document, port, key)
    assert not found, found
    assert {status for _, status in statuses} >= {200, 401, 405}


def test_metrics_say_whose_they_are_and_routes_are_counted_once(open_indexes):
    indexes = open_indexes()

    async def conversation(http):
        for name, asked in QUERIES.items():
            for _ in range(2):
                path = f"/v1/indexes/{name}/search"
                assert (await http.post(path, json={"queries": asked.tolist(), "k": 3})).status_code == 200
        return (await http.get("/metrics")).text

    text = talk(indexes, conversation)
    for name in QUERIES:
        assert f'hybridindex_searches_total{{index="{name}"}} 2.0' in text
        assert f'hybridindex_request_queries_count{{index="{name}"}} 2.0' in text
        assert f'hybridindex_responses_total{{route="/v1/indexes/{name}/search",status="200"}} 2.0' in text
        assert re.search(rf'hybridindex_resident_bytes{{device="0: cpu",index="{name}"}} \d', text)
    assert text.count("# TYPE hybridindex_searches_total counter") == 1
    # One memory for all: a sum over indexes counted it twice.
    for of_all in ("request_memory_bytes{", 'refused_total{index="docs",reason="memory"', 'reason="client memory"'):
        assert text.count(of_all) == 1
    assert text.count('reason="deadline"') == len(QUERIES)


def test_admin_routes_of_each_index_need_the_role(open_indexes, tmp_path):
    keys = KeyFile(tmp_path / "keys.json")
    user, admin = keys.add("app", "search"), keys.add("ops", "admin")
    indexes = open_indexes()
    with live(indexes, Keyring(keys.path)) as port:
        url = f"http://127.0.0.1:{port}"
        for name in QUERIES:
            with Client(url, key=user, index=name) as client:
                client.search(QUERIES[name], 3)
                for refused in (client.reload, client.repartition, client.apply_plan):
                    with pytest.raises(AccessDeniedError, match="role admin"):
                        refused()
            with Client(url, key=admin, index=name) as client:
                assert not client.repartition()["applied"]
            with Client(url, index=name) as client, pytest.raises(AccessDeniedError):
                client.status()


@pytest.mark.parametrize("broken", ["code", "docs"])
def test_an_index_that_does_not_open_leaves_the_others_alone(open_indexes, folders, expected, broken):
    file = next(folders[broken].glob("gen-*/lists.bin"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    indexes = open_indexes()
    (whole,) = {"docs", "code"} - {broken}
    with live(indexes) as port:
        url = f"http://127.0.0.1:{port}"
        with Client(url, index=whole) as client, Client(url, index=broken, retry=RetryPolicy(attempts=1)) as other:
            assert_same(client.search(QUERIES[whole], 5), expected[whole])
            for refused in (other.status, lambda: other.search(QUERIES[broken]), other.reload):
                with pytest.raises(OverloadedError, match=f"index {broken} could not be opened"):
                    refused()
            rows = {row["name"]: row for row in client.indexes()["indexes"]}
            assert "lists.bin" in rows[broken]["note"]
            assert str(folders[broken]) not in rows[broken]["note"]
            assert rows[broken]["count"] is None
            assert rows[whole]["share_bytes"][0] > BUDGET * 0.99
            plain = httpx.get(f"{url}/v1/status")
            assert plain.status_code == (503 if broken == "docs" else 200)
            assert httpx.get(f"{url}/readyz").status_code == 200
            health = looked_at(lambda: httpx.get(f"{url}/healthz"), httpx.Response.json)
            assert health.status_code == 503
            wrong = [check for check in health.json()["checks"] if not check["ok"]]
            assert [check["name"] for check in wrong] == [broken]
            assert f"{whole}: disk" in [check["name"] for check in health.json()["checks"]]


def test_where_none_opens_the_daemon_does_not_start(open_indexes, folders):
    for path in folders.values():
        file = next(path.glob("gen-*/lists.bin"))
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(hx.HybridIndexError, match="checksum"):
        open_indexes()


def test_devices_of_several_need_a_budget(open_indexes):
    with pytest.raises(InvalidInputError, match="device_budget_bytes is missing; several indexes share it"):
        open_indexes(router={"device_budget_bytes": None})


def test_without_devices_several_serve_on_the_host(open_indexes):
    indexes = open_indexes(router={"devices": (), "device_budget_bytes": None})
    assert indexes.listing()["device_budget_bytes"] is None
    for name in QUERIES:
        assert ask(indexes, "GET", f"/v1/indexes/{name}/status").json()["devices"] == []


def test_draining_means_all(open_indexes):
    indexes = open_indexes()

    async def conversation(http):
        assert (await http.post("/v1/drain")).status_code == 202
        path = "/v1/indexes/code/search"
        return [(await http.post(p, json={"queries": QUERIES["code"].tolist()})).status_code for p in (path,)]

    assert talk(indexes, conversation) == [503]
    assert indexes.draining
    assert not indexes.ready
    assert np.all([service.admission.draining for service in indexes.services.values()])


def test_requests_of_all_indexes_share_one_memory(open_indexes):
    indexes = open_indexes(limits=Limits(request_memory_bytes=LEAST_REQUEST_MEMORY))
    body = {"queries": QUERIES["code"].tolist(), "k": 5}
    with live(indexes) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        assert http.post("/v1/indexes/code/search", json=body).status_code == 200
        assert all(service.memory is indexes.memory for service in indexes.services.values())
        while indexes.memory.taken_bytes:
            pass
        most = indexes.memory.most - (16 << 10)
        with holding(indexes.memory, "one", most), holding(indexes.memory, "two", most):
            for name in indexes.names:
                refused = http.post(f"/v1/indexes/{name}/search", json=body)
                assert (refused.status_code, "request_memory_bytes" in refused.json()["detail"]) == (503, True)
        assert http.post("/v1/indexes/code/search", json=body).status_code == 200
    assert indexes.memory.taken_bytes == 0


def test_rows_of_each_go_to_it_alone(open_indexes, folders):
    indexes = open_indexes()
    with live(indexes) as port:
        url = f"http://127.0.0.1:{port}"
        with Client(url, index="docs") as docs, Client(url, index="code") as code, Client(url) as first:
            far = {"docs": 100 + QUERIES["docs"], "code": 100 + QUERIES["code"]}
            before = code.status()["changes"]["live"]
            ids = first.add(far["docs"], idempotency_key="k")
            # The same route under its other name.
            assert docs.add(far["docs"], idempotency_key="k").tolist() == ids.tolist()
            assert code.status()["changes"]["live"] == before
            others = code.add(far["code"], idempotency_key="k")
            for client in (docs, code):
                # On a busy machine it is made before its turn comes to serve; it is tried again then.
                made = client.compact()["generation"]
                until(lambda client=client, made=made: client.status()["index"]["generation"] == made)
            assert docs.search(far["docs"], 1).ids[:, 0].tolist() == ids.tolist()
            assert code.search(far["code"], 1).ids[:, 0].tolist() == others.tolist()
            text = httpx.get(f"{url}/metrics").text
            for name in ("docs", "code"):
                assert f'hybridindex_rows_added_total{{index="{name}"}} 20.0' in text
                assert f'hybridindex_compactions_total{{index="{name}"}} 1.0' in text
