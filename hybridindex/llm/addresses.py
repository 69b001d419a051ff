"""Addresses of LLM servers, as people give them."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from hybridindex.errors import InvalidInputError
from hybridindex.llm.events import shown

__all__ = ["base_url"]


def base_url(url: str) -> str:
    """Scheme, host, port and path without a trailing ``/v1``. Messages and logs show it as it is.

    Raises:
        InvalidInputError: no http or https address, or one with a query or fragment, or with a user's name or a
            password, which are not shown.
    """
    try:
        parts = urlsplit(url)
        host, good = parts.hostname or "", parts.scheme in ("http", "https") and parts.port != 0
        # Of what cannot be read as an address, any part before an @ may be a password.
        secret = "@" in (parts.netloc if good and host else url)
    except ValueError:
        host, good, secret = "", False, "@" in url
    if secret:
        raise InvalidInputError(
            "url holds a user's name or a password, or an @ where a host is expected; give the address alone, and an "
            "API key by its own option"
        )
    if not good or not host or not host.isprintable() or " " in host or parts.query or parts.fragment:
        raise InvalidInputError(
            f"url is {shown(re.split('[?#]', url)[0])}; expected http://host:port or https://host:port, without a "
            "query or a fragment"
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/").removesuffix("/v1").rstrip("/")
