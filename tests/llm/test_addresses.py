"""Addresses of LLM servers: what is none is refused before anything is sent, and no password is shown."""

from __future__ import annotations

import pytest

from hybridindex.errors import InvalidInputError
from hybridindex.llm.addresses import base_url
from hybridindex.profiler.llm.server import LLMServer
from hybridindex.rag.embedders.openai import OpenAIEmbedder
from hybridindex.rag.generator import OpenAIGenerator


@pytest.mark.parametrize(
    "url",
    [
        "ftp://x",
        "http://",
        "127.0.0.1:8000",
        "http://h?key=s3cret",
        "http://h#s3cret",
        "http://h:99999",
        "http://h:abc",
        "http://[::1",
        "http://a b/",
        "http://\x00/",
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidInputError, match="url is") as caught:
        base_url(url)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("make", [LLMServer, OpenAIGenerator, lambda url: OpenAIEmbedder(url, "m")])
@pytest.mark.parametrize(
    "url", ["http://user:s3cret@h", "https://s3cret@h/v1", "http://user:s3cret@[::1", "ftp://user:s3cret@h"]
)
def test_a_password_in_an_address_is_refused_and_never_shown(make, url: str) -> None:
    with pytest.raises(InvalidInputError, match="holds a user's name or a password") as caught:
        make(url)
    assert "s3cret" not in str(caught.value)
    assert caught.value.__context__ is None


def test_an_address_may_end_with_v1() -> None:
    assert base_url("http://h:8000/v1/") == base_url("http://h:8000") == "http://h:8000"
    assert base_url("https://h/llm/v1") == "https://h/llm"
    assert base_url("http://h/a@b") == "http://h/a@b"
