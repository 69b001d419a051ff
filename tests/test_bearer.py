"""API keys that no HTTP header can carry are refused where they are given, and never shown."""

from __future__ import annotations

import traceback

import pytest

from hybridindex.bearer import bearer
from hybridindex.client import AsyncClient, Client
from hybridindex.cluster.nodes.calls import NodeCalls
from hybridindex.errors import InvalidInputError
from hybridindex.rag.embedders.openai import OpenAIEmbedder
from hybridindex.rag.generator import OpenAIGenerator

URL = "http://127.0.0.1:9"
BAD = [
    ("sk-secret\n", "a line feed at its end"),
    ("sk-secret\r\n", "a carriage return at its end"),
    ("sk-secret ", "a space at its end"),
    ("\tsk-secret", "a tab at its start"),
    ("sk-\nsecret", "a line feed at character 4"),
    ("sk-secrét", "a character outside ASCII at character 8"),
    ("sk-\x7fsecret", "a control character at character 4"),
    ("", "is empty"),
]


@pytest.mark.parametrize(
    ("take", "named"),
    [
        (lambda key: OpenAIGenerator(URL, model="m", key=key), "HYBRIDINDEX_LLM_KEY"),
        (lambda key: OpenAIEmbedder(URL, "m", key=key), "HYBRIDINDEX_EMBEDDER_KEY"),
        (lambda key: Client(URL, key=key), "HYBRIDINDEX_KEY"),
        (lambda key: AsyncClient(URL, key=key), "HYBRIDINDEX_KEY"),
        (lambda key: NodeCalls(URL, key), "HYBRIDINDEX_CLUSTER_KEY"),
    ],
    ids=["generator", "embedder", "client", "async client", "calls of nodes"],
)
@pytest.mark.parametrize(("key", "complaint"), BAD)
def test_a_key_that_no_header_can_carry_is_named_and_not_shown(take, named, key, complaint):
    with pytest.raises(InvalidInputError, match=complaint) as caught:
        take(key)
    assert named in str(caught.value)
    assert "secr" not in "".join(traceback.format_exception_only(caught.value))
    assert caught.value.__cause__ is None


def test_a_good_key_is_sent_as_it_is():
    assert bearer("sk-!~/+=.", "key") == "Bearer sk-!~/+=."


def test_a_key_that_is_no_text_is_refused_without_being_shown():
    with pytest.raises(InvalidInputError, match="key is a bytes; expected text") as caught:
        bearer(b"sk-secret", "key")
    assert "secret" not in str(caught.value)
