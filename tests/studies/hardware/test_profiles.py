"""Shipped profiles, and files of a user's own."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from hybridindex.errors import InvalidInputError
from hybridindex.studies import hardware
from hybridindex.studies.hardware import chip, chip_from, model, model_from, names, server, server_from

READERS = {"chips": chip, "servers": server, "models": model}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in READERS for name in names(kind)])
def test_every_shipped_number_says_where_it_comes_from(kind, name):
    profile = READERS[kind](name)
    assert profile.name == name
    assert profile.sources
    for source in profile.sources.values():
        assert source.endswith(")")
        assert "(20" in source


def test_what_is_shipped():
    assert {"h100", "h200", "l40s", "a100", "rtx4090", "xpu-a", "xpu-b", "xpu-c"} <= set(names("chips"))
    assert {"llama3-1b", "llama3-8b", "llama3-70b", "llama3-405b", "encoder-120m"} <= set(names("models"))
    assert names("servers") == ["epyc-milan"]


def test_data_files_are_part_of_the_package():
    room = resources.files("hybridindex.studies")
    for kind in READERS:
        assert any(f.name.endswith(".json") for f in room.joinpath("hardware", kind).iterdir())
    assert any(f.name.endswith(".yaml") for f in room.joinpath("schedule", "cases").iterdir())


def test_units_become_bytes_and_operations():
    xpu, milan = chip("xpu-c"), server("epyc-milan")
    assert (xpu.flops_per_s, xpu.memory_bytes, xpu.memory_bytes_per_s) == (459e12, 96e9, 2.765e12)
    assert (milan.cores, milan.memory_bytes, milan.scan_bytes_per_core_s, milan.chips) == (96, 384e9, 18e9, 4)


def test_keys_and_values_of_a_token():
    # 2 x 80 layers x 8 heads x 128 values x 2 bytes.
    assert model("llama3-70b").kv_bytes_per_token() == 327_680


def quantity(value, unit):
    return {"value": value, "unit": unit, "source": "measured here", "date": "2026-11-20"}


def a_chip(**changes):
    fields = {
        "name": "mine",
        "flops_per_s": quantity(10, "TFLOP/s"),
        "memory_bytes": quantity(8, "GiB"),
        "memory_bytes_per_s": quantity(1, "TB/s"),
        "link_bytes_per_s": quantity(50, "GB/s"),
        "host_bytes_per_s": quantity(25e9, "B/s"),
    }
    return {k: v for k, v in (fields | changes).items() if v is not None}


def test_a_file_of_ones_own(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(a_chip()))
    mine = chip(str(file))
    assert (mine.memory_bytes, mine.host_bytes_per_s) == (8 * 2**30, 25e9)
    assert mine.sources["memory_bytes"] == "measured here (2026-11-20)"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": None}, "chip has no name"),
        ({"flops_per_s": None}, "chip mine: flops_per_s is None; expected value, unit"),
        ({"flops_per_s": 10e12}, "chip mine: flops_per_s is 10000000000000.0; expected value, unit"),
        ({"memory_bytes": {"value": 8, "source": "a", "date": "b"}}, "chip mine: memory_bytes has unit None"),
        ({"memory_bytes": quantity(8, "GB/s")}, "memory_bytes has unit 'GB/s'; expected B, GB, GiB"),
        ({"memory_bytes": quantity(8, ["GB"])}, "memory_bytes has unit"),
        ({"memory_bytes": quantity(-8, "GB")}, "memory_bytes has value -8; expected a positive number of GB"),
        ({"memory_bytes": quantity(float("nan"), "GB")}, "memory_bytes has value nan"),
        ({"memory_bytes": quantity(10**400, "GB")}, "memory_bytes has value 1000"),
        ({"memory_bytes": quantity("8", "GB")}, "memory_bytes has value '8'"),
        ({"memory_bytes": {"value": 8, "unit": "GB", "date": "2026"}}, "memory_bytes has no source"),
        ({"memory_bytes": {"value": 8, "unit": "GB", "source": "x"}}, "memory_bytes has no date"),
        ({"colour": "red"}, "colour is not a field"),
    ],
)
def test_a_wrong_field_is_named(changes, says):
    with pytest.raises(InvalidInputError, match=says):
        chip_from(a_chip(**changes))


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "is not JSON"), ("[1]", "holds no object"), ("[" * 100_000, "is larger than 65536 bytes")],
)
def test_a_bad_file_is_named(tmp_path, text, says):
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(InvalidInputError, match=says):
        chip(str(file))


def test_deep_nesting_is_not_json(tmp_path):
    file = tmp_path / "deep.json"
    file.write_text("[" * 60_000)
    with pytest.raises(InvalidInputError, match="is not JSON"):
        chip(str(file))


@pytest.mark.parametrize("reader", READERS.values())
def test_an_unknown_name_lists_the_known(reader):
    with pytest.raises(InvalidInputError, match="is 'nothing'; expected one of "):
        reader("nothing")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidInputError, match="cannot be read: No such file"):
        chip(str(tmp_path / "none.json"))


def test_counts_are_whole_numbers():
    data = {
        "name": "s",
        "cores": quantity(96.5, "count"),
        "memory_bytes": quantity(1, "GB"),
        "memory_bytes_per_s": quantity(1, "GB/s"),
        "scan_bytes_per_core_s": quantity(1, "GB/s"),
        "chips": quantity(4, "count"),
    }
    with pytest.raises(InvalidInputError, match=r"cores has value 96\.5; expected a whole number"):
        server_from(data)


def test_a_model_says_whether_it_generates():
    data = {"name": "m", "generates": "yes"}
    with pytest.raises(InvalidInputError, match="generates is 'yes'; expected true or false"):
        model_from(data)


def test_kinds_are_the_folders():
    assert hardware.names("chips") == sorted(hardware.names("chips"))
