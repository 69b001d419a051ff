"""Frozen dataclasses as bytes and back: JSON for what is small, raw memory for arrays. Never pickle.

Many flat records of one class are sent by columns, numbers as arrays: a megabyte of JSON is one call that holds the
GIL for ten milliseconds.

A frame is a header (magic, JSON bytes, array bytes), the JSON, and the arrays one after another, each at a multiple of
64 bytes. Only classes that the reader names are built; an object that both sides have is sent by its name.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from io import RawIOBase
from operator import attrgetter
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from hybridindex.errors import InvalidInputError, RefreshError

__all__ = ["MAX_FRAME_BYTES", "PipeCodec", "read_frame", "write_frame"]

#: Largest frame that is read or written.
MAX_FRAME_BYTES: Final = 8 << 30
_MAGIC: Final = b"HXF1"
_HEADER: Final = struct.Struct("<4sQQ")
_ALIGN: Final = 64
_KINDS: Final = "biuf"
_CHUNK_BYTES: Final = 1 << 20
_PLAIN: Final = frozenset((type(None), bool, int, float, str))
_DTYPES: Final[Mapping[type[Any], type[np.generic]]] = {bool: np.bool_, int: np.int64, float: np.float64}


class PipeCodec:
    """Encodes and decodes named classes. Immutable; from any thread."""

    def __init__(self, classes: Iterable[type[Any]]) -> None:
        """``classes``: dataclasses and string enums."""
        self._classes = {cls.__name__: cls for cls in classes}

    def encode(self, value: Any, known: Mapping[str, object] | None = None) -> list[memoryview]:
        """The parts of a frame; arrays are not copied where they are contiguous.

        Args:
            known: objects that the reader has too, by name; found by identity.

        Raises:
            InvalidInputError: a class that may not travel, an array of objects, or more than the largest frame.
        """
        names = {id(obj): name for name, obj in (known or {}).items()}
        arrays: list[npt.NDArray[Any]] = []
        places: list[tuple[str, tuple[int, ...], int]] = []
        end = 0

        def place(array: npt.NDArray[Any]) -> int:
            nonlocal end
            if array.dtype.kind not in _KINDS:
                raise InvalidInputError(f"an array of dtype {array.dtype} cannot travel; expected numbers or bools")
            arrays.append(np.ascontiguousarray(array))
            places.append((array.dtype.str, array.shape, end))
            end += -(-array.nbytes // _ALIGN) * _ALIGN
            return len(arrays) - 1

        def tree(obj: Any) -> Any:
            if type(obj) in _PLAIN:
                return obj
            if (name := names.get(id(obj))) is not None:
                return {"known": name}
            if isinstance(obj, np.ndarray):
                return {"array": place(obj)}
            if isinstance(obj, np.generic):
                return obj.item()
            if isinstance(obj, tuple) and (columns := self._columns(obj)) is not None:
                packed = [column if array is None else {"array": place(array)} for column, array in columns]
                return {"rows": type(obj[0]).__name__, "columns": packed}
            if isinstance(obj, tuple | list):
                return {type(obj).__name__: [tree(item) for item in obj]}
            if isinstance(obj, Mapping):
                return {"map": [[tree(key), tree(item)] for key, item in obj.items()]}
            name = type(obj).__name__
            if self._classes.get(name) is not type(obj):
                raise InvalidInputError(f"{type(obj).__qualname__} cannot travel through the pipe")
            if isinstance(obj, StrEnum):
                return {"enum": name, "value": obj.value}
            return {"class": name, "values": [tree(getattr(obj, f.name)) for f in dataclasses.fields(obj)]}

        text = json.dumps({"value": tree(value), "arrays": places}).encode()
        if end + len(text) > MAX_FRAME_BYTES:
            raise InvalidInputError(f"a frame of {end:,} bytes is larger than {MAX_FRAME_BYTES:,}")
        parts = [memoryview(_HEADER.pack(_MAGIC, len(text), end)), memoryview(text)]
        for array in arrays:
            if array.nbytes:
                parts.append(array.reshape(-1).view(np.uint8).data)
                parts.append(memoryview(bytes(-array.nbytes % _ALIGN)))
        return parts

    def _columns(self, items: tuple[Any, ...]) -> list[tuple[list[Any], npt.NDArray[Any] | None]] | None:
        """Values of each field of many flat records of one class, and as an array where it says the same; None where
        they are no such records."""
        if len(items) < 2:
            return None
        kind = type(items[0])
        if self._classes.get(kind.__name__) is not kind or not dataclasses.is_dataclass(kind):
            return None
        names = [f.name for f in dataclasses.fields(kind)]
        if len(names) < 2 or any(type(item) is not kind for item in items):
            return None
        columns = [list(column) for column in zip(*map(attrgetter(*names), items), strict=True)]
        kinds = [set(map(type, column)) for column in columns]
        if not all(_PLAIN.issuperset(kind) for kind in kinds):
            return None
        return [(column, _as_array(column, kind)) for column, kind in zip(columns, kinds, strict=True)]

    def decode(self, text: bytes, data: bytearray, known: Mapping[str, object] | None = None) -> Any:
        """What was encoded; arrays are views of ``data``.

        Raises:
            RefreshError: the frame is damaged, or names a class or object that is not known here.
        """
        named = known or {}
        try:
            head = json.loads(text)
            arrays = [_view(data, dtype, tuple(shape), offset) for dtype, shape, offset in head["arrays"]]

            def build(node: Any) -> Any:
                if not isinstance(node, dict):
                    return node
                if "class" in node:
                    cls = self._classes[node["class"]]
                    fields = dataclasses.fields(cls)
                    return cls(**{f.name: build(v) for f, v in zip(fields, node["values"], strict=True)})
                if "rows" in node:
                    cls = self._classes[node["rows"]]
                    names = [f.name for f in dataclasses.fields(cls)]
                    built = [c if isinstance(c, list) else build(c).tolist() for c in node["columns"]]
                    return tuple(cls(**dict(zip(names, row, strict=True))) for row in zip(*built, strict=True))
                if "tuple" in node:
                    return tuple(build(item) for item in node["tuple"])
                if "list" in node:
                    return [build(item) for item in node["list"]]
                if "array" in node:
                    return arrays[node["array"]]
                if "map" in node:
                    return {build(key): build(item) for key, item in node["map"]}
                if "known" in node:
                    return named[node["known"]]
                return self._classes[node["enum"]](node["value"])

            return build(head["value"])
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise RefreshError(
                f"a damaged frame, or one of another version: {type(error).__name__}: {error}"
            ) from error


def _as_array(column: list[Any], kinds: set[type[Any]]) -> npt.NDArray[Any] | None:
    """``column`` as an array that gives back the same values; None where there is none."""
    if len(kinds) != 1 or (dtype := _DTYPES.get(*kinds)) is None:
        return None
    try:
        return np.array(column, dtype=dtype)
    except OverflowError:
        return None


def _view(data: bytearray, dtype: str, shape: tuple[int, ...], offset: int) -> npt.NDArray[Any]:
    kind = np.dtype(dtype)
    if kind.kind not in _KINDS:
        raise ValueError(f"dtype {dtype}")
    count = int(np.prod(shape, dtype=np.int64))
    array: npt.NDArray[Any] = np.frombuffer(data, kind, count, offset) if count else np.empty(0, kind)
    return array.reshape(shape)


def write_frame(stream: RawIOBase, parts: Sequence[memoryview]) -> None:
    """Writes the parts of one frame to an unbuffered stream.

    Raises:
        OSError: nobody reads any more.
    """
    for part in parts:
        for start in range(0, len(part), _CHUNK_BYTES):
            left = part[start : start + _CHUNK_BYTES]
            while left:
                left = left[cast("int", stream.write(left)) :]


def read_frame(stream: RawIOBase) -> tuple[bytes, bytearray] | None:
    """JSON and array bytes of the next frame of an unbuffered stream; None where it ended before one.

    Raises:
        RefreshError: it ended within a frame, or what came is none.
    """
    head = _read(stream, _HEADER.size, may_end=True)
    if not head:
        return None
    magic, n_text, n_data = _HEADER.unpack(head)
    if magic != _MAGIC or n_text + n_data > MAX_FRAME_BYTES:
        raise RefreshError(f"no frame: it begins with {magic!r} and claims {n_text + n_data:,} bytes")
    return bytes(_read(stream, n_text)), _read(stream, n_data)


def _read(stream: RawIOBase, size: int, *, may_end: bool = False) -> bytearray:
    found = bytearray(size)
    view, done = memoryview(found), 0
    while done < size:
        n = stream.readinto(view[done : done + _CHUNK_BYTES])
        if not n:
            if may_end and done == 0:
                return bytearray()
            raise RefreshError(f"the other side ended after {done:,} of {size:,} bytes")
        done += n
    return found
