"""The command chat: questions to a pipeline, answers as they are written, with the passages they come from.

Searches through the index's running daemon, else in this process. The LLM is any OpenAI-compatible server, or a
recorded trace.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

import hybridindex as hx
from hybridindex.cli.commands_serve import Budget, choose_plan
from hybridindex.cli.console import emit, err, out, parse_bytes
from hybridindex.cli.options import Devices, Json, Nprobe, PlanChoice, StoreUrl
from hybridindex.errors import GenerationError, InvalidInputError, MissingDependencyError
from hybridindex.llm_profiles import find_llm_measurement
from hybridindex.rag.chunk_time import ChunkTimeModel
from hybridindex.rag.documents import DocumentsInfo, DocumentStore
from hybridindex.rag.generator import Generator, OpenAIGenerator
from hybridindex.rag.periodic import PeriodicRetrieval
from hybridindex.rag.pipelines import PIPELINES
from hybridindex.rag.records import Answer, LookedAhead
from hybridindex.rag.retriever import CenteredEmbedder, Embedder, Retriever, SessionSource
from hybridindex.rag.steps import Steps
from hybridindex.rag.trace import ReplayGenerator, RunTrace, TraceWriter, read_traces
from hybridindex.service.place import find_daemon
from hybridindex.store.control import ControlStore

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
        model: Annotated[str, typer.Option(help="As the server names it; default its first.")] = "",
        mode: Annotated[str, typer.Option(help="chat, or completions for models without a chat template.")] = "chat",
        key: Annotated[str | None, typer.Option("--llm-key", envvar="HYBRIDINDEX_LLM_KEY", help="API key.")] = None,
        pipeline: Annotated[str, typer.Option(help=f"{', '.join(PIPELINES)} or {_PIPERAG}.")] = "hyde",
        question: Annotated[str | None, typer.Option("--question", "-q", help="One question; then exit.")] = None,
        k: Annotated[int, typer.Option("-k", help="Passages per search.", min=1)] = 5,
        nprobe: Nprobe = None,
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
        with contextlib.ExitStack() as owned:
            texts = owned.enter_context(DocumentStore(documents or index / "documents.sqlite"))
            source = _source(owned, index, texts, plan, device, budget, store)
            retriever = Retriever(source, _embedder(texts.info, cache), texts, k=k, nprobe=nprobe)
            runs: Iterator[RunTrace] | None = None
            generator: Generator | None = None
            if replay is not None:
                runs = read_traces(replay)
            else:
                assert llm is not None
                generator = owned.enter_context(OpenAIGenerator(llm, model=model, key=key, mode=mode))  # type: ignore[arg-type]
            writer = None
            if record is not None:
                name = generator.model if isinstance(generator, OpenAIGenerator) else "replay"
                writer = owned.enter_context(TraceWriter(record, model=name))
            name = generator.model if pipeline == _PIPERAG and isinstance(generator, OpenAIGenerator) else ""
            times = _chunk_times(index, store, name)
            for asked, says, ours in _questions(question, runs, generator, pipeline, speed):
                talking = question is None and replay is None
                answer = _answer(asked, retriever, says, ours, times, lookahead=lookahead, quiet=json, talking=talking)
                if answer is None:
                    continue
                if writer is not None:
                    writer.append(answer)
                emit(_payload(answer), as_json=json, table=_table(answer))


def _questions(
    question: str | None, runs: Iterator[RunTrace] | None, generator: Generator | None, pipeline: str, speed: float
) -> Iterator[tuple[str, Generator, str]]:
    """Question, what answers it, and the pipeline: of a trace, the one given, or typed ones."""
    if runs is not None:
        for run in runs:
            if question is None or run.question == question:
                name = _PIPERAG if run.pipeline.startswith(_PIPERAG) else run.pipeline
                yield run.question, ReplayGenerator(run.generations, speed=speed), name
        return
    assert generator is not None
    if question is not None:
        yield question, generator, pipeline
        return
    for _ in itertools.count():
        try:
            typed = out.input("[bold]? [/]").strip()
        except EOFError:
            return
        if typed:
            yield typed, generator, pipeline


def _answer(
    question: str,
    retriever: Retriever,
    generator: Generator,
    pipeline: str,
    times: ChunkTimeModel,
    *,
    lookahead: bool,
    quiet: bool,
    talking: bool,
) -> Answer | None:
    """None where Ctrl-C, or an LLM that failed, ended an answer of a conversation."""
    show: Callable[[str], object] | None = None if quiet else lambda text: out.out(text, end="", highlight=False)
    try:
        with Steps(question, retriever, generator, lookahead=lookahead, on_text=show) as steps:
            if pipeline == _PIPERAG:
                answer = PeriodicRetrieval().run(steps, times).answer
            else:
                answer = PIPELINES[pipeline](steps)
    except KeyboardInterrupt:
        if not talking:
            raise
        err.print("\nended; the retrieval session is closed", highlight=False)
        return None
    except GenerationError as error:
        if not talking:
            raise
        err.print(f"\n{error}", markup=False, highlight=False)
        return None
    if show is not None:
        show("\n")
    return answer


def _chunk_times(index: Path, store: str | None, model: str) -> ChunkTimeModel:
    """What the control store knows of this LLM's pace, where it was measured; later, what the answers teach."""
    url = store or (index / "control.sqlite")
    if not model or (isinstance(url, Path) and not url.exists()):
        return ChunkTimeModel()
    with ControlStore.open(url) as control:
        measured = find_llm_measurement(control, model)
    return ChunkTimeModel() if measured is None else ChunkTimeModel.of_measurement(measured)


def _source(
    owned: contextlib.ExitStack,
    index: Path,
    texts: DocumentStore,
    plan: str,
    devices: list[str] | None,
    budget: str | None,
    store: str | None,
) -> SessionSource:
    daemon = find_daemon(index)
    if daemon is not None and daemon.urls:
        from hybridindex.client.client import Client

        client = owned.enter_context(Client(daemon.urls[0]))
        texts.check_index(str(client.status()["index"]["fingerprint"]))
        return client
    opened = owned.enter_context(hx.open(index))
    texts.check_index(opened.fingerprint)
    nbytes = None if budget is None else parse_bytes(budget)
    chosen = choose_plan(opened, plan, devices, store)
    return owned.enter_context(opened.router(chosen, devices or (), device_budget_bytes=nbytes))


def _embedder(info: DocumentsInfo, cache: Path) -> Embedder:
    """The embedder that the store names."""
    from hybridindex.demo.documents import EMBEDDER
    from hybridindex.demo.embed import load_embedder

    if info.embedder != EMBEDDER:
        raise MissingDependencyError(
            f"the documents were embedded by {info.embedder!r}; chat has {EMBEDDER!r} alone. Use hybridindex.rag from "
            "Python with an embedder of your own"
        )
    embedder = load_embedder(cache / "downloads" / "wheels")
    return embedder if info.mean is None else CenteredEmbedder(embedder, info.mean)


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
        # As they are: square brackets in a passage are no markup.
        table.add_row(str(passage.id), f"{passage.score:.3f}", Text(passage.source), Text(text))
    return table
