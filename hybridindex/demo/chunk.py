"""Documents to passages: greedy chunks of 70 to 95 words. Pure functions over strings and bytes.

Covers plain text, dict entries and Debian package descriptions. Does not cover files on disk
(:mod:`hybridindex.demo.corpus`). A passage never contains a line break, so a text file can hold one per line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

__all__ = [
    "MAX_WORDS",
    "MIN_WORDS",
    "chunk_text",
    "dict_entries",
    "package_descriptions",
    "tidy",
    "unwrap",
]

MIN_WORDS = 70  # a chunk ends at the first sentence or block end after this many words ...
MAX_WORDS = 95  # ... and at this many at the latest
_TAIL_WORDS = 12  # a shorter last chunk of a longer document is dropped: it says nothing on its own

_SENTENCE_END = (".", "?", "!", ".)", '."', '?"', '!"', ".”", ":", ";")
_PARAGRAPH_END = re.compile(r"\n[ \t]*\n")
_PROSE_WORD = re.compile(r"[^\W\d_]{2,}")

_DICT_LINK = re.compile(r"\{([^{}]*)\}")
_DICT_NOISE = re.compile(r"\[(?:\d{4} Webster|PJC|WordNet)[^]]*\]|--(?=[A-Z])")
_BASE64 = {c: i for i, c in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")}


def tidy(text: str) -> str:
    """The words of ``text`` with single spaces and no line breaks."""
    return " ".join(text.split())


def unwrap(text: str) -> str:
    """Paragraphs, separated by empty lines in ``text``, as one line each: its other line ends mean nothing."""
    return "\n".join(tidy(paragraph) for paragraph in _PARAGRAPH_END.split(text))


def chunk_text(text: str, *, title: str = "", min_words: int = 1) -> Iterator[str]:
    """Greedy passages of at most ``MAX_WORDS`` words, a title before every one but the first not counted.

    A text of ``min_words`` to ``MAX_WORDS`` words is one passage. In a longer one a chunk ends at the first line end
    or sentence end from the 70th word on, at the 95th word otherwise. Chunks that are mostly not words (tables of
    numbers, code) are left out, and so is a very short last one.
    """
    words: list[str] = []
    line_ends: set[int] = set()
    for line in text.splitlines():
        words.extend(line.split())
        line_ends.add(len(words))
    start, total = 0, len(words)
    while start < total:
        end = total if total - start <= MAX_WORDS else start + MAX_WORDS
        if end < total:
            for cut in range(start + MIN_WORDS, end):
                if cut in line_ends or words[cut - 1].endswith(_SENTENCE_END):
                    end = cut
                    break
        count = end - start
        chunk = " ".join(words[start:end])
        long_enough = count >= (min_words if start == 0 else max(min_words, _TAIL_WORDS))
        if long_enough and 2 * len(_PROSE_WORD.findall(chunk)) >= count:
            yield f"{title}: {chunk}" if title and start else chunk
        start = end


def dict_entries(index: str, data: bytes) -> Iterator[str]:
    """Entries of a dictd dictionary in the order of its data, each once, its own "00-database" notes left out.

    ``index`` holds lines of headword, offset and length (base-64 numbers, tab-separated); ``data`` is the unpacked
    dictionary. Lines that point outside the data are skipped.
    """
    extents: set[tuple[int, int]] = set()
    for line in index.splitlines():
        fields = line.split("\t")
        if len(fields) < 3 or fields[0].startswith(("00-database", "00database")):
            continue
        offset, length = _base64_number(fields[1]), _base64_number(fields[2])
        if offset >= 0 and length > 0 and offset + length <= len(data):
            extents.add((offset, length))
    for offset, length in sorted(extents):
        entry = data[offset : offset + length].decode("utf-8", errors="replace")
        yield _DICT_NOISE.sub(" ", _DICT_LINK.sub(r"\1", entry))


def _base64_number(digits: str) -> int:
    value = 0
    for digit in digits:
        if digit not in _BASE64:
            return -1
        value = value * 64 + _BASE64[digit]
    return value


def package_descriptions(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(package, text) of the records of a Debian ``Translation-en`` file: short description, then the long one."""
    package, open_field = "", False
    text: list[str] = []
    for line in lines:
        stripped = line.rstrip("\n")
        if stripped.startswith("Package: "):
            package, text, open_field = stripped[9:], [], False
        elif stripped.startswith("Description-en: "):
            text, open_field = [stripped[16:] + "."], True
        elif open_field and stripped.startswith(" "):
            text.append("" if stripped == " ." else stripped)
        elif not stripped:
            if package and text:
                yield package, "\n".join(text)
            package, text, open_field = "", [], False
        else:
            open_field = False
    if package and text:
        yield package, "\n".join(text)
