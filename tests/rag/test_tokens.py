"""Tokens of a document store: whose they are is found out by where they start, and others are refused."""

from __future__ import annotations

import sqlite3
import string

import numpy as np
import pytest
import tokenizers

from benchmarks.rag.answer_quality import periodic_likelihood
from hybridindex.errors import InvalidInputError
from hybridindex.rag.documents import DocumentStore, write_documents
from hybridindex.rag.embed import StaticEmbedder
from hybridindex.rag.periodic import PeriodicRetrieval
from hybridindex.rag.retriever import CenteredEmbedder, Retriever
from hybridindex.rag.shift import shift_passage
from hybridindex.rag.steps import Steps
from hybridindex.rag.tokens import word_starts
from tests.rag.test_periodic import CHUNKS, QUESTION, Overlap, retrieved, write
from tests.rag.world import DIM, embedder, replay
from tests.rag.world import documents as all_documents


class Subwords:
    """The toy embedder; its tokens are single letters."""

    def __init__(self):
        letters = string.ascii_lowercase
        pieces = ["[UNK]", *letters, *(f"##{letter}" for letter in letters)]
        tokenizer = tokenizers.Tokenizer(
            tokenizers.models.WordPiece({piece: number for number, piece in enumerate(pieces)}, unk_token="[UNK]")
        )
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        self.token_starts = StaticEmbedder(np.zeros((1, DIM), dtype=np.float32), tokenizer).token_starts
        self.embed = embedder().embed


def letters_of(text):
    return len("".join(text.split()))


@pytest.fixture
def subwords(world, tmp_path):
    """A store of letters for the world's index."""
    path = tmp_path / "letters.sqlite"
    write_documents(
        path, all_documents(), index_fingerprint=world[0].fingerprint, embedder="toy", dim=DIM, mean=world[2],
        token_starts=Subwords().token_starts, tokenizer="letters",
    )  # fmt: skip
    return path


def retriever_of(source, store, within=None):
    return Retriever(source, CenteredEmbedder(within or Subwords(), store.info.mean), store, k=3)


def check_shifts(source, store):
    written, prompts = write(retriever_of(source, store), PeriodicRetrieval(interval=4, window=16), *CHUNKS)
    # The last chunk's are used by nobody.
    assert [chunk.staleness for chunk in written.chunks] == [letters_of(chunk) for chunk in CHUNKS]
    for one in retrieved(written)[0].ids[0]:
        shifted = shift_passage(store, one, letters_of(CHUNKS[0]))
        assert shifted
        assert shifted in prompts[1]
    assert [letters_of(event.texts[0]) for event in retrieved(written)[1:]] == [16] * 3


def test_windows_and_shifts_are_counted_as_the_store_counts(source, subwords):
    with DocumentStore(subwords) as store:
        assert store.info.tokenizer == "letters"
        check_shifts(source, store)


def test_a_store_that_does_not_name_its_tokens_is_counted_alike(source, subwords):
    with sqlite3.connect(subwords) as db:
        db.execute("DELETE FROM about WHERE name = 'tokenizer'")
    db.close()
    with DocumentStore(subwords) as store:
        assert store.info.tokenizer == ""
        check_shifts(source, store)
        with pytest.raises(InvalidInputError, match="of a tokenizer that it does not name"):
            retriever_of(source, store).token_starts(word_starts)


def test_tokens_of_another_kind_are_refused(source, router, subwords, retriever):
    with DocumentStore(subwords) as store:
        complaint = (
            rf"finds 96 tokens in the first 8 passages, .* has {sum(len(p.starts) for p in store.first(8))} tokens of"
        )
        with pytest.raises(InvalidInputError, match=complaint + " 'letters'; give"):
            write(retriever_of(source, store), PeriodicRetrieval(token_starts=word_starts), *CHUNKS)
        with pytest.raises(InvalidInputError, match="finds 96 or 96 tokens"):
            retriever_of(source, store, embedder()).token_starts()
        given = PeriodicRetrieval(token_starts=Subwords().token_starts)
        with Steps(QUESTION, retriever, replay()) as steps, pytest.raises(InvalidInputError, match="token_starts find"):
            periodic_likelihood(given, steps, Overlap(), "".join(CHUNKS))
    assert router.residency.n_resident == 0


def test_a_store_of_words_says_so(tmp_path, source, world):
    write_documents(tmp_path / "d", all_documents(), index_fingerprint="f", embedder="e", dim=DIM, mean=world[2])
    with DocumentStore(tmp_path / "d") as store:
        assert store.info.tokenizer == "words"
        # The embedder has tokens of its own, which are not the store's.
        assert retriever_of(source, store).token_starts() is word_starts


def test_without_texts_any_tokens_do(source):
    letters = Subwords().token_starts
    assert Retriever(source, embedder(), None).token_starts(letters) is letters
