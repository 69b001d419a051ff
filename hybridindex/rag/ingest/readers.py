"""From a file, or a text, to chunks of text: what becomes passages."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hybridindex import filesystem
from hybridindex.errors import FileError, InvalidInputError, MissingDependencyError, how_to_install
from hybridindex.rag.collection.items import metadata_json
from hybridindex.rag.documents import MAX_TEXT
from hybridindex.rag.ingest.sources import GivenText, Source
from hybridindex.rag.ingest.texts import TextFile, count_words, split_words

__all__ = ["Chunk", "Reading", "check_name", "read_chunks"]

#: Words of a chunk of what is one long text, where nothing else is said.
_WORDS = 200
#: A change of how files are read makes all chunks anew.
_READER = 3
_PARQUET_ROWS = 1024
_HEADING = re.compile(r"#{1,6}\s")
#: What begins a tag, and no comment, and has no end before the next one begins.
_ENDLESS_TAG = re.compile(r"<(?!!--)(?=[^<>]*(?:<|\Z))")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How sources become chunks."""

    #: Most words of a chunk; None: lines and records are one each, longer texts have 200.
    words: int | None = None
    #: Whether a line of a text file is a text of its own; None: of files that were named, not of those in folders.
    lines: bool | None = None

    @classmethod
    def as_said(cls, said: str) -> Reading:
        """The opposite of :meth:`said`, as far as another source can be read that way."""
        words = json.loads(said).get("words")
        return cls(words=words if isinstance(words, int) else None)

    def of_lines(self, source: Source | GivenText) -> bool:
        return source.kind == "text" and (source.is_named if self.lines is None else self.lines)

    def said(self, source: Source | GivenText) -> str:
        """What chunks of a source depend on, beside its bytes."""
        return json.dumps({"reader": _READER, "words": self.words, "lines": self.of_lines(source)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    text: str
    #: Where it is from, for readers.
    source: str = ""
    #: Given by the file.
    id: int | None = None
    #: Whether it goes on where the chunk before it ended.
    continues: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)

    def digest(self) -> bytes:
        """Of all that an index keeps of it."""
        said = json.dumps([self.text, self.source, self.metadata], sort_keys=True, default=str)
        return hashlib.blake2b(said.encode(), digest_size=16).digest()


def check_name(source: Source | GivenText) -> None:
    """Raises InvalidInputError: the name cannot be kept."""
    try:
        source.name.encode()
    except UnicodeError:
        raise InvalidInputError(f"{source.name!r} has a name that is not UTF-8; rename it") from None


def read_chunks(source: Source | GivenText, reading: Reading) -> Iterator[Chunk]:
    """Chunks in the order of the source.

    Raises:
        InvalidInputError: it cannot be read as what its name says; names it.
        MissingDependencyError: what reads PDF or Parquet is not installed.
    """
    for number, chunk in enumerate(_chunks(source, reading)):
        try:
            chunk.text.encode()
            chunk.source.encode()
            if chunk.metadata:
                json.dumps(chunk.metadata, ensure_ascii=False, default=str).encode()
        except UnicodeError:
            raise InvalidInputError(
                f"texts {source.name!r} hold half of a surrogate pair in passage {number} (from 0), its source or its "
                "metadata, which is not text"
            ) from None
        if len(chunk.text) > MAX_TEXT:
            raise InvalidInputError(
                f"texts {source.name!r} have {len(chunk.text)} characters in passage {number} (from 0); expected "
                f"{MAX_TEXT} at most: ask for fewer words (--words)"
            )
        yield chunk


def _chunks(source: Source | GivenText, reading: Reading) -> Iterator[Chunk]:
    if isinstance(source, GivenText):
        # As of files, whose text it may be.
        text = source.text.removeprefix("\ufeff")
        text = _text_of(text, source.name) if source.kind == "html" else text
        yield from _of_text(source, text, reading.words or _WORDS, dict(source.metadata))
        return
    try:
        if source.kind == "jsonl" or reading.of_lines(source):
            yield from _records(source, TextFile(path=source.path, words=reading.words).records(), reading.words)
        elif source.kind == "parquet":
            yield from _records(source, _rows(source), reading.words)
        elif source.kind == "pdf":
            yield from _of_pages(source, reading.words or _WORDS)
        else:
            text = filesystem.read_text(source.path, encoding="utf-8-sig")
            text = _text_of(text, source.name) if source.kind == "html" else text
            yield from _of_text(source, text, reading.words or _WORDS, {})
    except (FileError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"texts {source.name!r} cannot be read: {error}") from error


def _records(
    source: Source, records: Iterator[tuple[str, str, int | None, dict[str, Any]]], words: int | None
) -> Iterator[Chunk]:
    for text, label, given, metadata in records:
        parts = [text] if words is None else split_words(text, words)
        if given is not None and len(parts) > 1:
            raise InvalidInputError(
                f"{source.path} gives the text of id {given} in {len(parts)} passages, which need an id each; "
                "leave ids out, or do not split (--words)"
            )
        for place, part in enumerate(parts):
            yield Chunk(text=part, source=label, id=given, continues=place > 0, metadata=metadata)


def _rows(source: Source) -> Iterator[tuple[str, str, int | None, dict[str, Any]]]:
    """Of a Parquet file with a column ``text``, and maybe ``id`` and ``source``."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingDependencyError(f"Parquet files need pyarrow: {how_to_install('formats')}") from error
    at = 0
    with filesystem.open_for_reading(source.path) as opened:
        try:
            with filesystem.performing("parse", source.path):
                file = pq.ParquetFile(opened)
            if "text" not in file.schema_arrow.names:
                raise InvalidInputError(
                    f"{source.path} has no column 'text'; it has {', '.join(file.schema_arrow.names)}"
                )
            for batch in file.iter_batches(_PARQUET_ROWS):
                for row in batch.to_pylist():
                    text, label, given = row.pop("text"), row.pop("source", None) or "", row.pop("id", None)
                    if not isinstance(text, str) or not text.strip():
                        raise InvalidInputError(f"{source.path}, row {at}, has no text; expected one in column 'text'")
                    if not isinstance(label, str):
                        raise InvalidInputError(f"{source.path}, row {at}: source is {label!r}; expected a string")
                    if given is not None and (not isinstance(given, int) or not 0 <= given < 1 << 63):
                        raise InvalidInputError(f"{source.path}, row {at}: id is {given!r}; expected 0 or more")
                    metadata = {name: value for name, value in row.items() if value is not None}
                    yield text.strip(), label, given, _as_json(metadata)
                    at += 1
        except (pa.ArrowException, OverflowError) as error:  # the latter of dates that Python has not
            raise InvalidInputError(f"{source.path} cannot be read as Parquet: {error}") from error


def _as_json(metadata: dict[str, Any]) -> dict[str, Any]:
    """As they are kept, so that an index takes the same whether it is built or changed; bytes in base64, and what else
    JSON has no word for as Python says it."""
    kept: dict[str, Any] = {}
    for name, value in metadata.items():
        try:
            kept |= json.loads(metadata_json({name: value}))
        except InvalidInputError:
            kept[name] = base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
    return kept


def _of_pages(source: Source, words: int) -> Iterator[Chunk]:
    try:
        import pypdf
    except ImportError as error:
        raise MissingDependencyError(f"PDF files need pypdf: {how_to_install('ingest')}") from error
    with filesystem.open_for_reading(source.path) as opened:
        try:
            document, before = pypdf.PdfReader(opened), False
            for number, page in enumerate(document.pages, 1):
                for chunk in _of_text(source, page.extract_text(), words, {"page": number}, continues=before):
                    before = True
                    yield chunk
        except (FileError, InvalidInputError):
            raise
        except Exception as error:  # a damaged file raises what it likes
            raise InvalidInputError(f"{source.path} cannot be read as PDF: {error!r}") from error


def _of_text(
    source: Source | GivenText, text: str, words: int, metadata: dict[str, Any], *, continues: bool = False
) -> Iterator[Chunk]:
    for part in _sections(text, words):
        yield Chunk(text=part, source=source.label, continues=continues, metadata=metadata)
        continues = True


def _sections(text: str, words: int) -> Iterator[str]:
    """Paragraphs together, up to so many words; a heading of Markdown begins another one, so that a change of one
    section leaves the chunks of the others as they are. A heading stays with what follows it."""
    held: list[str] = []
    count, only_headings = 0, True
    for paragraph in (part.strip() for part in re.split(r"\n\s*\n", text)):
        n, is_heading = count_words(paragraph), _HEADING.match(paragraph) is not None
        # Text may follow on the next line.
        is_bare = all(_HEADING.match(line) for line in paragraph.splitlines())
        if held and not only_headings and (count + n > words or is_heading):
            yield "\n\n".join(held)
            held, count, only_headings = [], 0, True
        if n:
            held.append(paragraph)
            count += n
            only_headings &= is_bare
        if count > words and not only_headings:
            yield from split_words("\n\n".join(held), words)
            held, count, only_headings = [], 0, True
    if held:
        whole = "\n\n".join(held)
        # Only headings without a text can be more.
        yield from [whole] if count <= words else split_words(whole, words)


class _Text(html.parser.HTMLParser):
    """The words that a reader of the page sees."""

    _HIDDEN = frozenset({"script", "style", "template", "noscript", "svg"})
    _BLOCKS = frozenset(
        {
            *("address", "article", "aside", "blockquote", "br", "dd", "div", "dl", "dt", "fieldset", "figcaption"),
            *("figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "main", "nav"),
            *("ol", "p", "pre", "section", "table", "td", "th", "title", "tr", "ul"),
        }
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._hidden = 0
        self.parts: list[str] = []

    def handle_starttag(self, tag: str, _attributes: list[tuple[str, str | None]]) -> None:
        if tag in self._HIDDEN:
            self._hidden += 1
        if tag in self._BLOCKS:
            self.parts.append("\n\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._HIDDEN:
            self._hidden = max(0, self._hidden - 1)
        if tag in self._BLOCKS:
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(re.sub(r"\s+", " ", data))


def _text_of(page: str, name: str) -> str:
    # Python's parser looks for the ends of tags and comments that have none again and again.
    last = page.rfind("-->")
    page = page[: last + 1] + page[last + 1 :].replace("<!--", "")
    reader = _Text()
    try:
        reader.feed(_ENDLESS_TAG.sub("&lt;", page))
        reader.close()
    except (AssertionError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"texts {name!r} cannot be read as HTML: {error}") from error
    return "".join(reader.parts)
