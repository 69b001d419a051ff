"""Machines by name, and LLMs on them by roofline."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from hybridindex.errors import InvalidInputError
from hybridindex.studies.hardware import model
from hybridindex.studies.what_if import LLMService, parse_fleet


@pytest.mark.parametrize(
    ("text", "name", "count"), [("h100x8", "h100", 8), ("rtx4090", "rtx4090", 1), ("rtx4090x2", "rtx4090", 2)]
)
def test_a_fleet_is_a_chip_and_a_number(text, name, count):
    fleet = parse_fleet(text)
    assert (fleet.chip.name, fleet.count) == (name, count)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("v100x8", r"hardware is 'v100x8'.*h100, h200"),
        ("", "hardware is ''"),
        ("h100x0", "hardware has 0 h100"),
        ("h100x-3", "hardware has -3 h100"),
        ("h100x65", "hardware has 65 h100; expected 1 to 64"),
    ],
)
def test_what_is_no_fleet_is_refused_with_what_exists(text, named):
    with pytest.raises(InvalidInputError, match=named):
        parse_fleet(text)


def test_a_hardware_file_without_units_names_the_field(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"name": "mine", "flops_per_s": 1e15}))
    with pytest.raises(InvalidInputError, match=r"chip mine: flops_per_s is .*expected value, unit \(FLOP/s"):
        parse_fleet(f"{file}x4")


def test_engines_are_as_the_paper_runs_them():
    # VectorLiteRAG, section VI-B: Llama3-70B takes four H100 of eight, Qwen3-32B two.
    sizes = {
        name: LLMService(model=model(name), fleet=parse_fleet("h100x8")).chips_per_engine
        for name in ("llama3-8b", "qwen3-32b", "llama3-70b")
    }
    assert sizes == {"llama3-8b": 1, "qwen3-32b": 2, "llama3-70b": 4}


def test_throughput_rises_with_the_cache_ever_less(service):
    sizes = np.linspace(0.05, 0.5, 10) * service.kv_bytes
    rates = np.array([service.throughput_rps(size) for size in sizes])
    assert (np.diff(rates) > 0).all()
    assert (np.diff(rates, 2) < 0).all()
    assert service.throughput_rps(0.0) == 0


def test_throughput_is_what_reading_weights_and_cache_allows(service):
    # One sequence: every token reads all weights once, and its own cache, at half of 3.35 TB/s.
    chip, llm = service.fleet.chip, service.model
    one = (service.input_tokens + service.output_tokens) * llm.kv_bytes_per_token() * service.engines
    step_s = (2 * llm.parameters + 1152 * llm.kv_bytes_per_token()) / (chip.memory_bytes_per_s / 2)
    prefill_s = 1024 * 2 * llm.parameters / (chip.flops_per_s / 2)
    assert service.throughput_rps(one) == pytest.approx(8 / (prefill_s + 256 * step_s), rel=0.02)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": model("llama3-405b"), "fleet": parse_fleet("rtx4090")}, "holds no llama3-405b"),
        ({"model": model("encoder-120m")}, "is an encoder"),
        ({"efficiency": 0.0}, "efficiency is 0.0"),
        ({"output_tokens": 0}, "output_tokens is 0"),
    ],
)
def test_impossible_services_are_named(service, change, named):
    with pytest.raises(InvalidInputError, match=named):
        replace(service, **change)
