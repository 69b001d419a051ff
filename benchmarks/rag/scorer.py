"""The served model's weights, read here to score texts: what a server's echo does anew for the whole prompt each time.

Needs torch and transformers, as the environment of ``make test-vllm`` has them. What two texts have in common at their
start is computed once, and probabilities only of the tokens that are asked for.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["LocalScorer"]


class LocalScorer:
    """A :class:`benchmarks.rag.answer_quality.Scorer` over a folder of weights. One thread."""

    def __init__(self, folder: Path) -> None:
        """``folder``: as ``benchmarks.rag.llm_models`` writes it."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

        self._torch = torch
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.bfloat16).eval()
        # Without the model's configuration all layers keep everything, so that it can be cut anywhere.
        self._cache = DynamicCache()
        self._known: list[int] = []

    def score(self, prompt: str, continuation: str, /) -> tuple[float, ...]:
        """Natural logarithms of the probabilities of the tokens that start within ``continuation``."""
        torch = self._torch
        encoded = self._tokenizer(prompt + continuation, return_offsets_mapping=True)
        tokens: list[int] = encoded["input_ids"]
        starts = (n for n, (start, end) in enumerate(encoded["offset_mapping"]) if end > start >= len(prompt))
        first = next(starts, None)
        if first is None:
            return ()  # all of it is in a token that starts before it
        # The token before the first one foretells it.
        most = min(len(self._known), first - 1)
        common = next((n for n in range(most) if self._known[n] != tokens[n]), most)
        if common < len(self._known):
            self._cache.crop(common - len(self._known))
        with torch.inference_mode():
            logits = self._model(
                torch.tensor([tokens[common:]]), past_key_values=self._cache, logits_to_keep=len(tokens) - first + 1
            ).logits[0, :-1]
            found = torch.log_softmax(logits.float(), dim=-1)
            scores = found[torch.arange(len(tokens) - first), torch.tensor(tokens[first:])]
        self._known = tokens
        return tuple(scores.tolist())
