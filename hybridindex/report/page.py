"""The HTML page: one self-contained file. All text from outside this module is escaped here."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from hybridindex.report.style import Picture
from hybridindex.report.tables import Table

__all__ = ["Block", "page", "picture_block", "pre_block", "table_block", "text_block"]

_CSS = """
:root { color-scheme: light dark; --back: #fff; --ink: #222; --soft: #555; --line: #ddd; --box: #f6f7f9;
        --good: #0072B2; --bad: #D55E00; --warned: #fff6ef; }
@media screen and (prefers-color-scheme: dark) {
  :root { --back: #1f1f1f; --ink: #e4e4e4; --soft: #ababab; --line: #444; --box: #2a2b2e;
          --good: #56B4E9; --bad: #F0915A; --warned: #33261d; }
  /* Pictures are drawn on white; their colours keep their hue. White becomes the page's background. */
  img { filter: invert(.88) hue-rotate(180deg); }
}
body { margin: 0; background: var(--back); color: var(--ink);
       font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 800px; margin: 0 auto; padding: 24px 20px 64px; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 40px 0 10px; padding-top: 14px; border-top: 1px solid var(--line); }
p { margin: 8px 0; overflow-wrap: anywhere; }
.under { color: var(--soft); margin-bottom: 20px; }
.verdict { border-left: 6px solid; padding: 10px 14px; margin: 16px 0; background: var(--box); }
.verdict b { text-transform: uppercase; letter-spacing: .04em; }
.feasible { border-color: var(--good); }
.infeasible { border-color: var(--bad); }
.warning { border: 2px solid var(--bad); padding: 10px 14px; margin: 16px 0; background: var(--warned); }
.missing { color: var(--soft); font-style: italic; }
figure { margin: 12px 0 0; }
img { display: block; width: 800px; max-width: 100%; height: auto; }
figcaption { color: var(--soft); font-size: .92rem; margin-top: 6px; overflow-wrap: anywhere; }
pre { background: var(--box); padding: 12px 14px; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .82rem;
      line-height: 1.55; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; margin: 8px 0; }
th, td { text-align: left; vertical-align: top; padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line); }
td, tbody th { overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
tbody th { font-weight: 600; width: 14rem; }
thead th { color: var(--soft); font-weight: 600; white-space: nowrap; }
a { color: var(--good); }
summary { cursor: pointer; padding: 6px 0; }
@media print { main { max-width: none; } figure, table { break-inside: avoid; } }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A piece of escaped HTML, under a heading or in the section of the block before."""

    html: str
    heading: str = ""


def text_block(text: str, *, kind: str = "", heading: str = "", lead: str = "") -> Block:
    """A paragraph; ``kind`` is a CSS class of this module, ``lead`` a bold beginning."""
    bold = f"<b>{escape(lead)}</b> " if lead else ""
    css = f' class="{kind}"' if kind else ""
    return Block(html=f"<p{css}>{bold}{escape(text)}</p>", heading=heading)


def pre_block(text: str, *, heading: str = "") -> Block:
    return Block(html=f"<pre>{escape(text)}</pre>", heading=heading)


def table_block(table: Table, *, heading: str = "", folded: str = "") -> Block:
    """A table; ``folded``: the summary behind which it is hidden."""
    head = ""
    if table.header:
        cells = "".join(f'<th scope="col">{escape(cell)}</th>' if cell else "<td></td>" for cell in table.header)
        head = f"<thead><tr>{cells}</tr></thead>"
    body = "".join(_row(row, named=not table.header) for row in table.rows)
    html = f'<div class="wide" tabindex="0"><table>{head}<tbody>{body}</tbody></table></div>'
    if folded:
        html = f"<details><summary>{escape(folded)}</summary>{html}</details>"
    return Block(html=html, heading=heading)


def _row(cells: Sequence[str], *, named: bool) -> str:
    first = f'<th scope="row">{escape(cells[0])}</th>' if named else f"<td>{escape(cells[0])}</td>"
    return f"<tr>{first}{''.join(f'<td>{escape(cell)}</td>' for cell in cells[1:])}</tr>"


def picture_block(picture: Picture) -> Block:
    """A figure with its caption, or a sentence on what is missing."""
    if picture.drawn is None:
        return Block(html=f'<p class="missing">Not measured. {escape(picture.caption)}</p>', heading=picture.title)
    png, csv = (base64.b64encode(data).decode("ascii") for data in (picture.drawn.png, picture.drawn.csv.encode()))
    return Block(
        html=f'<figure><img alt="{escape(picture.title)}: described below" src="data:image/png;base64,{png}">'
        f"<figcaption>{escape(picture.caption)} "
        f'<a download="{escape(picture.name)}.csv" href="data:text/csv;base64,{csv}" '
        f'aria-label="{escape(picture.title)}: numbers as CSV">Numbers as CSV</a></figcaption></figure>',
        heading=picture.title,
    )


def page(title: str, under: str, blocks: Sequence[Block]) -> str:
    """The whole document. Its content security policy forbids scripts and anything loaded from elsewhere."""
    body = "\n".join((f"<h2>{escape(b.heading)}</h2>\n" if b.heading else "") + b.html for b in blocks)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{escape(title)}</h1>\n<p class="under">{escape(under)}</p>\n{body}\n</main>\n</body>\n</html>\n'
    )
