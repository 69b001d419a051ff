"""Words of HTML, man and pod pages, as far as a search corpus needs them, and the passages of folders of such pages.

Does not cover layout, tables and equations.
"""

from __future__ import annotations

import gzip
import html
import re
from collections.abc import Iterator
from pathlib import Path

from hybridindex.demo.chunk import chunk_text, unwrap

__all__ = ["html_pages", "html_to_text", "man_to_text", "manual_pages", "pod_to_text"]

_PAGE_MIN_WORDS = 12
_LEFT_OUT = frozenset(("src", "translations"))

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


def html_pages(root: Path) -> Iterator[str]:
    """Passages of the HTML pages under ``root``; listings of source code and translated pages are left out."""
    pages = [path for path in sorted(root.rglob("*.html")) if path.is_file() and not _LEFT_OUT & {*path.parts[:-1]}]
    for path in pages:
        page = path.read_text(encoding="utf-8", errors="replace")
        # No titles here: the same paragraph stands on many generated pages and is to be kept once.
        yield from chunk_text(html_to_text(page), min_words=_PAGE_MIN_WORDS)


def manual_pages(root: Path) -> Iterator[str]:
    """Passages of man pages and pod files under ``root``."""
    man = [path for path in sorted(root.glob("usr/share/man/man*/*.gz")) if not path.is_symlink()]
    pages = man + sorted(root.rglob("*.pod"))
    for path in pages:
        if path.suffix == ".gz":
            text = man_to_text(gzip.decompress(path.read_bytes()).decode("utf-8", errors="replace"))
        else:
            text = pod_to_text(path.read_text(encoding="utf-8", errors="replace"))
        title = path.name.removesuffix(".gz").rpartition(".")[0]
        yield from chunk_text(unwrap(text), title=title, min_words=_PAGE_MIN_WORDS)
