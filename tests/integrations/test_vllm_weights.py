"""Bytes of weights out of a model's folder, and folders that have none or lie."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridindex.errors import InvalidInputError
from hybridindex.integrations.vllm_weights import weight_bytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, size in (("model-1.safetensors", 1000), ("model-2.safetensors", 500), ("consolidated.safetensors", 1500)):
        (tmp_path / name).write_bytes(b"w" * size)
    (tmp_path / "tokenizer.json").write_bytes(b"{}" * 100)
    return tmp_path


def write_index(folder: Path, *files: str) -> None:
    weights = {f"layer.{i}": name for i, name in enumerate(files)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))


def test_all_weights_of_a_folder_count_and_nothing_else(folder: Path) -> None:
    assert weight_bytes(folder) == 3000


def test_an_index_says_which_files_are_loaded_each_once(folder: Path) -> None:
    write_index(folder, "model-1.safetensors", "model-2.safetensors", "model-1.safetensors")
    assert weight_bytes(folder) == 1500


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("no json", "is damaged"),
        ("[" * 100_000, "is damaged"),
        ("[]", "is damaged"),
        ('{"weight_map": 3}', "is damaged"),
        ('{"weight_map": {"a": "../../etc/passwd"}}', "expected files of its own folder"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors, which is missing"),
        ('{"weight_map": {}}', "holds no .safetensors files"),
    ],
)
def test_an_index_that_lies_is_refused(folder: Path, text: str, why: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InvalidInputError, match=why):
        weight_bytes(folder)


def test_what_is_no_folder_of_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidInputError, match=r"'Qwen/Qwen3-8B', which is not a folder on this machine; .* by name give model_bytes"
    ):
        weight_bytes(Path("Qwen/Qwen3-8B"))
    with pytest.raises(InvalidInputError, match=r"holds no \.safetensors files"):
        weight_bytes(tmp_path)


def test_an_index_of_any_size_is_not_read(folder: Path) -> None:
    with (folder / "model.safetensors.index.json").open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(InvalidInputError, match="is larger than"):
        weight_bytes(folder)
