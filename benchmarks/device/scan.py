"""The device scan against the device's own memory, and against a dense product over everything that is resident.

Lists of random rows are made where the arena is, on scattered pages; nothing is built or copied. Answers are checked
first, of a few queries of each batch: each returned row's distance against float64, and that none better was left out.
Then, per batch:

- *scan*: a whole ``scan``, from host arrays to host arrays, tables and copies included; wall clock. *scan of a sum*:
  the time that torch takes to sum as many bytes of the arena, over that.
- *kernels*: distances and selection alone, tables made before; CUDA events. Eight batches take turns, so that the
  cache does not serve one from the last. They have four times the product's scratch, so that no batch takes two tiles.
- *GB/s*: unique bytes (code bytes of the lists that the batch probes, each once) over the kernels' time. *of a sum*:
  that of the sum over the kernels'.
- *graph*: the same launches replayed from a CUDA graph: what is left when launching costs the host nothing.
- *dense*: torch's product of the queries with as many rows as are resident and topk over the result; CUDA events. *over
  dense*: its time over the kernels'.

The main shapes are batches of 1, 8 and 64 that probe 256 lists each, drawn evenly, of 1,000 rows of 768 dimensions, by
inner product, for each codec. Then one thing is another one: the metric; lists of 100 rows; of 10,000, a tenth as many;
384 dimensions; batches of 64 in which 1, 4 and 18 queries probe the same list; and probes of neighbouring requests of a
real log (:mod:`benchmarks.device.calls.probes`).

Targets, for every shape: 40, 70 and 70 % of a sum by the clock at batch 1, 8 and 64; of the kernels alone 50, 70 and
70 %, and faster than dense.

Without a GPU it runs to its end on the stand-in device with a few megabytes and a hundredth of the rows a list, to show
that it runs. Such timings say nothing of a GPU, and are printed as what they are.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.common.measure import Attempts, arguments, show, write
from benchmarks.device.calls import probes as draw
from benchmarks.device.targets import KERNEL_TARGETS, SCAN_NPROBE, SCAN_SHAPES, SCAN_TARGETS
from hybridindex.index.codec import DeviceCodec
from hybridindex.paging import PageGeometry, scratch_for_budget, usual_page_bytes
from hybridindex.tiers.contract.residency import Residency, ResidencyStore
from hybridindex.tiers.paged.arena import PageArena
from hybridindex.tiers.paged.page_scanner import PageScanner
from hybridindex.tiers.paged.torch_scanner import TorchScanner
from hybridindex.tiers.paged.triton_scanner import TritonScanner, Workspace
from hybridindex.types import F32, I64, Metric

K = 10
TURNS = 8
#: Queries of a batch whose answers are checked: float64 takes its time.
CHECKED = 4
#: Rows that are compared in float64 at once.
_ROWS_AT_ONCE = 65_536
#: Of a distance, over the sum of its terms: torch's float32 sum of 768 squares was seen to err by 1.6e-6. TF32 would
#: take a hundred times as much.
ROUNDED = 4e-6
#: Of the table: heading, and key of a row.
COLUMNS = (
    ("shape", "shape"),
    ("codec", "codec"),
    ("dim", "dim"),
    ("batch", "batch"),
    ("nprobe", "nprobe"),
    ("reuse", "reuse"),
    ("unique bytes", "unique_bytes"),
    ("scan ms", "scan_ms"),
    ("scan of a sum", "scan_of_a_sum"),
    ("kernels ms", "kernels_ms"),
    ("GB/s", "gbps"),
    ("sum GB/s", "sum_gbps"),
    ("of a sum", "of_a_sum"),
    ("graph", "graph_of_a_sum"),
    ("dense ms", "dense_ms"),
    ("over dense", "over_dense"),
    ("wrong", "wrong"),
    ("of", "checked"),
)
BYTES = {"f32": 4, "f16": 2, "bf16": 2, "sq8": 1}
#: Dimensions, rows of a list, and which of :data:`SCAN_SHAPES` such lists are for.
SETS = (
    (768, 1000, ("main", "l2", "reuse 1", "reuse 4", "reuse 18", "request log")),
    (768, 100, ("100 rows a list",)),
    (768, 10_000, ("10,000 rows a list",)),
    (384, 1000, ("384 dimensions",)),
)
#: Of the largest lists fewer are probed: as many bytes as of the others.
_LARGE_NPROBE = 26
#: How many times larger the lists of the sets are than those of the stand-in.
_SMALLER = 100
#: Queries and probes.
Batch = tuple[F32, I64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentLists:
    """What a scanner asks of an index, of lists that exist on the device alone. Row r of list l has id l << 32 | r."""

    metric: Metric
    scan_dim: int
    list_sizes: I64
    codec: DeviceCodec
    arena: PageArena
    residency: Residency

    @property
    def nlist(self) -> int:
        return len(self.list_sizes)

    def ids_at(self, lists: I64, rows: I64) -> I64:
        return lists << 32 | rows

    @property
    def code_size(self) -> int:
        return self.codec.code_size

    @property
    def rows(self) -> Any:
        """(n, dim) torch view of every row of the arena, those of half empty pages included; bytes of sq8."""
        import torch

        kinds = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "sq8": torch.uint8}
        return self.arena.data.view(-1).view(kinds[self.codec.kind]).view(-1, self.scan_dim)

    def rows_of(self, ids: I64) -> I64:
        """Where the rows with these ids lie among :attr:`rows`."""
        found, per_page = [], self.arena.geometry.rows_per_page
        for one in ids.tolist():
            pages, row = self.residency.list_pages[one >> 32], one & 0xFFFFFFFF
            assert pages is not None
            found.append(int(pages[row // per_page]) * per_page + row % per_page)
        return np.array(found, dtype=np.int64)

    @property
    def k(self) -> int:
        """How many rows a scan finds."""
        return K

    def scanner(self, scratch_bytes: int) -> PageScanner:
        made: type[PageScanner] = TorchScanner if TritonScanner.unsupported(self.arena) else TritonScanner
        return made(*self.scanner_arguments(scratch_bytes))

    def repeatable(self, scratch_bytes: int) -> tuple[PageScanner, RepeatableWorkspace]:
        """A scanner whose launches can be made again."""
        scanner = TritonScanner(*self.scanner_arguments(scratch_bytes))
        scanner.workspace = workspace = RepeatableWorkspace(self.arena, self.codec, scratch_bytes)
        return scanner, workspace

    def scan(self, scanner: PageScanner, queries: F32, probes: I64) -> tuple[F32, I64]:
        return scanner.scan(queries, probes, np.zeros(probes.shape, np.float32), self.k)

    def wrong(self, queries: F32, probes: I64, found: tuple[F32, I64]) -> int:
        """How many queries have a wrong answer."""
        return wrong_answers(self, queries, probes, *found)

    def dense_seconds(self, batches: list[Batch], repeats: int) -> float | None:
        """Seconds of a product with every row, and topk; None of bytes, which torch multiplies with nothing."""
        import torch

        if self.codec.kind == "sq8":
            return None
        # Not the room that is left on half empty pages.
        rows = self.rows[: int(self.list_sizes.sum())]
        on_device = [torch.from_numpy(queries).to(rows.device, rows.dtype) for queries, _ in batches]
        return seconds_of(lambda turn: (on_device[turn] @ rows.T).topk(K, dim=1), rows.device, max(2, repeats // 4))

    def scanner_arguments(self, scratch_bytes: int) -> tuple[Any, ...]:
        return self, self.codec, self.arena, self.residency, 0, scratch_bytes


def make_sizes(n: int, seed: int, list_rows: int | None = None) -> I64:
    """Log-normal rows of lists, about ``n`` in all; ``list_rows`` in each on average, or 4 * sqrt(n) lists."""
    nlist = int(4 * np.sqrt(n)) if list_rows is None else max(2, n // list_rows)
    share = np.random.default_rng(seed).lognormal(0.0, 0.4, nlist)
    sizes: I64 = np.maximum(1, (share / share.sum() * n).astype(np.int64))
    return sizes


def place(sizes: I64, device: Any, geometry: PageGeometry, seed: int) -> tuple[PageArena, Residency]:
    """An arena with lists of ``sizes`` rows on pages in random order."""
    n_pages = geometry.pages_for(sizes)
    arena = PageArena(device, geometry, int(n_pages.sum()))
    order = np.random.default_rng(seed + 1).permutation(arena.pages.n_pages).astype(np.int32)
    ends = np.cumsum(n_pages)
    store = ResidencyStore(len(sizes), lambda _device, _pages: None)
    store.publish({i: (0, pages) for i, pages in enumerate(np.split(order, ends[:-1]))})
    return arena, store.current


def make_lists(
    device: Any, kind: Any, dim: int, metric: Metric, nbytes: int, seed: int = 0, *, list_rows: int | None = None
) -> ResidentLists:
    """About ``nbytes`` of normal rows in lists as :func:`make_sizes` says, on pages in random order."""
    import torch

    code_size = dim * BYTES[kind]
    codec = DeviceCodec(kind=kind, dim=dim, code_size=code_size, by_residual=False)
    if kind == "sq8":
        codec = replace(codec, vmin=np.full(dim, -4, np.float32), vdiff=np.full(dim, 8, np.float32))
    sizes = make_sizes(nbytes // code_size, seed, list_rows)
    geometry = PageGeometry.for_code_size(code_size, usual_page_bytes(kind, code_size, sizes))
    arena, residency = place(sizes, device, geometry, seed)
    lists = ResidentLists(metric=metric, scan_dim=dim, list_sizes=sizes, codec=codec, arena=arena, residency=residency)
    generator = torch.Generator(device).manual_seed(seed)
    for part in lists.rows.split(1 << 18):
        if kind == "sq8":
            part.random_(0, 256, generator=generator)
        else:
            part.copy_(torch.randn(part.shape, generator=generator, device=device))
    return lists


def make_batch(
    lists: ResidentLists, n: int, nprobe: int, rng: np.random.Generator, shape: str = "main"
) -> tuple[F32, I64]:
    """n normal queries that probe ``nprobe`` lists each, drawn as one of :data:`SCAN_SHAPES` has it."""
    nlist, nprobe = lists.nlist, min(nprobe, lists.nlist)
    if shape == "request log":
        probes = draw.of_log(nlist, n, nprobe, rng)
    elif shape.startswith("reuse "):
        probes = draw.with_reuse(nlist, n, nprobe, int(shape.removeprefix("reuse ")), rng)
    else:
        probes = draw.even(nlist, n, nprobe, rng)
    return rng.standard_normal((n, lists.scan_dim), dtype=np.float32), probes


def wrong_answers(lists: ResidentLists, queries: F32, probes: I64, distances: F32, ids: I64) -> int:
    """Queries with a wrong distance, a better row left out, or a row of a list that they do not probe."""
    per_page, wrong = lists.arena.geometry.rows_per_page, 0
    sign = -1.0 if lists.metric == "ip" else 1.0
    for x, probed, found, at in zip(queries, probes, distances, ids, strict=True):
        places, names = [], []
        for i in probed.tolist():
            pages = lists.residency.list_pages[i]
            assert pages is not None
            size = int(lists.list_sizes[i])
            places.append((pages.astype(np.int64)[:, None] * per_page + np.arange(per_page)).ravel()[:size])
            names.append(i << 32 | np.arange(size))
        exact, terms = exact_distances(lists, np.concatenate(places), x)
        name = np.concatenate(names)
        own_at = [np.flatnonzero(name == one) for one in at]
        own = np.array([exact[place[0]] if len(place) else np.nan for place in own_at])
        near = ROUNDED * np.array([terms[place[0]] if len(place) else np.nan for place in own_at])
        kth = np.partition(sign * exact, min(len(at), len(exact)) - 1)[min(len(at), len(exact)) - 1]
        right = (np.abs(found - own) <= near) & (sign * own <= kth + near)
        wrong += not bool(right.all() and len(np.unique(at)) == len(at))
    return wrong


def exact_distances(lists: ResidentLists, where: I64, query: F32) -> tuple[Any, Any]:
    """Of rows of the arena, in float64, and how large the numbers are that they are the sums of: (n,) each."""
    import torch

    device, codec = lists.rows.device, lists.codec
    x = torch.from_numpy(query).to(device).double()
    found = []
    for start in range(0, len(where), _ROWS_AT_ONCE):
        rows = lists.rows[torch.from_numpy(where[start : start + _ROWS_AT_ONCE]).to(device)].double()
        size = rows.abs()
        if codec.kind == "sq8":
            scale, offset = (torch.from_numpy(v).to(device).double() for v in (codec.scale, codec.offset))
            rows = offset + scale * rows
            size = rows.abs() + offset.abs()
        if lists.metric == "ip":
            found.append((rows @ x, size @ x.abs()))
        else:
            away = rows - x
            found.append(((away * away).sum(dim=1), ((size + x.abs()) * away.abs()).sum(dim=1)))
    exact, terms = (torch.cat(both).cpu().numpy() for both in zip(*found, strict=True))
    return exact, terms


def seconds_of(run: Callable[[int], object], device: Any, repeats: int) -> float:
    """Median seconds of ``run(turn)``: by CUDA events on a GPU, by the clock elsewhere."""
    import torch

    taken = []
    for turn in range(-TURNS, repeats):
        if device.type == "cuda":
            event: Any = torch.cuda.Event
            before, after = event(enable_timing=True), event(enable_timing=True)
            before.record()
            run(turn % TURNS)
            after.record()
            after.synchronize()
            seconds = before.elapsed_time(after) / 1e3
        else:
            start = time.perf_counter()
            run(turn % TURNS)
            seconds = time.perf_counter() - start
        if turn >= 0:
            taken.append(seconds)
    return float(np.median(taken))


def measure(
    lists: ResidentLists, n: int, nprobe: int, repeats: int, scratch_bytes: int, shape: str = "main"
) -> dict[str, Any]:
    """One row: times of one shape of batch, after its answers were checked."""
    import torch

    rng = np.random.default_rng(n * 1000 + nprobe)
    device, arena = lists.arena.device, lists.arena
    batches = [make_batch(lists, n, nprobe, rng, shape) for _ in range(TURNS)]
    scanner = lists.scanner(scratch_bytes)
    distances, ids = lists.scan(scanner, *batches[0])
    checked = min(n, CHECKED)
    wrong = lists.wrong(batches[0][0][:checked], batches[0][1][:checked], (distances[:checked], ids[:checked]))

    def scan(turn: int) -> None:
        lists.scan(scanner, *batches[turn])

    walls = []
    for turn in range(repeats + TURNS):
        start = time.perf_counter()
        scan(turn % TURNS)
        walls.append(time.perf_counter() - start)
    unique = float(np.mean([lists.list_sizes[np.unique(p)].sum() for _, p in batches]) * lists.codec.code_size)
    probed = float(np.mean([lists.list_sizes[p].sum() for _, p in batches]) * lists.codec.code_size)
    words = arena.data.view(-1).view(torch.float32)
    length = int(unique) // 4
    room = max(1, len(words) - length)
    summed = seconds_of(lambda turn: words[turn * room // TURNS :][:length].sum(), device, repeats)
    dense = lists.dense_seconds(batches, repeats)
    kernels, graph, graph_reason = None, None, ""
    if scanner.name == "triton" and (prepared := prepare(lists, batches, 4 * scratch_bytes)):
        kernels = seconds_of(replay(prepared), device, repeats)
        graph, graph_reason = graph_seconds(prepared, device, repeats)
    return {
        "shape": shape,
        "codec": lists.codec.kind,
        "dim": lists.scan_dim,
        "metric": lists.metric,
        "batch": n,
        "nprobe": batches[0][1].shape[1],
        "lists": lists.nlist,
        "list_rows": float(lists.list_sizes.mean()),
        "k": lists.k,
        "reuse": probed / unique,
        "unique_bytes": unique,
        "resident_bytes": arena.nbytes,
        "scanner": scanner.name,
        "scan_ms": float(np.median(walls[TURNS:])) * 1e3,
        "scan_gbps": unique / float(np.median(walls[TURNS:])) / 1e9,
        "scan_of_a_sum": summed / float(np.median(walls[TURNS:])),
        "kernels_ms": None if kernels is None else kernels * 1e3,
        "gbps": None if kernels is None else unique / kernels / 1e9,
        "sum_ms": summed * 1e3,
        "sum_gbps": unique / summed / 1e9,
        "of_a_sum": None if kernels is None else summed / kernels,
        "graph_ms": None if graph is None else graph * 1e3,
        "graph_of_a_sum": None if graph is None else summed / graph,
        "graph_reason": graph_reason,
        "dense_ms": None if dense is None else dense * 1e3,
        "over_dense": None if kernels is None or dense is None else dense / kernels,
        "wrong": wrong,
        "checked": checked,
    }


class RepeatableWorkspace(Workspace):
    """Remembers what a scan launched, and launches it again: the tables still lie in the scratch."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.launched: list[tuple[Any, ...]] = []
        self.selected: list[tuple[Any, ...]] = []

    def launch(self, *args: Any) -> None:
        self.launched.append(args)
        super().launch(*args)

    def select(self, *args: Any) -> int:
        self.selected.append(args)
        return super().select(*args)

    def again(self) -> None:
        super().launch(*self.launched[0])
        super().select(*self.selected[0])


def prepare(lists: ResidentLists, batches: list[Batch], scratch_bytes: int) -> list[RepeatableWorkspace]:
    """Each batch's launches, with a scratch of its own; none where a batch takes several tiles."""
    prepared = []
    for queries, probes in batches:
        scanner, own = lists.repeatable(scratch_bytes)
        lists.scan(scanner, queries, probes)
        if len(own.launched) != 1:
            return []
        prepared.append(own)
    return prepared


def replay(prepared: list[RepeatableWorkspace]) -> Callable[[int], None]:
    """Launches the batch of a turn again."""
    return lambda turn: prepared[turn].again()


def graph_seconds(prepared: list[RepeatableWorkspace], device: Any, repeats: int) -> tuple[float | None, str]:
    """Seconds of a batch's launches replayed from a CUDA graph; None and why where there is none."""
    import torch

    if device.type != "cuda":
        return None, "no GPU"
    graphs = []
    try:
        for workspace in prepared:
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                workspace.again()
        return seconds_of(lambda turn: graphs[turn].replay(), device, repeats), ""
    except Exception as error:  # noqa: BLE001 - one figure less; the others stand
        return None, f"capture failed: {error!r}"


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", default="", help="cuda:N, or cpu for the stand-in; the first GPU where there is one"
    )
    parser.add_argument("--gigabytes", type=float, default=4.5, help="resident bytes on a GPU")
    parser.add_argument("--repeats", type=int, default=40)


def main() -> None:
    args = arguments(__doc__, _options)
    import torch

    from hybridindex.tiers.contract.devices import resolve_device

    device, info = resolve_device(args.device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    nbytes = 8 << 20 if info.stand_in else int(args.gigabytes * 1e9)
    repeats = 2 if info.stand_in else args.repeats
    if info.stand_in:
        sys.stdout.write("no GPU: 8 MB on the stand-in device, to show that this runs; no figure here says anything\n")
    rows: list[dict[str, Any]] = []
    attempts = Attempts()

    def save(*, complete: bool = False) -> None:
        targets = {"scan_of_a_sum": SCAN_TARGETS, "of_a_sum": KERNEL_TARGETS, "over_dense": 1.0}
        result = {"device": info.label, "stand_in": info.stand_in, "complete": complete, "k": K, "targets": targets,
                  "log": draw.log_source(), "rows": rows, "failed": attempts.failed}  # fmt: skip
        write(args.json, "device_scan", result)

    scratch = scratch_for_budget(1 << 40)
    for dim, list_rows, shapes in SETS:
        fewer = max(1, list_rows // _SMALLER) if info.stand_in else list_rows
        nprobe = SCAN_NPROBE if list_rows < 10_000 else _LARGE_NPROBE
        for kind in BYTES:
            with attempts(f"{kind}, d={dim}, {list_rows} rows a list"):
                lists = make_lists(device, kind, dim, "ip", nbytes, list_rows=fewer)
                for shape in shapes:
                    own = replace(lists, metric="l2") if shape == "l2" else lists
                    for n in SCAN_SHAPES[shape]:
                        with attempts(f"{kind}, {shape}, batch {n}"):
                            rows.append(measure(own, n, nprobe, repeats, scratch, shape))
                        save()
                del lists, own
    save(complete=not attempts.failed)
    if rows:
        resident = f"{rows[0]['resident_bytes'] / 1e9:.2f} GB resident"
        show(
            f"device scan on {info.label}, {rows[0]['scanner']} scanner, {resident}",
            tuple(name for name, _ in COLUMNS),
            [tuple("-" if r[key] is None else r[key] for _, key in COLUMNS) for r in rows],
        )
    attempts.end()
    if any(r["wrong"] for r in rows):
        raise SystemExit("wrong answers")


if __name__ == "__main__":
    main()
