"""Makes the blocking client out of the asynchronous one: ``python -m tests.client.blocking`` writes it."""

from __future__ import annotations

import re
from pathlib import Path

import hybridindex.client

FOLDER = Path(hybridindex.client.__file__).parent
SOURCE, MADE = FOLDER / "async_client.py", FOLDER / "client.py"
#: Longer patterns first: they hold shorter ones.
WORDS = (
    (r'\A""".*?"""', '"""The blocking client. Generated from ``async_client.py``, which is the file to edit."""'),
    (r"One event loop; close it once", "Any thread; close it once"),
    (r"import asyncio\n(import contextlib\nimport ssl\n)", r"\1import time\n"),
    (r"asyncio\.sleep", "time.sleep"),
    (r"import Awaitable, Callable, Iterable", "import Callable, Iterable"),
    (r"Awaitable\[object\]", "object"),
    (r"\basync (def|with)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\bAsync(Client|RemoteSession)\b", r"\1"),
    (r"\b__a(enter|exit)__\b", r"__\1__"),
    (r"\baclose\b", "close"),
    (r"\basync_answer_within\b", "answer_within"),
    (r"\basync_transport\b", "blocking_transport"),
)


def blocking(text: str) -> str:
    """The blocking client's source.

    Raises:
        AssertionError: a pattern matches nothing, or something asynchronous is left.
    """
    for pattern, replacement in WORDS:
        text, n = re.subn(pattern, replacement, text, flags=re.DOTALL)
        assert n, f"{pattern} is nowhere in {SOURCE.name}"
    left = re.findall(r"(?i)\w*(?:async(?!_client)|await)\w*", text)
    assert not left, f"left in the blocking client: {left}"
    return text


if __name__ == "__main__":
    MADE.write_text(blocking(SOURCE.read_text()))
