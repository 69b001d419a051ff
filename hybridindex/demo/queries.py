"""The demo's queries: a real web log, read from inside the Anserini jar in the pyserini wheel (a zip in a zip).

It is not part of this project: it is fetched when the demo runs, and its own terms apply.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from hybridindex import filesystem
from hybridindex.demo.chunk import tidy
from hybridindex.rag.wheels import FetchError, WheelSpec

__all__ = ["LOG", "PYSERINI_WHEEL", "clean", "colon_lines", "open_topics", "read_log", "topic_file"]

PYSERINI_WHEEL = WheelSpec(
    name="pyserini",
    version="0.12.0",
    sha256="15832592a972c2006f946f7721fc8bc5ff69822d8b29c853dc701ab7535a5553",
    size_mb=67.5,
)

#: TREC Terabyte 2005 efficiency topics: a web log in its order, with repeats.
LOG = "trec-terabyte05"
_LOG_FILE = "terabyte05.efficiency"
_JAR = "pyserini/resources/jars/anserini-0.12.0-fatjar.jar"
_TOPICS = "topics-and-qrels/topics."


def colon_lines(text: str) -> Iterator[str]:
    """Queries of lines like ``12:words`` or, with a priority, ``20001:1:words``."""
    for line in text.split("\n"):  # splitlines() also cuts at characters that occur inside questions
        _, _, rest = line.partition(":")
        priority, mark, query = rest.partition(":")
        yield query if mark and priority.isdigit() else rest


def open_topics(pyserini_wheel: Path) -> zipfile.ZipFile:
    """The jar inside the wheel, as a zip file in memory (72 MB)."""
    with filesystem.open_zip(pyserini_wheel) as wheel:
        return zipfile.ZipFile(io.BytesIO(wheel.read(_JAR)))


def topic_file(topics: zipfile.ZipFile, name: str) -> str:
    """The text of a topic file of :func:`open_topics`. Raises FetchError where the jar has none."""
    try:
        return topics.read(f"{_TOPICS}{name}.txt").decode("utf-8", errors="replace")
    except KeyError as error:
        raise FetchError(
            f"topic file {name} is not in the Anserini jar; this version expects another layout"
        ) from error


def clean(queries: Iterable[str]) -> list[str]:
    """``queries`` as tidy lines in their order; empty ones left out, repeats kept."""
    return [query for query in map(tidy, queries) if query]


def read_log(pyserini_wheel: Path) -> list[str]:
    """The queries of the log."""
    with open_topics(pyserini_wheel) as topics:
        return clean(colon_lines(topic_file(topics, _LOG_FILE)))
