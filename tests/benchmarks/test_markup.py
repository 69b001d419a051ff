from __future__ import annotations

import gzip
from html.parser import HTMLParser
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.markup import html_pages, html_to_text, man_to_text, manual_pages, pod_to_text
from hybridindex.demo.chunk import tidy

_SENTENCE = "This page explains how the small machine reads its first long line"


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


def test_listings_and_translations_are_left_out_of_html(tmp_path: Path) -> None:
    for folder, word in (("doc", "kept"), ("doc/src", "listing"), ("doc/translations/it", "translated")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "index.html").write_text(f"<title>T</title><p>{_SENTENCE} {word}</p>")
    assert [passage.split()[-1] for passage in html_pages(tmp_path)] == ["kept"]


def test_manual_pages_and_pod_are_read_and_links_are_not(tmp_path: Path) -> None:
    man = tmp_path / "usr/share/man/man3"
    man.mkdir(parents=True)
    (man / "open.3.gz").write_bytes(gzip.compress(f".SH NAME\n{_SENTENCE} open\n".encode()))
    (man / "also.3.gz").symlink_to("open.3.gz")
    (tmp_path / "perlfoo.pod").write_text(f"=head1 NAME\n\n{_SENTENCE} foo\n")
    assert [passage.split()[-1] for passage in manual_pages(tmp_path)] == ["open", "foo"]
