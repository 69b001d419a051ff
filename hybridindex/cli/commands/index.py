"""Commands that make, change or check an index: build, import, add, delete, compact, verify and others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Group
from rich.table import Table

import hybridindex as hx
from hybridindex import filesystem
from hybridindex.api import STORE_FILE, copy_store
from hybridindex.cli.console import (
    CliProgress,
    ExitCode,
    emit,
    err,
    load_ids,
    load_npy,
    parse_bytes,
    readable_bytes,
    refuse_special_file,
    require_store,
    telling_commit,
)
from hybridindex.cli.option_groups import grouped, refuse_beside_remove
from hybridindex.cli.options import IndexPath, InputOptions, Json, Key, NewFolder, RowAttributes, StoreUrl
from hybridindex.cli.row_parts import MOST_ROWS, RowInput, open_target
from hybridindex.errors import (
    CorruptIndexError,
    FileError,
    HybridIndexError,
    InvalidInputError,
    StoreError,
    StoreLockedError,
    StoreVersionError,
)
from hybridindex.index import previous_generation, read_manifest
from hybridindex.index.attributes.columns import read_table
from hybridindex.index.changes.snapshots import Snapshot, check_note
from hybridindex.index.changes.snapshots import restore as restore_snapshot
from hybridindex.index.changes.snapshots import snapshot as write_snapshot
from hybridindex.index.compress import check_asked
from hybridindex.index.inputs.matrices import VECS
from hybridindex.index.integrity import name_lists
from hybridindex.index.rabitq.spec import CandidateTable
from hybridindex.index.share.record import read_held
from hybridindex.index.storage.beside import missing_shared
from hybridindex.index.storage.list_digests import read_digests
from hybridindex.index.storage.manifest import DIGESTS_FILE, LISTS_FILE
from hybridindex.service.daemon_address import find_daemon

__all__ = ["index_table", "register"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOptions:
    """How vectors are kept and searched."""

    nlist: Annotated[int | None, typer.Option(help="Number of lists; default: about 4*sqrt(n).", min=1)] = None
    metric: Annotated[str, typer.Option(help="ip or l2.")] = "ip"
    codec: Annotated[str, typer.Option(help="flat, fp16, bf16, sq8, pq[M] or pqfs[M]; rabitq: see compress.")] = "flat"
    bits: Annotated[int | None, typer.Option(help="Compress: store codes of 1, 2 or 4 bits beside the rows.")] = None
    rerank: Annotated[str | None, typer.Option(help="With codec rabitq: codec of the rows: flat, fp16, bf16, sq8.")] = (
        None
    )
    normalize: Annotated[bool, typer.Option(help="Cosine: normalise vectors and queries (metric ip).")] = False
    nprobe: Annotated[int | None, typer.Option(help="Default lists per query.", min=1)] = None


def describe(index: hx.Index) -> dict[str, Any]:
    """What ``build``, ``import`` and ``verify`` answer about an index."""
    sizes = index.list_sizes
    codes, share = index.ivf.rabitq, index.ivf.share
    return {
        "path": index.path,
        "fingerprint": index.fingerprint,
        "generation": index.ivf.generation,
        "count": index.count,
        "deleted": index.n_deleted or None,
        "dim": index.dim,
        "metric": index.metric,
        "codec": index.codec,
        "nlist": index.nlist,
        "nprobe": index.nprobe,
        "code_bytes": int(index.list_bytes.sum()),
        "list_size_min": int(sizes.min()),
        "list_size_median": float(sorted(sizes.tolist())[len(sizes) // 2]),
        "list_size_max": int(sizes.max()),
        "share_lists": None if share is None else int(share.held.sum()),
        "share_bytes": None if share is None else share.held_bytes,
        "rabitq_bits": None if codes is None else codes.spec.bits,
        "rabitq_bytes": None if codes is None else codes.spec.file_bytes,
        "rabitq_problem": index.ivf.rabitq_problem or None,
        "attributes": index.attributes or None,
        "attributes_problem": index.ivf.attributes_problem or None,
    }


def _share_problem(opened: hx.Index) -> str | None:
    """Lists that a share should hold and that are damaged; None: there are none."""
    share, rows = opened.ivf.share, opened.ivf.rows
    recorded = None if share is None else read_held(rows.integrity.folder, rows.manifest)
    if share is None or recorded is None:
        return None
    damaged = np.flatnonzero(recorded & ~share.held).tolist()
    return f"{name_lists(damaged)} of the share are damaged; take them again" if damaged else None


def index_table(facts: dict[str, Any], title: str) -> Table:
    table = Table(title=title, show_header=False)
    for name, value in facts.items():
        if value is None:
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{key} ({kind})" for key, kind in value.items())
        shown = readable_bytes(value) if name.endswith("_bytes") else f"{value:,}" if type(value) is int else value
        table.add_row(name.replace("_", " "), str(shown))
    return table


def _digests_problem(opened: hx.Index) -> str | None:
    """Of single lists; an index of an older version has none, and is whole."""
    rows = opened.ivf.rows
    file = rows.integrity.folder / DIGESTS_FILE
    of_lists = rows.manifest.files[LISTS_FILE].xxh3_128
    if not filesystem.exists(file) or read_digests(file, of_lists, rows.nlist) is not None:
        return None
    return f"{file.name} is damaged: it cannot name a damaged list; the next generation has a new one"


def _attribute_problem(opened: hx.Index) -> str | None:
    """Why attributes that there should be cannot be used, after reading all of them."""
    stored = opened.ivf.attributes
    try:
        if stored is not None:
            stored.check()
    except HybridIndexError as error:
        return str(error)
    return opened.ivf.attributes_problem or None


def _snapshot_problem(index: Path) -> str | None:
    """What a snapshot has lost."""
    try:
        check_note(index)
    except CorruptIndexError as error:
        return str(error)
    return None


def _check_store(opened: hx.Index, url: str | None) -> tuple[str | None, list[str], str | None]:
    """The control store of an index, what is wrong with it, and why it was not read. None: it has none."""
    from hybridindex.store.engine import locate
    from hybridindex.store.structure import find_damage_of_file

    place = locate(url or opened.path / STORE_FILE)
    require_store(url)
    if place.path is not None and not filesystem.exists(place.path):
        return None, [], None
    if cut_off := find_damage_of_file(place.path, whole=False):  # opening it would make a new store of it
        return place.name, cut_off, None
    try:
        with opened.store(url) as control:
            return place.name, [str(problem) for problem in control.find_damage()], None
    except StoreError as error:
        out_of_reach = isinstance(error, StoreLockedError | StoreVersionError) or isinstance(error.__cause__, FileError)
        if url is None and out_of_reach:
            return place.name, find_damage_of_file(place.path), str(error)
        return place.name, [str(error)], None


def _candidate_table(candidates: CandidateTable) -> Table:
    table = Table(title="candidates of a search: rows that are compared exactly")
    for name in ("nprobe", *(f"k = {k}" for k in candidates.k)):
        table.add_column(name, justify="right")
    for at, nprobe in enumerate(candidates.nprobe):
        table.add_row(f"{nprobe:,}", *(f"{row[at]:,}" for row in candidates.r))
    return table


Replace = Annotated[
    bool,
    typer.Option("--replace", help="Replace an existing index; it is kept for rollback."),
]


def _say_who_serves(index: Path) -> None:
    """On standard error: what a running daemon serves, and what changes that."""
    daemon = find_daemon(index)
    if daemon is not None and daemon.generation != read_manifest(index).generation:
        words = f'{daemon} until: hybridindex reload {index} (or its setting reload = "auto")'
        err.print(words, highlight=False)
    elif daemon is None and filesystem.exists(index / "cluster" / "cluster.json"):
        words = (
            "a cluster serves it: nodes take up a compaction or a rollback by themselves, and a rebuilt index after: "
            f"hybridindex cluster repartition {index}"
        )
        err.print(words, highlight=False)


def _say_replaced(index: Path, facts: dict[str, Any]) -> None:
    facts["previous_generation"] = kept = previous_generation(index)
    if kept is not None:
        err.print(f"generation {kept} is kept until this one serves; to go back: hybridindex rollback {index}")
        _say_who_serves(index)


def _say_codes_changed(index: Path, until: str) -> None:
    if (daemon := find_daemon(index)) is not None:
        words = f'{daemon}; {until}: hybridindex reload {index} (or its setting reload = "auto")'
        err.print(words, highlight=False)


def _say_snapshot(done: Snapshot, *, as_json: bool) -> None:
    facts: dict[str, Any] = {
        "path": done.path,
        "generation": done.generation,
        "changes": done.number,
        "copied_bytes": done.copied_bytes,
        "linked_bytes": done.linked_bytes,
    }
    words = (
        f"{done.path}: generation {done.generation} with change {done.number}; {done.copied_bytes:,} bytes copied, "
        f"{done.linked_bytes:,} linked"
    )
    emit(facts, as_json=as_json, table=words)


def register(app: typer.Typer) -> None:
    """Adds the commands of this file."""

    @app.command()
    @grouped
    def build(
        vectors: Annotated[
            Path,
            typer.Argument(
                metavar="VECTORS",
                help="(n, d) numbers: .npy, .fvecs, .bvecs, .parquet, .arrow, .feather, .h5 or .hdf5.",
                show_default=False,
            ),
        ],
        index: IndexPath,
        *,
        source: InputOptions,
        attributes: RowAttributes = None,
        layout: LayoutOptions,
        memory: Annotated[str, typer.Option(help="Anonymous memory that the build may use.")] = "1GiB",
        seed: Annotated[int | None, typer.Option(help="Seed of training; default: the library's.")] = None,
        replace: Replace = False,
        json: Json = False,
    ) -> None:
        """Build an index from a file of vectors, streaming, in bounded memory."""
        options: dict[str, Any] = {}
        if source.ids is not None:
            options["ids"] = load_npy(source.ids, "--ids")
        if attributes is not None:
            options["attributes"] = read_table(attributes)
        if seed is not None:
            options["seed"] = seed
        with (
            telling_commit(index, as_json=json),
            CliProgress(quiet=json) as progress,
            hx.build(
                source.file(vectors),
                index,
                nlist=layout.nlist,
                metric=layout.metric,  # type: ignore[arg-type]
                codec=layout.codec,
                normalize=layout.normalize,
                nprobe=layout.nprobe,
                bits=layout.bits,
                rerank=layout.rerank,
                memory_budget_bytes=parse_bytes(memory),
                replace=replace,
                progress=progress,
                **options,
            ) as built,
        ):
            facts = describe(built)
        _say_replaced(index, facts)
        emit(facts, as_json=json, table=index_table(facts, "built"))

    @app.command(name="import")
    def import_(
        file: Annotated[Path, typer.Argument(metavar="FILE.faiss", help="Any faiss IVF index.", show_default=False)],
        index: IndexPath,
        replace: Replace = False,
        nprobe: Annotated[int | None, typer.Option(help="Default lists per query; default: the file's.", min=1)] = None,
        refine: Annotated[
            str | None,
            typer.Option(
                help="For IVF…,RFlat: vectors (exact vectors go into the lists) or drop (keep only the codes)."
            ),
        ] = None,
        allow_on_disk: Annotated[
            bool,
            typer.Option(
                "--allow-on-disk",
                help="Also read lists from the file that FILE names, below its folder. Only for a trusted FILE.",
            ),
        ] = False,
        json: Json = False,
    ) -> None:
        """Import a faiss IVF index file, pre-transforms included."""
        with (
            telling_commit(index, as_json=json),
            CliProgress(quiet=json) as progress,
            hx.from_faiss(
                file,
                index,
                nprobe=nprobe,
                refine=refine,
                allow_on_disk=allow_on_disk,
                replace=replace,
                progress=progress,
            ) as imported,
        ):
            facts = describe(imported)
        _say_replaced(index, facts)
        emit(facts, as_json=json, table=index_table(facts, "imported"))

    @app.command()
    def compress(
        ctx: typer.Context,
        index: IndexPath,
        bits: Annotated[int, typer.Option(help="Bits per dimension: 1, 2 or 4.")] = 1,
        recall_loss: Annotated[
            float, typer.Option(help="Fraction of recall@k that searches may lose on average; sets the candidates.")
        ] = 0.005,
        queries: Annotated[
            Path | None,
            typer.Option(
                "--queries",
                "-q",
                metavar="FILE.npy",
                help="A few hundred queries to measure the candidates with; default: rows of the index, with noise.",
            ),
        ] = None,
        seed: Annotated[int, typer.Option(help="Seed of the rotation and of samples.")] = 0,
        remove: Annotated[bool, typer.Option("--remove", help="Remove the codes.")] = False,
        json: Json = False,
    ) -> None:
        """Add RaBitQ codes to an index. Searches scan them and compare the best rows exactly."""
        if remove:
            refuse_beside_remove(ctx, ("bits", "recall_loss", "queries", "seed"))
            with hx.open(index, verify="quick") as opened:
                removed = opened.remove_codes()
            emit({"removed_bytes": removed}, as_json=json, table=f"removed {readable_bytes(removed)} of codes")
            _say_codes_changed(index, "it uses the codes that it has read until")
            return
        given = None if queries is None else load_npy(queries, "--queries")
        # Before every byte of the index is compared with its checksum.
        with hx.open(index, verify="quick") as opened:
            check_asked(opened.ivf, bits, recall_loss, given, seed)
        with CliProgress(quiet=json) as progress, hx.open(index) as opened:
            spec = opened.compress(bits, recall_loss=recall_loss, queries=given, seed=seed, progress=progress)
            rows_bytes = int(opened.list_bytes.sum())
        facts = {
            "path": index,
            "generation": spec.generation,
            "count": spec.count,
            "bits": spec.bits,
            "rows_bytes": rows_bytes,
            "codes_bytes": spec.file_bytes,
            "recall_loss": spec.recall_loss,
            "measured_with": spec.measured_with,
        }
        table = Group(index_table(facts, "compressed"), _candidate_table(spec.candidates))
        emit({**facts, "candidates": spec.candidates}, as_json=json, table=table)
        if given is None:
            err.print("candidates were measured with rows of the index; real queries (--queries) may need more")
        _say_codes_changed(index, "it takes up the new codes after")

    @app.command()
    def attributes(
        ctx: typer.Context,
        index: IndexPath,
        table: Annotated[
            Path | None,
            typer.Argument(
                metavar="FILE", show_default=False, help="Parquet, Arrow, Feather, CSV or JSON lines: one row per id."
            ),
        ] = None,
        id_column: Annotated[
            str | None, typer.Option(metavar="NAME", help="Column of the ids; default: rows are numbered from 0.")
        ] = None,
        remove: Annotated[bool, typer.Option("--remove", help="Remove the attributes.")] = False,
        json: Json = False,
    ) -> None:
        """Set the attributes of an index that search conditions (--where) may use; replaces earlier ones."""
        if remove:
            refuse_beside_remove(ctx, ("table", "id_column"))
            with hx.open(index, verify="quick") as opened:
                removed = opened.remove_attributes()
            emit({"removed_bytes": removed}, as_json=json, table=f"removed {readable_bytes(removed)} of attributes")
            return
        if table is None:
            raise InvalidInputError("FILE is missing; expected a table, or --remove")
        given, ids = read_table(table), None
        if id_column is not None:
            if id_column not in given.column_names:
                raise InvalidInputError(
                    f"--id-column is {id_column!r}; expected one of {', '.join(given.column_names)}"
                )
            ids = given[id_column].to_numpy()
            given = given.drop_columns([id_column])
        with hx.open(index, verify="quick") as opened:
            opened.set_attributes(given, ids)
            facts = {"path": index, "count": opened.count, "rows": len(given), "attributes": opened.attributes}
        shown = Table("attribute", "kind", title=f"{len(given):,} of {facts['count']:,} rows have attributes")
        for name, kind in facts["attributes"].items():  # type: ignore[attr-defined]
            shown.add_row(name, kind)
        emit(facts, as_json=json, table=shown)

    @app.command()
    @grouped
    def add(
        index: IndexPath,
        vectors: Annotated[
            Path,
            typer.Argument(metavar="VECTORS", help="Rows to add: a file as for build.", show_default=False),
        ],
        *,
        source: InputOptions,
        attributes: RowAttributes = None,
        upsert: Annotated[
            bool, typer.Option("--upsert", help="Replace rows that have the same ids. Safe to repeat.")
        ] = False,
        batch: Annotated[int, typer.Option(help="Rows per change.", min=1, max=MOST_ROWS)] = 10_000,
        key: Key = None,
        json: Json = False,
    ) -> None:
        """Add rows to an index, through its daemon if one serves it. Searches find them at once.

        Each batch is durable when the next one begins. If the command ends early, repeat it with --upsert and the same
        ids.
        """
        rows = RowInput(file=source.file(vectors), ids=source.ids, attributes=attributes)
        if upsert and source.ids is None and source.ids_column is None and vectors.suffix.lower() in (".npy", *VECS):
            raise InvalidInputError("--ids is missing; expected the id of each row, because --upsert is given")
        replaced = 0
        with CliProgress(quiet=json) as progress, open_target(index, key, as_json=json) as target:
            for part, ids, table, total in rows.parts(min(batch, target.most_rows)):
                progress("add", target.done, total)
                replaced += target.add(part, ids, table, replace=upsert)
                progress("add", target.done, total)
            facts = {"path": index, "rows": target.done, "replaced": replaced, **target.facts()}
        words = f"added {facts['rows'] - replaced:,} rows, replaced {replaced:,}; {facts['live']:,} rows in all"
        emit(facts, as_json=json, table=words)

    @app.command()
    def delete(
        index: IndexPath,
        ids: Annotated[
            Path | None,
            typer.Option("--ids", metavar="FILE", help="A .npy file of integers, or a text file, one id per line."),
        ] = None,
        where: Annotated[
            str | None, typer.Option(help='Or a condition on attributes, e.g. "year < 2019"; see docs/filters.md.')
        ] = None,
        key: Key = None,
        json: Json = False,
    ) -> None:
        """Delete rows of an index permanently, through its daemon if one serves it."""
        if (ids is None) == (where is None):
            raise InvalidInputError(
                f"--ids and --where are both {'missing' if ids is None else 'given'}; expected exactly one"
            )
        given = None if ids is None else load_ids(ids, "--ids")
        with open_target(index, key) as target:
            n = target.delete(given, where)
            now = target.facts()
        facts = {"path": index, "deleted": n, "deleted_in_all": now["deleted"], "count": now["count"]}
        emit(
            facts, as_json=json, table=f"deleted {n:,} ids; {facts['deleted_in_all']:,} of {facts['count']:,} in total"
        )

    @app.command()
    def compact(index: IndexPath, key: Key = None, json: Json = False) -> None:
        """Rewrite the lists of an index, with added rows and without deleted ones.

        If a daemon serves the index, the daemon does it and serves the new lists. In a cluster the node that writes
        does it, and all nodes switch to the new lists. An index that is open for writing does it automatically.
        """
        with CliProgress(quiet=json) as progress, open_target(index, key, upkeep=True) as target:
            facts = {"path": index, **target.compact(progress)}
        words = "nothing to compact"
        if facts["compacted"]:
            words = f"generation {facts['generation']} has {facts['count']:,} rows"
            words += f"; {facts['split']:,} lists were split, {facts['dissolved']:,} dissolved"
        emit(facts, as_json=json, table=words)
        if facts["compacted"]:
            _say_who_serves(index)

    @app.command()
    def export(
        index: IndexPath,
        file: Annotated[
            Path, typer.Argument(metavar="FILE.faiss", help="File to write; replaced if it exists.", show_default=False)
        ],
        json: Json = False,
    ) -> None:
        """Write an index as a plain faiss file."""
        refuse_special_file(file, "FILE")
        with hx.open(index) as opened:
            opened.to_faiss(file)
        facts = {"file": file, "bytes": filesystem.stat(file).st_size}
        emit(facts, as_json=json, table=f"wrote {file} ({readable_bytes(facts['bytes'])})")  # type: ignore[arg-type]

    @app.command()
    def verify(index: IndexPath, store: StoreUrl = None, json: Json = False) -> None:
        """Read the whole index and its control store, compare all checksums, and describe the index."""
        with hx.open(index, verify="full") as opened:
            facts = describe(opened)
            facts["attributes_problem"] = _attribute_problem(opened)
            facts["share_problem"] = _share_problem(opened)
            facts["digests_problem"] = _digests_problem(opened)
            facts["store"], problems, facts["store_unread"] = _check_store(opened, store)
        facts["snapshot_problem"] = _snapshot_problem(index)
        damaged = [] if facts["rabitq_problem"] is None else ["the rows are intact, the codes are damaged"]
        damaged += [] if facts["attributes_problem"] is None else ["the attributes cannot be used"]
        damaged += ["the control store is damaged"] if problems else []
        damaged += [] if facts["share_problem"] is None else ["the share has damaged lists"]
        damaged += [] if facts["digests_problem"] is None else [f"the rows are intact, {facts['digests_problem']}"]
        lost = missing_shared(opened.ivf.rows.integrity.folder)
        damaged += [f"{name} is missing, and with it the texts of the rows" for name in lost]
        damaged += [] if facts["snapshot_problem"] is None else ["it differs from the snapshot"]
        whole = "all checksums match" if facts["share_lists"] is None else "a share: all checksums of its lists match"
        title = "; ".join(damaged) or whole
        payload = {**facts, "store_problems": problems, "ok": not damaged}
        emit(payload, as_json=json, table=index_table(facts, title))
        if facts["store_unread"]:
            err.print(f"the control store was not read: {facts['store_unread']}", highlight=False, soft_wrap=True)
        for problem in problems:
            err.print(problem, highlight=False, soft_wrap=True)
        if damaged:
            raise typer.Exit(ExitCode.BAD_INDEX)

    @app.command()
    def rollback(
        index: IndexPath,
        force: Annotated[
            bool, typer.Option("--force", help="Roll back even if changes made since the compaction are lost.")
        ] = False,
        json: Json = False,
    ) -> None:
        """Go back to the generation that the current one replaced, after checking it. Repeat to undo."""
        before = read_manifest(index).generation
        facts = {"generation": hx.rollback(index, force=force), "rolled_back": before}
        words = f"generation {facts['generation']} is current again; generation {before} is kept until it serves"
        emit(facts, as_json=json, table=words)
        _say_who_serves(index)

    @app.command()
    def gc(index: IndexPath, json: Json = False) -> None:
        """Remove replaced generations, which ends rollback. A daemon does this once it serves the new one."""
        removed = hx.remove_replaced(index)
        words = f"removed generations: {', '.join(map(str, removed)) or 'none'}"
        emit({"removed": removed}, as_json=json, table=words)

    @app.command()
    def snapshot(
        index: IndexPath,
        to: NewFolder,
        previous: Annotated[
            Path | None,
            typer.Option(metavar="DIR", help="Earlier snapshot; files that it has are linked.", show_default=False),
        ] = None,
        json: Json = False,
    ) -> None:
        """Write a snapshot of an index while it is searched and changed.

        Lists are linked if the file system allows it, and then take no space.
        """
        with CliProgress(quiet=json) as progress:
            done = write_snapshot(index, to, previous=previous, beside=copy_store, progress=progress)
        _say_snapshot(done, as_json=json)

    @app.command()
    def restore(
        snapshot: Annotated[
            Path, typer.Argument(metavar="SNAPSHOT", help="Folder written by snapshot.", show_default=False)
        ],
        to: NewFolder,
        json: Json = False,
    ) -> None:
        """Restore an index from a snapshot, and compare every byte with its checksum."""
        with CliProgress(quiet=json) as progress:
            done = restore_snapshot(snapshot, to, beside=copy_store, progress=progress)
        _say_snapshot(done, as_json=json)
