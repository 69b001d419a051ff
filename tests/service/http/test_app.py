"""The HTTP interface: every route, every refusal as a problem document, exact answers in every format."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import shutil
import sys

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from hybridindex.answer_codec import ANSWER_TYPE, decode_answer
from hybridindex.config import RouterConfig
from hybridindex.service.config import Limits, ServiceConfig
from hybridindex.service.core import Service
from hybridindex.service.http.app import create_app
from hybridindex.service.http.problems import PROBLEM_TYPE
from tests.examples import examples
from tests.service.conftest import HERE, ask, assert_same, held_engine, talk
from tests.stuck import held_quantizer

RAW = {"content-type": "application/octet-stream"}


@pytest.fixture(scope="module")
def refusing(planned_index, tmp_path_factory):
    """One service for all requests that it refuses: they change nothing."""
    path = shutil.copytree(planned_index, tmp_path_factory.mktemp("refusing") / "idx")
    config = ServiceConfig(router=RouterConfig(devices=("cpu",)), limits=Limits(max_body_bytes=4096))
    service = Service.open(path, config, planning=HERE)
    service.warm_up()
    yield service
    service.close()
    service.router.check_invariants()
    service.admission.check_invariants()


def is_problem(answer, status, field=None):
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == PROBLEM_TYPE
    problem = answer.json()
    assert problem["status"] == status
    assert problem["request_id"] == answer.headers["x-request-id"]
    assert problem["type"].startswith("urn:hybridindex:problem:")
    assert problem["detail"]
    if field is not None:
        assert problem["field"] == field
    return problem


def test_every_format_gives_the_routers_answer(service, queries):
    expected = service.router.search(queries, 4, 5)
    stream = io.BytesIO()
    np.save(stream, queries)

    async def conversation(http):
        as_json = await http.post("/v1/search", json={"queries": queries.tolist(), "k": 4, "nprobe": 5})
        assert as_json.status_code == 200
        assert as_json.json()["ids"] == expected.ids.tolist()
        assert as_json.json()["distances"] == expected.distances.tolist()
        assert as_json.json()["nprobe_used"] == expected.nprobe_used.tolist()
        options = {"k": 4, "nprobe": 5}
        accept = {"accept": ANSWER_TYPE}
        raw = await http.post("/v1/search", content=queries.tobytes(), params=options, headers={**RAW, **accept})
        assert raw.headers["content-type"] == ANSWER_TYPE
        assert_same(decode_answer(raw.content), expected)
        npy = await http.post(
            "/v1/search",
            content=stream.getvalue(),
            params=options,
            headers={"content-type": "application/x-npy", **accept},
        )
        assert_same(decode_answer(npy.content), expected)

    talk(service, conversation)


def test_too_many_queries_are_refused(service, queries):
    many = np.tile(queries, (600, 1))
    assert len(many) > service.config.limits.max_queries
    is_problem(ask(service, "POST", "/v1/search", content=many.tobytes(), headers=RAW), 400, "queries")


def test_requests_above_a_mebibyte_are_exact(make_service, queries):
    service = make_service(limits={"max_queries": 20_000, "in_flight_queries": 20_000})
    many = np.tile(queries, (600, 1))
    assert many.nbytes > 1 << 20
    expected = service.router.search(many, 3)

    async def conversation(http):
        raw = await http.post(
            "/v1/search", content=many.tobytes(), params={"k": 3}, headers={**RAW, "accept": ANSWER_TYPE}
        )
        assert_same(decode_answer(raw.content), expected)
        text = json.dumps({"queries": many.tolist(), "k": 3})
        answer = await http.post("/v1/search", content=text, headers={"content-type": "application/json"})
        assert answer.json()["ids"] == expected.ids.tolist()

    talk(service, conversation)


@pytest.mark.parametrize(
    ("status", "field", "request_"),
    [
        (400, "k", {"json": {"queries": [0] * 24, "k": 0}}),
        (400, "nprobe", {"json": {"queries": [0] * 24, "nprobe": 25}}),
        (400, "queries", {"json": {"queries": [0] * 23}}),
        (400, "queries", {"json": {"queries": [1e300] * 24}}),
        (400, "queries", {"content": np.full(24, np.nan, np.float32).tobytes(), "headers": RAW}),
        (400, "body", {"content": b"{", "headers": {"content-type": "application/json"}}),
        (400, "n", {"content": b"", "headers": RAW}),
        (413, "body", {"content": b"0" * 5000, "headers": RAW}),
        (413, "body", {"content": b"0", "headers": {**RAW, "content-length": "0" * 5000 + "1"}}),
        (415, "Content-Type", {"content": b"<x/>", "headers": {"content-type": "text/xml"}}),
        (415, "Content-Encoding", {"content": b"x", "headers": {**RAW, "content-encoding": "gzip"}}),
    ],
)
def test_wrong_searches_are_problems_that_name_the_field(refusing, status, field, request_):
    is_problem(ask(refusing, "POST", "/v1/search", **request_), status, field)
    assert refusing.admission.n_in_flight == 0


def test_a_body_of_unsaid_length_is_counted_as_it_comes(make_service):
    service = make_service(limits={"max_body_bytes": 4096})
    sent = 0

    async def stream():
        nonlocal sent
        for _ in range(100):
            sent += 1000
            yield b"0" * 1000

    is_problem(ask(service, "POST", "/v1/search", content=stream(), headers=RAW), 413, "body")


def test_a_body_that_does_not_come_is_408(make_service):
    service = make_service(limits={"client_timeout_s": 0.01})

    async def stream():
        yield b"0"
        await asyncio.Event().wait()

    is_problem(ask(service, "POST", "/v1/search", content=stream(), headers=RAW), 408)


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v2", 404), ("GET", "/v1/search", 405), ("PUT", "/", 405)]
)
def test_what_is_not_there_is_a_problem_too(service, method, path, status):
    is_problem(ask(service, method, path), status)


def test_a_request_keeps_its_id_if_it_is_a_plain_one(service):
    assert ask(service, "GET", "/livez", headers={"x-request-id": "abc-1.2"}).headers["x-request-id"] == "abc-1.2"
    for bad in ("a b", "x" * 65, "a\tb", ""):
        assert ask(service, "GET", "/livez", headers={"x-request-id": bad}).headers["x-request-id"] != bad


def test_an_error_inside_tells_only_the_log(service, monkeypatch, caplog, queries):
    def fail(*_args, **_options):
        raise ZeroDivisionError("/secret/path")

    monkeypatch.setattr(service.router, "asearch", fail)
    with caplog.at_level(logging.ERROR, "hybridindex.access"):
        answer = ask(service, "POST", "/v1/search", json={"queries": queries[0].tolist()})
    is_problem(answer, 500)
    assert "secret" not in answer.text
    assert "ZeroDivisionError" in caplog.text
    assert service.admission.n_in_flight == 0


def test_sessions_over_http(service, queries):
    expected = service.router.search(queries, 3)

    async def conversation(http):
        opened = await http.post("/v1/sessions", json={"lookahead_bytes": 1 << 20})
        assert opened.status_code == 201
        path = f"/v1/sessions/{opened.json()['session']}"
        ahead = await http.post(f"{path}/lookahead", json={"queries": queries.tolist(), "nprobe": 4})
        assert (ahead.status_code, ahead.json()) == (202, {"started": True, "dropped": 0})
        found = await http.post(f"{path}/search", json={"queries": queries.tolist(), "k": 3})
        assert found.json()["ids"] == expected.ids.tolist()
        stats = await http.get(path)
        assert stats.json()["searches"] == 1
        assert stats.json()["lookaheads"] == 1
        assert (await http.delete(path)).status_code == 204
        for method, where in (
            ("DELETE", path),
            ("GET", path),
            ("POST", f"{path}/search"),
            ("POST", f"{path}/lookahead"),
        ):
            body = {"json": {"queries": queries[0].tolist()}} if method == "POST" else {}
            is_problem(await http.request(method, where, **body), 404, "session")
        is_problem(await http.post("/v1/sessions", json={"lookahead_bytes": -1}), 400, "lookahead_bytes")
        is_problem(await http.post("/v1/sessions", json={"bytes": 1}), 400)

    talk(service, conversation)
    assert len(service.sessions) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("apply", 1),
        ("slo_ms", "fast"),
        ("slo_ms", -1),
        ("rate_qps", None),
        ("coverage", True),
        ("coverage", 2),
        ("bandwidth_share", 0),
        ("bandwidth_share", 5e-324),
        ("bandwidth_share", [1]),
        ("device_budget_bytes", "1GiB"),
        ("device_budget_bytes", ["x"]),
        ("device_budget_bytes", -1),
    ],
)
def test_wrong_changes_are_problems_and_change_nothing(refusing, field, value):
    answer = ask(refusing, "POST", "/v1/repartition", json={"apply": True, "slo_ms": 50, "coverage": 0.4, field: value})
    problem = is_problem(answer, 400)
    assert field in problem["detail"]
    assert len(refusing.store.list_plans()) == 1


def test_a_coverage_in_words_is_told_the_one_word_there_is(service):
    answer = ask(service, "POST", "/v1/repartition", json={"coverage": "solved"})
    assert answer.status_code == 400
    assert answer.json()["detail"] == "coverage is 'solved'; expected a number 0..1, or 'solve'"


@pytest.mark.parametrize("path", ["/v1/repartition", "/v1/sessions", "/v1/drain"])
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_what_a_form_can_send_changes_nothing(refusing, path, kind):
    body = b'{"apply": true}' if path == "/v1/repartition" else b"{}"
    answer = ask(refusing, "POST", path, content=body, headers={"content-type": kind})
    is_problem(answer, 415, "Content-Type")
    assert refusing.ready
    assert len(refusing.sessions) == 0
    assert len(refusing.store.list_plans()) == 1


def test_sessions_are_limited(make_service):
    service = make_service(limits={"max_sessions": 1})

    async def conversation(http):
        assert (await http.post("/v1/sessions")).status_code == 201
        refused = await http.post("/v1/sessions")
        is_problem(refused, 503)
        assert int(refused.headers["retry-after"]) >= 1

    talk(service, conversation)


def test_readiness_follows_warming_up_and_draining(make_service, monkeypatch):
    service = make_service(warm=False)
    forget, warmed = service.router.forget_load, []
    monkeypatch.setattr(service.router, "forget_load", lambda: (warmed.append(service.router.stats()), forget()))
    is_problem(ask(service, "GET", "/readyz"), 503)
    assert ask(service, "GET", "/livez").text == "ok\n"
    service.warm_up()
    assert ask(service, "GET", "/readyz").text == "ok\n"
    # Every tier that holds lists scanned something.
    (stats,) = warmed
    assert stats.device_work_bytes > 0
    assert stats.host_work_bytes > 0
    # Nobody asked for that.
    counted = ask(service, "GET", "/v1/status").json()["router"]
    assert (counted["queries"], counted["batches"], counted["hit_rate"], counted["stages"]) == (0, 0, 0, {})
    assert ask(service, "POST", "/v1/drain").status_code == 202
    is_problem(ask(service, "GET", "/readyz"), 503)
    refused = ask(service, "POST", "/v1/search", json={"queries": [0] * 24})
    is_problem(refused, 503)
    assert refused.headers["connection"] == "close"
    is_problem(ask(service, "POST", "/v1/sessions"), 503)


def test_a_lookahead_says_what_it_dropped_and_a_drain_drops_the_rest(make_service, queries, monkeypatch):
    service = make_service(router={"lookahead_queue_bytes": 1 << 14})
    entered, resume = held_quantizer(service.index.ivf, monkeypatch)

    async def conversation(http):
        path = f"/v1/sessions/{(await http.post('/v1/sessions', json={})).json()['session']}"
        asked = {"queries": queries[:4].tolist(), "nprobe": 4}
        await http.post(f"{path}/lookahead", json=asked)
        assert await asyncio.to_thread(entered.wait, 30)
        answers = [(await http.post(f"{path}/lookahead", json=asked)).json() for _ in range(20)]
        assert [each["dropped"] for each in answers] == [0] * 6 + [1] * 14
        router = (await http.get("/v1/status")).json()["router"]
        assert router["lookahead_dropped"] == 14
        assert 0 < router["lookahead_waiting_bytes"] <= 1 << 14
        assert "hybridindex_lookahead_dropped_total 14.0" in (await http.get("/metrics")).text
        await http.post("/v1/drain")
        assert service.router.stats().lookahead_waiting_bytes == 0
        is_problem(await http.post(f"{path}/lookahead", json=asked), 503)
        resume.set()

    talk(service, conversation)
    assert service.router.stats().lookahead_dropped == 20


def test_a_daemon_that_cannot_warm_up_lives_and_is_not_ready(make_service, monkeypatch, caplog):
    service = make_service(warm=False)

    def fail():
        raise RuntimeError("a disk that cannot be read")

    monkeypatch.setattr(service, "warm_up", fail)

    async def run():
        app = create_app(service)
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://daemon") as http,
        ):
            async with asyncio.timeout(300):
                while "warming up failed" not in caplog.text:
                    await asyncio.sleep(0.01)
            return [(await http.get(path)).status_code for path in ("/livez", "/readyz")]

    assert asyncio.run(run()) == [200, 503]
    assert "warming up failed" in caplog.text
    assert "a disk that cannot be read" in caplog.text


def test_health_names_what_is_wrong(service, queries):
    healthy = ask(service, "GET", "/healthz")
    assert healthy.status_code == 200
    assert {c["name"] for c in healthy.json()["checks"]} >= {
        "disk",
        "control store",
        "device cpu (stand-in)",
        "fallbacks",
    }
    service.store.close()
    sick = ask(service, "GET", "/healthz")
    assert sick.status_code == 503
    assert [c["name"] for c in sick.json()["checks"] if not c["ok"]] == ["control store"]


def test_a_failed_device_shows_everywhere_and_answers_stay(service, queries):
    expected = service.router.search(queries, 5)
    service.router._served.recovery.close()  # it would try again, and find nothing wrong
    service.router.devices[0].fail(RuntimeError("it broke"))
    answer = ask(service, "POST", "/v1/search", json={"queries": queries.tolist(), "k": 5})
    assert answer.json()["ids"] == expected.ids.tolist()
    sick = ask(service, "GET", "/healthz")
    assert sick.status_code == 503
    wrong = {c["name"]: c["detail"] for c in sick.json()["checks"] if not c["ok"]}
    assert wrong.pop("device cpu (stand-in)") == "failed 1 time(s)"
    assert list(wrong) == ["fallbacks"]  # its lists have no place now
    assert ask(service, "GET", "/v1/status").json()["devices"][0]["failed"]
    assert service.router.stats().device_failures == 1


def test_a_stored_plan_is_applied_and_an_infeasible_one_only_by_force(service):
    bad = service.store.save_plan(service.index.plan(0.001, 16 << 20).to_record(), 1)
    apply = f"/v1/plans/{bad}/apply"
    dry = ask(service, "POST", apply, json={"dry_run": True})
    assert (dry.status_code, dry.json()["applied"], dry.json()["plan_id"]) == (200, False, bad)
    for path, body in ((apply, {}), ("/v1/repartition", {"apply": True, "slo_ms": 0.001, "coverage": "solve"})):
        refused = ask(service, "POST", path, json=body)
        is_problem(refused, 409)
        assert refused.json()["type"] == "urn:hybridindex:problem:infeasible-plan"
        assert refused.json()["field"] == "force"
    assert service.plan_id == 1
    assert ask(service, "POST", apply, json={"force": True}).json()["plan_id"] == bad == service.plan_id
    is_problem(ask(service, "POST", "/v1/plans/99/apply"), 404)
    for field, value in (("force", "yes"), ("dry_run", 1), ("bandwidth_share", 0.001), ("bandwidth_share", "half")):
        wrong = ask(service, "POST", apply, json={field: value})
        is_problem(wrong, 400)
        assert wrong.json()["field"] == field


def test_the_openapi_document_describes_every_route_and_its_examples_work(service):
    schema = ask(service, "GET", "/v1/openapi.json").json()
    assert len(schema["paths"]) == 27
    assert "Problem" in schema["components"]["schemas"]
    for path in ("/v1/search", "/v1/vectors", "/v1/sessions", "/v1/repartition", "/v1/plans/{plan}/apply"):
        example = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["example"]
        if "queries" in example:
            example["queries"] = [[0.1] * 24]
            example["nprobe"] = 4
        assert ask(service, "POST", path.replace("{plan}", "1"), json=example).status_code in (200, 201)


@examples(80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=400),
    st.sampled_from(["application/octet-stream", "application/x-npy", "application/json", "", "x/y; q"]),
    st.dictionaries(st.sampled_from(["n", "d", "k", "nprobe", "deadline_ms", "min_nprobe", "z"]), st.text(max_size=12)),
    st.booleans(),
)
def test_no_body_makes_an_internal_error(service, body, kind, options, magic):
    if magic:
        body = b"\x93NUMPY\x01\x00" + body
    answer = ask(service, "POST", "/v1/search", content=body, params=options, headers={"content-type": kind})
    assert answer.status_code in (200, 400, 413, 415), answer.text
    if answer.status_code != 200:
        assert answer.headers["content-type"] == PROBLEM_TYPE


def test_overload_is_refused_with_retry_after_and_loses_nothing(make_service, queries):
    service = make_service(limits={"queue_queries": 8, "in_flight_queries": 2})
    expected = service.router.search(queries, 3)

    async def conversation(http):
        async def search(row):
            return await http.post("/v1/search", json={"queries": queries[row].tolist(), "k": 3})

        with held_engine(service.router, queries) as gate:
            tasks = [asyncio.create_task(search(row)) for row in range(12)]
            # The share of one client is four queries: two are searched, four wait, six are refused.
            while sum(t.done() for t in tasks) < 6:
                await asyncio.sleep(0)
            refused = [t for t in tasks if t.done()]
            assert service.admission.n_waiting == 4
            assert service.admission.n_in_flight == 2
            gate.set()
            answers = await asyncio.gather(*tasks)
        for row, (task, answer) in enumerate(zip(tasks, answers, strict=True)):
            if task in refused:
                is_problem(answer, 429)
                assert 1 <= int(answer.headers["retry-after"]) <= 30
            else:
                assert answer.json()["ids"] == expected.ids[row : row + 1].tolist()
        assert len(refused) == 6
        again = await search(11)
        assert again.status_code == 200

    talk(service, conversation)
    assert service.admission.refused["client"] == 6


def test_a_deadline_passes_in_the_queue_without_a_search(make_service, queries):
    service = make_service(limits={"in_flight_queries": 1})

    async def conversation(http):
        with held_engine(service.router, queries) as gate:
            first = asyncio.create_task(http.post("/v1/search", json={"queries": queries[0].tolist()}))
            while service.admission.n_in_flight == 0:
                await asyncio.sleep(0)
            late = await http.post("/v1/search", json={"queries": queries[1].tolist(), "deadline_ms": 1})
            is_problem(late, 504, "deadline_ms")
            gate.set()
            assert (await first).status_code == 200

    before = service.router.stats().queries
    talk(service, conversation)
    assert service.router.stats().queries == before + 2  # the held one and the first


def test_overload_lowers_nprobe_only_where_allowed_and_says_so(make_service, queries):
    service = make_service(
        limits={"queue_queries": 4, "client_share": 1, "in_flight_queries": 1, "overload_min_nprobe": 2}
    )

    async def conversation(http):
        async def search():
            return (await http.post("/v1/search", json={"queries": queries[0].tolist()})).json()["nprobe_used"][0]

        with held_engine(service.router, queries) as gate:
            tasks = [asyncio.create_task(search()) for _ in range(5)]
            while service.admission.n_waiting < 4:
                await asyncio.sleep(0)
            gate.set()
            return await asyncio.gather(*tasks)

    used = talk(service, conversation)
    assert used[0] == 6
    assert used[1] < 6
    assert min(used) >= 2
    assert used[-1] == 6


def test_memory_does_not_grow_with_requests(service, queries, monkeypatch):
    import gc
    import tracemalloc

    def held():
        # Requests of the client refer to themselves: what waits for the collector is not held by the daemon.
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    # Log lines that are kept for a test's report would be counted.
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    # The client looks for a missing module with each request, and the search for it interns a path: in a long run of
    # tests the interpreter's table of such strings has megabytes, and is allocated anew when entries came and went.
    monkeypatch.setitem(sys.modules, "sniffio", None)
    body = queries[:1].tobytes()

    async def conversation(http):
        async def some(number):
            for _ in range(number):
                answer = await http.post("/v1/search", content=body, headers={**RAW, "accept": ANSWER_TYPE})
                assert answer.status_code == 200
                await http.get("/v1/none")

        await some(100)
        tracemalloc.start()
        try:
            await some(100)
            before = held()
            await some(700)
            return held() - before
        finally:
            tracemalloc.stop()

    assert talk(service, conversation) < 60_000


def test_options_that_are_given_twice_are_refused(service):
    for path in ("/v1/series", "/v1/events"):
        answer = ask(service, "GET", f"{path}?since=0&since=1")
        is_problem(answer, 400)
        assert "names an option twice" in answer.json()["detail"]


def test_options_that_a_route_has_not_are_refused(service):
    """``apply=true`` beside a body used to be passed over, and the answer was that of a dry run."""
    asked = [("GET", "/v1/events?limt=5", "'limt'"), ("GET", "/v1/series?until=5", "'until'")]
    posts = ("/v1/repartition?apply=true", "/v1/plans/1/apply?apply=true", "/v1/drain?apply=true")
    for method, path, name in [*asked, *(("POST", path, "'apply'") for path in posts)]:
        answer = ask(service, method, path)
        is_problem(answer, 400)
        assert name in answer.json()["detail"]
    assert not service.admission.draining
