"""OpenTelemetry traces: a server span per request, with its stages as children. Needs the extra ``traces``.

Off unless asked for (``serve --traces``) or the standard ``OTEL_*`` environment names a collector. Spans hold counts
and times; never a query, an answer, a key or the name of a session, which would give access to it. The SDK exports on
its own threads; what a collector does not accept is dropped.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from queue import SimpleQueue

from hybridindex import __version__
from hybridindex.errors import MissingDependencyError, how_to_install
from hybridindex.processes import OfOneProcess
from hybridindex.router.batch.stages import BatchReport
from hybridindex.types import SearchResult

try:
    from opentelemetry import context
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, SpanKind, StatusCode, get_current_span, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise MissingDependencyError(f"traces need OpenTelemetry: {how_to_install('traces')}") from error

__all__ = ["SearchTrace", "Traces", "to_collector"]

_log = logging.getLogger(__name__)

_PREFIX = "hybridindex."
#: Batches that may wait for their spans; more are dropped.
_MAX_PENDING = 4096
#: Longest wait for a collector at :meth:`Traces.close`.
_CLOSE_TIMEOUT_S = 5.0
_CONTEXT_HEADERS = ("traceparent", "tracestate")


class Traces(OfOneProcess):
    """Makes the spans of one service. :meth:`request` and :meth:`search` on the event loop."""

    def __init__(self, provider: TracerProvider) -> None:
        """``provider``: shut down by :meth:`close`."""
        self._provider = provider
        self._tracer = provider.get_tracer("hybridindex", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._pending: SimpleQueue[tuple[context.Context, float, BatchReport] | None] = SimpleQueue()
        #: Batches without spans: too many waited, or the SDK raised.
        self.n_dropped = 0
        self._writer = threading.Thread(target=self._write, name="hybridindex-traces", daemon=True)
        self._writer.start()

    @contextlib.contextmanager
    def request(
        self, method: str, headers: Mapping[bytes, bytes], request_id: str
    ) -> Iterator[Callable[[str, int], None]]:
        """The span of one HTTP request, current inside; a child of the caller's ``traceparent``.

        Yields a function to be called at the end with the route, a template and never a path that a client sent, and
        the status.
        """

        def answered(route: str, status: int) -> None:
            span.update_name(f"{method} {route}")
            span.set_attribute("http.route", route)
            span.set_attribute("http.response.status_code", status)
            if status >= 500:
                span.set_attribute("error.type", str(status))
                span.set_status(StatusCode.ERROR)

        carrier = {name: value.decode("latin-1") for name in _CONTEXT_HEADERS if (value := headers.get(name.encode()))}
        parent = self._propagator.extract(carrier, context=context.Context())
        attributes = {"http.request.method": method, f"{_PREFIX}request_id": request_id}
        span = self._tracer.start_span(method, parent, kind=SpanKind.SERVER, attributes=attributes)
        token = context.attach(set_span_in_context(span, parent))
        try:
            yield answered
        finally:
            context.detach(token)
            span.end()

    def search(self) -> SearchTrace | None:
        """Records one search below the current span; None where that span is not recorded."""
        span = get_current_span()
        return SearchTrace(self, span) if span.is_recording() else None

    def child(self, parent: context.Context, name: str, started_s: float, ended_s: float, **attributes: int) -> None:
        """A finished span, between two times of ``time.perf_counter``."""
        # One offset for both ends: the wall clock may be set meanwhile.
        offset_s = time.time() - time.perf_counter()
        span = self._tracer.start_span(
            _PREFIX + name,
            parent,
            attributes={_PREFIX + key: value for key, value in attributes.items()},
            start_time=_nanoseconds(started_s + offset_s),
        )
        span.end(_nanoseconds(max(started_s, ended_s) + offset_s))

    def later(self, parent: context.Context, submitted_s: float, report: BatchReport) -> None:
        """Queues a batch for the thread that makes its spans. Any thread; returns at once."""
        if self._pending.qsize() >= _MAX_PENDING:
            self._drop()
        else:
            self._pending.put((parent, submitted_s, report))

    def _drop(self) -> None:
        self.n_dropped += 1
        if self.n_dropped == 1:
            _log.warning("traces come faster than spans can be made; those of some batches are left out")

    def _write(self) -> None:
        while (item := self._pending.get()) is not None:
            try:
                self._batch(*item)
            except Exception:  # noqa: BLE001 - an error in the SDK must not affect searches
                self.n_dropped += 1
                _log.exception("a batch could not be traced")

    def _batch(self, parent: context.Context, submitted_s: float, report: BatchReport) -> None:
        size = {"batch": report.number, "batch_requests": report.n_requests, "batch_queries": report.n_queries}
        self.child(parent, "batch_queue", submitted_s, report.started_s, **size)
        for stage in report.stages:
            busy = {"busy_us": round(stage.busy_s * 1e6)} if stage.busy_s < stage.ended_s - stage.started_s else {}
            self.child(parent, stage.stage, stage.started_s, stage.ended_s, **size, **busy)

    def close(self) -> None:
        """Exports pending spans, for a few seconds at most. Closing twice is harmless."""
        self._pending.put(None)
        self._writer.join(_CLOSE_TIMEOUT_S)
        # The SDK would wait long for a collector that does not answer.
        ending = threading.Thread(target=self._provider.shutdown, name="hybridindex-traces-end", daemon=True)
        ending.start()
        ending.join(_CLOSE_TIMEOUT_S)
        if ending.is_alive():
            _log.warning("the collector of traces does not answer; the last spans are lost")


class SearchTrace:
    """Records one search: its wait for admission, its numbers, and the stages of its batch."""

    __slots__ = ("_parent", "_span", "_started_s", "_submitted_s", "_traces")

    def __init__(self, traces: Traces, span: Span) -> None:
        self._traces = traces
        self._span = span
        self._parent = set_span_in_context(span)
        self._started_s = self._submitted_s = time.perf_counter()

    def admitted(self) -> None:
        """Admission let it in."""
        self._submitted_s = time.perf_counter()
        self._traces.child(self._parent, "queue", self._started_s, self._submitted_s)

    def asked(self, *, n: int, k: int, nprobe: int, plan_id: int | None, session_id: str | None) -> None:
        """``nprobe``: before load or a deadline lowers it."""
        self._set(queries=n, k=k, nprobe=nprobe)
        if plan_id is not None:
            self._set(plan_id=plan_id)
        if session_id is not None:
            # Tells sessions apart, and gives no access to them.
            self._set(session=hashlib.sha256(session_id.encode()).hexdigest()[:12])

    def on_batch(self, report: BatchReport) -> None:
        """For the router's ``on_batch``; on its threads."""
        self._traces.later(self._parent, self._submitted_s, report)

    def answered(self, result: SearchResult) -> None:
        self._set(
            nprobe_used_min=int(result.nprobe_used.min()),
            nprobe_used_max=int(result.nprobe_used.max()),
            hit_rate=float(result.hit_rate.mean()),
        )

    def _set(self, **attributes: str | float) -> None:
        self._span.set_attributes({_PREFIX + name: value for name, value in attributes.items()})


def to_collector() -> Traces:
    """Traces exported by OTLP over HTTP, to where the standard ``OTEL_*`` environment says.

    Raises:
        MissingDependencyError: the exporter is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise MissingDependencyError(f"traces need an OTLP exporter: {how_to_install('traces')}") from error
    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "hybridindex", "service.version": __version__}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Traces(provider)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
