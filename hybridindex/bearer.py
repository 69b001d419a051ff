"""The value of an ``Authorization`` header, from an API key that such a header can carry."""

from __future__ import annotations

from hybridindex.errors import InvalidInputError

__all__ = ["bearer"]

_NAMES = {"\n": "a line feed", "\r": "a carriage return", "\t": "a tab", " ": "a space"}


def bearer(key: str, name: str) -> str:
    """``Bearer KEY``.

    Libraries that send headers refuse some characters, or send what is another header, and show the key as they do so.

    Args:
        key: of visible ASCII characters.
        name: of the argument or variable that holds the key, for the message.

    Raises:
        InvalidInputError: another character, or none. The message does not hold the key.
    """
    if not isinstance(key, str):
        raise InvalidInputError(f"{name} is a {type(key).__name__}; expected text")
    if not key:
        raise InvalidInputError(f"{name} is empty; expected an API key, or none at all")
    bad = [place for place, character in enumerate(key) if not "\x21" <= character <= "\x7e"]
    if bad:
        first = bad[0]
        found = _NAMES.get(key[first]) or (
            "a control character" if key[first].isascii() else "a character outside ASCII"
        )
        at_end = bad == list(range(first, len(key)))
        where = "at its start" if first == 0 else "at its end" if at_end else f"at character {first + 1}"
        raise InvalidInputError(f"{name} holds {found} {where}; expected an API key of visible ASCII characters")
    return f"Bearer {key}"
