"""Traces of a real service, read from the SDK's own exporter in memory; and a collector that fails or never answers."""

from __future__ import annotations

import asyncio
import http.server
import logging
import threading
import time

import numpy as np
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from hybridindex.errors import MissingDependencyError, how_to_install
from hybridindex.service import daemon as run
from hybridindex.service.observe.traces import Traces, to_collector
from hybridindex.service.searches import Observation, SearchRequest
from tests.service.conftest import ask, talk

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
STAGES = ["queue", "batch_queue", "coarse", "split", "host_scan", "device_scan_0", "merge"]


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def traced(service, exporter):
    """A service with traces, and ``spans()`` that closes both and gives what was exported."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    service.traces = Traces(provider)
    yield service
    service.traces.close()


def spans_of(service, exporter):
    """Finished spans by name, once the router has told of its last batch and that is written."""
    service.router.close()
    service.traces.close()
    found: dict[str, list] = {}
    for span in exporter.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    return found


def test_a_request_has_a_span_with_its_numbers_and_one_for_each_stage(traced, exporter, queries):
    answer = ask(
        traced,
        "POST",
        "/v1/search",
        json={"queries": queries.tolist(), "k": 3, "nprobe": 20},
        headers={"x-request-id": "mine"},
    )
    assert answer.status_code == 200
    spans = spans_of(traced, exporter)
    (server,) = spans.pop("POST /v1/search")
    assert server.kind is SpanKind.SERVER
    assert server.parent is None
    assert dict(server.attributes) == {
        "http.request.method": "POST",
        "http.route": "/v1/search",
        "http.response.status_code": 200,
        "hybridindex.request_id": "mine",
        "hybridindex.queries": 20,
        "hybridindex.k": 3,
        "hybridindex.nprobe": 20,
        "hybridindex.nprobe_used_min": 20,
        "hybridindex.nprobe_used_max": 20,
        "hybridindex.hit_rate": pytest.approx(float(np.mean(answer.json()["hit_rate"]))),
        "hybridindex.plan_id": 1,
    }
    assert sorted(spans) == sorted(f"hybridindex.{stage}" for stage in STAGES)
    for (span,) in spans.values():
        assert span.parent.span_id == server.context.span_id
        assert span.context.trace_id == server.context.trace_id
        assert server.start_time <= span.start_time <= span.end_time
    for stage in STAGES[1:]:
        attributes = spans[f"hybridindex.{stage}"][0].attributes
        assert attributes["hybridindex.batch_requests"] == 1
        assert attributes["hybridindex.batch_queries"] == 20
    assert spans["hybridindex.coarse"][0].end_time <= spans["hybridindex.host_scan"][0].start_time
    # Its merges have pauses between them.
    merge = spans["hybridindex.merge"][0]
    assert 0 <= merge.attributes["hybridindex.busy_us"] * 1000 < merge.end_time - merge.start_time


def test_the_callers_trace_goes_on(traced, exporter, queries):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    ask(traced, "POST", "/v1/search", json={"queries": queries[0].tolist()}, headers=headers)
    spans = spans_of(traced, exporter)
    (server,) = spans["POST /v1/search"]
    assert f"{server.parent.span_id:016x}" == PARENT
    assert {f"{span.context.trace_id:032x}" for found in spans.values() for span in found} == {TRACE}
    assert server.context.trace_state["vendor"] == "1"


@pytest.mark.parametrize("header", ["nonsense", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{PARENT}", "\xff" * 300])
def test_a_parent_that_cannot_be_read_begins_a_trace(traced, exporter, header, queries):
    headers = {"traceparent": header.encode("latin-1")}
    assert ask(traced, "POST", "/v1/search", json={"queries": queries[0].tolist()}, headers=headers).status_code == 200
    (server,) = spans_of(traced, exporter)["POST /v1/search"]
    assert server.parent is None


def test_what_the_caller_does_not_sample_is_not_recorded(traced, exporter, queries):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    asked = []
    asearch = traced.router.asearch
    traced.router.asearch = lambda *args, **options: asked.append(options) or asearch(*args, **options)
    assert ask(traced, "POST", "/v1/search", json={"queries": queries[0].tolist()}, headers=headers).status_code == 200
    assert not spans_of(traced, exporter)
    assert asked == [{}]


def test_errors_and_other_routes(traced, exporter, monkeypatch):
    def broken():
        raise RuntimeError("secret /path")

    monkeypatch.setattr(traced, "history", broken)

    async def conversation(http):
        await http.post("/v1/search", json={"queries": []})
        await http.get("/v1/plans")
        await http.get("/nowhere/secret")
        for quiet in ("/livez", "/readyz", "/healthz", "/metrics"):
            await http.get(quiet)

    talk(traced, conversation)
    spans = spans_of(traced, exporter)
    assert sorted(spans) == ["GET /v1/plans", "GET unmatched", "POST /v1/search"]
    (refused,), (failed,) = spans["POST /v1/search"], spans["GET /v1/plans"]
    assert (refused.attributes["http.response.status_code"], refused.status.status_code) == (400, StatusCode.UNSET)
    assert (failed.attributes["http.response.status_code"], failed.status.status_code) == (500, StatusCode.ERROR)
    assert "secret" not in "".join(span.to_json() for found in spans.values() for span in found)


def test_a_session_is_told_apart_and_its_name_stays_secret(traced, exporter, queries):
    async def conversation(http):
        names = [(await http.post("/v1/sessions")).json()["session"] for _ in range(2)]
        for name in (names[0], names[0], names[1]):
            await http.post(f"/v1/sessions/{name}/search", json={"queries": queries.tolist()})
        return names

    names = talk(traced, conversation)
    spans = spans_of(traced, exporter)
    shown = [s.attributes["hybridindex.session"] for s in spans["POST /v1/sessions/{session}/search"]]
    assert shown[0] == shown[1] != shown[2]
    assert len(spans["hybridindex.coarse"]) == 3
    text = "".join(span.to_json() for found in spans.values() for span in found)
    assert not any(name in text for name in names)


def test_requests_of_one_batch_each_have_its_spans(traced, exporter, queries):
    """Without HTTP: what is current where the service is called is the parent."""
    request = SearchRequest(queries=queries[:2], k=2)

    async def one():
        with traced.traces.request("TEST", {}, "id"):
            await traced.search(request, "me")

    async def both():
        await asyncio.gather(one(), one())

    asyncio.run(both())
    spans = spans_of(traced, exporter)
    servers = {span.context.span_id for span in spans["TEST"]}
    assert {span.parent.span_id for span in spans["hybridindex.coarse"]} == servers
    assert len(servers) == 2


def test_nothing_is_recorded_without_a_span_or_without_traces(service, exporter, queries):
    seen: list[Observation] = []
    service.on_search.append(seen.append)
    asyncio.run(service.search(SearchRequest(queries=queries), "me"))
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    service.traces = Traces(provider)
    asyncio.run(service.search(SearchRequest(queries=queries), "me"))
    assert len(seen) == 2
    assert not spans_of(service, exporter)


def test_a_sampler_that_says_no_costs_no_spans(service, exporter, queries):
    provider = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    service.traces = Traces(provider)
    assert ask(service, "POST", "/v1/search", json={"queries": queries.tolist()}).status_code == 200
    assert not spans_of(service, exporter)


class BrokenExporter(SpanExporter):
    def __init__(self) -> None:
        self.n_calls = 0

    def export(self, spans):
        self.n_calls += 1
        raise RuntimeError("the collector is gone")


def test_an_exporter_that_raises_costs_nobody_an_answer(service, queries):
    expected = service.router.search(queries, 10)
    broken = BrokenExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(broken))
    service.traces = Traces(provider)
    for _ in range(3):
        answer = ask(service, "POST", "/v1/search", json={"queries": queries.tolist()})
        assert answer.json()["ids"] == expected.ids.tolist()
    spans_of(service, InMemorySpanExporter())
    assert broken.n_calls == 3 * (1 + len(STAGES))


def test_spans_that_cannot_be_made_are_counted_and_stop_nobody(traced, queries, monkeypatch, caplog):
    def broken(*_args, **_options):
        raise RuntimeError("a sampler")

    monkeypatch.setattr(traced.traces, "_batch", broken)
    monkeypatch.setattr(logging.getLogger("hybridindex"), "propagate", True)
    for _ in range(2):
        ask(traced, "POST", "/v1/search", json={"queries": queries[0].tolist()})
    traced.router.close()
    traced.traces.close()
    assert traced.traces.n_dropped == 2
    assert "could not be traced" in caplog.text


def test_what_comes_too_fast_is_dropped(traced, exporter, queries, monkeypatch):
    monkeypatch.setattr("hybridindex.service.observe.traces._MAX_PENDING", 0)
    assert ask(traced, "POST", "/v1/search", json={"queries": queries[0].tolist()}).status_code == 200
    spans = spans_of(traced, exporter)
    assert sorted(spans) == ["POST /v1/search", "hybridindex.queue"]
    assert traced.traces.n_dropped == 1


class Collector(http.server.BaseHTTPRequestHandler):
    """Keeps the bodies of what is posted; answers when it may."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.taken.append((self.path, body))
        assert self.server.may_answer.wait(300)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_args) -> None:
        pass


@pytest.fixture
def collector(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    server.taken, server.may_answer = [], threading.Event()
    server.may_answer.set()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield server
    server.may_answer.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_spans_reach_a_collector_under_our_name_unless_another_is_given(service, collector, queries, monkeypatch):
    for name in ("hybridindex", "mine"):
        if name == "mine":
            monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
        service.traces = to_collector()
        ask(service, "POST", "/v1/search", json={"queries": queries[0].tolist()})
        while "coarse" not in (seen := service.router.stats()).stages or seen.stages["coarse"].count < seen.batches:
            time.sleep(0.001)
        service.traces.close()
        path, body = collector.taken.pop()
        assert path == "/v1/traces"
        assert f"service.name\x12{chr(len(name) + 2)}\n{chr(len(name))}{name}".encode() in body
        assert b"POST /v1/search" in body


def test_a_collector_that_never_answers_delays_nothing(service, collector, queries, monkeypatch):
    monkeypatch.setattr("hybridindex.service.observe.traces._CLOSE_TIMEOUT_S", 0.05)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    collector.may_answer.clear()
    service.traces = to_collector()
    expected = service.router.search(queries, 10)

    async def conversation(http):
        for _ in range(5):
            answer = await http.post("/v1/search", json={"queries": queries.tolist()})
            assert_same_ids(answer, expected)
        while not collector.taken:
            await asyncio.sleep(0.001)
        assert_same_ids(await http.post("/v1/search", json={"queries": queries.tolist()}), expected)

    talk(service, conversation)
    service.traces.close()  # although it was never answered
    collector.may_answer.set()
    for thread in threading.enumerate():
        if thread.name == "hybridindex-traces-end":
            thread.join(300)


def assert_same_ids(answer, expected) -> None:
    assert answer.json()["ids"] == expected.ids.tolist()


@pytest.mark.parametrize(
    ("asked", "environment", "on"),
    [
        (None, {}, False),
        (True, {}, True),
        (False, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, False),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, True),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"}, True),
        (None, {"OTEL_TRACES_EXPORTER": "otlp"}, True),
        (None, {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, False),
        (True, {"OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_who_turns_traces_on(asked, environment, on):
    traces = run._open_traces(asked, environment)
    assert (traces is not None) == on
    if traces is not None:
        traces.close()


def test_without_the_extra_only_asking_for_traces_is_an_error(monkeypatch, caplog):
    import sys

    monkeypatch.delitem(sys.modules, "hybridindex.service.observe.traces")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setattr(logging.getLogger("hybridindex"), "propagate", True)
    with pytest.raises(MissingDependencyError, match=r"pip install 'opentelemetry-sdk"):
        run._open_traces(True, {})
    assert run._open_traces(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}) is None
    assert how_to_install("traces") in caplog.text
