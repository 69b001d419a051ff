"""How vLLM and a plan share devices: engine arguments, and whether everything fits. Pure.

vLLM (0.20 to 0.33) decides its memory once, at its start:

- it requires ``free >= total * gpu_memory_utilization``, also when the bytes of the KV cache are given;
- without those bytes it measures what is left, and aborts if free memory *grew* meanwhile (vllm#56830).

So both arguments are given: a utilization that holds with the index loaded or not, and the bytes, so that vLLM does not
measure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridindex.errors import InvalidInputError, ProfileError

if TYPE_CHECKING:
    from hybridindex.partitioner.plan import Plan
    from hybridindex.types import LLMProfile

__all__ = ["DEFAULT_CONTEXT_BYTES", "EngineShare", "check_fit", "room_beside", "share_with"]

#: The CUDA context of the process that holds the index, and its libraries.
DEFAULT_CONTEXT_BYTES = 768 << 20
#: What a router keeps for lookahead beside the plan's lists, if its budget has room, where no window was measured.
_DEFAULT_LOOKAHEAD_BYTES = 256 << 20
#: vLLM's own default.
_MAX_UTILIZATION = 0.92


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShare:
    """What vLLM may take of each device beside one plan. Bytes are per device; vLLM takes the same of all."""

    #: None: vLLM sizes its cache by the utilization.
    kv_cache_memory_bytes: int | None
    #: None where the device's memory is not known, as on a CPU.
    gpu_memory_utilization: float | None
    #: The most that the router holds on each device, lookahead included.
    index_bytes: tuple[int, ...]
    #: What was not counted, or is beyond the measured range.
    notes: tuple[str, ...]

    def arguments(self) -> list[str]:
        """For ``vllm serve``."""
        words = []
        if self.kv_cache_memory_bytes is not None:
            words += ["--kv-cache-memory-bytes", str(self.kv_cache_memory_bytes)]
        if self.gpu_memory_utilization is not None:
            words += ["--gpu-memory-utilization", f"{self.gpu_memory_utilization:.2f}"]
        return words


def share_with(
    plan: Plan,
    *,
    device_memory_bytes: int | None,
    kv_cache_bytes: int | None = None,
    model_bytes: int | None = None,
    context_bytes: int = DEFAULT_CONTEXT_BYTES,
    lookahead_bytes: int | None = None,
    llm: LLMProfile | None = None,
) -> EngineShare:
    """vLLM's share beside ``plan``, checked to fit.

    Args:
        device_memory_bytes: of one device, all of it; None: not known, then only the KV cache is computed.
        kv_cache_bytes: of one device; default: what the plan's LLM profile leaves beside the index.
        model_bytes: weights and activations that vLLM puts on one device, as its log says.
        context_bytes: what the router's process takes beside its budget.
        lookahead_bytes: the router's; None: what it takes by itself.
        llm: whose measured steps are the router's windows (:func:`hybridindex.plans.llm_profiles.step_times`); None:
            the plan's.

    Raises:
        InvalidInputError: it does not fit (names all numbers), or vLLM's share is not known.
    """
    if kv_cache_bytes is not None and kv_cache_bytes < 1:
        # vLLM reads 0 as "not given", and would measure.
        raise InvalidInputError(f"kv_cache_bytes is {kv_cache_bytes}; expected 1 byte or more")
    notes: list[str] = []
    if lookahead_bytes is None:
        lookahead_bytes = _lookahead_bytes(plan, llm or plan.request.llm)
    index_bytes = tuple(
        min(budget, max(planned, scratch) + lookahead_bytes)
        for budget, planned, scratch in zip(
            plan.request.budgets, plan.device_bytes_each, plan.request.scratch, strict=True
        )
    )
    largest = max(index_bytes)
    if largest < max(plan.request.budgets):
        notes.append(f"with another plan the index may grow to its budget, {max(plan.request.budgets)} bytes")
    kv = kv_cache_bytes
    planned_llm = plan.request.llm
    if kv is None and planned_llm is not None:
        whole = planned_llm.kv_cache_bytes // plan.n_devices
        kv = whole - largest
        if kv <= 0:
            raise InvalidInputError(
                f"the plan's LLM profile has {whole} bytes of KV cache per device, of which the index may take "
                f"{largest}: nothing is left; plan with a smaller budget, or profile the LLM with a larger cache"
            )
        least = min((size for size, rps in planned_llm.points if rps > 0), default=planned_llm.kv_cache_bytes)
        if kv * plan.n_devices < least:
            notes.append(f"{kv * plan.n_devices} bytes of KV cache are below the smallest measured, {least}")
    if kv is None and device_memory_bytes is None:
        raise InvalidInputError(
            "kv_cache_bytes is missing, the plan has no LLM profile, and device_memory_bytes is not known; give one"
        )
    utilization = None
    if device_memory_bytes is not None:
        check_fit(
            device_memory_bytes, index_bytes=largest, context_bytes=context_bytes, kv_bytes=kv, model_bytes=model_bytes
        )
        left = device_memory_bytes - largest - context_bytes
        utilization = min(_MAX_UTILIZATION, math.floor(left / device_memory_bytes * 100) / 100)
        if utilization <= 0:
            raise InvalidInputError(
                f"of {device_memory_bytes} bytes the index may take {largest} and its process {context_bytes}: "
                "less than a hundredth is left for vLLM; plan with a smaller budget"
            )
    if model_bytes is None:
        notes.append("weights and activations of the model are not in the account: give model_bytes")
    if kv is None:
        notes.append("vLLM sizes its KV cache itself: nothing on the device may free memory while it starts")
    return EngineShare(
        kv_cache_memory_bytes=kv,
        gpu_memory_utilization=utilization,
        index_bytes=index_bytes,
        notes=tuple(notes),
    )


def _lookahead_bytes(plan: Plan, llm: LLMProfile | None) -> int:
    """What a router keeps for sessions where nothing is configured."""
    window_s = 0.0 if llm is None else max(llm.generation_s.values(), default=0.0)
    try:
        # On GPUs a router copies from page-locked memory; the plan has another rate where that was not timed.
        return int(window_s * plan.copy_bytes_per_s(pinned=True)) if window_s > 0 else _DEFAULT_LOOKAHEAD_BYTES
    except ProfileError:
        return _DEFAULT_LOOKAHEAD_BYTES


def check_fit(
    device_memory_bytes: int, *, index_bytes: int, context_bytes: int, kv_bytes: int | None, model_bytes: int | None
) -> None:
    """Raises InvalidInputError, with all numbers, where the shares of one device exceed its memory."""
    parts = {
        "the index with scratch and lookahead": index_bytes,
        "its process": context_bytes,
        "vLLM's KV cache": kv_bytes or 0,
        "the model": model_bytes or 0,
    }
    for name, nbytes in {"the device": device_memory_bytes, **parts}.items():
        if nbytes < 0:
            raise InvalidInputError(f"{name}: {nbytes} bytes; expected 0 or more")
    total = sum(parts.values())
    if total > device_memory_bytes:
        words = ", ".join(f"{name} {nbytes}" for name, nbytes in parts.items() if nbytes)
        raise InvalidInputError(
            f"device memory is {device_memory_bytes} bytes; {words} come to {total}, {total - device_memory_bytes} too "
            "many; lower the index budget or the KV cache"
        )


def room_beside(free_bytes: int, *, index_bytes: int, context_bytes: int | None) -> tuple[str, bool]:
    """Memory for the index on a device where vLLM runs: all numbers in words, and whether it is enough.

    Args:
        free_bytes: after the index's process got its context.
        context_bytes: None: not known, as vLLM's process had one before, or the driver does not tell.
    """
    context = context_bytes or 0
    process = "its process an unknown part" if context_bytes is None else f"its process {context}"
    words = f"the index may take {index_bytes} bytes and {process}, {free_bytes + context} were free"
    return words, index_bytes <= free_bytes
