"""The manifest says what was written, or says that it does not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import CorruptIndexError, IndexFormatError, UnsupportedIndexError
from hybridindex.index.storage.manifest import (
    FileEntry,
    Manifest,
    content_fingerprint,
    parse_manifest,
    render_manifest,
)
from hybridindex.index.storage.signed_json import render_signed

FILES = {name: FileEntry(size=7, xxh3_128="ab" * 16) for name in ("model.faiss", "lists.idx.npy", "lists.bin")}
MANIFEST = Manifest(
    generation=3,
    created_at="2026-01-01T00:00:00+00:00",
    metric="ip",
    codec="flat",
    dim=8,
    scan_dim=8,
    nlist=4,
    count=100,
    nprobe=2,
    layout="rows",
    by_residual=False,
    normalized=True,
    code_size=32,
    fingerprint="f" * 32,
    files=FILES,
    versions={"numpy": "2"},
    notes={"source": "build"},
)


def test_round_trip() -> None:
    assert parse_manifest(render_manifest(MANIFEST), "m") == MANIFEST


@given(st.data())
def test_any_changed_byte_is_noticed(data: st.DataObject) -> None:
    raw = bytearray(render_manifest(MANIFEST))
    position = data.draw(st.integers(0, len(raw) - 1))
    raw[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(IndexFormatError):
        parse_manifest(bytes(raw), "m")


@given(st.integers(0, 10_000))
def test_truncation_is_noticed(length: int) -> None:
    raw = render_manifest(MANIFEST)
    with pytest.raises(CorruptIndexError):
        parse_manifest(raw[: min(length, len(raw) - 1)], "m")


def test_white_space_that_json_would_accept_is_noticed() -> None:
    with pytest.raises(CorruptIndexError, match="checksum"):
        parse_manifest(render_manifest(MANIFEST) + b" ", "m")


def test_newer_format_asks_for_an_upgrade() -> None:
    content = json.loads(render_manifest(MANIFEST))
    content["format_version"] = 2
    with pytest.raises(UnsupportedIndexError, match=r"format_version 2.*upgrade"):
        parse_manifest(json.dumps(content).encode(), "m")


def test_json_that_is_too_deep_is_damage() -> None:
    with pytest.raises(CorruptIndexError, match="m is not valid JSON"):
        parse_manifest(b"[" * 100_000, "m")


@pytest.mark.parametrize("raw", [b"{}", b"[]", b'{"format": "other"}', b"null"])
def test_foreign_json_is_not_ours(raw: bytes) -> None:
    with pytest.raises(UnsupportedIndexError, match="not a hybridindex file"):
        parse_manifest(raw, "m")


@pytest.mark.parametrize(
    "wrong",
    [
        {"codec": 5},
        {"notes": None},
        {"files": []},
        {"files": {**json.loads(render_manifest(MANIFEST))["files"], "lists.bin": {"size": 7, "xxh3_128": 5}}},
        {"files": {**json.loads(render_manifest(MANIFEST))["files"], "lists.bin": {"size": 7, "xxh3_128": "../x"}}},
    ],
)
def test_what_another_writer_misstates_is_said(wrong: dict[str, Any]) -> None:
    content = {**json.loads(render_manifest(MANIFEST)), **wrong}
    for name in ("format", "format_version", "xxh3_128_of_content"):
        del content[name]
    with pytest.raises(CorruptIndexError, match="m lacks or misstates a field"):
        parse_manifest(render_signed("hybridindex", 1, content), "m")


def test_fingerprint_follows_content() -> None:
    values = {
        key: getattr(MANIFEST, key)
        for key in ("metric", "codec", "dim", "scan_dim", "nlist", "count", "by_residual", "normalized", "code_size")
    }
    other = {**FILES, "lists.bin": FileEntry(size=7, xxh3_128="cd" * 16)}
    assert content_fingerprint(values, FILES) == content_fingerprint(dict(reversed(values.items())), FILES)
    assert content_fingerprint(values, FILES) != content_fingerprint(values, other)
    assert content_fingerprint(values, FILES) != content_fingerprint({**values, "metric": "l2"}, FILES)
