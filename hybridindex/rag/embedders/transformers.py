"""Models of sentence-transformers, in this process. The package is optional and loads when the first one is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hybridindex.errors import InvalidInputError, MissingDependencyError, how_to_install
from hybridindex.rag.embed import normalize
from hybridindex.types import F32

__all__ = ["SentenceEmbedder"]


class SentenceEmbedder:
    """Unit vectors of a model. As thread-safe as the model: use one thread."""

    def __init__(self, model: str, *, device: str | None = None, batch_size: int = 32) -> None:
        """
        Args:
            model: a name on the Hugging Face hub, or a folder.
            device: as torch names it; None: the package's choice.
            batch_size: texts at a time.

        Raises:
            MissingDependencyError: sentence-transformers is not installed. InvalidInputError: no such model.
        """
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise MissingDependencyError(
                f"sentence-transformers is needed to embed with its models: {how_to_install('embed')}"
            ) from error
        try:
            self._model: Any = SentenceTransformer(model, device=device)
        except (OSError, ValueError) as error:
            raise InvalidInputError(f"sentence-transformers cannot load {model!r}: {error}") from error
        self._batch_size = batch_size
        self.name = f"sentence-transformers:{model}"

    def embed(self, texts: Sequence[str], /) -> F32:
        """Unit vectors (n, d) float32 of queries, with the model's prompt for them where it has one."""
        return self._encoded("encode_query", texts)

    def embed_passages(self, texts: Sequence[str], /) -> F32:
        """The same of passages."""
        return self._encoded("encode_document", texts)

    def _encoded(self, how: str, texts: Sequence[str]) -> F32:
        # Before version 5 there is one way for both.
        encode = getattr(self._model, how, self._model.encode)
        found = encode(list(texts), batch_size=self._batch_size, show_progress_bar=False, convert_to_numpy=True)
        return normalize(np.asarray(found, dtype=np.float32))
