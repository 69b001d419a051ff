"""Prometheus metrics of one service. Latencies are observed; everything else is read at a scrape.

Stages of a request: ``parse``, ``queue`` (admission), ``search`` (all that the router does) and ``encode``. Stages of
the router's batches: those of :mod:`hybridindex.router.batch.stages`; its queue is ``batch_queue`` here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from hybridindex.errors import MissingDependencyError, how_to_install
from hybridindex.router.batch.stages import LOOKAHEAD_WAIT, BatchReport, StageSum
from hybridindex.service.cluster.member import Member
from hybridindex.service.core import Service
from hybridindex.service.describe import describe
from hybridindex.service.searches import Observation

try:
    from prometheus_client import CollectorRegistry, Counter, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
    from prometheus_client.metrics_core import Metric as MetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise MissingDependencyError(f"metrics need prometheus-client: {how_to_install('service')}") from error

from hybridindex.service.observe.histograms import Buckets, Histogram

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric
    from prometheus_client.samples import Sample

__all__ = ["CONTENT_TYPE", "Metrics", "render"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
#: Stages can be far shorter than requests.
_STAGE_SECONDS = (0.00005, 0.0001, 0.00025, *_SECONDS)
_QUERIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
_TENTHS = tuple(i / 10 for i in range(1, 11))
_PREFIX = "hybridindex_"


class Metrics:
    """One registry. ``observe`` and ``count_response`` on the event loop, the others on any thread."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.registry = CollectorRegistry()
        self._stages = Histogram(
            f"{_PREFIX}stage_seconds",
            "Time by stage: of a request (parse, queue, search, encode) or of a batch of the router.",
            _STAGE_SECONDS,
            "stage",
        )
        self._latency = Histogram(
            f"{_PREFIX}request_seconds", "Time from a request's arrival to its answer, by route.", _SECONDS, "route"
        )
        self._responses = Counter(
            f"{_PREFIX}responses_total", "Answers by route and status.", ["route", "status"], registry=self.registry
        )
        sizes = Histogram(f"{_PREFIX}request_queries", "Queries per search request.", _QUERIES)
        hit_rates = Histogram(f"{_PREFIX}hit_rate", "Mean hit rate by bytes of each request.", _TENTHS)
        self._sizes, self._hit_rate = sizes.of(), hit_rates.of()
        for family in (self._stages, self._latency, sizes, hit_rates):
            self.registry.register(family)
        self._met = Counter(
            f"{_PREFIX}slo_met_total", "Searches answered within the SLO, waiting included.", registry=self.registry
        )
        self._judged = Counter(
            f"{_PREFIX}slo_judged_total", "Searches answered while an SLO was in force.", registry=self.registry
        )
        self._lowered = Counter(
            f"{_PREFIX}overload_lowered_total", "Searches whose nprobe a full queue lowered.", registry=self.registry
        )
        self._partial = Counter(
            f"{_PREFIX}partial_answers_total",
            "Searches with a partial answer, which they allowed.",
            registry=self.registry,
        )
        self._missing = Counter(
            f"{_PREFIX}missing_coverage_total",
            "What partial answers lacked: the sum over queries of 1 - coverage.",
            registry=self.registry,
        )
        # A look-up of a label takes longer than an observation.
        self._stage = {name: self._stages.of(name) for name in ("parse", "queue", "search", "encode", "batch_queue")}
        self._of_route: dict[tuple[str, int], tuple[Counter, Buckets]] = {}
        self.registry.register(_Readings(service))
        service.on_search.append(self.observe)
        service.router.on_batch.append(self.observe_batch)

    def observe(self, seen: Observation) -> None:
        """Counts one answered search."""
        self._stage["queue"].observe(seen.queue_s)
        self._stage["search"].observe(seen.search_s)
        self._sizes.observe(len(seen.queries))
        self._hit_rate.observe(seen.hit_rate_sum / len(seen.queries))
        if seen.lowered:
            self._lowered.inc()
        coverage = seen.result.coverage
        if coverage is not None:
            self._partial.inc()
            self._missing.inc(float((1.0 - coverage).sum()))
        slo_ms = self._service.slo_ms
        if slo_ms is not None:
            self._judged.inc()
            if seen.latency_s * 1e3 <= slo_ms:
                self._met.inc()

    def observe_batch(self, seen: BatchReport) -> None:
        """Counts one batch of the router."""
        for waited in seen.queue_s:
            self._stage["batch_queue"].observe(waited)
        for time in seen.stages:
            stage = self._stage.get(time.stage)
            if stage is None:
                # One per stage and device. Two threads at once find the same one.
                stage = self._stage[time.stage] = self._stages.of(time.stage)
            stage.observe(time.busy_s)

    def time_stage(self, stage: str, seconds: float) -> None:
        """``stage``: "parse" or "encode"."""
        self._stage[stage].observe(seconds)

    def count_response(self, route: str, status: int, seconds: float) -> None:
        """Counts an answer. ``route`` is a template, never a path that a client sent."""
        known = self._of_route.get((route, status))
        if known is None:
            known = self._responses.labels(route, str(status)), self._latency.of(route)
            self._of_route[route, status] = known
        known[0].inc()
        known[1].observe(seconds)

    def render(self) -> bytes:
        """The text format."""
        return generate_latest(self.registry)


def render(metrics: Mapping[str, Metrics]) -> bytes:
    """The text format of several indexes: the label ``index`` says whose a value is. A single one has no label.

    Answers by route are counted by the first for all; the route has the index's name. The memory of requests is one
    for all: the first tells of it.
    """
    if len(metrics) == 1:
        return next(iter(metrics.values())).render()
    registry = CollectorRegistry()
    registry.register(_Labelled(metrics))
    return generate_latest(registry)


def _is_of_all(sample: Sample) -> bool:
    return sample.name == f"{_PREFIX}request_memory_bytes" or sample.labels.get("reason") in ("memory", "client memory")


class _Labelled(Collector):
    """The families of several indexes as one, with a label."""

    def __init__(self, metrics: Mapping[str, Metrics]) -> None:
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for at, (name, one) in enumerate(self._metrics.items()):
            for family in one.registry.collect():
                merged = families.setdefault(family.name, MetricFamily(family.name, family.documentation, family.type))
                merged.samples += [
                    sample if "route" in sample.labels else sample._replace(labels={"index": name, **sample.labels})
                    for sample in family.samples
                    if at == 0 or not _is_of_all(sample)
                ]
        yield from families.values()


class _Readings(Collector):
    """Values that are read from the service at a scrape."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> list[Metric]:
        return []  # registering must not read the service

    def collect(self) -> Iterator[Metric]:
        service = self._service
        yield from self._router(service)
        yield from self._devices(service)
        yield from self._queue(service)
        if service.member is not None:
            yield from self._nodes(service.member)
        refresher = service.refresher
        if refresher is not None:
            state = GaugeMetricFamily(
                f"{_PREFIX}refresher_state", "1 for the current state of drift detection.", labels=["state"]
            )
            state.add_metric([str(describe(refresher.status()).get("drift_state", "unknown"))], 1)
            yield state

    @staticmethod
    def _nodes(member: Member) -> Iterator[Metric]:
        """Of a node of a cluster: its share, and the nodes that it asks."""
        map_ = member.remote.map
        unreachable, part = member.unreachable()
        for name, text, value in (
            ("held_lists", "Lists that this node holds.", int(member.share.held.sum())),
            ("held_bytes", "Bytes of the lists that this node holds.", member.share.held_bytes),
            ("unreachable_lists", "Lists that are on no node that answers.", unreachable),
            ("unreachable_share", "Part of the bytes of all lists that is on no node that answers.", part),
            ("map_version", "Version of the cluster map in force; 0 without one.", 0 if map_ is None else map_.version),
            ("replicas", "Least number of nodes that should hold each list.", 0 if map_ is None else map_.replicas),
            ("lists_below_replicas", "Lists held by fewer answering nodes than replicas.", member.below_replicas()),
        ):
            yield GaugeMetricFamily(f"{_PREFIX}{name}", text, value=value)
        if (following := member.following) is not None:
            yield GaugeMetricFamily(
                f"{_PREFIX}change", "Number of the last change that searches see.", following.number
            )
            yield GaugeMetricFamily(
                f"{_PREFIX}change_age_seconds", "Seconds since this node last knew all changes.", following.age_s
            )
        peers = member.remote.status()
        up = GaugeMetricFamily(f"{_PREFIX}node_up", "1 while another node answers.", labels=["node"])
        for peer in peers:
            up.add_metric([peer["name"]], peer["state"] in ("up", "late"))
        yield up
        for key, name, text in (
            ("asked", "node_scans", "Scans that another node was asked for; over searches, the fan-out."),
            ("asked_bytes", "node_work_bytes", "Code bytes that another node was asked to scan."),
            ("failed", "node_scans_failed", "Scans that another node did not answer."),
            ("hedged", "node_hedges", "Scans that others were asked for, too, because one took long."),
            ("downs", "node_downs", "How often another node stopped answering."),
        ):
            family = CounterMetricFamily(f"{_PREFIX}{name}", text, labels=["node"])
            for peer in peers:
                family.add_metric([peer["name"]], peer[key])
            yield family

    def _router(self, service: Service) -> Iterator[Metric]:
        stats, plan = service.router.stats(), service.router.plan
        damage = service.router.damage
        waits = stats.stages.get(LOOKAHEAD_WAIT, StageSum(count=0, seconds=0.0))
        for name, text, value in (
            ("searches", "Requests that the router took.", stats.requests),
            ("queries", "Queries that the router took.", stats.queries),
            ("batches", "Batches; queries over batches is the mean batch.", stats.batches),
            ("host_work_bytes", "Code bytes that queries probed on the host.", stats.host_work_bytes),
            ("device_work_bytes", "Code bytes that queries probed on devices.", stats.device_work_bytes),
            ("device_fallbacks", "Batch parts that the host scanned for a device.", stats.device_fallbacks),
            ("device_quantized", "Queries whose lists a device found.", stats.device_quantized),
            ("device_quantized_again", "Queries whose lists the host had to find again.", stats.device_quantized_again),
            ("nprobe_lowered", "Requests whose nprobe a deadline lowered.", stats.nprobe_lowered),
            ("filtered_searches", "Requests with a filter.", stats.filtered_requests),
            ("filtered_rows", "Rows compared by requests with a filter.", stats.filtered_rows),
            ("candidates", "Rows that searches by codes compared exactly.", stats.candidates),
            ("device_candidates", "Candidates that devices compared.", stats.device_candidates),
            ("row_pages", "Pages of candidates read from disk.", stats.row_pages),
            ("lookahead_bytes", "Bytes that lookahead moved.", stats.lookahead_bytes),
            ("lookahead_dropped", "Lookaheads dropped from a full queue.", stats.lookahead_dropped),
            ("lookahead_waits", "Session searches that waited for lists being copied.", waits.count),
            ("lookahead_wait_seconds", "Seconds that session searches waited for lists.", waits.seconds),
            ("device_recoveries", "Failed devices that recovered.", stats.device_recoveries),
            ("scrubbed_bytes", "Bytes of lists that were compared with their digests.", damage.nbytes),
            ("scrub_passes", "How often all lists were compared.", damage.passes),
            ("damage_found", "How often a list, or a copy of one, was found damaged.", damage.found),
            ("device_slowdowns", "Device failures because of slowness.", stats.device_slowdowns),
        ):
            yield CounterMetricFamily(f"{_PREFIX}{name}", text, value=value)
        for name, text, reading in (
            ("largest_batch", "Most queries in one batch.", stats.largest_batch),
            ("hit_rate_observed", "Part of the scan work that devices served, since the start.", stats.hit_rate),
            (
                "hit_rate_expected",
                "Hit rate predicted for the plan's lists on devices.",
                service.expected_hit_rate or 0.0,
            ),
            ("hit_rate_planned", "Hit rate that the plan predicts.", 0.0 if plan is None else plan.predicted_hit_rate),
            ("lookahead_waiting_bytes", "Bytes of waiting lookahead drafts.", stats.lookahead_waiting_bytes),
            ("quarantined_lists", "Damaged lists that no search may probe.", len(damage.quarantined)),
            ("mended_lists", "Lists damaged in the file and served from memory.", len(damage.mended)),
            ("resident_lists", "Lists on devices.", service.router.residency.n_resident),
            ("unplaced_lists", "Lists of the plan that no device holds.", stats.unplaced_lists),
            ("slo_seconds", "The SLO; 0 without one.", (service.slo_ms or 0.0) / 1e3),
            ("generation", "The generation of the index that serves.", service.index.ivf.generation),
        ):
            yield GaugeMetricFamily(f"{_PREFIX}{name}", text, value=reading)
        yield from self._rows(service)
        counts = service.generations.counts
        reloads = CounterMetricFamily(f"{_PREFIX}reloads", "Replacements of the index, by outcome.", labels=["outcome"])
        reloads.add_metric(["done"], counts.done)
        reloads.add_metric(["failed"], counts.failed)
        yield reloads

    def _rows(self, service: Service) -> Iterator[Metric]:
        counts, state = service.rows.counts, service.rows.state(service.index)
        for name, text, value in (
            ("rows_added", "Rows that clients added.", counts.added),
            ("rows_replaced", "Rows that replaced others.", counts.replaced),
            ("rows_deleted", "Ids whose rows clients deleted.", counts.deleted),
            ("compactions", "How often the lists were rewritten with all changes.", state["compactions"]),
            ("lists_split", "Lists that compactions split.", state["split"]),
            ("lists_dissolved", "Lists that compactions dissolved.", state["dissolved"]),
        ):
            yield CounterMetricFamily(f"{_PREFIX}{name}", text, value=value)
        for name, text, reading in (
            ("rows_live", "Rows that searches find.", state["live"]),
            ("rows_beside", "Rows added since the lists were written.", state["added"]),
            ("rows_beside_bytes", "Bytes in memory of added rows.", state["added_bytes"]),
            ("rows_beside_on_devices", "Added rows that devices hold.", service.router.added_on_devices),
            ("rows_gone", "Ids deleted since the lists were written.", state["deleted"]),
            ("change_log_bytes", "Bytes of the change log.", state["log_bytes"]),
            ("last_change", "Number of the last change.", state["number"]),
            ("writer", "1 while only this daemon may write to the index.", float(state["writer"])),
            ("compaction_failed", "1 if the last compaction failed.", float(state["problem"] is not None)),
        ):
            yield GaugeMetricFamily(f"{_PREFIX}{name}", text, value=reading)
        done = service.documents.counts
        documents = CounterMetricFamily(f"{_PREFIX}documents", "Documents that clients changed.", labels=["outcome"])
        for outcome, count in (("added", done.added), ("changed", done.changed), ("removed", done.removed)):
            documents.add_metric([outcome], count)
        yield documents
        yield CounterMetricFamily(
            f"{_PREFIX}chunks_embedded", "Chunks of documents that were embedded.", value=done.embedded
        )
        refused = CounterMetricFamily(f"{_PREFIX}writes_refused", "Changes refused, by reason.", labels=["reason"])
        for reason, count in list(counts.refused.items()):
            refused.add_metric([reason], count)
        yield refused

    def _devices(self, service: Service) -> Iterator[Metric]:
        resident = GaugeMetricFamily(f"{_PREFIX}resident_bytes", "Bytes of pages in use.", labels=["device"])
        moved = CounterMetricFamily(f"{_PREFIX}moved_bytes", "Bytes copied to a device.", labels=["device"])
        failures = CounterMetricFamily(f"{_PREFIX}device_failures", "How often a device failed.", labels=["device"])
        usable = GaugeMetricFamily(f"{_PREFIX}device_usable", "1 while a device scans.", labels=["device"])
        info = InfoMetricFamily(f"{_PREFIX}device", "Name of a device in tables and logs.", labels=["device"])
        for tier in service.router.devices:
            # Not tier.label: a GPU that was busy at the start tells it only once it is opened.
            label = [f"{tier.ordinal}: {tier.info.name}"]
            info.add_metric(label, {"label": tier.label})
            resident.add_metric(label, tier.used_bytes)
            moved.add_metric(label, tier.moved_bytes)
            failures.add_metric(label, tier.n_failures)
            usable.add_metric(label, float(tier.usable))
        yield from (info, resident, moved, failures, usable)

    def _queue(self, service: Service) -> Iterator[Metric]:
        admission = service.admission
        for name, text, value in (
            ("queue_waiting", "Queries that wait for the router.", admission.n_waiting),
            ("queue_in_flight", "Queries handed to the router.", admission.n_in_flight),
            ("request_memory_bytes", "Bytes taken by requests under way, of all indexes.", service.memory.taken_bytes),
            ("sessions_open", "Open sessions.", len(service.sessions)),
            ("ready", "1 while the daemon is ready.", float(service.ready)),
        ):
            yield GaugeMetricFamily(f"{_PREFIX}{name}", text, value=value)
        refused = CounterMetricFamily(f"{_PREFIX}refused", "Requests refused, by reason.", labels=["reason"])
        for reason, count in admission.refused.items():
            refused.add_metric([reason], count)
        refused.add_metric(["memory"], service.memory.refused["full"])
        refused.add_metric(["client memory"], service.memory.refused["share"])
        yield refused
        yield CounterMetricFamily(
            f"{_PREFIX}sessions_expired", "Sessions that nobody closed.", value=service.sessions.n_expired
        )
        yield CounterMetricFamily(
            f"{_PREFIX}sessions_displaced",
            "Sessions replaced by another client's.",
            value=service.sessions.n_displaced,
        )
        yield CounterMetricFamily(
            f"{_PREFIX}observer_errors", "Errors raised by observers of searches.", value=service.n_observer_errors
        )
