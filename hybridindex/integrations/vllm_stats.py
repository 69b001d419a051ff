"""vLLM's stat logger plugin (``vllm.stat_logger_plugins``): gives generation times and load to the router.

vLLM loads it in its API server's process, wherever hybridindex is installed, unless ``VLLM_PLUGINS`` names others. It
copies a few numbers per engine step, and none until a router is attached.
"""

from __future__ import annotations

import logging
from typing import Any

from hybridindex.errors import MissingDependencyError, how_to_install
from hybridindex.integrations.llm_load import ENGINE_LOAD

try:
    from vllm.v1.metrics.loggers import StatLoggerBase
except ImportError as error:
    raise MissingDependencyError(f"the stat logger needs vLLM: {how_to_install('vllm')}") from error

__all__ = ["LoadLogger"]

_log = logging.getLogger(__name__)


class LoadLogger(StatLoggerBase):  # type: ignore[misc, unused-ignore]
    """One per engine. vLLM calls ``record`` once per step, on the event loop."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._engine_index = engine_index
        self._is_readable = True

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Raises nothing: vLLM ends all requests where a stat logger raises."""
        if not (ENGINE_LOAD.wanted and self._is_readable):
            return
        try:
            self._note(scheduler_stats, iteration_stats)
        except (AttributeError, TypeError) as error:
            # vLLM may change these statistics in any version.
            self._is_readable = False
            _log.warning(
                "engine %d: the statistics of this vLLM cannot be read (%s); its load is not followed from now on",
                self._engine_index,
                error,
            )

    def _note(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        if scheduler_stats is not None:
            ENGINE_LOAD.note_queue(
                running=scheduler_stats.num_running_reqs,
                waiting=scheduler_stats.num_waiting_reqs,
                kv_usage=scheduler_stats.kv_cache_usage,
                engine=self._engine_index,
            )
        if iteration_stats is not None:
            ENGINE_LOAD.note_first_tokens(iteration_stats.time_to_first_tokens_iter)
            ENGINE_LOAD.note_finished([request.e2e_latency for request in iteration_stats.finished_requests])

    def log_engine_initialized(self) -> None:
        pass
