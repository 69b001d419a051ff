"""httpx, where it is installed: connections, and its errors in our words."""

from __future__ import annotations

import ssl
from types import ModuleType
from typing import Any

from hybridindex.client.messages import Address, Call
from hybridindex.errors import InvalidInputError, MissingDependencyError, UnreachableError

__all__ = ["check_timeout", "load_httpx", "never_sent", "options_of", "transport_options", "unreachable"]


def load_httpx() -> ModuleType:
    """Raises MissingDependencyError, naming the extra."""
    try:
        import httpx
    except ImportError as error:
        raise MissingDependencyError("the client needs httpx: pip install 'hybridindex[client]'") from error
    return httpx


def check_timeout(timeout_s: float) -> float:
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s <= 86_400:
        raise InvalidInputError(f"timeout_s is {timeout_s!r}; expected seconds above 0, a day at most")
    return float(timeout_s)


def transport_options(address: Address, verify: ssl.SSLContext | bool) -> dict[str, Any]:
    """For an httpx transport. Proxies of the environment are not used: a daemon is near."""
    return {"uds": address.uds, "verify": verify} if address.uds is None else {"uds": address.uds}


def options_of(call: Call, key: str | None) -> dict[str, Any]:
    """For ``httpx.Client.request``."""
    headers = dict(call.headers)
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    return {"params": call.params or None, "content": call.content, "headers": headers}


def never_sent(error: Exception) -> bool:
    """Whether no byte of the request can have reached the daemon."""
    httpx = load_httpx()
    return isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)


def unreachable(error: Exception, address: Address) -> UnreachableError:
    where = f"unix:{address.uds}" if address.uds is not None else address.url
    what = str(error) or type(error).__name__
    return UnreachableError(f"no answer from the daemon at {where} ({what})")
