"""Bytes of a model's weights, from its folder of safetensors files: before vLLM has ever run, and could log them.

Weights as they are stored. What vLLM converts at its start (another dtype, quantization) and what it takes beside them
(activations, CUDA graphs) is in its log alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from hybridindex.errors import InvalidInputError

__all__ = ["weight_bytes"]

_INDEX: Final = "model.safetensors.index.json"
#: The largest models name some hundred thousand tensors in theirs.
_MAX_INDEX_BYTES: Final = 64 << 20


def weight_bytes(folder: Path) -> int:
    """Of the files that the folder's index names; without an index, of all safetensors files in it.

    Raises:
        InvalidInputError: no folder, one without such files, or an index that is damaged or names a missing file.
    """
    if not folder.is_dir():
        raise InvalidInputError(
            f"model is {str(folder)!r}, which is no folder here; expected one with .safetensors files; for a model "
            "that vLLM downloads by name give model_bytes"
        )
    index = folder / _INDEX
    try:
        # Some folders hold the same weights twice, in files of another layout: the index says which are loaded.
        names = _named(index) if index.exists() else {path.name for path in folder.glob("*.safetensors")}
        total = sum((folder / name).stat().st_size for name in names)
    except FileNotFoundError as error:
        raise InvalidInputError(f"model: {index} names {error.filename}, which is missing: download it again") from None
    except OSError as error:
        raise InvalidInputError(f"model: {folder} cannot be read ({error})") from error
    if not total:
        raise InvalidInputError(f"model: {folder} holds no .safetensors files; expected them, or give model_bytes")
    return total


def _named(index: Path) -> set[str]:
    if index.stat().st_size > _MAX_INDEX_BYTES:
        raise InvalidInputError(f"model: {index} is larger than {_MAX_INDEX_BYTES} bytes; expected a list of tensors")
    try:
        names = json.loads(index.read_bytes())["weight_map"].values()
        found = {str(name) for name in names}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidInputError(
            f"model: {index} is damaged ({error!r}); expected weight_map, tensor to file"
        ) from error
    if outside := sorted(name for name in found if Path(name).name != name):
        raise InvalidInputError(f"model: {index} names {outside[0]!r}; expected files of its own folder")
    return found
