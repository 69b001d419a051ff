"""Frames of pickle protocol 5 between the serving process and the planning process that it started.

A frame is a header (magic, number of parts), the parts' sizes, and the parts: the pickle, then the memory of each array
as it is. Nobody else can write to these pipes; even so only named classes are built (ADR 0020).
"""

from __future__ import annotations

import copyreg
import dataclasses
import io
import pickle
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from io import RawIOBase
from typing import Any, Final, cast

import numpy as np

from hybridindex.errors import InvalidInputError, RefreshError

__all__ = ["MAX_FRAME_BYTES", "PipeCodec", "read_frame", "write_frame"]

#: Largest frame that is read or written.
MAX_FRAME_BYTES: Final = 8 << 30
_MAGIC: Final = b"HXF2"
_HEADER: Final = struct.Struct("<4sI")
_MAX_PARTS: Final = 1 << 16
_CHUNK_BYTES: Final = 1 << 20
#: What numpy's own pickles name.
_NUMPY: Final = frozenset(("ndarray", "dtype", "_frombuffer", "_reconstruct", "scalar"))


class _Pickler(pickle.Pickler):
    """Sends objects that the reader has too by their names."""

    names: Mapping[int, str] = {}

    def persistent_id(self, obj: object) -> str | None:
        return self.names.get(id(obj))


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, parts: Sequence[bytearray], allowed: Mapping[tuple[str, str], type], known: Mapping[str, object]
    ) -> None:
        super().__init__(io.BytesIO(parts[0]), buffers=parts[1:])
        self._allowed = allowed
        self._known = known

    def find_class(self, module: str, name: str) -> Any:
        if (cls := self._allowed.get((module, name))) is not None:
            return cls
        if module.partition(".")[0] == "numpy" and name in _NUMPY:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} may not travel through the pipe")

    def persistent_load(self, name: str) -> object:
        return self._known[name]


class PipeCodec:
    """Encodes and decodes named classes. Immutable; from any thread."""

    def __init__(self, classes: Iterable[type[Any]]) -> None:
        """``classes``: dataclasses with slots and string enums; only these, plain values and arrays are built."""
        self._classes = {(cls.__module__, cls.__qualname__): cls for cls in classes}
        self._reducers: dict[type[Any], Callable[[Any], Any]] = {np.memmap: lambda a: np.asarray(a).__reduce_ex__(5)}
        self._reducers |= {cls: _reducer(cls) for cls in self._classes.values()}

    def encode(self, value: object, known: Mapping[str, object] | None = None) -> list[memoryview]:
        """The parts of a frame; contiguous arrays are not copied.

        Args:
            known: objects that the reader has too, by name; found by identity.

        Raises:
            InvalidInputError: it is larger than the largest frame.
        """
        file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        kind = _Pickler if known else pickle.Pickler  # the plain one makes no call for each object
        pickler = kind(file, 5, buffer_callback=cast("Any", buffers.append))
        pickler.dispatch_table = self._reducers
        if isinstance(pickler, _Pickler):
            pickler.names = {id(obj): name for name, obj in (known or {}).items()}
        pickler.dump(value)
        parts = [memoryview(file.getvalue()), *(buffer.raw() for buffer in buffers)]
        if (size := sum(part.nbytes for part in parts)) > MAX_FRAME_BYTES:
            raise InvalidInputError(f"a frame of {size:,} bytes is larger than {MAX_FRAME_BYTES:,}")
        sizes = struct.pack(f"<{len(parts)}Q", *(part.nbytes for part in parts))
        return [memoryview(_HEADER.pack(_MAGIC, len(parts)) + sizes), *parts]

    def decode(self, parts: Sequence[bytearray], known: Mapping[str, object] | None = None) -> Any:
        """What was encoded; arrays are views of ``parts``.

        Raises:
            RefreshError: the frame is damaged, or names a class or object that is not known here.
        """
        try:
            return _Unpickler(parts, self._classes, known or {}).load()
        except Exception as error:  # a damaged pickle may raise anything
            raise RefreshError(
                f"a damaged frame, or one of another version: {type(error).__name__}: {error}"
            ) from error


def _reducer(cls: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """As the class's own ``__reduce__`` would, without looking its fields up for each object. Enums by their values:
    some releases of Python 3.11, as 3.11.2, send a call of ``getattr`` instead."""
    if issubclass(cls, Enum):
        return lambda obj: (cls, (obj.value,))
    names = [field.name for field in dataclasses.fields(cls)]
    return lambda obj: (copyreg.__newobj__, (cls,), [getattr(obj, name) for name in names])  # type: ignore[attr-defined]


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


def read_frame(stream: RawIOBase) -> list[bytearray] | None:
    """The pickle and the arrays' bytes of the next frame of an unbuffered stream; None where it ended before one.

    Raises:
        RefreshError: it ended within a frame, or what came is none.
    """
    head = _read(stream, _HEADER.size, may_end=True)
    if not head:
        return None
    magic, n_parts = _HEADER.unpack(head)
    if magic != _MAGIC or not 1 <= n_parts <= _MAX_PARTS:
        raise RefreshError(f"not a frame: it begins with {magic!r} and claims {n_parts:,} parts")
    sizes = struct.unpack(f"<{n_parts}Q", _read(stream, 8 * n_parts))
    if sum(sizes) > MAX_FRAME_BYTES:
        raise RefreshError(f"not a frame: it claims {sum(sizes):,} bytes")
    return [_read(stream, size) for size in sizes]


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
