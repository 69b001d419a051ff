"""The blocking client. Tries again where that is safe; :mod:`hybridindex.client.retry` says when."""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any
from urllib.parse import quote

from hybridindex.client.messages import (
    Address,
    Call,
    call,
    error_of,
    json_of,
    lookahead_call,
    recent_call,
    result_of,
    search_call,
)
from hybridindex.client.retry import Attempts, RetryPolicy
from hybridindex.client.transport import (
    RequestMaker,
    check_timeout,
    load_httpx,
    never_sent,
    transport_options,
    unreachable,
)
from hybridindex.errors import UnknownSessionError
from hybridindex.types import SearchResult

__all__ = ["Client", "RemoteSession"]


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

    def _send(self, asked: Call, timeout_s: float | None = None) -> bytes:
        limit_s = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        attempts = Attempts(self._retry, limit_s)
        while True:
            left_s = attempts.remaining_s()
            params = asked.params
            if "deadline_ms" in params:
                params = {**params, "deadline_ms": left_s * 1e3}
            try:
                answer = self._transport.handle_request(self._request(asked, params, left_s))
                body: bytes = answer.read()
                answer.close()
            except self._httpx.TransportError as error:
                failed = unreachable(error, self._address)
                pause = attempts.pause_after(failed, repeatable=asked.repeatable or never_sent(error))
            else:
                failure = error_of(answer.status_code, answer.headers, body)
                if failure is None:
                    return body
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
        return self._search(None, queries, k, nprobe, deadline_ms, min_nprobe)

    def _search(
        self,
        session: str | None,
        queries: Any,
        k: int,
        nprobe: int | None,
        deadline_ms: float | None,
        min_nprobe: int | None,
    ) -> SearchResult:
        asked = search_call(queries, session, k=k, nprobe=nprobe, deadline_ms=deadline_ms, min_nprobe=min_nprobe)
        limit_s = None if deadline_ms is None else check_timeout(deadline_ms / 1e3)
        return result_of(self._send(asked, limit_s))

    def session(self, *, lookahead_bytes: int | None = None, window_ms: float | None = None) -> RemoteSession:
        """Opens a retrieval session; see :meth:`hybridindex.router.Router.session`. A context manager."""
        body = {"lookahead_bytes": lookahead_bytes, "window_ms": window_ms}
        opened = json_of(self._send(call("POST", "/v1/sessions", body, repeatable=False)))
        return RemoteSession(self, str(opened["session"]))

    def status(self) -> dict[str, Any]:
        """What is served, where lists are, what waits."""
        return dict(json_of(self._send(call("GET", "/v1/status"))))

    def plan(self, plan_id: int | str | None = None) -> dict[str, Any]:
        """The plan in force; or a stored one, by its id or "latest"."""
        path = "/v1/plan" if plan_id is None else f"/v1/plans/{quote(str(plan_id), safe='')}"
        return dict(json_of(self._send(call("GET", path))))

    def plans(self) -> dict[str, Any]:
        """Stored and applied plans."""
        return dict(json_of(self._send(call("GET", "/v1/plans"))))

    def repartition(self, *, apply: bool = False, **changes: Any) -> dict[str, Any]:
        """Plans anew; moves lists only where ``apply`` says so. Needs a key with the role admin.

        Args:
            changes: slo_ms, device_budget_bytes, rate_qps, coverage, bandwidth_share.
        """
        asked = call("POST", "/v1/repartition", {"apply": apply, **changes}, repeatable=not apply)
        return dict(json_of(self._send(asked)))

    def upload_queries(self, queries: Any) -> dict[str, Any]:
        """Gives (n, d) float32 queries of late to the refresh, to plan from. Needs a key with the role admin.

        Raises:
            ProfileError: the daemon keeps no queries.
        """
        return dict(json_of(self._send(recent_call(queries))))

    def drain(self) -> None:
        """Lets the daemon finish and stop. Needs a key with the role admin."""
        self._send(call("POST", "/v1/drain"))

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
        return self._client._search(self._name, queries, k, nprobe, deadline_ms, min_nprobe)

    def stats(self) -> dict[str, Any]:
        """What lookahead did so far."""
        return dict(json_of(self._client._send(call("GET", f"/v1/sessions/{self._name}"))))

    def close(self) -> None:
        """Ends it; one that is over already is no error."""
        if not self._closed:
            self._closed = True
            # Unknown: it expired, or an earlier attempt of this very call ended it.
            with contextlib.suppress(UnknownSessionError):
                self._client._send(call("DELETE", f"/v1/sessions/{self._name}"))

    def __enter__(self) -> RemoteSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
