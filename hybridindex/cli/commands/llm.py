"""Commands about the LLM beside the index: ``profile llm`` measures it, ``vllm-args`` fits vLLM to a plan."""

from __future__ import annotations

import json as jsonlib
import re
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperGroup

import hybridindex as hx
from hybridindex import filesystem
from hybridindex.cli.console import CliProgress, emit, err, out, parse_bytes, readable_bytes, to_json
from hybridindex.cli.option_groups import grouped
from hybridindex.cli.options import Devices, IndexPath, Json, StoreUrl
from hybridindex.errors import InvalidInputError, LLMServerError
from hybridindex.types import LLMMeasurement, LLMProfile

if TYPE_CHECKING:
    from hybridindex.store.control import ControlStore

__all__ = ["chosen_llm", "profile_group", "register"]

_STEP = re.compile(r"([A-Za-z][A-Za-z0-9_-]{0,63})=([0-9]{1,7}):([0-9]{1,7})")


class _ProfileGroup(TyperGroup):
    """``profile INDEX …`` means ``profile index INDEX …``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in ctx.help_option_names:
            # An index may have the name of a command.
            is_folder = args[0] == "index" and (len(args) == 1 or args[1].startswith("-"))
            if args[0] not in self.commands or (is_folder and "--help" not in args):
                args = ["index", *args]
        return super().parse_args(ctx, args)


def profile_group(app: typer.Typer) -> typer.Typer:
    """The group ``profile``, with ``llm`` in it; the caller adds ``index``."""
    group = typer.Typer(
        cls=_ProfileGroup,
        no_args_is_help=True,
        help="Measure an index (the default), or the LLM beside it.",
        epilog="profile INDEX ... is short for profile index INDEX ...; its options: hybridindex profile index -h",
    )
    app.add_typer(group, name="profile")
    group.command(name="llm")(grouped(_profile_llm))
    return group


def chosen_llm(choice: str, control: ControlStore, hardware_fingerprint: str | None) -> LLMProfile:
    """What ``plan --llm`` names: a file, "latest" or the id of a stored measurement.

    Raises:
        InvalidInputError: a file that holds no LLM profile. ProfileError: nothing is stored.
    """
    from hybridindex.plans.llm_profiles import llm_profile_from_data, load_llm_profile

    if choice == "latest" or choice.isdecimal():
        return load_llm_profile(control, choice, hardware_fingerprint=hardware_fingerprint)
    try:
        return llm_profile_from_data(jsonlib.loads(filesystem.read_text(choice)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidInputError(
            f"--llm: {choice} is not an LLM profile ({error}); expected 'latest', an id, or a JSON file with "
            "kv_cache_bytes, throughput_rps and optionally points [[bytes, requests/s], …], ttft_s, input_tokens, "
            "output_tokens"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMOptions:
    """Which LLM is measured: one behind a server, or one that vLLM runs offline."""

    url: Annotated[str | None, typer.Option(help="OpenAI-compatible server, such as http://127.0.0.1:8000.")] = None
    vllm_offline: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Sweep KV-cache sizes with vLLM itself, one process each.")
    ] = None
    model: Annotated[str | None, typer.Option(help="Model to measure; required if the server has several.")] = None
    kv_cache_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE[,SIZE…]", help="KV cache per device; of a server, only if its metrics lack it."),
    ] = None
    n_devices: Annotated[int, typer.Option(help="Devices that one engine's KV cache is spread over.", min=1)] = 1
    engine_arg: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Offline: argument of vllm.LLM. Repeatable.")
    ] = None
    api_key: Annotated[
        str | None, typer.Option(envvar="HYBRIDINDEX_LLM_KEY", help="API key; better set in the environment.")
    ] = None
    wait: Annotated[float, typer.Option(help="Seconds to wait for a server that is starting.")] = 0.0
    timeout: Annotated[float | None, typer.Option(help="Seconds per request (default: 60) or offline point (300).")] = (
        None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMLoadOptions:
    """What the LLM is asked."""

    input_tokens: Annotated[int, typer.Option(help="Tokens per prompt, including its passages.", min=1)] = 512
    output_tokens: Annotated[int, typer.Option(help="Tokens per answer.", min=1)] = 64
    step: Annotated[
        list[str] | None, typer.Option(metavar="NAME=IN:OUT", help="Further pipeline step to time. Repeatable.")
    ] = None
    max_concurrency: Annotated[int, typer.Option(help="Most concurrent clients.", min=1)] = 32
    requests: Annotated[int, typer.Option(help="Offline: requests per size.", min=1)] = 64
    max_seconds: Annotated[float, typer.Option(help="Server: start no request that would end later.")] = 120.0
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0


def _profile_llm(
    *,
    llm: LLMOptions,
    load: LLMLoadOptions,
    index: Annotated[Path | None, typer.Option(metavar="INDEX", help="Store the result beside this index.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.json", help="Write the result here.")
    ] = None,
    store: StoreUrl = None,
    json: Json = False,
) -> None:
    """Measure an LLM's throughput by KV cache, TTFT, TPOT and step times; store them for plans."""
    if (llm.url is None) == (llm.vllm_offline is None):
        raise InvalidInputError("--url and --vllm-offline: expected exactly one of them")
    sizes = tuple(parse_bytes(part) for part in llm.kv_cache_bytes.split(",")) if llm.kv_cache_bytes is not None else ()
    checkpoint = None if index is None else index / "llm.checkpoint"
    with _resumable(checkpoint), ExitStack() as stack:
        # Opened before minutes of measuring: a store that cannot be written is refused now.
        control = _control(index, store, stack)
        progress = stack.enter_context(CliProgress(quiet=json))
        measure = _sweep_offline if llm.vllm_offline is not None else _measure_server
        measured = measure(llm, load, sizes, progress, checkpoint)
        number = _keep(measured, control, output)
    payload = {"llm_id": number, **to_json(measured)}
    emit(payload, as_json=json, table=_table(measured, number))


@contextmanager
def _resumable(checkpoint: Path | None) -> Iterator[None]:
    """After an interruption, says that the same command goes on where it stopped."""
    try:
        yield
    except (KeyboardInterrupt, LLMServerError):
        if checkpoint is not None and filesystem.exists(checkpoint):
            words = (
                f"{checkpoint} keeps the finished parts of the measurement; repeat the command to continue from there"
            )
            err.print(words, highlight=False, soft_wrap=True)
        raise


def _sweep_offline(
    llm: LLMOptions, load: LLMLoadOptions, sizes: tuple[int, ...], progress: CliProgress, checkpoint: Path | None
) -> LLMMeasurement:
    from hybridindex.profiler.llm.offline import SweepRequest, sweep_kv_cache

    assert llm.vllm_offline is not None
    sweep = SweepRequest(
        model=llm.vllm_offline,
        kv_cache_bytes=sizes,
        n_devices=llm.n_devices,
        input_tokens=load.input_tokens,
        output_tokens=load.output_tokens,
        n_requests=load.requests,
        engine_args=dict(_engine_arg(word) for word in llm.engine_arg or ()),
        timeout_s=300.0 if llm.timeout is None else llm.timeout,
        seed=load.seed,
    )
    return sweep_kv_cache(sweep, progress=progress, checkpoint=checkpoint)


def _measure_server(
    llm: LLMOptions, load: LLMLoadOptions, sizes: tuple[int, ...], progress: CliProgress, checkpoint: Path | None
) -> LLMMeasurement:
    from hybridindex.profiler.llm.measure import LLMRequest, profile_llm_server

    assert llm.url is not None
    if len(sizes) > 1:
        raise InvalidInputError(
            f"--kv-cache-bytes names {len(sizes)} sizes; expected one: a running server has one, and a sweep needs "
            "--vllm-offline"
        )
    request = LLMRequest(
        model=llm.model,
        kv_cache_bytes=sizes[0] if sizes else None,
        n_devices=llm.n_devices,
        input_tokens=load.input_tokens,
        output_tokens=load.output_tokens,
        max_concurrency=load.max_concurrency,
        steps=dict(_step(word) for word in load.step or ()),
        max_seconds=load.max_seconds,
        seed=load.seed,
    )
    return profile_llm_server(
        llm.url,
        request,
        key=llm.api_key,
        timeout_s=60.0 if llm.timeout is None else llm.timeout,
        wait_s=llm.wait,
        progress=progress,
        checkpoint=checkpoint,
    )


def _control(index: Path | None, store: str | None, stack: ExitStack) -> ControlStore | None:
    if index is not None:
        opened = stack.enter_context(hx.open(index, verify="quick"))
        return stack.enter_context(opened.store(store))
    if store is not None:
        from hybridindex.store.control import ControlStore

        return stack.enter_context(ControlStore.open(store))
    return None


def _keep(measured: LLMMeasurement, control: ControlStore | None, output: Path | None) -> int | None:
    number = None
    if control is not None:
        from hybridindex.plans.llm_profiles import save_llm_measurement

        number = save_llm_measurement(control, measured)
    if output is not None:
        filesystem.write_bytes(output, (jsonlib.dumps(to_json(measured), indent=2) + "\n").encode())
    return number


def _step(word: str) -> tuple[str, tuple[int, int]]:
    match = _STEP.fullmatch(word)
    if match is None:
        raise InvalidInputError(f"--step is {word!r}; expected NAME=IN:OUT in tokens, such as rewrite=100:30")
    return match[1], (int(match[2]), int(match[3]))


def _engine_arg(word: str) -> tuple[str, Any]:
    name, equals, value = word.partition("=")
    if not equals or not name.isidentifier():
        raise InvalidInputError(f"--engine-arg is {word!r}; expected NAME=VALUE, such as max_model_len=4096")
    try:
        return name, jsonlib.loads(value)
    except ValueError:
        return name, value


def _table(measured: LLMMeasurement, number: int | None) -> Table:
    profile = measured.profile
    title = f"LLM {measured.model}" + ("" if number is None else f", measurement {number}")
    table = Table("clients", "requests/s", "TTFT p50 / p90", "per token", "KV used", "preempted", title=title)
    if measured.method == "offline":
        table = Table("KV cache", "requests/s", "preempted", title=title)
        worked = [point for point in profile.points if point[1] > 0]
        for (size, rps), level in zip(worked, measured.levels, strict=True):
            table.add_row(readable_bytes(size), f"{rps:.3g}", str(level.preemptions))
        for size, why in measured.refused:
            table.add_row(readable_bytes(size), "0", why.splitlines()[0][:80])
        return table
    for level in measured.levels:
        table.add_row(
            str(level.concurrency),
            f"{level.throughput_rps:.3g}",
            f"{level.ttft_p50_s * 1e3:.0f} / {level.ttft_p90_s * 1e3:.0f} ms",
            f"{level.tpot_p50_s * 1e3:.2f} ms",
            "-" if level.kv_usage is None else f"{level.kv_usage:.0%}",
            "-" if level.preemptions is None else str(level.preemptions),
        )
    steps = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in profile.generation_s.items())
    table.caption = (
        f"{profile.throughput_rps:.3g} requests/s of {profile.input_tokens}/{profile.output_tokens} tokens with "
        f"{readable_bytes(profile.kv_cache_bytes)} of KV cache; alone: {steps}"
        + "".join(
            f"\n{name}: {_in_words(measured.notes[name])}"
            for name in ("stopped", "not_saturated", "fewer_requests", "no_time_for", "metrics")
            if name in measured.notes
        )
        + ("" if number is not None else "\nnot stored; use --index or --store to keep it for plan --llm latest")
    )
    return table


def _in_words(note: Any) -> str:
    if isinstance(note, dict):
        return ", ".join(f"{name} {value}" for name, value in note.items())
    return ", ".join(map(str, note)) if isinstance(note, list) else str(note)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """Memory of one device, and what the model takes of it."""

    device_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of one device; default: as CUDA reports.")
    ] = None
    kv_cache_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="KV cache of one device; default: the LLM profile's, less the plan."),
    ] = None
    model: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder of safetensors; its weights are spread over all devices."),
    ] = None
    model_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Weights and activations on one device, as vLLM logs them.")
    ] = None


def register(app: typer.Typer) -> None:
    """Adds the commands of this file that are not in a group."""

    @app.command(name="vllm-args")
    @grouped
    def vllm_args(
        index: IndexPath,
        plan_id: Annotated[str, typer.Option("--plan", help="Plan id or 'latest'.")] = "latest",
        *,
        memory: MemoryOptions,
        device: Devices = None,
        args_only: Annotated[
            bool,
            typer.Option(
                "--args-only", help="Print only the arguments, notes on stderr: vllm serve MODEL $(… --args-only)."
            ),
        ] = False,
        store: StoreUrl = None,
        json: Json = False,
    ) -> None:
        """Print vLLM's arguments beside a plan, checked to fit the device, and the order to start in."""
        from hybridindex.integrations.vllm import share_with
        from hybridindex.integrations.vllm_weights import weight_bytes
        from hybridindex.plans.llm_profiles import step_times
        from hybridindex.plans.precision import choose_view
        from hybridindex.plans.stored import load_plan
        from hybridindex.tiers.contract.devices import kind_here, resolve_device

        if memory.model is not None and memory.model_bytes is not None:
            raise InvalidInputError("--model and --model-bytes: expected only one of them")
        with _naming_flags():
            weights = None if memory.model is None else weight_bytes(memory.model)
        with hx.open(index, verify="quick") as opened, opened.store(store) as control:
            found = load_plan(choose_view(opened.ivf, control, plan_id), plan_id, control)
            if found is None:
                raise InvalidInputError("--plan is 'none'; expected a plan id or 'latest'")
            number, decided = found
            steps = step_times(control, decided)
        cuda = kind_here() == "cuda" or memory.device_memory is not None
        devices = device or [f"cuda:{i}" if cuda else "cpu" for i in range(decided.n_devices)]
        total = parse_bytes(memory.device_memory) if memory.device_memory else resolve_device(devices[0])[1].total_bytes
        taken = parse_bytes(memory.model_bytes) if memory.model_bytes else None
        if weights is not None:
            taken = -(-weights // decided.n_devices)
        with _naming_flags():
            share = share_with(
                decided,
                device_memory_bytes=total,
                kv_cache_bytes=parse_bytes(memory.kv_cache_bytes) if memory.kv_cache_bytes else None,
                model_bytes=taken,
                llm=steps,
            )
        notes = [_with_flags(note) for note in share.notes]
        if not decided.feasible:
            notes.append(
                f"the plan is infeasible; before the first start: hybridindex apply {index} --plan {number} --force"
            )
        if weights is not None:
            parts = f", {taken} on each of {decided.n_devices} devices" if decided.n_devices > 1 else ""
            notes.append(
                f"the model counts as {weights} bytes of weights{parts}, as stored; activations and CUDA graphs are "
                "not counted: take --model-bytes from vLLM's log to include them"
            )
        where = str(index.absolute())
        environment = {
            "VLLM_PLUGINS": "hybridindex",
            "HYBRIDINDEX_INDEX": where,
            "HYBRIDINDEX_DEVICES": ",".join(devices),
            "HYBRIDINDEX_PLAN": str(number),
        }
        beside = ["hybridindex", "serve", where, *(word for name in devices for word in ("--device", name))]
        beside += ["--plan", str(number)]
        payload = {
            "plan_id": number,
            "args": share.arguments(),
            "kv_cache_memory_bytes": share.kv_cache_memory_bytes,
            "gpu_memory_utilization": share.gpu_memory_utilization,
            "index_bytes": list(share.index_bytes),
            "model_bytes": taken,
            "environment": environment,
            "beside": beside,
            "notes": notes,
        }
        emit(payload, as_json=json)
        if args_only and not json:
            typer.echo(shlex.join(share.arguments()))
            for note in notes:  # stdout is for vLLM
                err.print(f"Note: {note}", highlight=False, soft_wrap=True)
        elif not json:
            serve = shlex.join(
                ["vllm", "serve", "MODEL" if memory.model is None else str(memory.model), *share.arguments()]
            )
            _show_share(serve, notes, environment, beside)


def _with_flags(text: str) -> str:
    """What :mod:`hybridindex.integrations.vllm` says, with the names of options for those of its arguments."""
    flags = {
        "device_memory_bytes": "--device-memory",
        "kv_cache_bytes": "--kv-cache-bytes",
        "model_bytes": "--model or --model-bytes",
    }
    return re.sub("|".join(rf"\b{name}\b" for name in flags), lambda found: flags[found[0]], text)


@contextmanager
def _naming_flags() -> Iterator[None]:
    """Errors raised within name options."""
    try:
        yield
    except InvalidInputError as error:
        raise InvalidInputError(_with_flags(str(error))) from error


def _show_share(serve: str, notes: list[str], environment: dict[str, str], beside: list[str]) -> None:
    inside = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
    lines = [
        "# One process: vLLM first sizes its cache, then the router takes its memory.",
        f"{inside} {serve}",
        "",
        "# Two processes: vLLM first; the daemon once http://127.0.0.1:8000/health answers. While vLLM starts, neither",
        "# start nor stop anything else on the device. If vLLM restarts later, the daemon may stay.",
        serve,
        shlex.join(beside),
        *(f"# Note: {note}" for note in notes),
    ]
    for line in lines:
        out.print(line, highlight=False, soft_wrap=True)
