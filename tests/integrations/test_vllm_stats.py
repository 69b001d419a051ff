"""The stat logger, with a stand-in for vLLM's base class. In vLLM itself: tests/vllm."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

from hybridindex.integrations.llm_load import EngineLoad

NAME = "hybridindex.integrations.vllm_stats"


@pytest.fixture
def module(monkeypatch):
    """Imported anew, with a load of its own that is followed."""
    for name in ("vllm", "vllm.v1", "vllm.v1.metrics", "vllm.v1.metrics.loggers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.v1.metrics.loggers"].StatLoggerBase = object
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    found = importlib.import_module(NAME)
    load = EngineLoad()
    load.attach()
    monkeypatch.setattr(found, "ENGINE_LOAD", load)
    yield found
    sys.modules.pop(NAME, None)


def queue(running: int, waiting: int, usage: float) -> SimpleNamespace:
    return SimpleNamespace(num_running_reqs=running, num_waiting_reqs=waiting, kv_cache_usage=usage)


def finished(*seconds: float) -> SimpleNamespace:
    requests = [SimpleNamespace(e2e_latency=each) for each in seconds]
    return SimpleNamespace(time_to_first_tokens_iter=[0.5], finished_requests=requests)


def test_the_load_is_that_of_all_engines(module) -> None:
    first, second = module.LoadLogger(None, 0), module.LoadLogger(None, 1)
    first.record(queue(3, 2, 0.75), finished(2.0))
    second.record(queue(1, 0, 0.25), None)
    read = module.ENGINE_LOAD.read()
    assert (read.running, read.waiting, read.kv_usage) == (4, 2, 0.75)
    assert (read.n_finished, read.generation_s, read.ttft_s) == (1, 2.0, 0.5)
    first.record(queue(0, 0, 0.0), None)
    assert module.ENGINE_LOAD.read().running == 1


@pytest.mark.parametrize(
    ("scheduler", "iteration"),
    [
        (SimpleNamespace(), None),
        (None, SimpleNamespace(time_to_first_tokens_iter=[])),
        (None, finished(None)),  # type: ignore[arg-type]
    ],
    ids=["no queue", "no finished requests", "no time"],
)
def test_statistics_of_another_vllm_end_no_request_and_are_said_once(module, caplog, scheduler, iteration) -> None:
    logger = module.LoadLogger(None, 7)
    for _ in range(3):
        logger.record(scheduler, iteration)
    [words] = [record.getMessage() for record in caplog.records]
    assert words.startswith("engine 7: the statistics of this vLLM cannot be read")
    assert module.ENGINE_LOAD.window_ms() is None
