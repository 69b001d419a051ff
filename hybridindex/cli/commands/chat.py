"""The command chat: questions to a pipeline, answers as they are written, with the passages they come from.

Searches through the index's running daemon, else in this process. The LLM is any OpenAI-compatible server, or a
recorded trace.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from hybridindex.cli.chat_parts import (
    EmbedderChoice,
    LLMOptions,
    Terminated,
    documents_of,
    measured_llm,
    open_embedder,
    open_llm,
    open_source,
    settings_of,
    terminable,
    windows_of,
)
from hybridindex.cli.console import emit, err, out
from hybridindex.cli.option_groups import grouped
from hybridindex.cli.options import Json, Nprobe, StoreUrl
from hybridindex.cli.setting_options import ConfigFile, RouterOptions, settings_in
from hybridindex.errors import GenerationError, InvalidInputError
from hybridindex.rag.chunk_time import ChunkTimeModel
from hybridindex.rag.documents import DocumentStore
from hybridindex.rag.generator import Generator, OpenAIGenerator
from hybridindex.rag.periodic import PeriodicRetrieval
from hybridindex.rag.pipelines import PIPELINES
from hybridindex.rag.records import Answer, LookedAhead
from hybridindex.rag.retriever import Retriever
from hybridindex.rag.steps import Steps
from hybridindex.rag.trace import ReplayGenerator, RunTrace, TraceWriter, read_traces
from hybridindex.router.router import Router
from hybridindex.service.config import ServiceConfig

__all__ = ["register"]

_PIPERAG = "piperag"
_NOT_FOLLOWED = (
    "the settings file has [refresh], which only a daemon follows: this chat keeps its plan; start hybridindex serve, "
    "and chat searches through it"
)
#: Characters of a passage in the table.
_SHOWN = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeRAGOptions:
    """For --pipeline piperag alone."""

    interval: Annotated[int | None, typer.Option(help="PipeRAG: tokens between retrievals (default: 64).", min=1)] = (
        None
    )
    max_tokens: Annotated[int | None, typer.Option(help="PipeRAG: tokens per answer (default: 256).", min=1)] = None
    min_nprobe: Annotated[int | None, typer.Option(help="PipeRAG: fewest lists per query under a deadline.", min=1)] = (
        None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkOptions:
    """What is asked, by which pipeline, and what is recorded or replayed."""

    pipeline: Annotated[str, typer.Option(help=f"{', '.join(PIPELINES)} or {_PIPERAG}.")] = "hyde"
    question: Annotated[str | None, typer.Option("--question", "-q", help="Answer one question, then exit.")] = None
    lookahead: Annotated[
        bool, typer.Option("--lookahead/--no-lookahead", help="Move lists while the LLM generates.")
    ] = True
    record: Annotated[Path | None, typer.Option("--record", metavar="FILE", help="Append the run to this trace.")] = (
        None
    )
    replay: Annotated[
        Path | None, typer.Option("--replay", metavar="FILE", help="Replay what this trace recorded; needs no --llm.")
    ] = None
    speed: Annotated[float, typer.Option(help="Replay speed, relative to the recording.")] = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PassageOptions:
    """Where passages come from."""

    k: Annotated[int, typer.Option("-k", help="Passages per search.", min=1)] = 5
    nprobe: Nprobe = None
    documents: Annotated[
        Path | None,
        typer.Option("--documents", metavar="FILE", help="Document store; default: documents.sqlite in INDEX."),
    ] = None
    plan: Annotated[
        str | None,
        typer.Option(
            help="Plan id, 'current' (applied last), 'latest', or 'none' to search on the host only.",
            show_default="current",
        ),
    ] = None
    store: StoreUrl = None
    cache: Annotated[Path, typer.Option("--cache", help="Folder for the demo's embedder.")] = Path("build/cache")


def register(app: typer.Typer) -> None:
    """Adds the commands of this file."""

    @app.command()
    @grouped
    def chat(
        index: Annotated[Path, typer.Argument(metavar="INDEX", help="Index directory with its document store.")],
        server: LLMOptions,
        talk: TalkOptions,
        piperag: PipeRAGOptions,
        passages: PassageOptions,
        embedding: EmbedderChoice,
        router: RouterOptions,
        config: ConfigFile = None,
        json: Json = False,
    ) -> None:
        """Ask questions; answers are streamed, with their passages. Ctrl-C ends an answer, Ctrl-D the chat.

        With --replay, the recorded questions are asked again. If no daemon serves the index, chat opens a router with
        its options and the settings file: plan, store_url and the table router, as for serve.
        """
        pipeline, question, replay = talk.pipeline, talk.question, talk.replay
        if pipeline != _PIPERAG and pipeline not in PIPELINES:
            raise InvalidInputError(f"--pipeline is {pipeline!r}; expected one of {', '.join(PIPELINES)}, {_PIPERAG}")
        if (server.llm is None) == (replay is None):
            raise InvalidInputError("give exactly one of --llm and --replay")
        if json and question is None and replay is None:
            raise InvalidInputError("--json requires --question or --replay")
        given = asdict(piperag)
        if pipeline != _PIPERAG and replay is None and any(given.values()):
            named = ", ".join(f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None)
            raise InvalidInputError(f"{named}: only for --pipeline {_PIPERAG}; --pipeline is {pipeline!r}")
        told = {**router.given(), "plan": passages.plan, "store_url": passages.store}
        said = settings_in(config)
        settings = said.without("refresh", "indexes").build(ServiceConfig, told)
        with terminable(), contextlib.ExitStack() as owned:
            texts = owned.enter_context(DocumentStore(passages.documents or documents_of(index)))
            source = open_source(owned, index, texts, settings)
            if "refresh" in said.names() and isinstance(source, Router):
                err.print(_NOT_FOLLOWED, highlight=False, markup=False)
            embedder = open_embedder(owned, texts.info, embedding, passages.cache)
            retriever = Retriever(source, embedder, texts, k=passages.k, nprobe=passages.nprobe)
            if pipeline == _PIPERAG:
                # Before anybody asks: a store of other tokens is refused.
                retriever.token_starts()
            runs: Iterator[RunTrace] | None = None
            generator: OpenAIGenerator | None = None
            if replay is not None:
                runs = read_traces(replay)
            else:
                generator = open_llm(owned, server)
            writer = None
            name = "replay" if generator is None else generator.model
            if talk.record is not None:
                writer = owned.enter_context(TraceWriter(talk.record, model=name))
            measured = None if generator is None else measured_llm(index, settings.store_url, name)
            windows = windows_of(source, measured) if talk.lookahead else {}
            times = ChunkTimeModel() if measured is None else ChunkTimeModel.of_measurement(measured)
            talking = question is None and replay is None
            for asked, says, ours, run in _questions(question, runs, generator, pipeline, talk.speed):
                periodic = settings_of(given, () if run is None else run.generations) if ours == _PIPERAG else None
                shown = None if json else _Shown()
                steps = Steps(asked, retriever, says, lookahead=talk.lookahead, step_s=windows, on_text=shown)
                answer = _answer(steps, _pipeline(ours, periodic, times), shown, talking=talking)
                if answer is None:
                    continue
                if writer is not None:
                    writer.append(answer)
                emit(_payload(answer), as_json=json, table=_table(answer))


def _questions(
    question: str | None, runs: Iterator[RunTrace] | None, generator: Generator | None, pipeline: str, speed: float
) -> Iterator[tuple[str, Generator, str, RunTrace | None]]:
    """Question, what answers it, pipeline, and the run that is replayed; of a trace, the one given, or typed ones."""
    if runs is not None:
        for run in runs:
            if question is None or run.question == question:
                name = _PIPERAG if run.pipeline.startswith(_PIPERAG) else run.pipeline
                yield run.question, ReplayGenerator(run.generations, speed=speed), name, run
        return
    assert generator is not None
    if question is not None:
        yield question, generator, pipeline, None
        return
    for _ in itertools.count():
        try:
            typed = out.input(Text("? ", style="bold")).strip()
        except EOFError:
            return
        if typed:
            yield typed, generator, pipeline, None


def _pipeline(name: str, periodic: PeriodicRetrieval | None, times: ChunkTimeModel) -> Callable[[Steps], Answer]:
    """``periodic``: for PipeRAG."""
    return PIPELINES[name] if periodic is None else lambda steps: periodic.run(steps, times).answer


class _Shown:
    """Prints an answer as it is written."""

    def __init__(self) -> None:
        self.begun = False

    def __call__(self, text: str) -> None:
        self.begun = True
        out.out(text, end="", highlight=False)


def _answer(steps: Steps, run: Callable[[Steps], Answer], shown: _Shown | None, *, talking: bool) -> Answer | None:
    """None where Ctrl-C, or an LLM that failed, ended an answer of a conversation."""
    try:
        with steps:
            return run(steps)
    except KeyboardInterrupt as ended:
        if not talking or isinstance(ended, Terminated):
            raise
        err.print("\ninterrupted; the retrieval session is closed", highlight=False)
        return None
    except GenerationError as error:
        if not talking:
            raise
        err.print(f"\n{error}", highlight=False)
        return None
    finally:
        # What is said next, be it an error, has a line of its own.
        if shown is not None and shown.begun:
            out.out("")


def _payload(answer: Answer) -> dict[str, Any]:
    return {
        "pipeline": answer.pipeline,
        "question": answer.question,
        "answer": answer.text,
        "passages": answer.passages,
        "seconds": answer.seconds,
        "retrieval_s": answer.retrieval_s,
        "generation_s": answer.generation_s,
        "lookaheads": sum(isinstance(event, LookedAhead) for event in answer.events),
    }


def _table(answer: Answer) -> Table:
    table = Table(
        "id", "score", "source", "passage",
        title=f"{answer.pipeline}: {answer.seconds:.2f} s, {answer.retrieval_s * 1e3:.1f} ms of it retrieval",
    )  # fmt: skip
    for passage in answer.passages:
        text = passage.text if len(passage.text) <= _SHOWN else f"{passage.text[:_SHOWN]}…"
        table.add_row(str(passage.id), f"{passage.score:.3f}", passage.source, text)
    return table
