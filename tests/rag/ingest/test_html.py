"""Pages as they come from the web: what is shown of them, in a time that grows as they do."""

from __future__ import annotations

import pytest

from hybridindex.errors import InvalidInputError
from hybridindex.rag.ingest.readers import Reading, read_chunks
from hybridindex.rag.ingest.sources import GivenText


def words(page):
    chunks = read_chunks(GivenText(name="page", text=page, kind="html"), Reading())
    return " ".join(" ".join(chunk.text for chunk in chunks).split())


@pytest.mark.parametrize(
    ("page", "shown"),
    [
        ("<p>one <b>bold</b> word<p>two", "one bold word two"),
        ("a < b and c > d", "a < b and c > d"),
        ("before <!-- <p>not this</p> --> after", "before after"),
        ("shown <!-- and this has no end", "shown and this has no end"),
        ("<script>if (a<b) no()</script>after", "after"),
        ("text <a href", "text <a href"),
    ],
)
def test_what_is_shown(page, shown):
    assert words(page) == shown


@pytest.mark.timeout(60)
@pytest.mark.parametrize("part", ["<a ", "<", "<!--", "</a ", "<!x ", "<?x ", "<a b='"])
def test_what_never_ends_is_read_in_a_moment(part):
    """A megabyte: Python's parser alone would look for the end from each of them, for an hour."""
    words(part * (1_000_000 // len(part)))


@pytest.mark.parametrize("page", ["<![]]>", "<![0]>", "<![x[>"])
def test_what_python_cannot_read_names_the_page(page):
    said = "texts 'page' cannot be read as HTML"
    try:
        words(page)  # other versions of Python can
    except InvalidInputError as error:
        said = str(error)
    assert said.startswith("texts 'page' cannot be read as HTML")
