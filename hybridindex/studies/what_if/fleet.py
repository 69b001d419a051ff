"""Equal chips in one machine, and an LLM's profile on them by roofline where none was measured.

An engine of the LLM takes the fewest chips (a power of two) of which its weights fill at most half; as many engines run
as fit. One number, ``efficiency``, says what part of a roofline kernels reach.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from hybridindex.errors import InvalidInputError
from hybridindex.studies.hardware import Chip, Model, chip, names
from hybridindex.studies.schedule.stages.roofline import Parallelism, decode_step_s, encode_s, powers_of_two
from hybridindex.types import LLMProfile

__all__ = ["Fleet", "LLMService", "parse_fleet"]

#: Part of a chip's memory for weights, KV cache and index; the engine needs the rest. vLLM's default.
MEMORY_SHARE = 0.92
#: Bytes of one weight: 16-bit numbers.
WEIGHT_BYTES = 2.0
#: Most sequences that an engine decodes at once; vLLM's default.
MAX_SEQUENCES = 256
#: KV-cache sizes at which throughput is computed, as parts of the whole cache; above 1 for what-ifs.
_KV_PARTS = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0, 1.25)
_MOST_CHIPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """``count`` chips of one kind."""

    chip: Chip
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.count <= _MOST_CHIPS:
            raise InvalidInputError(f"hardware has {self.count} {self.chip.name}; expected 1 to {_MOST_CHIPS}")

    @property
    def usable_bytes(self) -> float:
        """Bytes of each chip for weights, KV cache and index."""
        return self.chip.memory_bytes * MEMORY_SHARE

    def __str__(self) -> str:
        return f"{self.count} x {self.chip.name}"


def parse_fleet(text: str) -> Fleet:
    """Reads "h100x8", "rtx4090" or "mine.jsonx4".

    Raises:
        InvalidInputError: an unknown chip (the shipped ones are listed), a number below 1, or a wrong chip file.
    """
    kind, count = text, 1
    if text not in names("chips") and (match := re.fullmatch(r"(.+)x(-?\d+)", text)):
        kind, count = match[1], int(match[2])
    if kind not in names("chips") and not kind.endswith(".json"):
        raise InvalidInputError(
            f"hardware is {text[:80]!r}; expected NAME or NAMExN, such as h100x8, with NAME one of "
            f"{', '.join(names('chips'))}, or a file FILE.json"
        )
    return Fleet(chip=chip(kind), count=count)


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMService:
    """A model served from a fleet. Raises InvalidInputError, which names the field."""

    model: Model
    fleet: Fleet
    input_tokens: int = 1024
    output_tokens: int = 256
    #: Part of the chips' peak rates that kernels reach.
    efficiency: float = 0.5
    #: KV-cache memory over the memory that is there; what-ifs change it.
    kv_factor: float = 1.0

    def __post_init__(self) -> None:
        if not self.model.generates:
            raise InvalidInputError(f"llm {self.model.name} is an encoder; expected a model that generates")
        for name in ("input_tokens", "output_tokens"):
            if not 1 <= getattr(self, name) <= 1 << 24:
                raise InvalidInputError(f"{name} is {getattr(self, name)}; expected 1 to {1 << 24}")
        if not 0 < self.efficiency <= 1:
            raise InvalidInputError(f"efficiency is {self.efficiency}; expected a part of the peak rates in (0, 1]")
        if self.kv_bytes < self._request_bytes * self.engines:
            raise InvalidInputError(
                f"hardware {self.fleet} holds no {self.model.name}: weights take {self._weights / 1e9:,.1f} GB and a "
                f"request {self._request_bytes / 1e9:,.2f} GB beside them, of "
                f"{self.fleet.count * self.fleet.usable_bytes / 1e9:,.1f} GB that are usable"
            )

    @property
    def _weights(self) -> float:
        return self.model.weight_bytes(WEIGHT_BYTES)

    @property
    def _request_bytes(self) -> float:
        return self.model.kv_bytes_per_token() * (self.input_tokens + self.output_tokens)

    @property
    def chips_per_engine(self) -> int:
        """The fewest, a power of two, of which weights fill at most half; else as many as there are."""
        sizes = powers_of_two(self.fleet.count)
        fits = (n for n in sizes if self._weights <= n * self.fleet.usable_bytes / 2)
        return next(fits, sizes[-1])

    @property
    def engines(self) -> int:
        return self.fleet.count // self.chips_per_engine

    @property
    def kv_bytes(self) -> float:
        """KV cache of all engines."""
        per_engine = self.chips_per_engine * self.fleet.usable_bytes - self._weights
        return self.engines * per_engine * self.kv_factor

    def _engine(self, sequences: float) -> tuple[float, float]:
        """Seconds of the prefill of one prompt, and of one decoding step of ``sequences``."""
        peak = self.fleet.chip
        reached = replace(
            peak,
            flops_per_s=peak.flops_per_s * self.efficiency,
            memory_bytes_per_s=peak.memory_bytes_per_s * self.efficiency,
        )
        how = Parallelism(tensor=self.chips_per_engine, pipeline=1, data=1)
        prefill = encode_s(self.model, reached, how, sequences=1, tokens=self.input_tokens, weight_bytes=WEIGHT_BYTES)
        step = decode_step_s(
            self.model,
            reached,
            how,
            sequences=sequences,
            context=self.input_tokens + self.output_tokens / 2,
            weight_bytes=WEIGHT_BYTES,
        )
        return prefill, step

    def throughput_rps(self, kv_bytes: float) -> float:
        """Requests per second of all engines when saturated, with ``kv_bytes`` of KV cache in all."""
        sequences = min(kv_bytes / self.engines / self._request_bytes, MAX_SEQUENCES)
        if sequences < 1:
            return 0.0
        prefill, step = self._engine(sequences)
        return self.engines / (prefill + self.output_tokens * step / sequences)

    def profile(self) -> LLMProfile:
        """The profile that a plan needs. A first token takes a prefill and the current decoding step."""
        total = self.kv_bytes
        prefill, step = self._engine(min(total / self.engines / self._request_bytes, MAX_SEQUENCES))
        points = [(int(part * total), self.throughput_rps(part * total)) for part in _KV_PARTS]
        return LLMProfile(
            kv_cache_bytes=int(total),
            throughput_rps=self.throughput_rps(total),
            points=tuple(points),
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            ttft_s=prefill + step,
        )
