"""Rooflines against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import InvalidInputError
from hybridindex.studies.hardware import Chip, Model
from hybridindex.studies.schedule.stages.roofline import (
    Parallelism,
    decode_costs,
    decode_step_s,
    encode_costs,
    encode_s,
    powers_of_two,
)

#: 1e12 FLOP/s, 1e10 bytes/s: balanced at 100 FLOP a byte.
CHIP = Chip(
    name="toy",
    flops_per_s=1e12,
    memory_bytes=1e9,
    memory_bytes_per_s=1e10,
    link_bytes_per_s=1e9,
    host_bytes_per_s=1e9,
    sources={},
)
#: 2 layers of 1e8 weights; 4 heads of 8, one of them for keys and values.
MODEL = Model(
    name="toy",
    parameters=2e8,
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=1,
    head_dim=8,
    generates=True,
    sources={},
)
ONE = Parallelism(tensor=1, pipeline=1, data=1)


def test_a_long_prompt_takes_its_arithmetic():
    # Weights: 2 layers x 2 x 1e8 x 1000 tokens = 4e11 FLOP. Attention, half of it masked: 2 layers x 4 x 0.5 x 1000^2
    # x 32 = 1.28e8 FLOP. At 1e12 FLOP/s. Both take longer than reading 1e8 bytes a layer at 1e10, 0.01 s.
    assert encode_s(MODEL, CHIP, ONE, sequences=1, tokens=1000) == pytest.approx(0.4 + 1.28e-4)


def test_a_decoding_step_takes_reading_weights_and_cache():
    # 1e8 bytes of weights a layer and 2 x 32 x 2 bytes of activations; 100 tokens of 2 x 8 x 2 bytes of cache.
    expected = 2 * ((1e8 + 128) / 1e10 + 100 * 32 / 1e10)
    assert decode_step_s(MODEL, CHIP, ONE, sequences=1, context=100) == pytest.approx(expected)
    assert MODEL.kv_bytes_per_token() == 2 * 2 * 8 * 2


def test_tensor_parallel_chips_share_the_work_and_reduce_twice_a_layer():
    two = Parallelism(tensor=2, pipeline=1, data=1)
    alone = encode_s(MODEL, CHIP, ONE, sequences=1, tokens=1000)
    # 2 layers x 2 reductions x 2 phases x half of 1000 x 32 x 2 bytes at 1e9.
    assert encode_s(MODEL, CHIP, two, sequences=1, tokens=1000) == pytest.approx(alone / 2 + 4 * 64_000 / 1e9)


def test_data_parallel_chips_share_the_sequences():
    two = Parallelism(tensor=1, pipeline=1, data=2)
    half = encode_s(MODEL, CHIP, ONE, sequences=4, tokens=50)
    assert encode_s(MODEL, CHIP, two, sequences=8, tokens=50) == pytest.approx(half)


def test_a_pipeline_begins_the_next_batch_before_the_last_is_done():
    ways = {str(c.parallelism): c for c in encode_costs(MODEL, CHIP, 2, sequences=1, tokens=1000)}
    pipelined = ways["2 pipeline"]
    # The same work, and 1000 x 32 x 2 bytes handed on.
    assert pipelined.latency_s == pytest.approx(0.4 + 1.28e-4 + 64_000 / 1e9)
    assert pipelined.interval_s == pytest.approx(pipelined.latency_s / 2)
    assert pipelined.memory_bytes == 1e8


def test_an_encoder_attends_both_ways():
    encoder = replace(MODEL, generates=False)
    more = encode_s(encoder, CHIP, ONE, sequences=1, tokens=1000) - encode_s(MODEL, CHIP, ONE, sequences=1, tokens=1000)
    assert more == pytest.approx(1.28e-4)


def test_weights_have_to_fit():
    cramped = replace(CHIP, memory_bytes=1.5e8)
    assert encode_costs(MODEL, cramped, 1, sequences=1, tokens=8) == ()
    assert {c.memory_bytes for c in encode_costs(MODEL, cramped, 2, sequences=1, tokens=8)} == {1e8}


def test_the_cache_has_to_fit():
    # 64 bytes a token, 10,000 tokens each: 0.64 MB a sequence beside 200 MB of weights, in 950 MB.
    fit = {"prompt": 9_000, "output": 1_000}
    assert decode_costs(MODEL, CHIP, 1, sequences=1024, **fit)
    assert decode_costs(MODEL, CHIP, 1, sequences=2048, **fit) == ()


def test_no_way_is_beaten_by_another(xpu, llm):
    costs = encode_costs(llm, xpu, 16, sequences=8, tokens=512)
    assert len(costs) > 1
    for one in costs:
        for other in costs:
            if one is not other:
                assert (
                    one.latency_s < other.latency_s
                    or one.interval_s < other.interval_s
                    or one.memory_bytes < other.memory_bytes
                )


@given(
    sequences=st.integers(1, 64),
    tokens=st.integers(1, 2048),
    faster=st.floats(1.0, 10.0),
    tensor=st.sampled_from([1, 2, 4]),
    field=st.sampled_from(["flops_per_s", "memory_bytes_per_s", "link_bytes_per_s"]),
)
def test_a_faster_chip_is_never_slower(sequences, tokens, faster, tensor, field):
    how = Parallelism(tensor=tensor, pipeline=2, data=1)
    better = replace(CHIP, **{field: getattr(CHIP, field) * faster})
    slack = 1 + 1e-12
    assert encode_s(MODEL, better, how, sequences=sequences, tokens=tokens) <= slack * encode_s(
        MODEL, CHIP, how, sequences=sequences, tokens=tokens
    )
    assert decode_step_s(MODEL, better, how, sequences=sequences, context=tokens) <= slack * decode_step_s(
        MODEL, CHIP, how, sequences=sequences, context=tokens
    )


def test_nothing_to_do_is_refused():
    with pytest.raises(InvalidInputError, match="0 sequences of 5 tokens"):
        encode_s(MODEL, CHIP, ONE, sequences=0, tokens=5)


def test_chips_are_counted_in_powers_of_two():
    assert powers_of_two(1) == [1]
    assert powers_of_two(96) == [1, 2, 4, 8, 16, 32, 64]
    assert powers_of_two(0) == []
    assert str(Parallelism(tensor=2, pipeline=1, data=4)) == "2 tensor x 4 data"
