"""Which requests a web page of somebody else may not send: cross-site changes, and names that point here by DNS.

Only browsers are meant. They send along who asks (Sec-Fetch-Site, Origin) and which name they were given (Host), and a
page cannot change these. Who may call what is in ``middleware.py``.
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
    """What is asked of each request before anything else. Immutable."""

    def __init__(self, *, host: str | None, keyed: bool) -> None:
        """
        Args:
            host: the address that the daemon listens on; None: unix sockets alone.
            keyed: callers show a key, which a foreign page has not; then any Host will do.
        """
        self._host = None if host is None else host.lower()
        self._keyed = keyed

    def check(self, scope: MutableMapping[str, Any], headers: Mapping[bytes, bytes]) -> None:
        """Lets a request of our own page, or of no page, pass.

        Raises:
            ProblemError: 403, a page of another site asks for a change. 421, without keys: the Host header names no
                address of this daemon, as after DNS rebinding.
        """
        host = headers.get(b"host", b"").decode("latin-1").lower()
        # Only a unix socket has no port, and no browser reaches one.
        server = scope.get("server")
        over_tcp = server is None or server[1] is not None
        if not self._keyed and over_tcp and host and not self._is_ours(_without_port(host)):
            detail = f"Host is {host[:100]!r}; expected localhost or a loopback address, as this daemon asks for no key"
            raise ProblemError(Problem(421, "misdirected", "Misdirected request", detail, "Host"))
        if scope["method"] in _READING:
            return
        site = headers.get(b"sec-fetch-site")
        if site is not None:
            foreign = site not in (b"same-origin", b"none")
        else:
            origin = headers.get(b"origin")
            foreign = origin is not None and origin.decode("latin-1").lower().partition("://")[2] != host
        if foreign:
            raise ProblemError(
                Problem(403, "cross-site", "Forbidden", "a page of another site asked for a change; it may not")
            )

    def _is_ours(self, name: str) -> bool:
        # Reading an address takes as long as the rest; no name is longer than this.
        return name == self._host or (len(name) <= 255 and _is_loopback(name))


_is_loopback = lru_cache(maxsize=256)(is_loopback)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")
