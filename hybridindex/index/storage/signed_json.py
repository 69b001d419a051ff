"""Canonical JSON files (sorted keys, two spaces, one trailing newline) that carry the digest of their own content: any
changed byte is noticed, white space included."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hybridindex.errors import CorruptIndexError, UnsupportedIndexError
from hybridindex.index.storage.checksums import digest_bytes

__all__ = ["canonical", "parse_signed", "render_signed"]

_SELF = "xxh3_128_of_content"


def canonical(content: Mapping[str, Any]) -> bytes:
    """One spelling of ``content``."""
    return (json.dumps(content, sort_keys=True, indent=2, ensure_ascii=True) + "\n").encode("ascii")


def render_signed(format_name: str, version: int, content: Mapping[str, Any]) -> bytes:
    """The bytes of the file."""
    content = {"format": format_name, "format_version": version, **content}
    return canonical({**content, _SELF: digest_bytes(canonical(content))})


def parse_signed(raw: bytes, where: str, format_name: str, newest: int, *, cure: str) -> dict[str, Any]:
    """What :func:`render_signed` was given; ``where`` names the file in errors.

    Args:
        newest: version of the format that this library reads.
        cure: what to do about a newer one.

    Raises:
        CorruptIndexError: not the bytes that were written.
        UnsupportedIndexError: of another format, or of a newer version.
    """
    try:
        content = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptIndexError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != format_name:
        raise UnsupportedIndexError(f"{where} is not a {format_name} file")
    version = content.get("format_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise CorruptIndexError(f"{where}: format_version is {version!r}; expected a positive integer")
    if version > newest:
        raise UnsupportedIndexError(
            f"{where} has format_version {version}; this hybridindex reads up to {newest}: {cure}"
        )
    stored = content.pop(_SELF, None)
    if stored != digest_bytes(canonical(content)) or canonical({**content, _SELF: stored}) != raw:
        raise CorruptIndexError(f"{where} differs from its own checksum")
    return content
