from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hybridindex.demo.chunk import (
    MAX_WORDS,
    MIN_WORDS,
    chunk_text,
    dict_entries,
    package_descriptions,
    tidy,
    unwrap,
)

_WORDS = st.lists(st.sampled_from(["alpha", "beta", "gamma.", "delta", "end!", "line\n"]), max_size=400)


@given(_WORDS)
def test_chunks_keep_the_words_in_order_and_lose_at_most_a_short_tail(words: list[str]) -> None:
    text = " ".join(words)
    chunks = list(chunk_text(text))
    kept = " ".join(chunks).split()
    original = text.split()
    assert kept == original[: len(kept)]
    assert len(original) - len(kept) < 12
    assert all(len(chunk.split()) <= MAX_WORDS for chunk in chunks)
    assert all(len(chunk.split()) >= MIN_WORDS for chunk in chunks[:-1])


def test_a_chunk_ends_at_the_first_sentence_end_after_the_minimum() -> None:
    words = ["word"] * 120
    words[50], words[79], words[85] = "early.", "here.", "late."
    first = next(chunk_text(" ".join(words)))
    assert len(first.split()) == 80
    assert first.endswith("here.")


def test_continuations_carry_the_title_and_first_chunks_do_not() -> None:
    first, second = chunk_text(" ".join(["word"] * 150), title="Thing")
    assert not first.startswith("Thing")
    assert second.startswith("Thing: word")


def test_numbers_and_short_texts_are_left_out() -> None:
    assert list(chunk_text("1 2 3 4 5 6 7 8 9 10")) == []
    assert list(chunk_text("three small words", min_words=4)) == []
    assert list(chunk_text("")) == []


@given(st.text(max_size=200))
def test_tidy_text_fits_on_one_line(text: str) -> None:
    assert len(tidy(text).splitlines()) <= 1
    assert all(len(line.splitlines()) <= 1 for line in unwrap(text).split("\n"))


def test_unwrap_keeps_paragraphs_and_joins_wrapped_lines() -> None:
    assert unwrap("one\n  two\n\nthree\nfour") == "one two\nthree four"


def test_dictionary_entries_come_once_in_data_order_without_broken_lines() -> None:
    data = b"first {entry} [1913 Webster]second entry"
    index = "\n".join(
        ["two\tc\tM", "one\tA\tc", "uno\tA\tc", "00-database-info\tA\tB", "bad\tA\t////", "odd\t!\tB", "x"]
    )
    entries = [tidy(entry) for entry in dict_entries(index, data)]
    assert entries == ["first entry", "second entry"]


def test_package_descriptions_join_short_and_long_text() -> None:
    lines = [
        "Package: a",
        "Description-md5: 0",
        "Description-en: Short",
        " long",
        " .",
        " more",
        "",
        "Package: b",
        "Description-en: B",
    ]
    assert list(package_descriptions(lines)) == [("a", "Short.\n long\n\n more"), ("b", "B.")]
