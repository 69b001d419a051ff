"""SHIFT of PipeRAG (§3.2, S1): moves results of a stale query window on by the text that was generated since.

Tokens are the document store's, not the LLM's.
"""

from __future__ import annotations

from hybridindex.errors import InvalidInputError
from hybridindex.rag.documents import DocumentStore, StoredPassage

__all__ = ["shift_passage", "tail_of"]

#: Passages that one shift reads; a longer shift ends there.
_MAX_SUCCESSORS = 8


def _tokens(stored: StoredPassage, first_char: int) -> list[str]:
    """The tokens that start at ``first_char`` or later, each with what follows it up to the next."""
    text = stored.document.text
    places = [int(start) for start in stored.starts if start >= first_char]
    return [text[a:b] for a, b in zip(places, [*places[1:], len(text)], strict=True)]


def _passage(documents: DocumentStore, row: int) -> StoredPassage | None:
    """None: it was deleted. Raises DocumentStoreError: no passage of a store comes or goes, and this is none."""
    found = documents.find([row]).get(row)
    return documents.read([row])[row] if found is None and not documents.is_live else found


def shift_passage(documents: DocumentStore, passage_id: int, staleness: int) -> str:
    """The passage without its first ``staleness`` tokens, and with as many of what follows it in its document.

    As many tokens as the passage has; fewer at the end of the document, empty where nothing is left. A repeated title
    at the start of a successor is left out.

    Raises:
        InvalidInputError: a negative staleness.
        DocumentStoreError: no such passage, in a store whose passages stay; in one that changes it was deleted, and the
        text is empty.
    """
    if staleness < 0:
        raise InvalidInputError(f"staleness is {staleness}; expected 0 or more tokens")
    stored = _passage(documents, passage_id)
    if stored is None:
        return ""
    if staleness == 0:
        return stored.document.text
    tokens = _tokens(stored, 0)
    length = len(tokens)
    for _ in range(_MAX_SUCCESSORS):
        successor = stored.document.successor
        if len(tokens) >= staleness + length or successor is None:
            break
        if (following := _passage(documents, successor)) is None:
            break  # what came before it still names it
        stored = following
        # Tokens include the white space after them, but a passage ends without any.
        if tokens:
            tokens[-1] = tokens[-1].rstrip() + " "
        tokens += _tokens(stored, stored.document.lead)
    return "".join(tokens[staleness : staleness + length]).strip()


def tail_of(text: str, starts: list[int], window: int) -> str:
    """The last ``window`` tokens of ``text``, whose tokens start at ``starts``; all of it where it has fewer."""
    return text[starts[-window] :] if len(starts) >= window else text
