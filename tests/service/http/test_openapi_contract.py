"""The OpenAPI document and the daemon hold each other to their word: schemathesis over every route of a real one.

What the document allows and what it forbids is sent; no answer is 500, every status, type, header and body is one that
the document names, what it forbids is refused, and nothing is answered without a key. Bodies that no document can
describe are in ``test_binary_fuzz.py``. The profile ``deep`` sends many more.
"""

from __future__ import annotations

import io
import shutil
from collections import Counter

import httpx
import numpy as np
import pytest
import schemathesis

# Loaded before there are threads: compiling a module beside them can fail on Python 3.11.
import schemathesis.specs.openapi.schemas
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.engine import events, from_schema

import hybridindex as hx
from hybridindex.answer_codec import ROWS_TYPE, encode_rows
from hybridindex.config import RouterConfig
from hybridindex.rag.documents import Document, write_documents
from hybridindex.refresh.refresher import RefreshConfig, Refresher
from hybridindex.service.auth import KeyFile, Keyring
from hybridindex.service.config import DocumentConfig, Limits, ServiceConfig
from hybridindex.service.core import Service
from tests.clustered import DIM
from tests.examples import examples
from tests.llm_double import LLMDouble
from tests.service.conftest import HERE
from tests.service.live import live

pytestmark = pytest.mark.hypothesis

#: Per route.
EXAMPLES = examples(5).max_examples


def _rows(n: int) -> np.ndarray:
    return np.random.default_rng(n).standard_normal((n, DIM)).astype(np.float32)


def _npy(n: int) -> bytes:
    stream = io.BytesIO()
    np.save(stream, _rows(n))
    return stream.getvalue()


# What no schema can say of bytes: how many there have to be.
schemathesis.openapi.media_type("application/octet-stream", st.integers(1, 5).map(lambda n: _rows(n).tobytes()))
schemathesis.openapi.media_type("application/x-npy", st.integers(1, 5).map(_npy))
schemathesis.openapi.media_type(ROWS_TYPE, st.integers(1, 5).map(lambda n: encode_rows(_rows(n), None)))


@pytest.fixture(scope="module")
def served(planned_index, tmp_path_factory):
    """(port, key of an admin, service) of a daemon with keys; its device moves lists for sessions, its refresher keeps
    queries and has no turns of its own."""
    folder = tmp_path_factory.mktemp("contract")
    keys = KeyFile(folder / "keys.json")
    key = keys.add("ops", "admin")
    path = shutil.copytree(planned_index, folder / "idx")
    with hx.open(path) as index:
        index.set_attributes({"year": np.arange(index.count) % 40 + 1980})
        told = {"index_fingerprint": index.fingerprint, "embedder": "openai:toy", "dim": index.dim}
        write_documents(path / "documents.sqlite", [Document(id=5, text="five")], **told)
    limits = Limits(max_sessions=10_000, max_body_bytes=1 << 20)
    double = LLMDouble()
    double.vectors_of = lambda texts: _rows(len(texts))
    documents = DocumentConfig(embedder_url=double.url)
    service = Service.open(
        path,
        ServiceConfig(router=RouterConfig(devices=("cpu",)), limits=limits, documents=documents),
        make_refresher=lambda *parts: Refresher(*parts, RefreshConfig(planning="here", tick_s=3600)),
        planning=HERE,
    )
    # The plan, which other routes tell of, is of this generation.
    service.rows.compact = lambda: {"compacted": False, "generation": 1}
    try:
        with double, live(service, Keyring(keys.path)) as port:
            yield port, key, service
        assert service.admission.n_in_flight == service.admission.n_waiting == 0
        service.admission.check_invariants()
        service.sessions.close_all()
        service.router.check_invariants()
    finally:
        service.close()


@pytest.fixture(scope="module")
def document(served):
    port, key, _ = served
    return httpx.get(f"http://127.0.0.1:{port}/v1/openapi.json", headers={"authorization": f"Bearer {key}"}).json()


@schemathesis.hook
def before_call(context, case, kwargs):
    """Takes away what no OpenAPI document can forbid: options beside a JSON body, a row count that another body has,
    vectors that are too long, conditions that are none, ids and attributes of other rows, keys of other changes,
    documents of one source, and with metadata of another kind."""
    if case.meta.generation.mode is not GenerationMode.POSITIVE:
        return
    case.headers.pop("Idempotency-Key", None)
    if case.path.endswith("/vectors"):
        case.query = {}
        if isinstance(case.body, dict):
            vectors = np.atleast_2d(np.clip(case.body["vectors"], -1e17, 1e17))
            beside = {"ids": list(range(len(vectors))), "attributes": {"year": [1990] * len(vectors)}, "mode": "upsert"}
            case.body = {"vectors": vectors.tolist(), **{name: beside[name] for name in beside if name in case.body}}
            if case.body.get("ids") is None:
                case.body.pop("mode", None)
            elif "mode" not in case.body:
                del case.body["ids"]
    if case.path.endswith("/documents") and isinstance(case.body, dict):
        each = {document["source"]: document for document in case.body["documents"]}
        for document in each.values():
            document.get("metadata", {}).pop("year", None)
        case.body = {**case.body, "documents": list(each.values())}
    if case.query:
        wrong = {"application/json": set(case.query), "application/x-npy": {"n", "d"}}.get(case.media_type, {"n"})
        case.query = {name: value for name, value in case.query.items() if name not in wrong}
    if isinstance(case.body, dict) and "queries" in case.body:
        case.body = {**case.body, "queries": np.clip(case.body["queries"], -1e17, 1e17).tolist()}
    if isinstance(case.body, dict) and "where" in case.body:
        case.body = {**case.body, "where": "year >= 2015"}


class InterpreterFlawError(Exception):
    """CPython 3.11 loses count of its own depth where two threads compile at once (python/cpython#106905)."""


def failures(document, port, key, **config):
    """What schemathesis complains of, once each, and how many requests of each status it sent."""
    generation = {"max-examples": EXAMPLES, "deterministic": EXAMPLES <= 10}
    settings = schemathesis.Config.from_dict(
        {
            "seed": 1,
            "base-url": f"http://127.0.0.1:{port}",
            "headers": {"Authorization": f"Bearer {key}"},
            "request-timeout": 60,
            "continue-on-failure": True,
            "checks": {
                "not_a_server_error": {"expected-statuses": ["2xx", "3xx", "4xx", 503, 504]},
                # Too many rows may make a body that is too large before it is read.
                "negative_data_rejection": {"expected-statuses": [*range(400, 430), "5xx"]},
            },
            # Of the methods that a route has not, two answer for the others.
            "phases": {"coverage": {"unexpected-methods": ["PATCH", "TRACE"]}},
            "generation": {**generation, **config.pop("generation", {})},
            **config,
        }
    )
    schema = schemathesis.openapi.from_dict(document, config=settings)
    found, statuses = {}, Counter()
    for event in from_schema(schema).execute():
        if isinstance(event, events.FatalError | events.NonFatalError):
            cause = event.exception if isinstance(event, events.FatalError) else event.value
            if "AST constructor recursion depth mismatch" in str(cause):
                raise InterpreterFlawError from cause
            raise AssertionError(f"schemathesis gave up: {event}") from cause
        if not isinstance(event, events.ScenarioFinished):
            continue
        for case_id, interaction in event.recorder.interactions.items():
            if interaction.response is not None:
                statuses[event.recorder.cases[case_id].value.operation.label, interaction.response.status_code] += 1
        for checks in event.recorder.checks.values():
            for check in checks:
                if check.failure_info is not None:
                    failure = check.failure_info.failure
                    text = f"{failure.title}: {failure.message}\n{check.failure_info.code_sample}"
                    found.setdefault((event.recorder.label, check.name, failure.title), text)
    return found, statuses


def test_requests_allowed_and_forbidden_get_described_answers(served, document):
    """Among the slowest: nine of ten requests are the systematic ones that schemathesis derives from the document.

    Fewer of them would leave limits and required fields untried; nothing else tries them all.
    """
    port, key, _ = served
    for attempt in range(3):
        try:
            found, statuses = failures(document, port, key)
            break
        except InterpreterFlawError:
            assert attempt < 2
    assert not found, "\n\n".join(f"{' | '.join(where)}\n{text[:1500]}" for where, text in found.items())
    # Every route was reached, and answered in every way that needs no fault or crowd.
    routes = {(f"{method.upper()} {path}") for path, ways in document["paths"].items() for method in ways}
    assert {label for label, status in statuses if status < 300} == routes
    open_to_all = {"GET /livez", "GET /readyz"}
    assert {label for label, status in statuses if status == 401} == routes - open_to_all
    assert {label for label, status in statuses if status == 405} >= routes - {"DELETE /v1/sessions/{session}"}
    assert statuses["POST /v1/search", 400] >= EXAMPLES <= statuses["POST /v1/search", 200]
