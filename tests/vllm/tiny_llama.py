"""A Llama of four million parameters with random weights, made offline in seconds: enough for vLLM to serve."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

__all__ = ["ANSWER_MARK", "make_tiny_llama"]

_VOCABULARY = 2000
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


#: What the chat template puts behind the question, which it leaves as it is.
ANSWER_MARK = "\n>"
_TEMPLATE = f"{{% for message in messages %}}{{{{ message.content }}}}{{% endfor %}}{{{{ {ANSWER_MARK!r} }}}}"


def make_tiny_llama(folder: Path, *, words: Sequence[str] = (), weights: bool = False, chat: bool = False) -> None:
    """Writes configuration and tokenizer.

    Args:
        words: are tokens, with a space before them.
        weights: writes them too, so large that probabilities differ and depend on what came before, and that it never
            ends by itself; without, they come from vLLM's ``--load-format dummy``, and every token is as probable as
            any other.
        chat: with a chat template.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    made = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 8))) for _ in range(2000)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=["<s>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = [" ".join(draw.choices(made, k=50)) for _ in range(500)]
    # What is frequent is a token as a whole.
    tokenizer.train_from_iterator([*lines, *([" " + " ".join(words)] * 1000)], trainer)
    lacking = [word for word in words if tokenizer.token_to_id(f"Ġ{word}") is None]
    assert not lacking, f"no tokens: {lacking}"
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, **names}
    if chat:
        settings["chat_template"] = _TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    if weights:
        _write_weights(folder / "model.safetensors")


def _write_weights(path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)

    def drawn(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        values: torch.Tensor = torch.randn(rows, columns, generator=generator) * scale * columns**-0.5
        return values.to(torch.bfloat16)

    hidden, inner = 256, 688
    one = torch.ones(hidden, dtype=torch.bfloat16)
    # Logits of standard deviation 2; the embedding is no larger than what the layers add to it.
    found = {
        "model.embed_tokens.weight": drawn(_VOCABULARY, hidden, hidden**0.5),
        "lm_head.weight": drawn(_VOCABULARY, hidden, 2.0),
        "model.norm.weight": one.clone(),
    }
    for layer in range(4):
        name = f"model.layers.{layer}"
        found |= {f"{name}.self_attn.{part}_proj.weight": drawn(hidden, hidden) for part in "qkvo"}
        found |= {f"{name}.mlp.{part}_proj.weight": drawn(inner, hidden) for part in ("gate", "up")}
        found[f"{name}.mlp.down_proj.weight"] = drawn(hidden, inner)
        found |= {f"{name}.{part}_layernorm.weight": one.clone() for part in ("input", "post_attention")}
    # Of the special tokens; the largest of so many logits is far above zero.
    found["lm_head.weight"][:3] = 0
    save_file(found, path, metadata={"format": "pt"})
