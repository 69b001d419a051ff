"""Sweeps vLLM's KV-cache size through its offline API: mu(KV) at several sizes, one engine and one process a point.

VectorLiteRAG shows this curve in its Fig. 4 and then assumes a straight line (Algorithm 1, line 5); here it is
measured. Needs vLLM in this environment. Latencies come from a server: :mod:`hybridindex.profiler.llm.measure`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from hybridindex import filesystem
from hybridindex.errors import InvalidInputError, LLMServerError, MissingDependencyError, how_to_install
from hybridindex.profiler.checkpoint import Checkpoint
from hybridindex.profiler.hardware import hardware_info
from hybridindex.types import LLMLevel, LLMMeasurement, LLMProfile

__all__ = ["SweepRequest", "sweep_kv_cache"]

_log = logging.getLogger(__name__)

#: Run as a file: it needs nothing else of ours, and the package takes longer to import than a small engine to start.
_POINT: Final = Path(__file__).with_name("offline_point.py")
_SHOWN_LINES: Final = 12
_MAX_RESULT_BYTES, _MAX_LOG_BYTES = 1 << 20, 1 << 20
_SHOWN_CAUSE: Final = 400
_ERROR: Final = re.compile(r"\b([A-Z]\w*(?:Error|Exception): .+)$", re.MULTILINE)
#: vLLM walks a dictionary that another of its threads fills while the engine starts. The next start mostly works.
_RACE: Final = "dictionary changed size during iteration"
#: Seconds for which a finished size can be resumed: a sweep takes hours, and nothing else runs on its devices.
_MAX_AGE_S: Final = 86_400.0
#: Arguments that the sweep sets.
_OWN: Final = {"model", "kv_cache_memory_bytes", "seed", "enable_prefix_caching", "disable_log_stats"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest:
    """What to sweep."""

    #: Folder or name, as vLLM takes it.
    model: str
    #: Per device.
    kv_cache_bytes: tuple[int, ...]
    #: Devices that one engine's cache is spread over.
    n_devices: int = 1
    input_tokens: int = 512
    output_tokens: int = 64
    #: Given at once: more than the largest cache holds, so that each size is filled.
    n_requests: int = 64
    #: Further arguments of ``vllm.LLM``.
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    #: For one point, its start included.
    timeout_s: float = 300.0
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = self.kv_cache_bytes
        if not sizes or any(isinstance(b, bool) or not isinstance(b, int) or b < 1 for b in sizes):
            raise InvalidInputError(f"kv_cache_bytes is {sizes!r}; expected one size or more, in whole bytes above 0")
        for name in ("n_devices", "input_tokens", "output_tokens", "n_requests"):
            if isinstance(getattr(self, name), bool) or not 1 <= getattr(self, name) <= 1 << 20:
                raise InvalidInputError(f"{name} is {getattr(self, name)!r}; expected 1 or more")
        if not 1 <= self.timeout_s <= 86_400:
            raise InvalidInputError(f"timeout_s is {self.timeout_s!r}; expected 1..86400 seconds")
        if own := _OWN & set(self.engine_args):
            raise InvalidInputError(f"engine_args name {', '.join(sorted(own))}; the sweep decides these itself")


def sweep_kv_cache(
    request: SweepRequest,
    *,
    progress: Callable[[str, int, int], None] | None = None,
    checkpoint: Path | None = None,
) -> LLMMeasurement:
    """Measures requests/s at each size, the smallest first.

    Sizes at which vLLM does not start, because they hold no request of the longest length for example, are kept as
    ``refused`` with the reason, and count as 0 requests/s: a plan may not go there. A sweep that goes on tries them
    again: something else may have had the memory. An engine that loses a race of its
    own threads is started once more; the note ``started_again`` says so.

    Raises:
        LLMServerError: no size worked, one took longer than ``timeout_s``, or vLLM failed for another reason than its
            KV cache.
        MissingDependencyError: vLLM is not installed here.
    """
    tell = progress or (lambda *_: None)
    # With the machine: another one may share the disk.
    hardware = hardware_info().fingerprint
    identity = {**asdict(request), "kv_cache_bytes": None, "timeout_s": None, "hardware": hardware}
    kept = Checkpoint(checkpoint, repr(identity), max_age_s=_MAX_AGE_S)
    levels: list[tuple[int, LLMLevel]] = []
    refused: list[tuple[int, str]] = []
    tokens: dict[str, int | None] = {}
    started_again: dict[str, str] = {}
    sizes = sorted(set(request.kv_cache_bytes))
    for i, size in enumerate(sizes):
        tell("KV-cache sizes", i, len(sizes))
        known = kept.get(f"kv {size}")
        result = known[0] if known is not None else _run_point(request, size)
        if "missing" in result:
            raise MissingDependencyError(f"sweeping needs vLLM ({result['missing']}): {how_to_install('vllm')}")
        # What was resumed keeps its time: it grows older with every attempt.
        if known is None and "refused" not in result:
            kept.put(f"kv {size}", result)
        total = size * request.n_devices
        if "raced" in result:
            started_again[str(total)] = result["raced"]
        if "refused" in result:
            refused.append((total, str(result["refused"])))
            continue
        tokens[str(total)] = result["kv_tokens"]
        levels.append((total, _level_of(request, result)))
    tell("KV-cache sizes", len(sizes), len(sizes))
    if not levels:
        raise LLMServerError(f"vLLM ran {request.model} at none of {len(sizes)} KV-cache sizes: {refused[-1][1]}")
    kept.remove()
    points = {size: level.throughput_rps for size, level in levels}
    # Only sizes below what worked: one that was too large for the machine is not on the curve.
    points |= {size: 0.0 for size, _ in refused if size < min(points)}
    largest = max(points)
    return LLMMeasurement(
        created_at=datetime.now(UTC).isoformat(timespec="microseconds"),
        hardware_fingerprint=hardware,
        model=request.model,
        method="offline",
        profile=LLMProfile(
            kv_cache_bytes=largest,
            throughput_rps=points[largest],
            points=tuple(sorted(points.items())),
            input_tokens=request.input_tokens,
            output_tokens=request.output_tokens,
        ),
        levels=tuple(level for _, level in levels),
        refused=tuple(refused),
        notes={
            "kv_cache_tokens": tokens,
            "engine_args": dict(request.engine_args),
            **({"started_again": started_again} if started_again else {}),
            **({"resumed": kept.resumed} if kept.resumed else {}),
        },
    )


def _level_of(request: SweepRequest, result: Mapping[str, Any]) -> LLMLevel:
    return LLMLevel(
        concurrency=request.n_requests,
        n_requests=request.n_requests,
        input_tokens=float(request.input_tokens),
        output_tokens=float(request.output_tokens),
        throughput_rps=request.n_requests / float(result["seconds"]),
        preemptions=int(result["preemptions"]),
    )


def _run_point(request: SweepRequest, size: int) -> dict[str, Any]:
    try:
        return _start_point(request, size)
    except LLMServerError as error:
        if _RACE not in str(error):
            raise
        _log.warning("%s; it is started once more", error)
        return {**_start_point(request, size), "raced": str(error)}


def _start_point(request: SweepRequest, size: int) -> dict[str, Any]:
    job = {**asdict(request), "kv_cache_bytes": size, "engine_args": dict(request.engine_args)}
    with filesystem.scratch_folder("hybridindex-llm-") as folder:
        asked, answered, log = (Path(folder) / name for name in ("job.json", "result.json", "log"))
        filesystem.write_bytes(asked, json.dumps(job).encode())
        with filesystem.open_for_writing(log) as output:
            # Its own session, so that the processes that vLLM starts can be ended with it.
            child = subprocess.Popen(  # noqa: S603 - our own module, no shell
                [sys.executable, "-P", str(_POINT), str(asked), str(answered)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = child.wait(request.timeout_s)
            except subprocess.TimeoutExpired:
                raise LLMServerError(
                    f"vLLM with {size} bytes of KV cache took longer than {request.timeout_s:g} s; its last lines: "
                    + _tail(log)
                ) from None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        if not filesystem.exists(answered) or filesystem.stat(answered).st_size > _MAX_RESULT_BYTES:
            raise LLMServerError(
                f"vLLM with {size} bytes of KV cache ended with status {status} and no result; its last lines: "
                + _tail(log)
            )
        result: dict[str, Any] = json.loads(filesystem.read_bytes(answered))
        if "refused" in result:
            result["refused"] = cause = _cause(log) or str(result["refused"])
            if "KV cache" not in cause:
                raise LLMServerError(f"vLLM with {size} bytes of KV cache did not run: {cause}")
        return result


def _cause(log: Path) -> str:
    """The last error that vLLM logged with a name, other than that it failed; empty where there is none."""
    named = [m[1] for m in _ERROR.finditer(_tail(log, 10_000)) if "See root cause above" not in m[1]]
    return named[-1][:_SHOWN_CAUSE] if named else ""


def _tail(log: Path, n_lines: int = _SHOWN_LINES) -> str:
    with filesystem.open_for_reading(log) as file:
        file.seek(max(0, filesystem.stat(log).st_size - _MAX_LOG_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return "\n".join(line[:1000] for line in lines[-n_lines:])
