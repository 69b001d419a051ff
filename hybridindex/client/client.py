"""The blocking client. Generated from ``async_client.py``, which is the file to edit."""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from hybridindex.client.messages import (
    Address,
    Call,
    close_session_call,
    drain_call,
    error_of,
    lookahead_call,
    open_session_call,
    plan_call,
    plans_call,
    recent_call,
    repartition_call,
    search_call,
    session_call,
    status_call,
)
from hybridindex.client.retry import Attempts, RetryPolicy
from hybridindex.client.transport import (
    RequestMaker,
    check_timeout,
    load_httpx,
    never_sent,
    time_limit,
    transport_options,
    unreachable,
)
from hybridindex.errors import UnknownSessionError
from hybridindex.types import SearchResult

__all__ = ["Client", "RemoteSession"]

T = TypeVar("T")


class Client:
    """A daemon's client. Any thread; close it once.

    Every call raises ServiceError or one of its kinds (UnreachableError, OverloadedError, AccessDeniedError …), and
    InvalidInputError where the daemon refuses a value.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        timeout_s: float = 30.0,
        retry: RetryPolicy | None = None,
        verify: ssl.SSLContext | bool = True,
        transport: Any = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Connects when first used.

        Args:
            url: ``http://host:port``, ``https://…`` or ``unix:/path``.
            key: an API key, where the daemon asks for one.
            timeout_s: longest time of one call, retries included.
            verify: False, or a context, for certificates of one's own.
            transport: another httpx transport, for tests.
            sleep: waits between attempts.

        Raises:
            InvalidInputError, MissingDependencyError.
        """
        self._httpx = load_httpx()
        self._address = Address.parse(url)
        self._timeout_s = check_timeout(timeout_s)
        self._retry = retry or RetryPolicy()
        self._sleep = sleep
        if transport is None:
            transport = self._httpx.HTTPTransport(**transport_options(self._address, verify))
        self._transport = transport
        self._request = RequestMaker(self._address, key)

    def _send(self, asked: Call[T]) -> T:
        attempts = Attempts(self._retry, time_limit(asked, self._timeout_s))
        while True:
            left_s = attempts.remaining_s()
            try:
                answer = self._transport.handle_request(self._request(asked, left_s))
                body: bytes = answer.read()
                answer.close()
            except self._httpx.TransportError as error:
                failed = unreachable(error, self._address)
                pause = attempts.pause_after(failed, repeatable=asked.repeatable or never_sent(error))
            else:
                failure = error_of(answer.status_code, answer.headers, body)
                if failure is None:
                    return asked.read(body)
                pause = attempts.pause_after(failure, repeatable=True)
            self._sleep(pause)

    def search(
        self,
        queries: Any,
        k: int = 10,
        nprobe: int | None = None,
        *,
        deadline_ms: float | None = None,
        min_nprobe: int | None = None,
    ) -> SearchResult:
        """As :meth:`hybridindex.router.Router.search`, over the network. A deadline bounds retries as well."""
        asked = search_call(queries, None, k=k, nprobe=nprobe, deadline_ms=deadline_ms, min_nprobe=min_nprobe)
        return self._send(asked)

    def session(
        self,
        *,
        lookahead_bytes: int | None = None,
        window_ms: float | None = None,
    ) -> RemoteSession:
        """Opens a retrieval session; see :meth:`hybridindex.router.Router.session`. A context manager."""
        asked = open_session_call(lookahead_bytes=lookahead_bytes, window_ms=window_ms)
        return RemoteSession(self, self._send(asked))

    def status(self) -> dict[str, Any]:
        """What is served, where lists are, what waits."""
        return self._send(status_call())

    def plan(self, plan_id: int | str | None = None) -> dict[str, Any]:
        """The plan in force; or a stored one, by its id or "latest"."""
        return self._send(plan_call(plan_id))

    def plans(self) -> dict[str, Any]:
        """Stored and applied plans."""
        return self._send(plans_call())

    def repartition(self, *, apply: bool = False, **changes: Any) -> dict[str, Any]:
        """Plans anew; moves lists only where ``apply`` says so. Needs a key with the role admin.

        Args:
            changes: slo_ms, device_budget_bytes, rate_qps, coverage, bandwidth_share.
        """
        return self._send(repartition_call(apply=apply, changes=changes))

    def upload_queries(self, queries: Any) -> dict[str, Any]:
        """Gives recent (n, d) float32 queries to the refresh, to plan from. Needs a key with the role admin.

        Raises:
            ProfileError: the daemon keeps no queries.
        """
        return self._send(recent_call(queries))

    def drain(self) -> None:
        """Lets the daemon finish and stop. Needs a key with the role admin."""
        self._send(drain_call())

    def close(self) -> None:
        """Closes the connections. Closing twice is harmless."""
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RemoteSession:
    """A session of a daemon; made by :meth:`Client.session`. It ends when closed, or when unused for a while."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self._name = name
        self._closed = False

    def lookahead(self, drafts: Any, *, nprobe: int | None = None, budget_bytes: int | None = None) -> None:
        """Starts moving the lists that ``drafts`` (d,) or (n, d) float32 would probe; does not wait for them."""
        self._client._send(lookahead_call(drafts, self._name, nprobe=nprobe, budget_bytes=budget_bytes))

    def search(
        self,
        queries: Any,
        k: int = 10,
        nprobe: int | None = None,
        *,
        deadline_ms: float | None = None,
        min_nprobe: int | None = None,
    ) -> SearchResult:
        """As :meth:`Client.search`, within the session."""
        asked = search_call(queries, self._name, k=k, nprobe=nprobe, deadline_ms=deadline_ms, min_nprobe=min_nprobe)
        return self._client._send(asked)

    def stats(self) -> dict[str, Any]:
        """What lookahead did so far."""
        return self._client._send(session_call(self._name))

    def close(self) -> None:
        """Ends it; one that is over already is no error."""
        if not self._closed:
            self._closed = True
            # Unknown: it expired, or an earlier attempt of this very call ended it.
            with contextlib.suppress(UnknownSessionError):
                self._client._send(close_session_call(self._name))

    def __enter__(self) -> RemoteSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
