"""Profiles an LLM behind an OpenAI-compatible server: throughput, TTFT and TPOT under rising concurrency.

One run gives one point of mu(KV): the saturated throughput at the KV-cache size that the server has now. Runs at other
sizes add their points (:func:`merge_points`); :mod:`hybridindex.profiler.llm.offline` sweeps sizes with vLLM's offline
API. Stores nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hybridindex.errors import InvalidInputError, LLMServerError
from hybridindex.profiler.llm.load import LLMRequest, LLMRun, Progress
from hybridindex.profiler.llm.metrics import CacheState
from hybridindex.profiler.llm.server import LLMServer
from hybridindex.types import LLMMeasurement, LLMProfile

__all__ = ["LLMRequest", "Progress", "merge_points", "profile_llm_server"]


def profile_llm_server(
    url: str,
    request: LLMRequest | None = None,
    *,
    key: str | None = None,
    timeout_s: float = 60.0,
    wait_s: float = 0.0,
    progress: Progress | None = None,
    checkpoint: Path | None = None,
    nonce: str | None = None,
) -> LLMMeasurement:
    """Measures a running server. Blocks; not within a running event loop.

    Args:
        url: of an OpenAI-compatible server: vLLM, SGLang, llama.cpp.
        key: sent as a bearer token.
        timeout_s: bounds each request.
        wait_s: how long the server may still be starting.
        checkpoint: keeps finished levels until the measurement is complete, an hour at most. The result's note
            ``resumed`` names those that an interrupted attempt measured.
        nonce: prompts of the same one and seed are the same; None: prompts that the server has not seen.

    Raises:
        LLMServerError: it is not there, answers wrongly, too slowly or not at all, or serves another model.
        InvalidInputError: an argument is out of range, or the KV-cache size is not known.
    """
    request = request or LLMRequest()

    async def run() -> LLMMeasurement:
        connections = request.max_concurrency + 2
        async with LLMServer(url, key=key, timeout_s=timeout_s, connections=connections) as server:
            await server.wait_ready(wait_s)
            served = await _choose_model(server, request.model)
            state, unread = await _cache_state(server, required=request.kv_cache_bytes is None)
            kv_bytes = _kv_bytes(server.url, state, request)
            tell = progress or (lambda *_: None)
            run = LLMRun(server, served[0], served[1], kv_bytes, state, request, tell, nonce)
            measured = await run.measure(checkpoint)
            return replace(measured, notes={**measured.notes, "metrics": unread}) if unread else measured

    return asyncio.run(run())


async def _choose_model(server: LLMServer, model: str | None) -> tuple[str, int | None]:
    served = await server.models()
    names = [m.name for m in served]
    if model is None and len(served) != 1:
        raise InvalidInputError(f"model is missing; {server.url} serves {', '.join(names) or 'none'}: name one")
    for each in served:
        if model is None or model in each.names:
            return each.name, each.max_tokens
    raise LLMServerError(f"{server.url} serves {', '.join(names) or 'no model'}, not {model}")


async def _cache_state(server: LLMServer, *, required: bool) -> tuple[CacheState | None, str]:
    """The cache as the server reports it, and why it could not be read; an error only where it is ``required``."""
    try:
        return await server.cache_state(), ""
    except LLMServerError as error:
        if required:
            raise LLMServerError(f"{error}; with --kv-cache-bytes it is not needed", status=error.status) from error
        return None, str(error)


def _kv_bytes(url: str, state: CacheState | None, request: LLMRequest) -> int:
    """KV-cache bytes over all devices and engines."""
    each = request.kv_cache_bytes
    if each is None and state is not None:
        each = state.kv_bytes
    if each is None or each < 1:
        why = (
            "has no vLLM metrics; give --kv-cache-bytes (of llama.cpp: what llama-server -lv 4 logs as KV buffer size, "
            "a line for each of its caches)"
            if state is None
            else f"tells {state.kv_tokens} KV-cache tokens and not their bytes, since it was not started with "
            '--kv-cache-memory-bytes; on a GPU its log has those of a device, "Available KV cache memory: … GiB": '
            "give them as --kv-cache-bytes"
        )
        raise InvalidInputError(f"kv_cache_bytes is not known: {url}/metrics {why}")
    return each * request.n_devices * (1 if state is None else state.n_engines)


def merge_points(measurements: Sequence[LLMMeasurement]) -> LLMProfile:
    """One profile out of measurements of one model: mu(KV) of all of them, the rest from the last.

    Only measurements of the last one's model, machine, method and lengths (within a tenth) count; where several have
    the same KV size, the latest does.

    Raises:
        InvalidInputError: there is none.
    """
    if not measurements:
        raise InvalidInputError("measurements is empty; expected one at least")
    last = measurements[-1]

    def alike(other: LLMMeasurement) -> bool:
        same = (other.model, other.hardware_fingerprint, other.method)
        lengths = zip(
            (other.profile.input_tokens, other.profile.output_tokens),
            (last.profile.input_tokens, last.profile.output_tokens),
            strict=True,
        )
        close = all(abs(a - b) * 10 <= max(a, b) for a, b in lengths)
        return same == (last.model, last.hardware_fingerprint, last.method) and close

    points = {kv: rps for m in measurements if alike(m) for kv, rps in m.profile.points}
    largest = max(points)
    return replace(
        last.profile,
        kv_cache_bytes=largest,
        throughput_rps=points[largest],
        points=tuple(sorted(points.items())),
    )
