"""The command that makes an index of texts, and brings it up to date."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybridindex.cli.chat_parts import EmbedderChoice
from hybridindex.cli.commands.index import index_table
from hybridindex.cli.console import CliProgress, emit
from hybridindex.cli.ingest_parts import PassageOptions, VectorLayout, ingest_texts
from hybridindex.cli.option_groups import grouped
from hybridindex.cli.options import IndexPath, Json, Key

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Adds the command of this file."""

    @app.command()
    @grouped
    def ingest(
        texts: Annotated[
            list[Path],
            typer.Argument(
                metavar="TEXTS...",
                help="Folders and files: .jsonl and .parquet with text, id, source; .txt, .md, .html, .pdf.",
                show_default=False,
            ),
        ],
        index: IndexPath,
        *,
        embedding: EmbedderChoice,
        passages: PassageOptions,
        layout: VectorLayout,
        key: Key = None,
        json: Json = False,
    ) -> None:
        """Embed texts and build an index of them, with a document store for chat. Repeat to ingest what changed."""
        with CliProgress(quiet=json) as progress:
            facts = ingest_texts(texts, index, embedding, passages, layout, progress, key)
        emit(facts, as_json=json, table=index_table(facts, "ingested"))
