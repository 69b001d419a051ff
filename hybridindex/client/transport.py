"""Connections by httpx, and its errors as the library's."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from hybridindex.bearer import bearer
from hybridindex.client.exchange import Waits, bound_each_wait
from hybridindex.client.messages import Address, Call, not_an_address
from hybridindex.errors import InvalidInputError, MissingDependencyError, UnreachableError, how_to_install

__all__ = [
    "RequestMaker",
    "TimeLimits",
    "async_transport",
    "blocking_transport",
    "load_httpx",
    "never_sent",
    "unreachable",
]

#: Cached URLs: apart from deadlines, searches repeat few sets of options.
_MAX_URLS = 256


def load_httpx() -> ModuleType:
    """Raises MissingDependencyError, naming the extra."""
    try:
        import httpx
    except ImportError as error:
        raise MissingDependencyError(f"the client needs httpx: {how_to_install('client')}") from error
    return httpx


class TimeLimits:
    """Longest times of calls, in seconds. Immutable."""

    def __init__(self, timeout_s: float, change_timeout_s: float) -> None:
        """Raises InvalidInputError for what is no time."""
        for name, value in (("timeout_s", timeout_s), ("change_timeout_s", change_timeout_s)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 86_400:
                raise InvalidInputError(f"{name} is {value!r}; expected seconds above 0, a day at most")
        self._timeout_s, self._change_timeout_s = float(timeout_s), float(change_timeout_s)

    def of(self, call: Call[Any]) -> float:
        """For all attempts: what its kind may take, or its deadline. Raises InvalidInputError for a bad deadline."""
        deadline_ms = call.params.get("deadline_ms")
        if isinstance(deadline_ms, np.integer | np.floating):
            deadline_ms = deadline_ms.item()
        if deadline_ms is None:
            return self._change_timeout_s if call.is_change else self._timeout_s
        # Compared before it is divided: an integer may be above all floats.
        if (
            isinstance(deadline_ms, bool)
            or not isinstance(deadline_ms, int | float)
            or not 0 < deadline_ms <= 86_400_000
        ):
            raise InvalidInputError(f"deadline_ms is {deadline_ms!r}; expected milliseconds above 0, a day at most")
        return min(deadline_ms / 1e3, self._timeout_s)


def blocking_transport(address: Address, verify: ssl.SSLContext | bool) -> Any:
    """One of httpx, which uses no proxies of the environment."""
    return bound_each_wait(load_httpx().HTTPTransport(**_options(address, verify)))


def async_transport(address: Address, verify: ssl.SSLContext | bool) -> Any:
    """As :func:`blocking_transport`, for asyncio."""
    return load_httpx().AsyncHTTPTransport(**_options(address, verify))


def _options(address: Address, verify: ssl.SSLContext | bool) -> dict[str, Any]:
    return {"uds": address.uds, "verify": verify} if address.uds is None else {"uds": address.uds}


class RequestMaker:
    """Makes httpx requests of one address. Any thread.

    Requests go straight to the transport: ``httpx.Client`` spends more time on cookies, redirects and proxies than a
    small search takes. URLs are parsed once.
    """

    def __init__(self, address: Address, key: str | None, index: str | None = None) -> None:
        """``index``: which of several is meant; None: the first. Raises InvalidInputError for a key that no header can
        carry, and an address that httpx cannot read."""
        self._httpx = load_httpx()
        try:
            self._httpx.URL(address.url)
        except self._httpx.InvalidURL as error:
            raise not_an_address(address.url, str(error)) from None
        self._index = index
        self._address = address
        self._own = {} if key is None else {"authorization": bearer(key, "key (HYBRIDINDEX_KEY of the environment)")}
        self._urls: dict[tuple[str, frozenset[tuple[str, Any]]], Any] = {}

    def __call__(self, call: Call[Any], timeout_s: float) -> Any:
        """An ``httpx.Request``. A deadline in ``call`` becomes the time that is left."""
        params = call.params
        if "deadline_ms" in params:
            params = {**params, "deadline_ms": timeout_s * 1e3}
        return self._httpx.Request(
            call.method,
            self._url(call.path_of(self._index), params),
            headers={**call.headers, **self._own},
            content=call.content,
            extensions={"timeout": Waits(timeout_s)},
        )

    def _url(self, path: str, params: Mapping[str, Any]) -> Any:
        key = path, frozenset(params.items())
        url = self._urls.get(key)
        if url is None:
            if len(self._urls) >= _MAX_URLS:
                self._urls.clear()
            url = self._urls[key] = self._httpx.URL(self._address.url + path, params=params or None)
        return url


def never_sent(error: Exception) -> bool:
    """Whether the daemon cannot have received any of the request."""
    httpx = load_httpx()
    return isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)


def unreachable(error: Exception, address: Address) -> UnreachableError:
    where = f"unix:{address.uds}" if address.uds is not None else address.url
    what = str(error) or type(error).__name__
    return UnreachableError(f"no answer from the daemon at {where} ({what})")
