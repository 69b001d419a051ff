"""Passages of a file of texts: ``.jsonl`` with a document per line, or ``.txt`` with a passage per line.

The file is read anew each time, so that its texts never lie in memory at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridindex import filesystem
from hybridindex.errors import InvalidInputError
from hybridindex.rag.documents import MAX_TEXT, Document

__all__ = ["TextFile", "count_words", "split_words"]

#: Of a line: a text of ASCII may be escaped.
_MAX_LINE = 8 * MAX_TEXT
_SENTENCE_ENDS = (
    *(".", "!", "?", ".”", '."', ".)", "。"),
    *("\uff01", "\uff1f", "。」", "。』", "。”", "\uff01」", "\uff1f」", "\uff01”", "\uff1f”", "\u17d4", "\u104b"),
)
#: Longer words, in characters, are none, but base64, say: so many of their characters count as one.
_LONGEST_WORD, _LETTERS = 1000, 8
#: Chinese and Japanese have no spaces, and a character counts as a word, with brackets before it and what ends behind.
_HAN = "々〆〇\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
_OPEN = "「『《〈【\uff08\u3014“\u2018"
_CLOSE = "、。」』》〉】”…ー々\uff09\u3015\u2019\uff0c\uff0e\uff01\uff1f\uff1a\uff1b\u3099\u309a\ufe00-\ufe0f"
_BETWEEN_HAN = re.compile(rf"(?<![{_OPEN}])(?:(?<=[{_HAN}{_CLOSE}])|(?=[{_HAN}{_OPEN}]))(?![{_CLOSE}])")
#: Nor have Thai, Lao, Burmese and Khmer: four of their characters count as a word, each with its marks.
_THAI = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
_MARKS = "\u0e31\u0e34-\u0e3a\u0e47-\u0e4e\u0eb1\u0eb4-\u0ebc\u0ec8-\u0ece\u102b-\u103e\u17b4-\u17d3"
_THAI_WORD = re.compile(rf"(?:[\u0e40-\u0e44\u0ec0-\u0ec4]?.[{_MARKS}]*){{1,4}}")
_IS_THAI, _UNSPACED = re.compile(f"[{_THAI}]"), re.compile(f"[{_HAN}{_THAI}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFile:
    """Passages of a file, in its order. Iterate it as often as needed."""

    path: Path
    #: Most words of a passage: longer texts become several. None: a text is a passage.
    words: int | None = None

    def __post_init__(self) -> None:
        if self.path.suffix.lower() not in (".jsonl", ".txt"):
            raise InvalidInputError(f"texts {str(self.path)!r} has no known ending; expected .jsonl or .txt")
        if self.words is not None and self.words < 1:
            raise InvalidInputError(f"words is {self.words}; expected 1 or more")

    def __iter__(self) -> Iterator[Document]:
        """
        Raises:
            InvalidInputError: the file cannot be read, or a line is no document; names the line.
        """
        number = 0
        for text, source, given, _ in self.records():
            passages = [text] if self.words is None else split_words(text, self.words)
            if given is not None and len(passages) > 1:
                raise InvalidInputError(
                    f"{self.path} gives the text of id {given} in {len(passages)} passages, which need an id each; "
                    "leave ids out, or do not split (--words)"
                )
            for place, passage in enumerate(passages):
                here = number if given is None else given
                successor = here + 1 if place + 1 < len(passages) else None
                yield Document(id=here, text=passage, source=source, successor=successor)
                number += 1

    def records(self) -> Iterator[tuple[str, str, int | None, dict[str, Any]]]:
        """Text, source, id and what else there is, of each line that is not blank. Raises InvalidInputError."""
        read = self._from_json if self.path.suffix.lower() == ".jsonl" else _from_line
        with_ids: bool | None = None
        try:
            with filesystem.open_text(self.path, encoding="utf-8-sig", newline="\n") as file:
                for number in range(1, 1 << 62):
                    line = file.readline(_MAX_LINE)
                    if not line:
                        return
                    if not line.endswith("\n") and len(line) >= _MAX_LINE:
                        raise InvalidInputError(f"{self.path}, line {number}, has more than {_MAX_LINE} characters")
                    if not line.strip():
                        continue
                    text, source, given, more = read(line, number)
                    if with_ids not in (None, given is not None):
                        raise InvalidInputError(f"{self.path}, line {number}: every line has an id, or none")
                    with_ids = given is not None
                    if len(text) > MAX_TEXT and self.words is None:
                        raise InvalidInputError(
                            f"{self.path}, line {number}, has {len(text)} characters; expected {MAX_TEXT} at most"
                        )
                    yield text, source, given, more
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInputError(f"texts {str(self.path)!r} cannot be read: {error}") from error

    def _from_json(self, line: str, number: int) -> tuple[str, str, int | None, dict[str, Any]]:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(f"{self.path}, line {number}, is not JSON ({error})") from error
        text = found.get("text") if isinstance(found, dict) else None
        if not isinstance(text, str) or not text.strip():
            raise InvalidInputError(f"{self.path}, line {number}, has no text; expected an object with 'text'")
        source, given = found.get("source", ""), found.get("id")
        if not isinstance(source, str):
            raise InvalidInputError(f"{self.path}, line {number}: source is {source!r}; expected a string")
        if given is not None and (isinstance(given, bool) or not isinstance(given, int) or not 0 <= given < 1 << 63):
            raise InvalidInputError(f"{self.path}, line {number}: id is {given!r}; expected an integer of 0 or more")
        more = {name: value for name, value in found.items() if name not in ("text", "source", "id")}
        return text.strip(), source, given, more


def _from_line(line: str, _number: int) -> tuple[str, str, None, dict[str, Any]]:
    return line.strip(), "", None, {}


def split_words(text: str, most: int) -> list[str]:
    """Passages of ``most`` words at most, ending with a sentence where one ends in their second half."""
    words = _words(text)
    passages, start = [], 0
    while start < len(words):
        end = min(start + most, len(words))
        if end < len(words):
            ends = (i for i in range(end, start + most // 2, -1) if words[i - 1].rstrip().endswith(_SENTENCE_ENDS))
            end = next(ends, end)
        passages.append("".join(words[start:end]).rstrip())
        start = end
    return passages


def count_words(text: str) -> int:
    """As :func:`split_words` counts them."""
    return len(_words(text))


def _words(text: str) -> list[str]:
    """With a space behind each, unless it is the first part of what stands together."""
    words: list[str] = []
    for run in text.split():
        if len(run) > _LONGEST_WORD or (not run.isascii() and _UNSPACED.search(run)):
            words += _parts(run)
            words[-1] += " "
        else:
            words.append(f"{run} ")
    return words


def _parts(run: str) -> Iterator[str]:
    """What counts as a word each, of characters without white space."""
    for part in _BETWEEN_HAN.split(run):
        if _IS_THAI.search(part):
            yield from _THAI_WORD.findall(part)
        elif len(part) > _LONGEST_WORD:
            yield from (part[at : at + _LETTERS] for at in range(0, len(part), _LETTERS))
        elif part:
            yield part
