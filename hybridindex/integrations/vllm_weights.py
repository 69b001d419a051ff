"""Bytes of a model's weights, as stored in its safetensors files.

Only vLLM's log tells the size after conversion (another dtype, quantization), and of activations and CUDA graphs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from hybridindex import filesystem
from hybridindex.errors import InvalidInputError

__all__ = ["weight_bytes"]

_INDEX: Final = "model.safetensors.index.json"
#: The index of the largest models names some hundred thousand tensors.
_MAX_INDEX_BYTES: Final = 64 << 20


def weight_bytes(folder: Path) -> int:
    """Of the files in the folder's index; without an index, of all its safetensors files.

    Raises:
        InvalidInputError: no folder, no such files, or an index that is damaged or names a missing file.
    """
    if not filesystem.is_dir(folder):
        raise InvalidInputError(
            f"model is {str(folder)!r}, which is not a folder on this machine; expected one with .safetensors files; "
            "for a model that vLLM downloads by name give model_bytes"
        )
    index = folder / _INDEX
    try:
        # Some folders hold the weights twice, in two layouts: the index says which are loaded.
        names = (
            _named(index)
            if filesystem.exists(index)
            else {path.name for path in filesystem.list_folder(folder, "*.safetensors")}
        )
        total = sum(filesystem.stat(folder / name).st_size for name in names)
    except FileNotFoundError as error:
        raise InvalidInputError(f"model: {index} names {error.filename}, which is missing: download it again") from None
    except OSError as error:
        raise InvalidInputError(f"model: {folder} cannot be read ({error})") from error
    if not total:
        raise InvalidInputError(f"model: {folder} holds no .safetensors files; expected them, or give model_bytes")
    return total


def _named(index: Path) -> set[str]:
    if filesystem.stat(index).st_size > _MAX_INDEX_BYTES:
        raise InvalidInputError(f"model: {index} is larger than {_MAX_INDEX_BYTES} bytes; expected a list of tensors")
    try:
        names = json.loads(filesystem.read_bytes(index))["weight_map"].values()
        found = {str(name) for name in names}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidInputError(
            f"model: {index} is damaged ({error!r}); expected weight_map, tensor to file"
        ) from error
    if outside := sorted(name for name in found if Path(name).name != name):
        raise InvalidInputError(f"model: {index} names {outside[0]!r}; expected files of its own folder")
    return found
