"""Where the tokens of a text start. The only tokenizer here is one of words."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["WORDS", "TokenStarts", "word_starts"]

#: Texts to the places (in characters, ascending) where their tokens start.
TokenStarts = Callable[[Sequence[str]], Sequence[npt.NDArray[np.uint32]]]

#: The name of :func:`word_starts` in a store.
WORDS = "words"


def word_starts(texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
    """Every run of characters without white space is a token: where no tokenizer is at hand."""
    found = []
    for text in texts:
        starts, inside = [], False
        for place, char in enumerate(text):
            if char.isspace():
                inside = False
            elif not inside:
                inside = True
                starts.append(place)
        found.append(np.array(starts, dtype=np.uint32))
    return found
