"""What holds texts: files, which there are below what was named; and texts that come by themselves. Whether either
changed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from hybridindex import filesystem
from hybridindex.errors import FileError, InvalidInputError

__all__ = ["ENDINGS", "GivenText", "Source", "find_sources"]

#: Ending -> what is in the file.
ENDINGS = {
    ".txt": "text",
    ".text": "text",
    ".md": "markdown",
    ".markdown": "markdown",
    ".html": "html",
    ".htm": "html",
    ".pdf": "pdf",
    ".jsonl": "jsonl",
    ".parquet": "parquet",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file."""

    path: Path
    #: What was named: the file itself, or a folder above it.
    root: Path
    #: One of the values of :data:`ENDINGS`.
    kind: str

    @property
    def name(self) -> str:
        """Names it in the document store."""
        return str(self.path)

    @property
    def is_named(self) -> bool:
        """Whether it was named itself."""
        return self.path == self.root

    @property
    def label(self) -> str:
        """For readers: its path below what was named."""
        return self.path.name if self.is_named else self.path.relative_to(self.root).as_posix()

    def size_and_time(self) -> tuple[int, int]:
        """Size, and time of the last change in ns. Raises FileError."""
        found = filesystem.stat(self.path)
        return found.st_size, found.st_mtime_ns

    def digest(self) -> str:
        """Of all bytes. Raises FileError."""
        return filesystem.file_digest(self.path, xxhash.xxh3_128)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenText:
    """A text that comes by itself. It is a source like a file of the same name."""

    #: Names it in the document store.
    name: str
    text: str
    #: "markdown", of plain texts too, or "html".
    kind: str = "markdown"
    #: For readers; empty: the name.
    title: str = ""
    #: Of each of its chunks.
    metadata: Mapping[str, Any] = field(default_factory=dict)
    #: Most words of a chunk; None: as :class:`hybridindex.rag.ingest.readers.Reading` says.
    words: int | None = None

    @property
    def label(self) -> str:
        return self.title or self.name

    @property
    def root(self) -> str:
        """There is nothing above it."""
        return ""

    @property
    def is_named(self) -> bool:
        return True

    def size_and_time(self) -> tuple[int, int]:
        """Nothing follows from them."""
        return len(self.text), 0

    def digest(self) -> str:
        """Of all that its chunks depend on."""
        said = json.dumps([self.kind, self.label, self.metadata, self.text], sort_keys=True)
        return xxhash.xxh3_128_hexdigest(said.encode())


def find_sources(named: Sequence[Path], *, known: Iterable[str] = ()) -> list[Source]:
    """Each file that was named, and in each folder all files with an ending of :data:`ENDINGS`; hidden ones left out.

    Args:
        known: names of sources from before, which may be gone.

    Raises:
        InvalidInputError: something that is not there and never was, or a named file of another kind.
    """
    found: dict[Path, Source] = {}
    before = set(known)
    for each in named:
        root = each.expanduser().resolve()
        try:
            if filesystem.is_dir(root):
                for path in filesystem.list_tree(root):
                    below = path.relative_to(root).parts
                    kind = ENDINGS.get(path.suffix.lower())
                    if kind and not any(part.startswith(".") for part in below) and filesystem.is_file(path):
                        found.setdefault(path, Source(path=path, root=root, kind=kind))
                continue
            kind = ENDINGS.get(root.suffix.lower())
            if not filesystem.exists(root) and any(Path(name).is_relative_to(root) for name in before):
                continue
            if kind is None:
                raise InvalidInputError(
                    f"texts {str(each)!r} has no known ending; expected a folder, or one of {', '.join(ENDINGS)}"
                )
            if filesystem.is_file(root):
                found[root] = Source(path=root, root=root, kind=kind)
            else:
                raise InvalidInputError(f"texts {str(each)!r} cannot be read: there is no such file or folder")
        except FileError as error:
            raise InvalidInputError(f"texts {str(each)!r} cannot be read: {error}") from error
    return [found[path] for path in sorted(found)]
