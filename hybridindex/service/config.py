"""What a daemon is told at its start, checked in full before anything is opened.

Paths come from here and from nowhere else: no request names a file.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hybridindex.errors import InvalidInputError
from hybridindex.store.retention import Retention
from hybridindex.tiers.contract.validate import MAX_K

__all__ = ["Limits", "ServiceConfig", "is_loopback"]

#: The router's own limit of one call.
_MAX_QUERIES = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one request, one client and all of them together may take."""

    max_body_bytes: int = 16 << 20
    max_k: int = MAX_K
    #: None: as many as the index has lists.
    max_nprobe: int | None = None
    max_queries: int = 4096
    #: Neighbours in one answer, over all its queries.
    max_answer_rows: int = 1 << 20
    max_sessions: int = 1024
    session_ttl_s: float = 300.0
    #: Queries that may wait, over all clients.
    queue_queries: int = 8192
    #: Part of the queue that one client may fill.
    client_share: float = 0.5
    #: Queries handed to the router and not yet answered. The router batches what it has, so this bounds its batches.
    in_flight_queries: int = 1024
    #: Longest wait for a search to start where the request names no deadline; None: as long as it takes.
    default_deadline_ms: float | None = 30_000.0
    #: Under overload nprobe falls towards this floor as the queue fills beyond a half; None: never.
    overload_min_nprobe: int | None = None
    #: Time a client has to send its headers, its body, and to take its answer.
    client_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        _whole(self, "max_body_bytes", 1024, 1 << 32)
        _whole(self, "max_k", 1, MAX_K)
        _whole(self, "max_nprobe", 1, 1 << 31, optional=True)
        _whole(self, "max_queries", 1, _MAX_QUERIES)
        _whole(self, "max_answer_rows", 1, 1 << 28)
        _whole(self, "max_sessions", 0, 1 << 20)
        _number(self, "session_ttl_s", 86_400 * 7)
        _whole(self, "queue_queries", 1, 1 << 24)
        _number(self, "client_share", 1)
        _whole(self, "in_flight_queries", 1, 1 << 20)
        _number(self, "default_deadline_ms", 86_400_000, optional=True)
        _whole(self, "overload_min_nprobe", 1, 1 << 31, optional=True)
        _number(self, "client_timeout_s", 3600)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """Addresses, tiers, plan, limits and keys of one daemon."""

    #: None: no TCP; then ``uds`` must be given.
    host: str | None = "127.0.0.1"
    #: 0: any free one.
    port: int = 8080
    uds: Path | None = None
    devices: tuple[str, ...] = ()
    #: One for all devices, or one each; empty: the plan's.
    device_budget_bytes: tuple[int, ...] = ()
    #: Whether a device that is full or busy at the start is tried again, and takes its budget when it can.
    retry_open: bool = True
    #: Most bytes of page-locked host memory for lists that sessions may fetch.
    pin_host_lists: int = 0
    #: "latest", "none", or a plan id.
    plan: str = "latest"
    #: What attainment counts; None: the plan's.
    slo_ms: float | None = None
    threads: int | None = None
    limits: Limits = field(default_factory=Limits)
    tls_cert: Path | None = None
    tls_key: Path | None = None
    key_file: Path | None = None
    #: Control store; None: the file beside the index.
    store_url: str | None = None
    #: What stays in the control store.
    retention: Retention = field(default_factory=Retention)
    #: Longest wait for requests in flight when the daemon stops.
    drain_timeout_s: float = 30.0
    log_format: Literal["text", "json"] = "text"
    #: OpenTelemetry; None: where the environment names a collector.
    traces: bool | None = None

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
        _sequence(self, "devices", str)
        _sequence(self, "device_budget_bytes", int)
        if len(self.device_budget_bytes) not in (0, 1, len(self.devices)):
            raise InvalidInputError(
                f"device_budget_bytes has {len(self.device_budget_bytes)} entries for {len(self.devices)} devices; "
                "expected one for all, or one each"
            )
        _whole(self, "pin_host_lists", 0, 1 << 62)
        if self.plan not in ("latest", "none") and not (isinstance(self.plan, str) and self.plan.isdecimal()):
            raise InvalidInputError(f"plan is {self.plan!r}; expected a plan id, 'latest' or 'none'")
        _number(self, "slo_ms", 86_400_000, optional=True)
        _whole(self, "threads", 1, 4096, optional=True)
        _number(self, "drain_timeout_s", 3600)
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "tls_cert" if self.tls_cert is None else "tls_key"
            raise InvalidInputError(f"{missing} is missing; expected both of tls_cert and tls_key, or neither")
        if self.log_format not in ("text", "json"):
            raise InvalidInputError(f"log_format is {self.log_format!r}; expected 'text' or 'json'")
        if self.host is not None and self.key_file is None and not is_loopback(self.host):
            raise InvalidInputError(
                f"host is {self.host!r}, which other machines can reach, and key_file is missing; expected a key file "
                "(hybridindex keys add), or a loopback address such as 127.0.0.1"
            )

    def budgets(self) -> int | tuple[int, ...] | None:
        """As :meth:`hybridindex.Index.router` takes them."""
        if not self.device_budget_bytes:
            return None
        return self.device_budget_bytes[0] if len(self.device_budget_bytes) == 1 else self.device_budget_bytes


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
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidInputError(f"{name} is {value!r}; expected an integer {low}..{high}")


def _number(config: Any, name: str, high: float, *, optional: bool = False) -> None:
    value = getattr(config, name)
    if value is None and optional:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and 0 < value <= high):
        raise InvalidInputError(f"{name} is {value!r}; expected a number above 0, at most {high:g}")


def _sequence(config: Any, name: str, kind: type) -> None:
    value = getattr(config, name)
    good = isinstance(value, Sequence) and not isinstance(value, str)
    if not good or not all(isinstance(v, kind) and not isinstance(v, bool) for v in value):
        raise InvalidInputError(f"{name} is {value!r}; expected a tuple of {kind.__name__}")
    if kind is int and any(v < 0 for v in value):
        raise InvalidInputError(f"{name} is {value!r}; expected whole bytes, 0 or more")
