"""Refuses requests of foreign web pages: cross-site changes, and hosts that DNS rebinding points here.

Browsers send Sec-Fetch-Site, Origin and Host, and a page cannot change these. ``middleware.py`` checks keys and roles.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from functools import lru_cache
from typing import Any

from hybridindex.service.config import is_loopback
from hybridindex.service.http.problems import Problem, ProblemError

__all__ = ["OriginPolicy"]

_READING = frozenset({"GET", "HEAD", "OPTIONS"})


class OriginPolicy:
    """Checked first on each request. Immutable."""

    def __init__(self, *, host: str | None, keyed: bool) -> None:
        """
        Args:
            host: the address that the daemon listens on; None: unix sockets alone.
            keyed: callers need a key. A foreign page has none, so any Host is accepted.
        """
        self._host = None if host is None else host.lower()
        self._keyed = keyed

    def check(self, scope: MutableMapping[str, Any], headers: Mapping[bytes, bytes]) -> None:
        """Accepts requests of our own page, and of clients that are not browsers.

        Raises:
            ProblemError: 403, a page of another site asks for a change, or, without keys, for anything. 421, without
                keys: Host is no address of this daemon, as after DNS rebinding.
        """
        host = headers.get(b"host", b"").decode("latin-1").lower()
        # A unix socket has no port, and browsers cannot reach it.
        server = scope.get("server")
        over_tcp = server is None or server[1] is not None
        if not self._keyed and over_tcp and host and not self._is_ours(_without_port(host)):
            detail = f"Host is {host[:100]!r}; expected localhost or a loopback address, as this daemon asks for no key"
            raise ProblemError(Problem(421, "misdirected", "Misdirected request", detail, "Host"))
        reads, site = scope["method"] in _READING, headers.get(b"sec-fetch-site")
        # A foreign page has no key. Where none is needed, others may let it read what we answer, as vLLM's CORS does;
        # whoever follows a link reads it alone.
        if reads and (self._keyed or headers.get(b"sec-fetch-mode") == b"navigate"):
            return
        if site is not None:
            foreign = site not in (b"same-origin", b"none")
        else:
            origin = headers.get(b"origin")
            foreign = origin is not None and origin.decode("latin-1").lower().partition("://")[2] != (host or None)
        if foreign:
            raise ProblemError(
                Problem(
                    403,
                    "cross-site",
                    "Forbidden",
                    f"a page of another site {'reads without a key' if reads else 'asked for a change'}; it may not",
                )
            )

    def _is_ours(self, name: str) -> bool:
        # Parsing an address is slow, and no valid name is longer.
        return name == self._host or (len(name) <= 255 and _is_loopback(name))


_is_loopback = lru_cache(maxsize=256)(is_loopback)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")
