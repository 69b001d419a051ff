"""What events of a completion say, and what is none."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import LLMServerError
from hybridindex.profiler.llm.stream import CompletionChunk, chunk_of


def test_text_reason_and_counts_are_read() -> None:
    assert chunk_of({"choices": [{"text": "é", "finish_reason": None}]}) == CompletionChunk(text="é")
    last = {"choices": [{"text": " b", "finish_reason": "length"}]}
    assert chunk_of(last) == CompletionChunk(text=" b", finish_reason="length")
    counts = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}
    assert chunk_of(counts) == CompletionChunk(text=None, prompt_tokens=7, completion_tokens=2)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=3), lambda c: st.lists(c, max_size=3)))
def test_events_of_the_wrong_shape_are_refused_or_empty(value: object) -> None:
    for event in ({"choices": value}, {"choices": [value]}, {"choices": [{"text": value}]}, {"usage": value}):
        with contextlib.suppress(LLMServerError):
            assert isinstance(chunk_of(event), CompletionChunk)


@pytest.mark.parametrize(
    ("event", "why"),
    [
        ({"error": {"message": "out of memory"}}, "out of memory"),
        ({"choices": [], "usage": {"completion_tokens": -1}}, "completion_tokens"),
        ({"choices": [], "usage": {"completion_tokens": True}}, "completion_tokens"),
        ({"choices": [5]}, "no completion chunk"),
        ({"choices": [{"text": 5}]}, "no completion chunk"),
    ],
)
def test_what_is_no_completion_is_said(event: dict, why: str) -> None:
    with pytest.raises(LLMServerError, match=why):
        chunk_of(event)
