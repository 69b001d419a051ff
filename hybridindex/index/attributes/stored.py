"""Attributes of the rows of one generation, beside them: ``attributes.json`` says what they are, and names the file.

    gen-000001/attributes.json                  the commit; signed
    gen-000001/attributes-<digest>.arrow        an Arrow IPC file, one record a row, in the order of the lists

They are read into memory when the first condition asks for them: what becomes of the file then changes no answer.
"""

from __future__ import annotations

import logging
import threading
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridindex import filesystem
from hybridindex.errors import CorruptIndexError, IndexFormatError, MissingFileError, UnreadableIndexError
from hybridindex.index.attributes.columns import ATTRIBUTE_KINDS, describe, need
from hybridindex.index.storage.checksums import digest_bytes, digest_file
from hybridindex.index.storage.generation import unreadable
from hybridindex.index.storage.manifest import LISTS_FILE, Manifest
from hybridindex.index.storage.signed_json import parse_signed, render_signed

__all__ = [
    "SPEC_FILE",
    "AttributeSpec",
    "StoredAttributes",
    "arrow_name",
    "find_attributes",
    "parse_spec",
    "render_spec",
    "spec_state",
]

_log = logging.getLogger(__name__)

SPEC_FILE = "attributes.json"
_FORMAT, _VERSION = "hybridindex attributes", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributeSpec:
    """What the attributes of a generation are."""

    generation: int
    #: Rows.
    count: int
    #: Of ``lists.bin``: attributes belong to rows in their places.
    rows_xxh3_128: str
    #: Name -> one of :data:`hybridindex.index.attributes.columns.ATTRIBUTE_KINDS`.
    columns: dict[str, str]
    file: str
    file_bytes: int
    file_xxh3_128: str
    created_at: str


def arrow_name(digest: str) -> str:
    """Of a file with this XXH3-128."""
    return f"attributes-{digest}.arrow"


def render_spec(spec: AttributeSpec) -> bytes:
    """The bytes of ``attributes.json``."""
    # A list keeps the order.
    return render_signed(_FORMAT, _VERSION, {**asdict(spec), "columns": [list(each) for each in spec.columns.items()]})


def parse_spec(raw: bytes, where: str) -> AttributeSpec:
    """The inverse; ``where`` names the file in errors.

    Raises:
        CorruptIndexError: damaged. UnsupportedIndexError: of a newer version.
    """
    content = parse_signed(raw, where, _FORMAT, _VERSION, cure="give the attributes again, or upgrade hybridindex")
    try:
        said = {name: value for name, value in content.items() if name not in ("format", "format_version")}
        spec = AttributeSpec(**{**said, "columns": dict(content["columns"])})
        are_known = set(spec.columns.values()) <= set(ATTRIBUTE_KINDS)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptIndexError(f"{where} is not a description of attributes: {error!r}") from error
    if spec.file != arrow_name(spec.file_xxh3_128) or not are_known:
        raise CorruptIndexError(f"{where} names {spec.file!r} with columns {spec.columns!r}")
    return spec


class StoredAttributes:
    """Attributes of an open index. Any thread."""

    def __init__(self, spec: AttributeSpec, path: Path) -> None:
        """Made by :func:`find_attributes`. The file stays open until it is read: what replaces it changes nothing."""
        self.spec = spec
        self.path = path
        self._file = filesystem.File(path, "r")
        self._close = weakref.finalize(self, self._file.close)
        self._reading = threading.Lock()
        self._columns: dict[str, Any] | None = None

    @property
    def is_read(self) -> bool:
        """Whether the file was read: what becomes of it changes nothing any more."""
        return self._columns is not None

    def check(self) -> None:
        """Compares every byte of the file with its digest, whatever was read.

        Raises:
            CorruptIndexError: it is not what was written. UnreadableIndexError: it cannot be read.
        """
        try:
            digest = digest_file(self.path)
        except OSError as error:
            raise unreadable(error, self.path) from error
        if digest != self.spec.file_xxh3_128:
            raise CorruptIndexError(f"{self.path} differs from its checksum in {SPEC_FILE}")

    @property
    def columns(self) -> dict[str, Any]:
        """Name -> pyarrow array, one value a row, in the order of the lists. Reads the file the first time.

        Raises:
            CorruptIndexError: it is not what was written. UnreadableIndexError: it cannot be read.
            MissingDependencyError: pyarrow is not installed.
        """
        with self._reading:
            if self._columns is None:
                self._columns = self._read()
            return self._columns

    def _read(self) -> dict[str, Any]:
        pa, ipc = need("pyarrow"), need("pyarrow.ipc")
        try:
            self._file.seek(0)  # another try may have stopped anywhere
            raw, done = bytearray(self.spec.file_bytes), 0
            while done < len(raw) and (count := self._file.readinto(memoryview(raw)[done:])):
                done += count
        except OSError as error:
            raise unreadable(error, self.path) from error
        if done < len(raw) or digest_bytes(memoryview(raw)) != self.spec.file_xxh3_128:
            raise CorruptIndexError(f"{self.path} differs from its checksum in {SPEC_FILE}")
        table = ipc.open_file(pa.py_buffer(raw)).read_all()
        if describe(table) != self.spec.columns or len(table) != self.spec.count:
            raise CorruptIndexError(f"{self.path} does not hold what {SPEC_FILE} says")
        self._close()
        try:
            combined = {name: table[name].combine_chunks() for name in table.column_names}
            return {name: c.combine_chunks() if isinstance(c, pa.ChunkedArray) else c for name, c in combined.items()}
        except pa.ArrowException as error:  # its arrays count bytes by 32 bits
            raise UnreadableIndexError(f"{self.path} has a column of more than 2 GiB: {error}") from error

    def __repr__(self) -> str:
        return f"<StoredAttributes {', '.join(self.spec.columns)}: {self.spec.count} rows>"


def spec_state(generation: Path) -> tuple[int, int, int] | None:
    """Differs where attributes were given in between; None: there are none."""
    try:
        found = filesystem.stat(generation / SPEC_FILE)
    except MissingFileError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def find_attributes(generation: Path, manifest: Manifest, told: str = "") -> tuple[StoredAttributes | None, str]:
    """The attributes of a generation; or None, and why not where there should be some. ``told``: what is in the log."""
    file = generation / SPEC_FILE
    try:
        try:
            raw = filesystem.read_bytes(file)
        except MissingFileError:
            return None, ""
        spec = parse_spec(raw, str(file))
        found = (spec.generation, spec.count, spec.rows_xxh3_128)
        said = (manifest.generation, manifest.count, manifest.files[LISTS_FILE].xxh3_128)
        if found != said:
            raise CorruptIndexError(f"{file} belongs to other rows: it has {found}, the manifest {said}")
        size = filesystem.stat(generation / spec.file).st_size
        if size != spec.file_bytes:
            raise CorruptIndexError(f"{generation / spec.file} has {size} bytes; expected {spec.file_bytes}")
        return StoredAttributes(spec, generation / spec.file), ""
    except (OSError, IndexFormatError) as error:
        cause = error if isinstance(error, IndexFormatError) else unreadable(error, file)
        problem = f"{cause}; conditions on attributes are refused until they are given again"
        if problem != told:
            _log.warning("the attributes of %s are not used: %s", generation.parent, problem)
        return None, problem
