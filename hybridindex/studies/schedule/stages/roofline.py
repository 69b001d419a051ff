"""Inference stages on accelerators: each operator takes the longer of computing and reading memory (RAGO, section
4(a)), under tensor, pipeline and data parallelism.

Each layer has one operator for the weights, one for attention, and two all-reduces between tensor-parallel chips. Rates
are peak rates, as the paper's figures imply; other losses of kernels are not modelled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybridindex.errors import InvalidInputError
from hybridindex.studies.hardware import Chip, Model

__all__ = ["Cost", "Parallelism", "decode_costs", "decode_step_s", "encode_costs", "encode_s", "powers_of_two"]

#: Weights are 8-bit integers, activations, keys and values 16-bit (section 4).
WEIGHT_BYTES = 1.0
VALUE_BYTES = 2.0
#: Part of a chip's memory for weights and cache.
MEMORY_SHARE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """How ``tensor * pipeline * data`` chips share a stage."""

    tensor: int
    pipeline: int
    data: int

    @property
    def chips(self) -> int:
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        parts = ((self.tensor, "tensor"), (self.pipeline, "pipeline"), (self.data, "data"))
        return " x ".join(f"{n} {name}" for n, name in parts if n > 1) or "1 chip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One batch of a stage: seconds until it is done, and until the next can begin."""

    latency_s: float
    interval_s: float
    #: Weights and cache on each chip.
    memory_bytes: float
    parallelism: Parallelism


def powers_of_two(largest: int) -> list[int]:
    """1, 2, 4, ... up to ``largest``."""
    return [1 << i for i in range(largest.bit_length()) if 1 << i <= largest]


def encode_s(
    model: Model,
    chip: Chip,
    how: Parallelism,
    *,
    sequences: float,
    tokens: int,
    attended: float = 1.0,
    weight_bytes: float = WEIGHT_BYTES,
) -> float:
    """Seconds for ``sequences`` sequences of ``tokens`` to pass all layers: prefill of an LLM, or an encoder's work.

    Args:
        sequences: of the whole batch; data-parallel chips share them.
        attended: part of the preceding tokens that a token attends to, averaged over layers.
        weight_bytes: of one parameter.

    Raises:
        InvalidInputError: no sequences or tokens.
    """
    if sequences <= 0 or tokens < 1:
        raise InvalidInputError(f"{sequences} sequences of {tokens} tokens; expected at least one of each")
    own = max(1.0, sequences / how.data)
    causal = 0.5 if model.generates else 1.0
    per_layer_weights = model.parameters / model.layers
    width = model.heads * model.head_dim
    linear_flops = 2.0 * per_layer_weights * own * tokens
    linear_bytes = per_layer_weights * weight_bytes + 2.0 * own * tokens * model.hidden * VALUE_BYTES
    scores_flops = 4.0 * causal * attended * own * tokens * tokens * width
    scores_bytes = own * tokens * (2.0 * width + model.kv_bytes_per_token() / model.layers) * VALUE_BYTES / 2.0
    layer_s = _operator_s(linear_flops, linear_bytes, chip, how) + _operator_s(scores_flops, scores_bytes, chip, how)
    return _all_layers_s(model, chip, how, layer_s, own * tokens)


def decode_step_s(
    model: Model,
    chip: Chip,
    how: Parallelism,
    *,
    sequences: float,
    context: float,
    weight_bytes: float = WEIGHT_BYTES,
) -> float:
    """Seconds of one decoding step of ``sequences`` sequences that have ``context`` tokens each."""
    own = max(1.0, sequences / how.data)
    per_layer_weights = model.parameters / model.layers
    linear_bytes = per_layer_weights * weight_bytes + 2.0 * own * model.hidden * VALUE_BYTES
    cache_bytes = own * context * model.kv_bytes_per_token(VALUE_BYTES) / model.layers
    scores_flops = 4.0 * own * context * model.heads * model.head_dim
    layer_s = _operator_s(2.0 * per_layer_weights * own, linear_bytes, chip, how)
    layer_s += _operator_s(scores_flops, cache_bytes, chip, how)
    return _all_layers_s(model, chip, how, layer_s, own)


def _operator_s(flops: float, nbytes: float, chip: Chip, how: Parallelism) -> float:
    return max(flops / chip.flops_per_s, nbytes / chip.memory_bytes_per_s) / how.tensor


def _all_layers_s(model: Model, chip: Chip, how: Parallelism, layer_s: float, tokens: float) -> float:
    moved = tokens * model.hidden * VALUE_BYTES
    # A ring sends every byte (n - 1) / n times in each of two phases, after attention and after the weights.
    reduce_s = 2.0 * 2.0 * (how.tensor - 1) / how.tensor * moved / chip.link_bytes_per_s
    between_s = (how.pipeline - 1) * moved / chip.link_bytes_per_s
    return model.layers * (layer_s + reduce_s) + between_s


def encode_costs(
    model: Model, chip: Chip, chips: int, *, sequences: float, tokens: int, attended: float = 1.0
) -> tuple[Cost, ...]:
    """The undominated ways to use ``chips`` chips for one batch; none where the weights do not fit."""
    costs = []
    for how in _ways(model, chips):
        per_chip = model.weight_bytes(WEIGHT_BYTES) / (how.tensor * how.pipeline)
        if per_chip > MEMORY_SHARE * chip.memory_bytes:
            continue
        if how.data > 1 and how.data > sequences:
            continue
        latency = encode_s(model, chip, how, sequences=sequences, tokens=tokens, attended=attended)
        costs.append(Cost(latency_s=latency, interval_s=latency / how.pipeline, memory_bytes=per_chip, parallelism=how))
    return _undominated(costs)


def decode_costs(
    model: Model, chip: Chip, chips: int, *, sequences: float, prompt: int, output: int
) -> tuple[Cost, ...]:
    """Ways to decode ``output`` tokens of ``sequences`` sequences at once; none where the cache does not fit.

    The latency is that of all steps, at the mean context; a pipeline works on as many batches as it has stages, and
    keeps the cache of all.
    """
    costs = []
    for how in _ways(model, chips):
        if how.data > 1 and how.data > sequences:
            continue
        per_chip = model.weight_bytes(WEIGHT_BYTES) / (how.tensor * how.pipeline)
        cache = max(1.0, sequences / how.data) * (prompt + output) * model.kv_bytes_per_token(VALUE_BYTES)
        # Keys and values are split by heads; more chips than that keep copies.
        # A stage of a pipeline keeps its own layers of as many batches as there are stages.
        per_chip += cache / min(how.tensor, model.kv_heads)
        if per_chip > MEMORY_SHARE * chip.memory_bytes:
            continue
        step = decode_step_s(model, chip, how, sequences=sequences, context=prompt + output / 2.0)
        costs.append(
            Cost(
                latency_s=step * output, interval_s=step * output / how.pipeline, memory_bytes=per_chip, parallelism=how
            )
        )
    return _undominated(costs)


def _ways(model: Model, chips: int) -> Iterator[Parallelism]:
    for tensor in powers_of_two(min(chips, model.heads)):
        for pipeline in powers_of_two(min(chips // tensor, model.layers)):
            if chips % (tensor * pipeline) == 0:
                yield Parallelism(tensor=tensor, pipeline=pipeline, data=chips // (tensor * pipeline))


def _undominated(costs: list[Cost]) -> tuple[Cost, ...]:
    def beats(a: Cost, b: Cost) -> bool:
        return a.latency_s <= b.latency_s and a.interval_s <= b.interval_s and a.memory_bytes <= b.memory_bytes

    kept: list[Cost] = []
    for cost in sorted(costs, key=lambda c: (c.latency_s, c.interval_s, c.memory_bytes)):
        if not any(beats(earlier, cost) for earlier in kept):
            kept.append(cost)
    return tuple(kept)
