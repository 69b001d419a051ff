"""Event streams: any portions, hostile content, limits."""

from __future__ import annotations

import contextlib
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import LLMServerError
from hybridindex.profiler.llm_stream import CompletionChunk, EventReader, parse_object, shown

STREAM = (
    b': a comment\r\ndata: {"choices": [{"text": "\xc3\xa9", "finish_reason": null}]}\r\n\r\n'
    b'event: x\ndata:{"choices": [{"text": " b", "finish_reason": "length"}]}\n\n'
    b'data: {"choices": [],\r\ndata: "usage": {"prompt_tokens": 7, "completion_tokens": 2}}\r\r'
    b"data: [DONE]\n\n"
)
CHUNKS = [
    CompletionChunk(text="é"),
    CompletionChunk(text=" b", finish_reason="length"),
    CompletionChunk(text=None, prompt_tokens=7, completion_tokens=2),
]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_chunks_do_not_depend_on_how_the_bytes_arrive(cuts: list[int]) -> None:
    reader = EventReader()
    edges = [0, *sorted(cuts), len(STREAM)]
    found = [chunk for a, b in itertools.pairwise(edges) for chunk in reader.feed(STREAM[a:b])]
    assert found == CHUNKS
    assert reader.done


@pytest.mark.parametrize("cut", range(len(STREAM)))
def test_no_single_cut_changes_them_not_even_between_cr_and_lf(cut: int) -> None:
    reader = EventReader()
    assert [*reader.feed(STREAM[:cut]), *reader.feed(STREAM[cut:])] == CHUNKS


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_arbitrary_bytes_give_chunks_or_a_clear_error(portions: list[bytes]) -> None:
    reader = EventReader()
    with contextlib.suppress(LLMServerError):
        for portion in portions:
            assert all(isinstance(chunk, CompletionChunk) for chunk in reader.feed(portion))


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=3), lambda c: st.lists(c, max_size=3)))
def test_events_of_the_wrong_shape_are_refused_or_empty(value: object) -> None:
    for event in (value, {"choices": value}, {"choices": [value]}, {"choices": [{"text": value}]}, {"usage": value}):
        with contextlib.suppress(LLMServerError):
            EventReader().feed(b"data: " + json.dumps(event).encode() + b"\n\n")


def test_a_line_without_end_and_an_answer_without_end_are_cut_off() -> None:
    reader = EventReader(max_line_bytes=100)
    reader.feed(b"data: " + b"x" * 90)
    with pytest.raises(LLMServerError, match="a line of the answer is longer than 100 bytes"):
        reader.feed(b"x" * 90)
    endless = EventReader(max_answer_bytes=50)
    for _ in range(6):
        endless.feed(b": tick\n\n")
    with pytest.raises(LLMServerError, match="the answer is longer than 50 bytes"):
        endless.feed(b": tick\n\n")


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"<html>\n", "no event stream"),
        (b"data: {\n\n", "no JSON object"),
        (b"data: " + b"[" * 100_000 + b"\n\n", "no JSON object"),
        (b'data: {"error": {"message": "out of memory"}}\n\n', "out of memory"),
        (b'data: {"choices": [], "usage": {"completion_tokens": -1}}\n\n', "completion_tokens"),
        (b'data: {"choices": [], "usage": {"completion_tokens": true}}\n\n', "completion_tokens"),
    ],
)
def test_what_is_no_completion_is_said(sent: bytes, why: str) -> None:
    with pytest.raises(LLMServerError, match=why):
        EventReader().feed(sent)


def test_messages_show_little_and_no_control_characters() -> None:
    assert shown(b"a\x1b[31m\nb\xff") == "'a [31m b�'"
    assert len(shown("x" * 10_000)) < 140
    with pytest.raises(LLMServerError, match="it is no JSON object"):
        parse_object(b"[]", "it")
