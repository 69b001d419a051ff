"""The same bytes in other generations of an index directory: for lists that are damaged in the one that serves."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from hybridindex import filesystem
from hybridindex.errors import HybridIndexError
from hybridindex.index.integrity import Integrity
from hybridindex.index.storage.generation import other_generations
from hybridindex.index.storage.list_digests import U64, list_spans, read_digests
from hybridindex.index.storage.manifest import DIGESTS_FILE, LISTS_FILE, MANIFEST_FILE, TABLE_FILE, parse_manifest
from hybridindex.types import I64

__all__ = ["OtherGenerations"]


class OtherGenerations:
    """Beside the one that is open. One thread."""

    def __init__(self, integrity: Integrity) -> None:
        self._integrity = integrity
        #: Digests and places of the lists of each that could be read.
        self._known: dict[Path, tuple[U64, I64]] = {}

    def find(self, list_id: int, part: int) -> tuple[str, bytes] | None:
        """The codes (0) or ids (1) of a list as they were written, and the generation that has them."""
        integrity = self._integrity
        assert integrity.digests is not None
        with suppress(OSError):
            for folder in other_generations(integrity.folder.parent, {integrity.folder.name}):
                known = self._known.get(folder) or _read(folder)
                if known is None:  # now; a later look may find it
                    continue
                self._known[folder] = known
                if list_id >= len(known[0]):
                    continue
                if known[0][list_id, part] != integrity.digests[list_id, part]:
                    continue
                start, stop = known[1][list_id, part].tolist()
                with suppress(OSError), filesystem.File(folder / LISTS_FILE, "r") as file:
                    file.seek(start)
                    content = file.read(stop - start)
                    if content is not None and integrity.is_good(list_id, part, content):
                        return folder.name, content
        return None


def _read(folder: Path) -> tuple[U64, I64] | None:
    with suppress(ValueError, EOFError, HybridIndexError):
        manifest = parse_manifest(filesystem.read_bytes(folder / MANIFEST_FILE), str(folder / MANIFEST_FILE))
        table = filesystem.read_array(folder / TABLE_FILE)
        digests = read_digests(folder / DIGESTS_FILE, manifest.files[LISTS_FILE].xxh3_128, len(table))
        if digests is not None:
            return digests, list_spans(table, manifest.code_size, manifest.layout)
    return None
