"""What a daemon is told at its start, checked in full before anything is opened.

Paths come from here and from nowhere else: no request names a file.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from hybridindex.config import (
    MAX_BATCH_QUERIES,
    MAX_K,
    RouterConfig,
    Setting,
    check_number,
    check_one_of,
    check_whole,
)
from hybridindex.errors import InvalidInputError
from hybridindex.service.intake.machine_memory import LEAST_REQUEST_MEMORY
from hybridindex.store.retention import Retention

__all__ = ["DocumentConfig", "Limits", "NodeConfig", "ServiceConfig", "check_plan_choice", "is_loopback"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one request, one client and all of them together may take."""

    max_body_bytes: Annotated[int, Setting(help="Bytes of a request's body.", flag="--max-body", is_bytes=True)] = (
        16 << 20
    )
    max_k: Annotated[int, Setting(help="Largest k of a request.")] = MAX_K
    max_nprobe: Annotated[int | None, Setting(help="Largest nprobe of a request; default: all lists of the index.")] = (
        None
    )
    max_queries: Annotated[int, Setting(help="Queries per request.")] = 4096
    max_rows: Annotated[int, Setting(help="Rows that one request may add or replace.")] = 1 << 16
    max_documents: Annotated[int, Setting(help="Documents per request. They may have max_rows new chunks.")] = 1000
    max_answer_rows: Annotated[int, Setting(help="Neighbours in one answer, over all its queries.")] = 1 << 20
    request_memory_bytes: Annotated[
        int | None,
        Setting(
            help="Most bytes that all requests under way take in total: bodies, queries, the arrays of batches, "
            "answers; default: an eighth of the machine's memory, at least 256 MiB and at most 8 GiB. Each "
            "index beyond the first takes up to 128 MiB on top of it.",
            flag="--request-memory",
            is_bytes=True,
        ),
    ] = None
    max_sessions: Annotated[
        int,
        Setting(help="Open sessions. Beyond them, a session of a client with few replaces one of a client with many."),
    ] = 1024
    session_ttl_s: Annotated[
        float, Setting(help="Seconds after which an unused session ends.", flag="--session-ttl")
    ] = 300.0
    queue_queries: Annotated[int, Setting(help="Queries that may wait, over all clients.", flag="--queue")] = 8192
    client_share: Annotated[
        float,
        Setting(
            help="Fraction of the queue, and of the memory for requests, that one client may fill while no other sends "
            "requests; less when others do."
        ),
    ] = 0.5
    #: The router batches what it has, so this bounds its batches.
    in_flight_queries: Annotated[int, Setting(help="Queries handed to the router and not yet answered.")] = 1024
    default_deadline_ms: Annotated[
        float | None,
        Setting(help="Longest wait for a search to start, if the request gives no deadline.", flag="--deadline-ms"),
    ] = 30_000.0
    overload_min_nprobe: Annotated[
        int | None,
        Setting(help="Under overload nprobe falls towards this value once the queue is half full; default: never."),
    ] = None
    client_timeout_s: Annotated[
        float, Setting(help="Seconds that a client has to send its headers, to send its body, and to read its answer.")
    ] = 30.0

    def __post_init__(self) -> None:
        _whole(self, "max_body_bytes", 1024, 1 << 32)
        _whole(self, "max_k", 1, MAX_K)
        _whole(self, "max_nprobe", 1, 1 << 31, optional=True)
        _whole(self, "max_queries", 1, MAX_BATCH_QUERIES)
        _whole(self, "max_rows", 1, 1 << 22)
        _whole(self, "max_documents", 1, 1 << 20)
        _whole(self, "max_answer_rows", 1, 1 << 28)
        _whole(self, "request_memory_bytes", LEAST_REQUEST_MEMORY, 1 << 50, optional=True)
        _whole(self, "max_sessions", 0, 1 << 20)
        _number(self, "session_ttl_s", 86_400 * 7)
        _whole(self, "queue_queries", 1, 1 << 24)
        _number(self, "client_share", 1)
        _whole(self, "in_flight_queries", 1, 1 << 20)
        _number(self, "default_deadline_ms", 86_400_000, optional=True)
        _whole(self, "overload_min_nprobe", 1, 1 << 31, optional=True)
        _number(self, "client_timeout_s", 3600)


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentConfig:
    """What documents that come are embedded with: the embedder of the index, in a process of the lowest priority. It
    downloads nothing."""

    embedder_url: Annotated[
        str | None,
        Setting(
            help="Server with /v1/embeddings, if the embedder of the index is openai:MODEL; default: "
            "HYBRIDINDEX_EMBEDDER_URL of the environment. HYBRIDINDEX_EMBEDDER_KEY may hold its key.",
            metavar="URL",
        ),
    ] = None
    embedder_cache: Annotated[
        Path, Setting(help="Folder in which hybridindex ingest keeps the demo's embedder (its --cache).", metavar="DIR")
    ] = Path("build/cache")
    embedder_threads: Annotated[int, Setting(help="Threads that the embedder may use.")] = 1
    embedder_timeout_s: Annotated[
        float,
        Setting(
            help="Seconds within which the documents of one request must be read and embedded; otherwise it fails, "
            "and nothing changes.",
            flag="--embedder-timeout",
        ),
    ] = 1800.0

    def __post_init__(self) -> None:
        url = self.embedder_url
        if url is not None and not (isinstance(url, str) and url.startswith(("http://", "https://"))):
            raise InvalidInputError(f"embedder_url is {url!r}; expected http://host:port or https://…")
        if not isinstance(self.embedder_cache, Path):
            raise InvalidInputError(f"embedder_cache is {self.embedder_cache!r}; expected a pathlib.Path")
        _whole(self, "embedder_threads", 1, 1024)
        _number(self, "embedder_timeout_s", 86_400)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """What a daemon is told that serves a share of an index, as a node of a cluster. Nodes show each other the key in
    HYBRIDINDEX_CLUSTER_KEY of the environment, which needs the role admin."""

    name: Annotated[
        str | None, Setting(help="Name of this node in its cluster; default: the daemon is no node.", flag="--node")
    ] = None
    source: Annotated[
        Path | None,
        Setting(help="The whole index, for lists that no other node has.", flag="--node-source", metavar="DIR"),
    ] = None
    memory_bytes: Annotated[
        int | None,
        Setting(help="Memory that lists may take on this node; for plans.", flag="--node-memory", is_bytes=True),
    ] = None
    ca: Annotated[
        Path | None,
        Setting(
            help="CA certificates that check the certificates of other nodes.", flag="--node-ca", metavar="FILE.pem"
        ),
    ] = None

    def __post_init__(self) -> None:
        name = self.name
        if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
            raise InvalidInputError(f"name is {name!r}; expected 1..64 letters, digits, '.', '_' or '-'")
        _whole(self, "memory_bytes", 1, 1 << 50, optional=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """All that one daemon is told, but for its index and what follows the load."""

    host: Annotated[
        str | None,
        Setting(
            help="Address to listen on; beyond this machine only with a key file. False: no TCP; then uds is required."
        ),
    ] = "127.0.0.1"
    port: Annotated[int, Setting(help="TCP port. 0: any free one.")] = 8080
    uds: Annotated[Path | None, Setting(help="Also listen on this unix socket.", metavar="PATH")] = None
    plan: Annotated[
        str,
        Setting(
            help="'current': the plan applied last. An id, or 'latest' (the newest): that plan is applied. 'none': the "
            "host scans everything."
        ),
    ] = "current"
    force: Annotated[bool, Setting(help="Apply the plan that plan names even if it is infeasible.")] = False
    slo_ms: Annotated[float | None, Setting(help="SLO that attainment is measured against; default: the plan's.")] = (
        None
    )
    tls_cert: Annotated[Path | None, Setting(help="TLS certificate; with tls_key.", metavar="FILE.pem")] = None
    tls_key: Annotated[Path | None, Setting(help="Private key of tls_cert.", metavar="FILE.pem")] = None
    key_file: Annotated[
        Path | None, Setting(help="API keys, made by: hybridindex keys add.", flag="--keys", metavar="FILE")
    ] = None
    store_url: Annotated[
        str | None,
        Setting(help="Control store; default: control.sqlite in the index directory.", flag="--store", metavar="URL"),
    ] = None
    reload: Annotated[
        Literal["manual", "auto"],
        Setting(
            help="When a new generation of the index replaces the one that serves. 'manual': on request "
            "(hybridindex reload, SIGHUP). 'auto': as soon as it is there."
        ),
    ] = "manual"
    write: Annotated[
        bool,
        Setting(
            help="Let clients add, replace and delete rows. From the first change on, no other process may write "
            "to the index, and the daemon compacts it automatically."
        ),
    ] = True
    durability: Annotated[
        Literal["synced", "written"],
        Setting(
            help="When changes of rows are answered. 'synced': once on disk. 'written': once handed to the operating "
            "system; a power cut may lose the last ones."
        ),
    ] = "synced"
    keep_replaced: Annotated[
        bool,
        Setting(
            help="Keep the replaced generation on disk for hybridindex rollback, even when the new one serves, "
            "until the next replacement."
        ),
    ] = False
    drain_timeout_s: Annotated[
        float, Setting(help="Seconds to answer requests in flight when the daemon stops.", flag="--drain-timeout")
    ] = 30.0
    log_format: Annotated[Literal["text", "json"], Setting(help="Format of log lines.")] = "text"
    traces: Annotated[
        bool | None,
        Setting(
            help="Send OpenTelemetry traces by OTLP over HTTP, as OTEL_* says; default: if these variables name a "
            "collector."
        ),
    ] = None
    router: RouterConfig = field(default_factory=RouterConfig)
    limits: Limits = field(default_factory=Limits)
    documents: DocumentConfig = field(default_factory=DocumentConfig)
    node: NodeConfig = field(default_factory=NodeConfig)
    #: What stays in the control store.
    retention: Retention = field(default_factory=Retention)

    def __post_init__(self) -> None:
        if self.host is None and self.uds is None:
            raise InvalidInputError("host and uds are both missing; expected an address, a socket path, or both")
        _whole(self, "port", 0, 65_535)
        for name in ("uds", "tls_cert", "tls_key", "key_file"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Path):
                raise InvalidInputError(f"{name} is {value!r}; expected a pathlib.Path or None")
        if self.uds is not None and len(str(self.uds.absolute()).encode()) > 107:
            raise InvalidInputError(f"uds is {self.uds}, longer than the 107 bytes that a socket's path may have")
        check_plan_choice(self.plan)
        if not isinstance(self.force, bool):
            raise InvalidInputError(f"force is {self.force!r}; expected true or false")
        _number(self, "slo_ms", 86_400_000, optional=True)
        check_one_of("reload", self.reload, ("manual", "auto"))
        check_one_of("durability", self.durability, ("synced", "written"))
        for name in ("write", "keep_replaced"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInputError(f"{name} is {getattr(self, name)!r}; expected true or false")
        _number(self, "drain_timeout_s", 3600)
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "tls_cert" if self.tls_cert is None else "tls_key"
            raise InvalidInputError(f"{missing} is missing; expected both of tls_cert and tls_key, or neither")
        check_one_of("log_format", self.log_format, ("text", "json"))
        if self.host is not None and self.key_file is None and not is_loopback(self.host):
            raise InvalidInputError(
                f"host is {self.host!r}, which other machines can reach, and key_file is missing; expected a key file "
                "(hybridindex keys add), or a loopback address such as 127.0.0.1"
            )


def check_plan_choice(plan: Any) -> None:
    """Raises InvalidInputError: neither an id nor a word for a plan."""
    if plan not in ("current", "latest", "none") and not (isinstance(plan, str) and plan.isdecimal()):
        raise InvalidInputError(f"plan is {plan!r}; expected a plan id, 'current', 'latest' or 'none'")


def is_loopback(host: str) -> bool:
    """True for addresses that only this machine reaches; a name other than localhost is not trusted to be one."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _whole(config: Any, name: str, low: int, high: int, *, optional: bool = False) -> None:
    value = getattr(config, name)
    if value is not None or not optional:
        check_whole(name, value, low, high)


def _number(config: Any, name: str, high: float, *, optional: bool = False) -> None:
    value = getattr(config, name)
    if value is not None or not optional:
        check_number(name, value, high)
