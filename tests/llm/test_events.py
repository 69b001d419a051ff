"""Event streams: any portions, hostile content, limits, the error that a caller asked for."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import GenerationError, LLMServerError
from hybridindex.llm.events import EventReader, events_of, parse_object, shown

STREAM = (
    b': a comment\r\ndata: {"text": "\xc3\xa9"}\r\n\r\n'
    b'event: x\ndata:{"text": " b"}\n\n'
    b'data: {"choices": [],\r\ndata: "n": 2}\r\r'
    b"data: [DONE]\n\n"
)
EVENTS = [{"text": "é"}, {"text": " b"}, {"choices": [], "n": 2}]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_do_not_depend_on_how_the_bytes_arrive(cuts: list[int]) -> None:
    reader = EventReader()
    edges = [0, *sorted(cuts), len(STREAM)]
    assert [event for a, b in itertools.pairwise(edges) for event in reader.feed(STREAM[a:b])] == EVENTS
    assert reader.done


@pytest.mark.parametrize("cut", range(len(STREAM)))
def test_no_single_cut_changes_them_not_even_between_cr_and_lf(cut: int) -> None:
    assert list(events_of([STREAM[:cut], STREAM[cut:]], EventReader())) == EVENTS


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_arbitrary_bytes_give_objects_or_a_clear_error(portions: list[bytes]) -> None:
    with contextlib.suppress(LLMServerError):
        assert all(isinstance(event, dict) for event in events_of(portions, EventReader()))


def test_nothing_is_read_behind_the_end() -> None:
    said = itertools.chain(
        [b'data: {"a": 1}\n\ndata: [DONE]\n\nnothing of ours\n'], iter(lambda: pytest.fail("read"), 0)
    )
    assert list(events_of(said, EventReader())) == [{"a": 1}]


@pytest.mark.parametrize("ending", [b"", b"\n", b"\r", b"\r\n"])
def test_the_empty_line_behind_the_last_event_may_be_missing(ending: bytes) -> None:
    assert list(events_of([b'data: {"a": 1}' + ending], EventReader())) == [{"a": 1}]
    reader = EventReader()
    assert list(events_of([b"data: [DONE]" + ending], reader)) == []
    assert reader.done


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
        (b"<html>\n", "not an event stream"),
        (b"data: {\n\n", "not a JSON object"),
        (b"data: 5\n\n", "not a JSON object"),
        (b"data: " + b"[" * 100_000 + b"\n\n", "not a JSON object"),
        (b"x" * (2 << 20), "a line of the answer is longer"),
        (b"data: " + b"x" * (2 << 20) + b"\n\n", "a line of the answer is longer"),
    ],
)
@pytest.mark.parametrize("kind", [LLMServerError, GenerationError])
def test_what_is_no_stream_of_objects_is_the_callers_error(sent: bytes, why: str, kind: type) -> None:
    with pytest.raises(kind, match=why):
        EventReader(error=kind).feed(sent)


def test_messages_show_little_and_no_control_characters() -> None:
    assert shown(b"a\x1b[31m\nb\xff") == "'a [31m b�'"
    assert len(shown("x" * 10_000)) < 140
    with pytest.raises(LLMServerError, match="it is not a JSON object"):
        parse_object(b"[]", "it")
