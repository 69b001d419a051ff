"""Stale query windows against the newest one, on held-out documents of the corpus; no LLM is needed.

As in PipeRAG's Table 2: the nearest passage of a window of 64 tokens, and of the window that ended s tokens before; the
cosine of the two passages under an embedder of sentences. Search is exact, so that no index is in the result. A cosine
means little by itself: its zero is where two passages are that have nothing to do with each other, which differs from
embedder to embedder. So every table has the cosine of random pairs beside it.

- **rows**: per staleness, the stale passage and the shifted one, against the newest window's passage and against the 64
  tokens that are written next, which is what retrieval is for.
- **corpora**: the same with parts of the corpus: how near the next best passage is, is a matter of its size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.rag.corpus import Reference
from hybridindex.rag.documents import DocumentStore
from hybridindex.rag.retriever import Embedder
from hybridindex.rag.shift import shift_passage, tail_of
from hybridindex.rag.tokens import TokenStarts
from hybridindex.types import F32, I64

__all__ = ["PIPERAG", "STALENESS", "similarities"]

STALENESS = (1, 2, 4, 8, 16, 32, 64)
#: PipeRAG's Table 2, Wikipedia.
PIPERAG = (0.9262, 0.9204, 0.9138, 0.9062, 0.8990, 0.8921, 0.8875)
_WINDOW = 64


@dataclass(frozen=True, slots=True)
class _Windows:
    """Query windows that end where a document goes on for ``_WINDOW`` tokens; ``ending[s]`` ended s tokens earlier."""

    ending: dict[int, list[str]]
    following: list[str]
    #: (windows,) reference of each.
    of: I64


def _windows(texts: Sequence[Reference], starts: TokenStarts) -> _Windows:
    ending: dict[int, list[str]] = {s: [] for s in (0, *STALENESS)}
    following: list[str] = []
    of: list[int] = []
    for number, reference in enumerate(texts):
        text = reference.text
        places = starts([text])[0].tolist()
        for end in range(_WINDOW + STALENESS[-1], len(places) - _WINDOW, _WINDOW):
            for stale, windows in ending.items():
                last = end - stale
                windows.append(tail_of(text[: places[last]], places[:last], _WINDOW).strip())
            following.append(text[places[end] : places[end + _WINDOW]].strip())
            of.append(number)
    return _Windows(ending, following, np.array(of))


def _nearest(queries: F32, passages: F32, allowed: Callable[[int], Any]) -> I64:
    """(windows, 2) the two nearest passages by inner product; ``allowed``: (passages,) bool for a window."""
    found = np.empty((len(queries), 2), np.int64)
    for number, scores in enumerate(np.asarray(queries @ passages.T)):
        scores[~allowed(number)] = -np.inf
        two = np.argpartition(scores, -2)[-2:]
        found[number] = two[np.argsort(-scores[two])]
    return found


def similarities(
    documents: DocumentStore, passages: F32, texts: Sequence[Reference], starts: TokenStarts, searching: Embedder,
    views: Mapping[str, Embedder], parts: Sequence[float],
) -> dict[str, Any]:  # fmt: skip
    """
    Args:
        passages: (n, d) as ``searching`` embeds them, in the order of the document store's ids from 0.
        views: embedders that cosines are taken with.
        parts: of the corpus, the last the whole.
    """
    windows = _windows(texts, starts)
    hidden = [np.isin(np.arange(len(passages)), list(reference.ids)) for reference in texts]
    queries = {stale: searching.embed(ending) for stale, ending in windows.ending.items()}
    rng = np.random.default_rng(0)
    dice = rng.random(len(passages))
    found = {
        part: {
            stale: _nearest(
                vectors, passages, lambda n, part=part: (dice <= part) & ~hidden[windows.of[n]]  # type: ignore[misc]
            )
            for stale, vectors in queries.items()
        }
        for part in parts
    }  # fmt: skip
    whole = found[parts[-1]]
    return {
        "windows": len(windows.of),
        "documents": len(texts),
        "views": {
            name: _view(_Remembering(view), documents, windows, whole, rng.permutation(len(windows.of)))
            for name, view in views.items()
        },
        "corpora": [
            {"part": part, "passages": int((dice <= part).sum()), **_corpus(views, documents, found[part])}
            for part in parts
        ],
    }


class _Remembering:
    """An embedder that embeds a text once."""

    def __init__(self, within: Embedder) -> None:
        self._within = within
        self._known: dict[str, F32] = {}

    def embed(self, texts: Sequence[str], /) -> F32:
        new = list(dict.fromkeys(text for text in texts if text not in self._known))
        if new:
            self._known.update(zip(new, self._within.embed(new), strict=True))
        return np.stack([self._known[text] for text in texts])


def _texts_of(documents: DocumentStore, ids: Sequence[int]) -> list[str]:
    found = documents.read(sorted(set(ids)))
    return [found[number].document.text for number in ids]


def _cosines(view: Embedder, some: Sequence[str], others: Sequence[str]) -> float:
    a, b = view.embed(some), view.embed(others)
    return float(np.mean(np.sum(a * b, axis=1)))


def _view(view: Embedder, documents: DocumentStore, windows: _Windows, found: dict[int, I64], mixed: I64) -> Any:
    """``mixed``: (windows,) a permutation, for random pairs."""
    fresh = _texts_of(documents, found[0][:, 0].tolist())
    second = _texts_of(documents, found[0][:, 1].tolist())
    other = [fresh[number] for number in mixed.tolist()]
    rows = []
    for stale, theirs in zip(STALENESS, PIPERAG, strict=True):
        ids = found[stale][:, 0].tolist()
        old = _texts_of(documents, ids)
        moved = [shift_passage(documents, number, stale) for number in ids]
        # Where a document ends with its passage nothing may be left; a pipeline then has no passage.
        left = [number for number, text in enumerate(moved) if text]

        def rest(values: Sequence[str], left: Sequence[int] = left) -> list[str]:
            return [values[number] for number in left]

        rows.append(
            {
                "staleness": stale,
                "same_passage": float(np.mean(found[stale][:, 0] == found[0][:, 0])),
                "in_first_two": float(np.mean([a in b for a, b in zip(found[stale][:, 0], found[0], strict=True)])),
                "cosine": _cosines(view, old, fresh),
                "cosine_shifted": _cosines(view, rest(moved), rest(fresh)),
                "to_following": _cosines(view, old, windows.following),
                "to_following_shifted": _cosines(view, rest(moved), rest(windows.following)),
                # Over the same windows: where nothing is left, there is no shifted passage.
                "shift_gains_to_following": _cosines(view, rest(moved), rest(windows.following))
                - _cosines(view, rest(old), rest(windows.following)),
                "nothing_left": 1 - len(left) / len(moved),
                "piperag": theirs,
            }
        )
    return {
        "random_pairs": _cosines(view, fresh, other),
        "first_and_second": _cosines(view, fresh, second),
        "fresh_to_following": _cosines(view, fresh, windows.following),
        "random_to_following": _cosines(view, other, windows.following),
        "rows": rows,
    }


def _corpus(views: Mapping[str, Embedder], documents: DocumentStore, found: dict[int, I64]) -> dict[str, Any]:
    fresh = _texts_of(documents, found[0][:, 0].tolist())
    rows: dict[str, Any] = {}
    for name, view in views.items():
        remembered = _Remembering(view)
        rows[name] = {
            str(stale): _cosines(remembered, _texts_of(documents, found[stale][:, 0].tolist()), fresh)
            for stale in STALENESS
        }
    return {"cosine": rows, "same_passage": {
        str(stale): float(np.mean(found[stale][:, 0] == found[0][:, 0])) for stale in STALENESS
    }}  # fmt: skip
