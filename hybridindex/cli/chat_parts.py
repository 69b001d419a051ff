"""What a chat is made of: where it searches, its embedder, its LLM, and PipeRAG's settings, as the options say.

Talking is :mod:`hybridindex.cli.commands.chat`'s.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import hybridindex as hx
from hybridindex import filesystem
from hybridindex.cli.console import err
from hybridindex.cli.routers import choose_plan
from hybridindex.errors import (
    FileError,
    GenerationError,
    HybridIndexError,
    InvalidInputError,
    MissingDependencyError,
    ProfileError,
    StoreError,
)
from hybridindex.index import read_manifest
from hybridindex.index.storage.beside import generation_file, lineage_of
from hybridindex.llm.refusals import NOT_YET
from hybridindex.plans.llm_profiles import find_llm_measurement, step_times
from hybridindex.rag.documents import DOCUMENTS_FILE, DocumentsInfo, DocumentStore
from hybridindex.rag.generator import OpenAIGenerator
from hybridindex.rag.periodic import PeriodicRetrieval
from hybridindex.rag.records import Generated
from hybridindex.rag.retriever import CenteredEmbedder, Embedder, SessionSource
from hybridindex.service.config import ServiceConfig
from hybridindex.service.daemon_address import find_daemon
from hybridindex.store.control import ControlStore
from hybridindex.types import LLMMeasurement

if TYPE_CHECKING:
    from hybridindex.rag.embedders import EmbedderOptions

__all__ = [
    "EmbedderChoice",
    "LLMOptions",
    "Terminated",
    "documents_of",
    "measured_llm",
    "open_embedder",
    "open_llm",
    "open_source",
    "settings_of",
    "terminable",
    "windows_of",
]


class Terminated(KeyboardInterrupt):
    """SIGTERM came: as Ctrl-C, but it ends the conversation too."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises :class:`Terminated` within: sessions are closed, as they are for Ctrl-C."""

    def terminate(_number: int, _frame: object) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        # Only there Python takes signals.
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        # None: it was set outside Python.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMOptions:
    """The server that generates."""

    llm: Annotated[str | None, typer.Option("--llm", metavar="URL", help="OpenAI-compatible server.")] = None
    model: Annotated[str, typer.Option(help="Model name on the server; required if it has several.")] = ""
    mode: Annotated[str, typer.Option(help="chat, or completions for models without a chat template.")] = "chat"
    key: Annotated[str | None, typer.Option("--llm-key", envvar="HYBRIDINDEX_LLM_KEY", help="API key.")] = None
    llm_timeout: Annotated[
        float | None, typer.Option(help="Seconds for a generation, and for silence in it (default: 120 and 30).")
    ] = None
    wait: Annotated[
        float, typer.Option(help="Seconds to wait for an LLM server that is starting.", min=0, max=86_400)
    ] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedderChoice:
    """What embeds texts."""

    embedder: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="demo, sentence-transformers:MODEL or openai:MODEL. For chat, default: the documents' own.",
        ),
    ] = None
    embedder_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="HYBRIDINDEX_EMBEDDER_URL",
            help="Server with /v1/embeddings, for openai:MODEL.",
        ),
    ] = None
    embedder_key: Annotated[
        str | None,
        typer.Option(envvar="HYBRIDINDEX_EMBEDDER_KEY", help="Its API key; better set in the environment."),
    ] = None

    def options(self, cache: Path) -> EmbedderOptions:
        from hybridindex.rag.embedders.named import EmbedderOptions

        return EmbedderOptions(
            url=self.embedder_url, key=self.embedder_key, wheel_folder=cache / "downloads" / "wheels"
        )


def open_llm(owned: contextlib.ExitStack, server: LLMOptions) -> OpenAIGenerator:
    """The LLM's server, which answers and serves the model.

    Raises:
        InvalidInputError, GenerationError: as :meth:`hybridindex.rag.generator.OpenAIGenerator.ready`.
    """
    url, mode, timeout_s = server.llm, server.mode, server.llm_timeout
    assert url is not None
    # Of a generation, and of its silences.
    limits: dict[str, Any] = {} if timeout_s is None else {"timeout_s": timeout_s, "idle_s": timeout_s}
    generator = OpenAIGenerator(url, model=server.model, key=server.key, mode=mode, **limits)  # type: ignore[arg-type]
    owned.enter_context(generator)
    try:
        generator.ready(server.wait)
    except GenerationError as error:
        if error.status not in NOT_YET:
            raise
        hint = f"waited {server.wait:g} s" if server.wait else "--wait SECONDS waits for a server that is starting"
        raise GenerationError(f"{error} ({hint})", status=error.status) from error
    return generator


def settings_of(given: dict[str, int | None], recorded: tuple[Generated, ...] = ()) -> PeriodicRetrieval:
    """PipeRAG's: the options that were given, then those of the run that is replayed, then its own."""
    found = PeriodicRetrieval()
    if recorded:
        written = sum(step.max_tokens for step in recorded)
        # One that ended before its tokens did might have gone on.
        whole = written if recorded[-1].finish == "length" else max(found.max_tokens, written)
        found = replace(found, interval=recorded[0].max_tokens, max_tokens=whole)
    named: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return replace(found, **named)


def measured_llm(index: Path, store: str | None, model: str) -> LLMMeasurement | None:
    """What the control store knows of this LLM's pace; None where it was not measured, or the store cannot be read,
    which is said."""
    url = store or (index / "control.sqlite")
    try:
        if not model or (isinstance(url, Path) and not filesystem.exists(url)):
            return None
        with ControlStore.open(url) as control:
            return find_llm_measurement(control, model)
    except (FileError, StoreError) as error:
        err.print(f"the LLM's measured speed is unknown: {error}", highlight=False)
        return None


def windows_of(source: SessionSource, measured: LLMMeasurement | None) -> dict[str, float]:
    """Seconds of the measured steps, for a source that can tell bytes from them; none, and it is said, for another."""
    if measured is None:
        return {}
    try:
        source.session(window_ms=1.0).close()
    except (InvalidInputError, ProfileError) as error:
        err.print(f"measured step times are not used as windows: {error}", highlight=False)
        return {}
    return dict(measured.profile.generation_s)


def documents_of(index: Path) -> Path:
    """The document store of the generation that the index's daemon serves, or without one of the current generation."""
    daemon = find_daemon(index)
    number = None if daemon is None else daemon.generation
    try:
        return generation_file(index, read_manifest(index).generation if number is None else number, DOCUMENTS_FILE)
    except HybridIndexError:
        return index / DOCUMENTS_FILE  # who opens the index says what is wrong with it


def open_source(owned: contextlib.ExitStack, index: Path, texts: DocumentStore, config: ServiceConfig) -> SessionSource:
    """A client of the index's daemon where one runs, else a router in this process; the texts belong to its index."""
    daemon = find_daemon(index)
    if daemon is not None and daemon.urls:
        from hybridindex.client.client import Client

        client = owned.enter_context(Client(daemon.urls[0], index=daemon.index))
        fingerprint = str(client.status()["index"]["fingerprint"])
        texts.check_index(fingerprint, lineage_of(index, fingerprint))
        return client
    opened = owned.enter_context(hx.open(index))
    texts.check_index(opened.fingerprint, lineage_of(index, opened.fingerprint))
    _, chosen = choose_plan(opened, config.plan, config.router.devices, config.store_url, config.router.precision)
    with opened.store(config.store_url, required=False) as control:
        llm = step_times(control, chosen)
    return owned.enter_context(opened.router(chosen, config=config.router, llm=llm))


def open_embedder(owned: contextlib.ExitStack, info: DocumentsInfo, chosen: EmbedderChoice, cache: Path) -> Embedder:
    """The embedder that the store names.

    Raises:
        InvalidInputError: another one was chosen. MissingDependencyError: the store's is not one of ours.
    """
    from hybridindex.rag.embedders import named

    if chosen.embedder is not None and (name := named.full_name(chosen.embedder)) != info.embedder:
        raise InvalidInputError(
            f"--embedder is {name!r}, but the documents were embedded by {info.embedder!r}; omit it, or ingest "
            "the texts again"
        )
    try:
        named.full_name(info.embedder)
    except InvalidInputError as error:
        raise MissingDependencyError(
            f"the documents were embedded by {info.embedder!r}; chat supports {named.EMBEDDERS}. For another embedder, "
            "use hybridindex.rag from Python"
        ) from error
    embedder = named.open_embedder(owned, info.embedder, chosen.options(cache))
    return embedder if info.mean is None else CenteredEmbedder(embedder, info.mean)
