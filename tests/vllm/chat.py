"""The command line with the tests' small embedder in place of the demo's, whose weights would be a download."""

from __future__ import annotations

from hybridindex.cli.entry import run
from hybridindex.rag import embed
from tests.rag.world import embedder

if __name__ == "__main__":
    embed.load_embedder = lambda wheel_folder: embedder()
    run()
