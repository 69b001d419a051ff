"""rabitq.json says what was written, or says that it does not; candidates beyond the table are not too few."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.config import MAX_CANDIDATES
from hybridindex.errors import CorruptIndexError, IndexFormatError, UnsupportedIndexError
from hybridindex.index.rabitq.spec import CandidateTable, RabitqSpec, bin_name, parse_spec, render_spec
from hybridindex.index.storage.signed_json import render_signed
from tests.index.rabitq.forms import form

TABLE = CandidateTable(k=(1, 10), nprobe=(1, 2, 4), r=((5, 8, 10), (20, 30, 50)))
SPEC = RabitqSpec(
    **dataclasses.asdict(form(100, bits=2, metric="l2")),
    generation=3,
    count=1000,
    nlist=4,
    rows_xxh3_128="ab" * 16,
    file=bin_name("cd" * 16),
    file_bytes=4096,
    file_xxh3_128="cd" * 16,
    recall_loss=0.005,
    candidates=TABLE,
    measured_with="queries",
    created_at="2026-01-01T00:00:00+00:00",
    versions={"numpy": "2"},
)


def test_round_trip():
    assert parse_spec(render_spec(SPEC), "s") == SPEC


@given(st.data())
def test_any_changed_byte_is_noticed(data):
    raw = bytearray(render_spec(SPEC))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(IndexFormatError):
        parse_spec(bytes(raw), "s")


def test_a_newer_version_is_named_with_what_helps():
    content = json.loads(render_spec(SPEC))
    raw = render_signed(content.pop("format"), content.pop("format_version") + 2, content)
    with pytest.raises(UnsupportedIndexError, match=r"format_version 3.*upgrade it, or compress the index again"):
        parse_spec(raw, "s")


@pytest.mark.parametrize(
    "wrong",
    [
        {"bits": 3},
        {"padded_dim": 100},
        {"rounds": 5},
        {"rounds": 0},
        {"source": "elsewhere"},
        {"f_scale": 0.3},
        {"metric": "cosine"},
        {"file": "../lists.bin"},
        {"candidates": {"k": [1], "nprobe": [1, 2], "r": [[1]]}},
        {"candidates": {"k": [None], "nprobe": [1], "r": [[1]]}},
        {"candidates": {"k": [1], "nprobe": ["1"], "r": [[1]]}},
        {"candidates": {"k": [1], "nprobe": [1], "r": [[0.5]]}},
        {"seed": -1},
        {"seed": 1 << 64},
        {"seed": "7"},
    ],
)
def test_values_that_do_not_fit_together_are_refused(wrong):
    content = {**dataclasses.asdict(SPEC), **wrong}
    with pytest.raises(CorruptIndexError, match="misstates"):
        parse_spec(render_signed("hybridindex rabitq", 1, content), "s")


def test_sizes_of_blocks_and_files():
    assert form(100, bits=1).block_bytes == 4 * 64 + 64
    assert form(100, bits=4, metric="l2").block_bytes == 16 * 64 + 128
    assert SPEC.file_bytes_for(np.array([0, 1, 16, 17])) == 4 * SPEC.block_bytes
    assert SPEC.file_bytes_for(np.array([0, 0])) == 64
    assert SPEC.block_starts(np.array([0, 1, 16, 17])).tolist() == [0, 0, 1, 2, 4]


@pytest.mark.parametrize(
    ("k", "nprobe", "expected"),
    [(1, 1, 5), (1, 2, 8), (2, 1, 20), (10, 3, 50), (10, 8, 100), (20, 8, 200), (200, 1, 400), (5000, 4, 5000)],
)
def test_candidates_are_those_of_the_next_larger_entry_or_in_proportion(k, nprobe, expected):
    assert SPEC.candidates_for(k, nprobe) == expected


def test_candidates_are_at_most_all_rows():
    assert SPEC.candidates_for(100, 400) == 1000


def test_candidates_are_at_most_what_scans_keep():
    large = dataclasses.replace(SPEC, count=10**6)
    assert [large.candidates_for(100, nprobe) for nprobe in (400, 1000)] == [50_000, MAX_CANDIDATES]
