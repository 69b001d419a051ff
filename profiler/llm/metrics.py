"""vLLM's ``/metrics``: size and use of its KV cache, preemptions. Text in, numbers out; no connection here.

vLLM 0.20 and newer: the labels of ``vllm:cache_config_info`` and three series. Of other servers nothing is known.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

__all__ = ["CacheState", "read_cache_state"]

_SAMPLE = re.compile(r"^(vllm:[a-z_]+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheState:
    """Of all engines behind one server, at one moment. None: the server does not tell."""

    #: KV-cache bytes of one device, and tokens of one engine. Bytes are told only where vLLM was given them.
    kv_bytes: int | None
    kv_tokens: int | None
    n_engines: int
    #: Used part of the fullest engine's cache, 0..1.
    usage: float | None
    preemptions: int | None
    #: All that the server says of its caches' settings, in one order.
    config: str = ""


def read_cache_state(text: str) -> CacheState | None:
    """None where the text has no KV cache of vLLM."""
    configs: dict[str, dict[str, str]] = {}
    usage: float | None = None
    preemptions: int | None = None
    for name, labels, value in _SAMPLE.findall(text):
        number = _number(value)
        if name == "vllm:cache_config_info":
            found = dict(_LABEL.findall(labels))
            configs[found.get("engine", "")] = found
        elif name == "vllm:kv_cache_usage_perc" and number is not None and 0.0 <= number <= 1.0:
            usage = max(usage or 0.0, number)
        elif name == "vllm:num_preemptions_total" and number is not None:
            preemptions = (preemptions or 0) + int(number)
    if not configs:
        return None
    return CacheState(
        kv_bytes=_whole(configs, "kv_cache_memory_bytes"),
        kv_tokens=_whole(configs, "kv_cache_size_tokens"),
        n_engines=len(configs),
        usage=usage,
        preemptions=preemptions,
        config=repr(sorted((engine, sorted(labels.items())) for engine, labels in configs.items())),
    )


def _whole(configs: dict[str, dict[str, str]], label: str) -> int | None:
    """The smallest of the engines; None where one does not tell."""
    values = [config.get(label, "") for config in configs.values()]
    return min(int(v) for v in values) if all(re.fullmatch(r"[0-9]{1,18}", v) for v in values) else None


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and abs(value) < 1 << 62 else None
