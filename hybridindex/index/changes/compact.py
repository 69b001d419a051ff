"""Writing what is left of an index, and what came, as a new generation, while searches and writes go on.

The changes that come meanwhile go into the old generation's log as ever; in the moment in which the new one becomes
current, while no change can be logged, they become the beginning of its log. A crash leaves the old generation or the
new one, with every change in either.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hybridindex import filesystem
from hybridindex.errors import BuildError, CorruptIndexError, SupersededError, UnreadableIndexError
from hybridindex.index.attributes.columns import gathered, schema_of
from hybridindex.index.attributes.stored import find_attributes
from hybridindex.index.changes.reshape import Shape, Thresholds
from hybridindex.index.changes.shape import CHUNK_BYTES, LeftRowsAtPace, Pace, nlist_ratio, reshapes, shape_of
from hybridindex.index.changes.shape_process import shape_elsewhere
from hybridindex.index.changes.write import largest_id, refuse_unwritable, takes_rows
from hybridindex.index.compress import compress
from hybridindex.index.faiss_model import peel, require_faiss, with_centroids, write_empty_model
from hybridindex.index.filters.write_attributes import write_ordered
from hybridindex.index.ivf import IVFIndex
from hybridindex.index.live.added import AddedLists
from hybridindex.index.live.convert import converted
from hybridindex.index.log.change_log import CHANGE_LOG, LogFile
from hybridindex.index.opening import open_generation
from hybridindex.index.rabitq.codes import find_codes
from hybridindex.index.storage.beside import carry_shared
from hybridindex.index.storage.commit import Progress, commit_generation, no_progress
from hybridindex.index.storage.generation import GenerationWriter, OutFile, current_name
from hybridindex.index.storage.lists import ExtentWriter
from hybridindex.index.storage.manifest import LISTS_FILE, MODEL_FILE
from hybridindex.processes import usual_switch_interval
from hybridindex.types import F32, I32, I64, U8

__all__ = ["Compaction", "compact", "needs_compaction"]

_log = logging.getLogger(__name__)

#: Rows that came or went, in parts of the generation's, before it pays; and bytes that they take at least, or so many
#: times the generation's rows. Or bytes of attributes, where they are half of those of the rows.
_WORTH_SHARE, _WORTH_BYTES, _WORTH_TIMES, _WORTH_ATTRIBUTES = 0.3, 1 << 20, 2, 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """What became of an index."""

    #: The new generation, open.
    index: IVFIndex
    count: int
    n_split: int
    n_dissolved: int
    n_moved: int
    #: Of the files of the generation.
    nbytes: int
    seconds: float


def needs_compaction(index: IVFIndex) -> bool:
    """Whether so much came or went that lists should be written anew."""
    live = index.live.current()
    if live is None or not takes_rows(index):
        return False
    gone = 0 if live.deleted is None else len(live.deleted.ids)
    came = 0 if live.added is None else live.added.count
    changed = gone + came
    rows = index.count * index.code_size
    if live.added is not None and live.added.attributes.nbytes > max(_WORTH_ATTRIBUTES, rows // 2):
        return True
    if changed <= _WORTH_SHARE * max(index.count, 1):
        return False
    return changed * index.code_size > _WORTH_BYTES or changed > _WORTH_TIMES * index.count > 0


def compact(
    index: IVFIndex,
    *,
    progress: Progress | None = None,
    share: float = 1.0,
    apart: bool = False,
    thresholds: Thresholds | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> Compaction | None:
    """Writes the index anew; None: nothing had changed. For who holds the writer's claim.

    Args:
        share: of the time in which it may work; it sleeps for the rest.
        apart: most of the work is done by a process of the lowest priority, where one can be started.
        thresholds: when lists are split and dissolved.
        stopping: asked now and then; when it says so, nothing is compacted, and BuildError raised.

    Raises:
        UnsupportedIndexError: lists of this codec cannot be written anew. CorruptIndexError: rows are damaged.
        BuildError: another process builds, or the generation was replaced. DiskFullError: no room. In each case
        everything stays as it was.
    """
    index = index.rows
    refuse_unwritable(index)
    started, report, pace = time.monotonic(), progress or no_progress, Pace(share, stopping)
    state: dict[str, Any] = {}

    def prepare(folder: Path) -> None:
        state["index"] = _furnished(index, folder, state["order"], state["added"], report)

    def finish(folder: Path) -> None:
        _carry_over(index, state["index"], folder, state["number"])

    writing = GenerationWriter(index.path, replace=True, prepare=prepare, finish=finish)
    with index.live.keeping_log(), writing as writer:
        live = index.live.read_now()
        if index.live.is_superseded or current_name(index.path) != index.integrity.folder.name:
            # Another process compacted it before this one had the locks: what was logged since is not in its log.
            raise (SupersededError if index.live.is_superseded else BuildError)(
                f"{index.integrity.folder.name} of {index.path} was replaced; open the index again, and compact that"
            )
        if live is None:
            return None
        _look_again(index)
        state["number"] = live.number
        state["added"] = live.added
        with index.integrity.all_whole():
            rows = LeftRowsAtPace(index, live, pace)
            elsewhere = partial(shape_elsewhere, rows, live.number, stopping=stopping)
            shape = _shape(rows, thresholds or Thresholds(), elsewhere if apart else None, report)
            lists, table, state["order"] = _write_lists(writer, rows, shape, report)
        _write_model(index, writer, None if shape is None else shape.centroids)
        nlist = len(table)
        notes = {
            **index.manifest.notes,
            "source": "build" if index.manifest.notes.get("source") == "build" else "compact",
            "changes": live.number,
            "nlist_ratio": nlist_ratio(index),
            "lineage": index.manifest.lineage,
            "compacted": index.fingerprint,
            "came": 0 if live.added is None else live.added.count,
            "largest_id": max(largest_id(index, live.added), index.live.added.largest_id),
            "parents": None if shape is None or _is_same(shape, index.nlist) else shape.parents.tolist(),
        }
        spec = dataclasses.replace(index.manifest, nprobe=_same_part(index.nprobe, index.nlist, nlist), notes=notes)
        try:
            manifest = commit_generation(writer, lists, table, spec, progress=report)
        except BaseException:
            if (opened := state.get("index")) is not None and not writer.is_current:
                opened.close()
            raise
    new: IVFIndex = state["index"]
    new.live.read_now()
    index.live.follow(new.live, is_own=True)
    done = Compaction(
        index=new,
        count=manifest.count,
        n_split=0 if shape is None else shape.n_split,
        n_dissolved=0 if shape is None else shape.n_dissolved,
        n_moved=0 if shape is None else shape.n_moved,
        nbytes=sum(entry.size for entry in manifest.files.values()),
        seconds=time.monotonic() - started,
    )
    _log.info(
        "%s: compacted %d rows into generation %d in %.1f s (%d lists split, %d dissolved, %d rows moved)",
        index.path, done.count, new.generation, done.seconds, done.n_split, done.n_dissolved, done.n_moved,
    )  # fmt: skip
    return done


def _look_again(index: IVFIndex) -> None:
    """For attributes and codes that others gave since the index was opened, or that could not be read then: the new
    generation would have none. With the writers' lock held.

    Raises:
        CorruptIndexError: attributes are there, and cannot be read.
    """
    folder = index.integrity.folder
    attributes, problem = find_attributes(folder, index.manifest)
    if problem:
        raise CorruptIndexError(f"{index.path} is not compacted, which would lose its attributes: {problem}")
    known = index.attributes
    if known is None or attributes is None or known.spec != attributes.spec:
        index.attributes = attributes
    index.attributes_problem = ""
    codes, problem = find_codes(folder, index.manifest, index.list_sizes, lambda: index.centroids, whole=False)
    had = index.rabitq
    if index.rabitq_problem or codes is None or had is None or codes.spec != had.spec:
        index.rabitq, index.rabitq_problem = codes, problem


def _shape(
    rows: LeftRowsAtPace,
    thresholds: Thresholds,
    elsewhere: Callable[[Thresholds], Shape | None] | None,
    report: Progress,
) -> Shape | None:
    found = None
    if elsewhere is not None and reshapes(rows):
        with usual_switch_interval():
            found = elsewhere(thresholds)
    return shape_of(rows, thresholds, report) if found is None else found


def _same_part(nprobe: int, before: int, nlist: int) -> int:
    """As large a part of the lists as ``nprobe`` was."""
    return max(1, min(nlist, round(nprobe * nlist / before)))


def _is_same(shape: Shape, nlist: int) -> bool:
    return len(shape.parents) == nlist and bool((shape.parents == np.arange(nlist)).all())


def _write_lists(
    writer: GenerationWriter, rows: LeftRowsAtPace, shape: Shape | None, report: Progress
) -> tuple[OutFile, I64, I64]:
    """The file, its table, and where each of its rows was: (count, 2) int64 old list and position, as
    :meth:`LeftRows.of` says it, in the order of the lists."""
    index = rows.index
    assigned: I32 = shape.lists if shape is not None else np.repeat(np.arange(index.nlist, dtype=np.int32), rows.sizes)
    nlist = index.nlist if shape is None else len(shape.centroids)
    out = writer.open_file(LISTS_FILE)
    extents = ExtentWriter(out, np.bincount(assigned, minlength=nlist).astype(np.int64), index.code_size)
    was = np.empty((len(assigned), 2), dtype=np.int64)
    at, parts, nbytes = 0, list[tuple[U8, I64]](), 0
    begun = 0
    for list_id in range(index.nlist):
        codes, ids, where = rows.of(list_id)
        was[at : at + len(ids), 0], was[at : at + len(ids), 1] = list_id, where
        at += len(ids)
        parts.append((codes, ids))
        nbytes += codes.nbytes
        if nbytes > CHUNK_BYTES or list_id + 1 == index.nlist:
            codes, ids = (np.concatenate(each) for each in zip(*parts, strict=True))
            extents.add(assigned[begun:at].astype(np.int64), codes, ids)
            begun, parts, nbytes = at, [], 0
            report("write", at, len(assigned))
            rows.pace.rest()
    return out, extents.table, was[np.argsort(assigned, kind="stable")]


def _write_model(index: IVFIndex, writer: GenerationWriter, centroids: F32 | None) -> None:
    if centroids is None:
        writer.open_file(MODEL_FILE).append(index.mapped_model())
        return
    faiss = require_faiss()
    model = peel(faiss.deserialize_index(np.array(index.mapped_model()), faiss.IO_FLAG_SKIP_PRECOMPUTE_TABLE))[0]
    with_centroids(model, centroids)
    write_empty_model(model.outer, model.ivf, writer.open_file(MODEL_FILE).append)


def _furnished(index: IVFIndex, folder: Path, order: I64, added: AddedLists | None, report: Progress) -> IVFIndex:
    """The new generation, open, with attributes and codes where the old one has them. It is not the current one."""
    carry_shared(index.path, index.integrity.folder, folder)
    new = open_generation(index.path, folder)
    try:
        if index.attributes is not None:
            write_ordered(new, _attributes_in(index, order, added))
            if new.attributes is None:
                raise UnreadableIndexError(new.attributes_problem)
            _ = new.attributes.columns  # as searches will read them: not after this became the current one
        if index.rabitq is not None:
            spec = index.rabitq.spec
            compress(new, spec.bits, seed=spec.seed, progress=report)
    except BaseException:
        new.close()
        raise
    return new


def _attributes_in(index: IVFIndex, order: I64, added: AddedLists | None) -> Any:
    """A pyarrow table with a record for each row of the new generation, in its order."""
    import pyarrow as pa

    assert index.attributes is not None
    schema = schema_of(index.attributes.spec.columns)
    tables = [pa.table(index.attributes.columns).cast(schema)]
    first = np.concatenate([[0], np.cumsum(index.list_sizes)])
    lists, at = order[:, 0], order[:, 1]
    came = at >= index.list_sizes[lists]
    record = first[lists] + at
    if added is not None:
        tables.append(added.attributes.table(schema))
        start = np.cumsum(added.sizes) - added.sizes
        place = start[lists[came]] + at[came] - index.list_sizes[lists[came]]
        record[came] = index.count + added.numbers[place]
    return gathered(tables, record)


def _carry_over(old: IVFIndex, new: IVFIndex, folder: Path, number: int) -> None:
    """Makes what was logged after change ``number`` the log of the new generation. Nobody logs anything meanwhile."""
    if not filesystem.is_dir(old.integrity.folder):
        raise BuildError(f"{old.integrity.folder.name} of {old.path} was replaced and removed")
    later = old.live.file.read().after(number)
    assert later is not None, "the log was written anew meanwhile"
    if not later:
        return
    log = LogFile(
        folder / CHANGE_LOG,
        rows_xxh3_128=new.manifest.files[LISTS_FILE].xxh3_128,
        code_size=new.code_size,
        nlist=new.nlist,
        first=number,
    )
    log.append([converted(change, new) for change in later], log.read().place)
