"""The tokens of a document store: where those of a text start, and which tokenizer agrees with what was stored.

Windows and shifts of PipeRAG are counted in them. Another tokenizer than the store's would shift too little or too
much without a word, so its offsets are compared with stored ones. Does not tokenize but for words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hybridindex.errors import InvalidInputError

if TYPE_CHECKING:
    from hybridindex.rag.documents import DocumentStore

__all__ = ["WORDS", "TokenStarts", "tokens_of_store", "word_starts"]

#: Texts to the places (in characters, ascending) where their tokens start.
TokenStarts = Callable[[Sequence[str]], Sequence[npt.NDArray[np.uint32]]]

#: The name of :func:`word_starts` in a store.
WORDS = "words"
#: Passages whose stored offsets are compared.
_COMPARED = 8


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


def tokens_of_store(documents: DocumentStore, tried: Sequence[TokenStarts]) -> TokenStarts:
    """The first of ``tried`` that finds the tokens of the store's first passages where the store has them.

    The offsets decide, not the store's name for its tokenizer: stores of older make have none.

    Raises:
        InvalidInputError: none does. DocumentStoreError: a damaged file.
    """
    stored = documents.first(_COMPARED)
    texts = [passage.document.text for passage in stored]
    counts: list[int] = []
    for token_starts in tried:
        found = token_starts(texts)
        if len(found) == len(stored) and all(
            np.array_equal(theirs, passage.starts) for theirs, passage in zip(found, stored, strict=True)
        ):
            return token_starts
        counts.append(sum(map(len, found)))
    name = repr(documents.info.tokenizer) if documents.info.tokenizer else "a tokenizer that it does not name"
    raise InvalidInputError(
        f"token_starts finds {' or '.join(map(str, counts))} tokens in the first {len(stored)} passages, which the "
        f"document store has {sum(len(passage.starts) for passage in stored)} of, of {name}; give the token_starts "
        "that the store was written with"
    )
