"""Documents to passages: markup removed, greedy chunks of 70 to 95 words. Pure functions over strings and bytes.

Covers HTML, man pages, pod, dict entries and Debian package descriptions, as far as a search corpus needs them: words
in reading order and the places where a chunk may end. Does not cover layout, tables, equations or files on disk
(:mod:`hybridindex.demo.corpus`). A passage never contains a line break, so a text file can hold one per line.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator

__all__ = [
    "MAX_WORDS",
    "MIN_WORDS",
    "chunk_text",
    "dict_entries",
    "html_to_text",
    "man_to_text",
    "package_descriptions",
    "pod_to_text",
    "tidy",
    "unwrap",
]

MIN_WORDS = 70  # a chunk ends at the first sentence or block end after this many words ...
MAX_WORDS = 95  # ... and at this many at the latest
_TAIL_WORDS = 12  # a shorter last chunk of a longer document is dropped: it says nothing on its own

_SENTENCE_END = (".", "?", "!", ".)", '."', '?"', '!"', ".”", ":", ";")
_PARAGRAPH_END = re.compile(r"\n[ \t]*\n")
_PROSE_WORD = re.compile(r"[^\W\d_]{2,}")

# The documents read here are machine-written and well formed, so removing tags by pattern gives the same words as
# html.parser (tests compare the two) at six to nine times the speed; a gigabyte of HTML makes that matter.
_HTML_DROPPED = re.compile(
    r"<!--.*?-->|<(script|style|nav|head|svg|footer|button|form)\b[^>]*>.*?</\1\s*>", re.DOTALL | re.IGNORECASE
)
_HTML_BLOCK = re.compile(
    r"</?(?:p|div|li|h[1-6]|dd|dt|pre|tr|td|th|section|article|br|table|ul|ol|dl|blockquote)\b[^>]*>", re.IGNORECASE
)
_HTML_TAG = re.compile(r"<[a-zA-Z/!?][^>]*>")

_ROFF_FONT = re.compile(r"\\f(?:\[[^]]*\]|\(..|.)|\\s[-+]?\d|\\[&/,|^%:]|\\\*\(..")
_ROFF_NAMED = re.compile(r"\\\[([^]]*)\]|\\\((..)")
_ROFF_CHARS = {"aq": "'", "cq": "'", "dq": '"', "em": " - ", "en": "-", "lq": '"', "oq": "'", "rq": '"', "ti": "~"}
_ROFF_TEXT_MACROS = frozenset(("SH", "SS", "B", "I", "BR", "RB", "BI", "IB", "IR", "RI", "TP", "IP", "SM", "SB", "UR"))
_ROFF_PARAGRAPHS = frozenset(("SH", "SS", "TP", "IP", "PP", "P", "LP"))
_POD_WIDE_CODE = re.compile(r"\b[BCFILSZ](<<+) (.*?) (>>+)")
_POD_CODE = re.compile(r"\b[BCFILSZ]<([^<>]*)>")
_POD_ESCAPE = {"E<lt>": "<", "E<gt>": ">", "E<sol>": "/", "E<verbar>": "|"}

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


def html_to_text(page: str) -> str:
    """Text of an HTML page: head, scripts, styles, navigation and forms removed, one line per block."""
    text = _HTML_BLOCK.sub("\n", _HTML_DROPPED.sub(" ", page).replace("\n", " "))
    return html.unescape(_HTML_TAG.sub("", text)).replace("¶", "")


def man_to_text(page: str) -> str:
    """Text of a man page source: macros and font changes removed, definitions and comments skipped."""
    out: list[str] = []
    in_definition = False
    for line in page.splitlines():
        if in_definition:
            in_definition = line.rstrip() != ".."
            continue
        if line.startswith((".", "'")):
            name, _, rest = line[1:].strip().partition(" ")
            in_definition = name in ("de", "ig")
            if name in _ROFF_PARAGRAPHS:
                out.append("")
            if name not in _ROFF_TEXT_MACROS:
                continue
            # Two-font macros set their arguments side by side: ".BR open (2)" prints "open(2)".
            line = rest.replace('"', "") if len(name) != 2 or name in ("SH", "SS", "TP", "IP") else _join(rest)
        line = _ROFF_NAMED.sub(lambda m: _ROFF_CHARS.get(m[1] or m[2], ""), _ROFF_FONT.sub("", line))
        line = line.replace("\\-", "-").replace("\\e", "\\").replace("\\ ", " ").replace("\\(", "")
        if not line.startswith('\\"'):
            out.append(line)
    return "\n".join(out)


def _join(arguments: str) -> str:
    return "".join(part.replace('"', "") for part in re.findall(r'"[^"]*"|\S+', arguments))


def pod_to_text(page: str) -> str:
    """Text of a pod page: commands become their headings, formatting codes their contents."""
    lines = [line.partition(" ")[2] if line.startswith("=") else line for line in page.splitlines()]
    text = "\n".join(lines)
    text = _POD_WIDE_CODE.sub(r"\2", re.sub(r"X<[^<>]*>", "", text))
    for _ in range(3):  # codes nest: B<I<name>>
        text = _POD_CODE.sub(lambda m: str(m[1]).split("|")[0], text)
    for code, char in _POD_ESCAPE.items():  # last: what they stand for is not markup
        text = text.replace(code, char)
    return text


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
