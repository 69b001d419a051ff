"""Text to vectors with a static table: the normalised mean of the tokens' rows.

Weights and tokenizer are wordllama's (MIT), read as data from an installed package or its wheel; the package itself is
not imported, so its dependencies are not needed. 256 dimensions, about 10,000 passages a second on
two cores. Embeds and centres; caches nothing.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridindex import filesystem
from hybridindex.errors import InvalidInputError, MissingDependencyError, how_to_install
from hybridindex.rag.wheels import FetchError, WheelSpec, fetch_wheel, find_wheel
from hybridindex.types import F32

__all__ = ["DIM", "EMBEDDER", "TOKENIZER", "WEIGHTS_SHA256", "StaticEmbedder", "center", "load_embedder", "normalize"]

DIM = 256
#: Names in document stores.
EMBEDDER = "wordllama-l2-supercat-256"
TOKENIZER = "wordllama-l2-supercat"
WEIGHTS_SHA256 = "64b47a2dc493cb8e85944076601189739852d7b64e0e1eedcb1937a251cd9fd5"
_TOKENIZER_SHA256 = "93248f2a9ec36c7b35f700a033d5f36228aae48db61aee31007fa49062cdeb68"
_WEIGHTS = "weights/l2_supercat_256.safetensors"
_TOKENIZER = "tokenizers/l2_supercat_tokenizer_config.json"

# The weights are the same in every build of the wheel; naming one build makes every Python and machine take that file.
_BUILD = ("--platform", "manylinux2014_x86_64", "--python-version", "3.11", "--implementation", "cp", "--abi", "cp311")
WORDLLAMA_WHEEL = WheelSpec(
    name="wordllama",
    version="0.4.0.post1",
    sha256="42c2c88907ace0b0681ac6f9092d6a300a6409a5d2d61071a3fb5e7159370c97",
    size_mb=19.2,
    pip_options=_BUILD,
)


def normalize(vectors: F32) -> F32:
    """Rows of length 1, (n, d) float32; rows of zeros stay zeros. A new array."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: F32 = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0)
    return unit


def center(vectors: F32, mean: F32) -> F32:
    """Subtract ``mean`` (d,) from every row of ``vectors`` (n, d) and normalise again; a new float32 array.

    Text embeddings share a large common component that makes all passages look alike; without it the lists of an IVF
    index separate topics. Apply it to passages and queries alike, with the mean of the passages. Raises
    InvalidInputError where the shapes do not fit.
    """
    if vectors.ndim != 2 or mean.shape != vectors.shape[1:]:
        raise InvalidInputError(
            f"mean: shape {mean.shape} does not fit vectors {vectors.shape}; expected (d,) and (n, d)"
        )
    return normalize(np.subtract(vectors, mean, dtype=np.float32))


class StaticEmbedder:
    """Mean of token rows. Read-only after construction; the tokenizer uses all cores by itself."""

    def __init__(self, table: F32, tokenizer: Any, name: str | None = None) -> None:
        """``table`` is (vocabulary, d) float32, ``tokenizer`` a ``tokenizers.Tokenizer``. ``name``: in stores."""
        self.name = name
        self._table = table
        self._tokenizer = tokenizer
        tokenizer.no_padding()
        tokenizer.no_truncation()

    @property
    def dim(self) -> int:
        return int(self._table.shape[1])

    def embed(self, texts: Sequence[str]) -> F32:
        """Unit vectors (n, d) float32 of ``texts``; the vector of a text without any token is zero."""
        from scipy import sparse  # a tenth of a second, for those who embed

        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = [np.array(encoding.ids, dtype=np.int32) for encoding in encoded]
        counts = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
        if counts.sum() == 0:
            return np.zeros((len(ids), self.dim), dtype=np.float32)
        bounds = np.concatenate([[0], np.cumsum(counts)])
        flat = np.concatenate(ids)
        # One row per text with a one per token: the product sums the tokens' rows without writing them out.
        tokens = sparse.csr_matrix((np.ones(len(flat), dtype=np.float32), flat, bounds), (len(ids), len(self._table)))
        sums: F32 = np.asarray(tokens @ self._table, dtype=np.float32)
        return normalize(sums)  # the mean has the direction of the sum

    def token_starts(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """The places in characters where the tokens of each text start, (tokens,) uint32 ascending."""
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        counts = [len(encoding) for encoding in encoded]
        found = (start for encoding in encoded for start, _ in encoding.offsets)
        flat = np.fromiter(found, dtype=np.uint32, count=sum(counts))
        # Several tokens of one character start at the same place: one of them is enough to cut there.
        kept = np.ones(len(flat), dtype=np.bool_)
        np.not_equal(flat[1:], flat[:-1], out=kept[1:])
        firsts = np.cumsum([0, *counts])
        kept[firsts[:-1][firsts[:-1] < len(flat)]] = True
        return [flat[a:b][kept[a:b]] for a, b in itertools.pairwise(firsts)]


def _read_parts(wheel_folder: Path, *, fetch: bool) -> tuple[bytes, bytes]:
    installed = importlib.util.find_spec("wordllama")  # finds the folder; does not import
    if installed is not None and installed.origin is not None:
        root = Path(installed.origin).parent
        if filesystem.is_file(root / _WEIGHTS) and filesystem.is_file(root / _TOKENIZER):
            weights = filesystem.read_bytes(root / _WEIGHTS)
            tokenizer = filesystem.read_bytes(root / _TOKENIZER)
            if hashlib.sha256(weights).hexdigest() == WEIGHTS_SHA256:
                return weights, tokenizer
    found = fetch_wheel(WORDLLAMA_WHEEL, wheel_folder) if fetch else find_wheel(WORDLLAMA_WHEEL, wheel_folder)
    if found is None:
        raise FetchError(
            f"{WORDLLAMA_WHEEL.requirement} is neither installed nor in {wheel_folder}, and is not downloaded here; "
            "hybridindex ingest --embedder demo fetches it into its --cache"
        )
    with filesystem.open_zip(found) as wheel:
        return wheel.read(f"wordllama/{_WEIGHTS}"), wheel.read(f"wordllama/{_TOKENIZER}")


def load_embedder(wheel_folder: Path, *, fetch: bool = True) -> StaticEmbedder:
    """The embedder with wordllama's weights, from an installed package or its wheel (fetched into ``wheel_folder``).
    ``fetch``: False: it has to be there.

    Raises MissingDependencyError without tokenizers or safetensors, FetchError where the weights cannot be had or
    are not the expected ones.
    """
    try:
        import safetensors.numpy
        import tokenizers
    except ImportError as error:
        raise MissingDependencyError(f"{error.name} is needed to embed text: {how_to_install('words')}") from error
    weights, tokenizer = _read_parts(wheel_folder, fetch=fetch)
    for what, content, expected in (("weights", weights, WEIGHTS_SHA256), ("tokenizer", tokenizer, _TOKENIZER_SHA256)):
        if (found := hashlib.sha256(content).hexdigest()) != expected:
            raise FetchError(
                f"wordllama {what}: SHA-256 is {found}, expected {expected}; remove {wheel_folder} and retry"
            )
    (table,) = safetensors.numpy.load(weights).values()
    return StaticEmbedder(table.astype(np.float32), tokenizers.Tokenizer.from_str(tokenizer.decode()), EMBEDDER)
