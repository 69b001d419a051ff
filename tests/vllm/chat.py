"""The command line with the tests' small embedder in place of the demo's, whose weights would be a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybridindex.cli.entry import run
from hybridindex.rag import embed
from tests.rag.world import embedder


def small_embedder(wheel_folder: Path, *, fetch: bool = True) -> Any:
    return embedder()


if __name__ == "__main__":
    embed.load_embedder = small_embedder
    run()
