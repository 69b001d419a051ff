"""The LLM in virtual time: capacity, the KV cache's limit, conservation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hybridindex.errors import InvalidInputError
from hybridindex.studies.simulator import fit_llm
from hybridindex.studies.simulator.llm_server import generate
from tests.studies.simulator.conftest import LLM

PER_TOKEN = 131_072.0


@pytest.mark.parametrize("index_bytes", [0, 1 << 30, 3 << 30])
@pytest.mark.parametrize("replicas", [1, 3])
def test_saturated_it_takes_what_the_profile_measured_at_that_kv_cache(index_bytes, replicas):
    profile = replace(LLM, points=((1 << 30, 80.0), (2 << 30, 140.0)))
    server = fit_llm(profile, index_bytes=index_bytes, kv_bytes_per_token=PER_TOKEN, replicas=replicas)
    expected = {0: 200.0, 1 << 30: 170.0, 3 << 30: 80.0}[index_bytes]
    assert server.capacity_rps == pytest.approx(expected, rel=1e-6)
    told = generate(np.zeros(6000), server)
    assert 6000 / told.done_s.max() == pytest.approx(expected, rel=0.05)
    assert told.kv_peak <= 1
    assert told.kv_mean > 0.8


def test_an_unloaded_request_waits_for_no_step_and_takes_its_own():
    server = fit_llm(LLM, index_bytes=0, kv_bytes_per_token=PER_TOKEN)
    told = generate(np.array([5.0]), server)
    assert told.first_token_s[0] == pytest.approx(5.0 + LLM.ttft_s - 0.9 * server.step_s)
    assert told.done_s[0] == pytest.approx(told.first_token_s[0] + 63 * server.step_s)


def test_under_load_nine_of_ten_first_tokens_come_within_the_measured_ttft():
    server = fit_llm(LLM, index_bytes=0, kv_bytes_per_token=PER_TOKEN)
    # One at a time, at places of the steps that do not repeat.
    ready = np.arange(4000) / (0.6 * server.capacity_rps) + np.random.default_rng(0).uniform(0, server.step_s, 4000)
    waits = (generate(np.sort(ready), server).first_token_s - np.sort(ready))[500:]
    assert float(np.quantile(waits, 0.9)) == pytest.approx(LLM.ttft_s, rel=0.1)


def test_no_more_than_the_kv_cache_holds_decode_at_once():
    server = fit_llm(LLM, index_bytes=(4 << 30) - int(3.5 * 576 * PER_TOKEN), kv_bytes_per_token=PER_TOKEN)
    assert server.sequences == 3
    told = generate(np.zeros(9), server)
    together = [int(((told.first_token_s <= t) & (told.done_s > t)).sum()) for t in told.first_token_s]
    assert max(together) == 3


def test_a_request_that_never_fits_gets_no_token_and_holds_up_nobody():
    server = fit_llm(LLM, index_bytes=0, kv_bytes_per_token=PER_TOKEN)
    prompts = np.array([512, server.kv_tokens, 512])
    told = generate(np.zeros(3), server, inputs=prompts, outputs=np.full(3, 64))
    assert np.isnan(told.done_s).tolist() == [False, True, False]


def test_contention_slows_generation():
    server = fit_llm(LLM, index_bytes=0, kv_bytes_per_token=PER_TOKEN)
    ready = np.linspace(0, 5, 500)
    assert generate(ready, server, slower=np.full(20, 1.5)).done_s.mean() > generate(ready, server).done_s.mean()


def test_an_index_that_takes_the_cache_leaves_no_server():
    assert fit_llm(LLM, index_bytes=4 << 30, kv_bytes_per_token=PER_TOKEN) is None


@pytest.mark.parametrize(
    ("wrong", "named"),
    [({"kv_bytes_per_token": 0.0}, "kv_bytes_per_token"), ({"profile": replace(LLM, input_tokens=0)}, "input_tokens")],
)
def test_wrong_numbers_are_named(wrong, named):
    given = {"profile": LLM, "index_bytes": 0, "kv_bytes_per_token": PER_TOKEN} | wrong
    with pytest.raises(InvalidInputError, match=named):
        fit_llm(given.pop("profile"), **given)


def test_factors_may_stand_for_more_than_a_second():
    server = fit_llm(LLM, index_bytes=0, kv_bytes_per_token=PER_TOKEN)
    ready = np.linspace(0, 19, 500)
    by_second = np.repeat([1.0, 3.0], 10)
    expected = generate(ready, server, slower=by_second).done_s
    np.testing.assert_allclose(generate(ready, server, slower=by_second[::10], slower_s=10.0).done_s, expected)
