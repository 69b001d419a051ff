"""The command chat: questions to a pipeline, answers as they are written, with the passages they come from.

Searches through the index's running daemon, else in this process. The LLM is any OpenAI-compatible server, or a
recorded trace.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from hybridindex.cli.commands.chat_parts import (
    Terminated,
    chunk_times,
    open_embedder,
    open_llm,
    open_source,
    settings_of,
    terminable,
)
from hybridindex.cli.console import emit, err, out
from hybridindex.cli.options import Budget, Devices, Json, Nprobe, PlanChoice, StoreUrl
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

__all__ = ["register"]

_PIPERAG = "piperag"
#: Characters of a passage in the table.
_SHOWN = 160


def register(app: typer.Typer) -> None:
    """Adds the commands of this file."""

    @app.command()
    def chat(
        index: Annotated[Path, typer.Argument(metavar="INDEX", help="Index directory with its document store.")],
        llm: Annotated[str | None, typer.Option("--llm", metavar="URL", help="OpenAI-compatible server.")] = None,
        model: Annotated[str, typer.Option(help="As the server names it; needed where it has several.")] = "",
        mode: Annotated[str, typer.Option(help="chat, or completions for models without a chat template.")] = "chat",
        key: Annotated[str | None, typer.Option("--llm-key", envvar="HYBRIDINDEX_LLM_KEY", help="API key.")] = None,
        llm_timeout: Annotated[
            float | None, typer.Option(help="Seconds for a generation, silence included (120, and 30 of silence).")
        ] = None,
        wait: Annotated[
            float, typer.Option(help="Seconds that the LLM's server may still be starting.", min=0, max=86_400)
        ] = 0.0,
        pipeline: Annotated[str, typer.Option(help=f"{', '.join(PIPELINES)} or {_PIPERAG}.")] = "hyde",
        question: Annotated[str | None, typer.Option("--question", "-q", help="One question; then exit.")] = None,
        k: Annotated[int, typer.Option("-k", help="Passages per search.", min=1)] = 5,
        nprobe: Nprobe = None,
        interval: Annotated[int | None, typer.Option(help="PipeRAG: tokens between retrievals (64).", min=1)] = None,
        max_tokens: Annotated[int | None, typer.Option(help="PipeRAG: tokens of an answer (256).", min=1)] = None,
        min_nprobe: Annotated[int | None, typer.Option(help="PipeRAG: fewest lists under a deadline.", min=1)] = None,
        documents: Annotated[
            Path | None, typer.Option("--documents", metavar="FILE", help="Default documents.sqlite in INDEX.")
        ] = None,
        record: Annotated[Path | None, typer.Option("--record", metavar="FILE", help="Append to a trace.")] = None,
        replay: Annotated[
            Path | None, typer.Option("--replay", metavar="FILE", help="Say what a trace recorded; no --llm.")
        ] = None,
        speed: Annotated[float, typer.Option(help="Of a replay, against the recorded.")] = 1.0,
        lookahead: Annotated[bool, typer.Option("--lookahead/--no-lookahead")] = True,
        plan: PlanChoice = "latest",
        device: Devices = None,
        budget: Budget = None,
        store: StoreUrl = None,
        cache: Annotated[Path, typer.Option("--cache", help="Where the embedder is kept.")] = Path("build/cache"),
        json: Json = False,
    ) -> None:
        """Ask questions; answers are streamed, with their passages. Ctrl-C ends an answer, Ctrl-D the chat.

        With --replay, the recorded questions are asked again.
        """
        if pipeline != _PIPERAG and pipeline not in PIPELINES:
            raise InvalidInputError(f"--pipeline is {pipeline!r}; expected one of {', '.join(PIPELINES)}, {_PIPERAG}")
        if (llm is None) == (replay is None):
            raise InvalidInputError("give --llm or --replay, one of them")
        if json and question is None and replay is None:
            raise InvalidInputError("--json needs --question or --replay: nobody is there to ask")
        given = {"interval": interval, "max_tokens": max_tokens, "min_nprobe": min_nprobe}
        if pipeline != _PIPERAG and replay is None and any(given.values()):
            named = ", ".join(f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None)
            raise InvalidInputError(f"{named}: for --pipeline {_PIPERAG} alone; --pipeline is {pipeline!r}")
        with terminable(), contextlib.ExitStack() as owned:
            texts = owned.enter_context(DocumentStore(documents or index / "documents.sqlite"))
            source = open_source(owned, index, texts, plan, device, budget, store)
            retriever = Retriever(source, open_embedder(texts.info, cache), texts, k=k, nprobe=nprobe)
            if pipeline == _PIPERAG:
                # Before anybody asks: a store of other tokens is refused.
                retriever.token_starts()
            runs: Iterator[RunTrace] | None = None
            generator: OpenAIGenerator | None = None
            if replay is not None:
                runs = read_traces(replay)
            else:
                assert llm is not None
                generator = open_llm(owned, llm, model, key, mode, llm_timeout, wait)
            writer = None
            name = "replay" if generator is None else generator.model
            if record is not None:
                writer = owned.enter_context(TraceWriter(record, model=name))
            times = chunk_times(index, store, name if pipeline == _PIPERAG and generator is not None else "")
            for asked, says, ours, run in _questions(question, runs, generator, pipeline, speed):
                talking = question is None and replay is None
                settings = settings_of(given, () if run is None else run.generations) if ours == _PIPERAG else None
                answer = _answer(
                    asked, retriever, says, ours, settings, times, lookahead=lookahead, quiet=json, talking=talking
                )
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


def _answer(
    question: str,
    retriever: Retriever,
    generator: Generator,
    pipeline: str,
    periodic: PeriodicRetrieval | None,
    times: ChunkTimeModel,
    *,
    lookahead: bool,
    quiet: bool,
    talking: bool,
) -> Answer | None:
    """None where Ctrl-C, or an LLM that failed, ended an answer of a conversation. ``periodic``: for PipeRAG."""
    begun = False

    def show(text: str) -> None:
        nonlocal begun
        begun = True
        out.out(text, end="", highlight=False)

    try:
        with Steps(question, retriever, generator, lookahead=lookahead, on_text=None if quiet else show) as steps:
            return PIPELINES[pipeline](steps) if periodic is None else periodic.run(steps, times).answer
    except KeyboardInterrupt as ended:
        if not talking or isinstance(ended, Terminated):
            raise
        err.print("\nended; the retrieval session is closed", highlight=False)
        return None
    except GenerationError as error:
        if not talking:
            raise
        err.print(f"\n{error}", highlight=False)
        return None
    finally:
        # What is said next, be it an error, has a line of its own.
        if begun:
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
