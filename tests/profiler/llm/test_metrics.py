"""KV-cache facts out of vLLM's metrics."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hybridindex.profiler.llm.metrics import read_cache_state
from tests.llm_double import METRICS


def test_size_use_and_preemptions_are_read() -> None:
    state = read_cache_state(METRICS)
    assert state is not None
    assert (state.kv_bytes, state.kv_tokens, state.n_engines) == (64 << 20, 16384, 1)
    assert (state.usage, state.preemptions) == (0.25, 3)


def test_several_engines_count_once_each() -> None:
    second = METRICS.replace('engine="0"', 'engine="1"').replace("} 0.25", "} 0.5").replace("16384", "8192")
    state = read_cache_state(METRICS + second)
    assert state is not None
    assert (state.n_engines, state.kv_tokens, state.usage, state.preemptions) == (2, 8192, 0.5, 6)


def test_a_cache_sized_by_utilization_has_tokens_and_no_bytes() -> None:
    state = read_cache_state(METRICS.replace('"67108864"', '"None"'))
    assert state is not None
    assert (state.kv_bytes, state.kv_tokens) == (None, 16384)


def test_other_metrics_have_no_cache() -> None:
    assert read_cache_state("# TYPE up gauge\nup 1\nllamacpp:kv_cache_usage_ratio 0.5\n") is None


@given(st.text(max_size=200), st.text(max_size=20))
def test_no_text_breaks_it(text: str, value: str) -> None:
    read_cache_state(text)
    state = read_cache_state(METRICS + f'vllm:kv_cache_usage_perc{{engine="0"}} {value}\n')
    assert state is not None
    assert 0.25 <= (state.usage or 0) <= 1
