"""``share.json``: which lists a share holds. It lies in the folder of the generation, and is replaced as a whole::

    {"format": "hybridindex-share", "lists_xxh3_128": of the whole lists.bin of the index, "held": [[start, stop], ...]}

It is written after the bytes of lists that come are safely on disk, and before bytes of lists that go are removed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from hybridindex import filesystem
from hybridindex.errors import CorruptIndexError, FileError, InvalidInputError, MissingFileError
from hybridindex.index.share.ranges import mask_of, ranges_of
from hybridindex.index.storage.generation import unreadable
from hybridindex.index.storage.manifest import LISTS_FILE, SHARE_FILE, Manifest
from hybridindex.index.storage.signed_json import parse_signed, render_signed

__all__ = ["read_held", "render_held"]

_FORMAT = "hybridindex-share"
_VERSION = 1


def render_held(held: npt.NDArray[np.bool_], manifest: Manifest) -> bytes:
    """The bytes of the file; ``held``: (nlist,) bool."""
    of = manifest.files[LISTS_FILE].xxh3_128
    return render_signed(_FORMAT, _VERSION, {"lists_xxh3_128": of, "held": ranges_of(held)})


def read_held(folder: Path, manifest: Manifest) -> npt.NDArray[np.bool_] | None:
    """(nlist,) bool: what the share in the folder of a generation holds; None: it is no share, and holds all.

    Raises:
        CorruptIndexError: not the bytes that were written, or of another index.
        UnsupportedIndexError: of a newer version.
        UnreadableIndexError: it is there, and cannot be read.
    """
    file = folder / SHARE_FILE
    try:
        raw = filesystem.read_bytes(file)
    except MissingFileError:
        return None
    except FileError as error:
        raise unreadable(error, file) from error
    content = parse_signed(raw, str(file), _FORMAT, _VERSION, cure="upgrade it")
    if content.get("lists_xxh3_128") != manifest.files[LISTS_FILE].xxh3_128:
        raise CorruptIndexError(f"{file} is of another index than the manifest beside it")
    try:
        return mask_of(content.get("held"), manifest.nlist)
    except InvalidInputError as error:
        raise CorruptIndexError(f"{file}: {error}") from error
