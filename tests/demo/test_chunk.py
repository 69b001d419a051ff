from __future__ import annotations

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from hybridindex.demo.chunk import (
    MAX_WORDS,
    MIN_WORDS,
    chunk_text,
    dict_entries,
    html_to_text,
    man_to_text,
    package_descriptions,
    pod_to_text,
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


class _Oracle(HTMLParser):
    """The words of a page as the standard library sees them."""

    dropped = frozenset(("head", "script", "style", "nav", "footer"))

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.text = ""
        self.depth = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.depth += tag in self.dropped
        self.text += " " * (tag in ("p", "div", "li", "td", "br"))

    def handle_endtag(self, tag: str) -> None:
        self.depth -= tag in self.dropped
        self.text += " " * (tag in ("p", "div", "li", "td"))

    def handle_data(self, data: str) -> None:
        self.text += data * (self.depth == 0)


_INLINE = st.sampled_from(
    ["plain", "a &amp; b", "x &lt; y", "<b>bo</b>ld", "<a href='q?a=1&b=2'>link</a>", "&#8217;s", "5 < 6"]
)
_BLOCK = st.tuples(st.sampled_from(["p", "div", "li", "td", "script", "style", "nav"]), st.lists(_INLINE, max_size=4))


@given(st.lists(_BLOCK, max_size=6))
def test_html_gives_the_words_that_html_parser_gives(blocks: list[tuple[str, list[str]]]) -> None:
    body = "".join(f"<{tag} class='c'>{' '.join(parts)}</{tag}>" for tag, parts in blocks)
    page = f"<!DOCTYPE html><html><head><title>t</title></head><body><!-- <p>no</p> -->{body}<br/></body></html>"
    oracle = _Oracle()
    oracle.feed(page)
    oracle.close()
    assert html_to_text(page).split() == oracle.text.split()


def test_html_lines_are_blocks() -> None:
    text = html_to_text("<p>one\ntwo</p><p>three</p>")
    assert [line for line in text.split("\n") if line] == ["one two", "three"]


def test_man_pages_lose_macros_fonts_and_comments() -> None:
    page = '.\\" a comment\n.TH X 3\n.de Sp\nhidden\n..\n.SH NAME\nopen \\- open \\fIa\\fP file\n'
    page += '.PP\n.BR open (2)\nsays "yes"\n'
    assert tidy(man_to_text(page)) == 'NAME open - open a file open(2) says "yes"'


def test_pod_loses_commands_and_formatting_codes() -> None:
    page = "=head1 NAME\n\nB<I<x>> and C<< $a->b >> see L<perlop|the manual> X<idx>E<lt>tagE<gt>\n"
    assert tidy(pod_to_text(page)).startswith("NAME x and $a->b see perlop <tag>")


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
