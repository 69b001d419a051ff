from __future__ import annotations

import hashlib
import re
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import InvalidInputError, MissingDependencyError, how_to_install
from hybridindex.rag import embed
from hybridindex.rag.wheels import FetchError
from tests.demo.small_files import toy_embedder, toy_table, toy_tokenizer

_TEXTS = st.lists(st.lists(st.sampled_from(["red", "blue", "green", "odd"]), max_size=6).map(" ".join), max_size=5)


@given(_TEXTS)
def test_a_vector_is_the_normalised_mean_of_its_tokens_rows(texts: list[str]) -> None:
    table, tokenizer = toy_table(8), toy_tokenizer()
    vectors = toy_embedder(8).embed(texts)
    assert vectors.shape == (len(texts), 8)
    assert vectors.dtype == np.float32
    for text, vector in zip(texts, vectors, strict=True):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        expected = table[ids].mean(axis=0) if ids else np.zeros(8)
        expected = expected / (np.linalg.norm(expected) or 1.0)
        np.testing.assert_allclose(vector, expected, atol=1e-6)


def test_padding_and_truncation_of_the_tokenizer_file_do_not_count() -> None:
    tokenizer = toy_tokenizer()
    tokenizer.enable_padding()
    tokenizer.enable_truncation(2)
    vectors = embed.StaticEmbedder(toy_table(8), tokenizer).embed(["red blue green", "red"])
    np.testing.assert_array_equal(vectors, toy_embedder(8).embed(["red blue green", "red"]))


def test_centring_removes_the_mean_and_normalises() -> None:
    vectors = embed.normalize(np.random.default_rng(1).standard_normal((50, 8)).astype(np.float32) + 3)
    mean = vectors.mean(axis=0)
    centered = embed.center(vectors, mean)
    assert centered.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(centered, axis=1), 1.0, atol=1e-6)
    expected = (vectors - mean) / np.linalg.norm(vectors - mean, axis=1, keepdims=True)
    np.testing.assert_allclose(centered, expected, atol=1e-6)
    assert np.linalg.norm(centered.mean(axis=0)) < np.linalg.norm(mean)


def test_a_vector_at_the_mean_becomes_zero_not_nan() -> None:
    mean = np.array([0.6, 0.8], dtype=np.float32)
    np.testing.assert_array_equal(embed.center(mean[None], mean), np.zeros((1, 2)))


def test_centring_refuses_a_mean_of_another_dimension() -> None:
    with pytest.raises(InvalidInputError, match="mean"):
        embed.center(np.zeros((2, 3), np.float32), np.zeros(4, np.float32))


def _toy_wheel(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    weights = safetensors.numpy.save({"embedding.weight": toy_table(8).astype(np.float16)})
    tokenizer = toy_tokenizer().to_str().encode()
    monkeypatch.setattr(embed, "WEIGHTS_SHA256", hashlib.sha256(weights).hexdigest())
    monkeypatch.setattr(embed, "_TOKENIZER_SHA256", hashlib.sha256(tokenizer).hexdigest())
    path = folder / "wordllama.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("wordllama/weights/l2_supercat_256.safetensors", weights)
        wheel.writestr("wordllama/tokenizers/l2_supercat_tokenizer_config.json", tokenizer)
    monkeypatch.setattr(embed, "fetch_wheel", lambda spec, folder: path)
    monkeypatch.setattr(embed.importlib.util, "find_spec", lambda name: None)
    return path


def test_weights_are_read_from_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _toy_wheel(tmp_path, monkeypatch)
    found = embed.load_embedder(tmp_path).embed(["red green"])
    np.testing.assert_allclose(found, toy_embedder(8).embed(["red green"]), atol=1e-3)


def test_other_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _toy_wheel(tmp_path, monkeypatch)
    monkeypatch.setattr(embed, "WEIGHTS_SHA256", "0" * 64)
    with pytest.raises(FetchError, match="SHA-256"):
        embed.load_embedder(tmp_path)


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    told = re.escape(how_to_install("words"))
    with pytest.raises(MissingDependencyError, match=rf"tokenizers is needed .*{told}$") as caught:
        embed.load_embedder(tmp_path)
    # It would take the place of faiss-gpu.
    assert "faiss" not in str(caught.value)
