"""The Triton scan against the oracle: every codec and metric, both kernels, tiles, scattered pages, odd shapes."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import weakref
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridindex.errors import InvalidInputError, OutOfBudgetError
from hybridindex.index import build
from hybridindex.index.codec import DeviceCodec
from hybridindex.paging import PageGeometry
from hybridindex.tiers.contract.residency import ResidencyStore
from hybridindex.tiers.paged import launch_shapes
from hybridindex.tiers.paged import triton_scanner as device_triton
from hybridindex.tiers.paged.arena import PageArena
from hybridindex.tiers.paged.device_tier import DeviceTier
from hybridindex.tiers.paged.native_scanner import NativePageScanner
from hybridindex.tiers.paged.tables.scan_tables import GROUP
from hybridindex.tiers.paged.torch_scanner import TorchScanner
from hybridindex.tiers.paged.triton_scanner import TritonScanner, Workspace
from tests.clustered import clustered
from tests.oracle import ROUNDED, check_answer
from tests.tiers.paged.scanning import scanning
from tests.tiers.triton_here import require_triton

CODECS = ("flat", "fp16", "bf16", "sq8")
METRICS = ("ip", "l2")


@pytest.fixture
def small(tmp_path):
    """``small(codec, metric, **options)``: 240 vectors of 20 dimensions in 6 lists, 4 KiB of vectors a list."""
    made = []

    def factory(codec="flat", metric="l2", *, n=240, dim=20, nlist=6, offset=0.0, vectors=None):
        vectors = clustered(n, dim, n_centers=8, seed=1, offset=offset) if vectors is None else vectors
        made.append(build(vectors, tmp_path / str(len(made)), nlist=nlist, metric=metric, codec=codec))
        return made[-1]

    yield factory
    for index in made:
        index.close()


def checked(index, scanner, queries, probes, k):
    """A scan whose answer was checked; ties in order of ids."""
    distances, ids = scanner.scan(queries, probes, np.zeros(probes.shape, np.float32), k)
    order = np.lexsort((ids, -distances if index.metric == "ip" else distances, ids < 0), axis=1)
    distances, ids = np.take_along_axis(distances, order, 1), np.take_along_axis(ids, order, 1)
    check_answer(index, queries, probes, k, distances, ids, precise=ROUNDED)
    return distances, ids


def everything(index, n, *, seed=3, offset=0.0):
    """n queries that probe every list, but for a few."""
    queries = clustered(n, index.scan_dim, n_centers=8, seed=seed, offset=offset)
    probes = np.tile(np.arange(index.nlist), (n, 1))
    probes[np.random.default_rng(seed).random(probes.shape) < 0.15] = -1
    return queries, probes


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("n", [2, 12])
def test_right_with_few_and_many_queries_a_list(small, device, codec, metric, n):
    index = small(codec, metric)
    with scanning(index, device) as scanner:
        checked(index, scanner, *everything(index, n), 5)


@pytest.mark.parametrize("codec", CODECS)
def test_products_of_many_queries_are_as_exact_as_float32(small, device, codec, monkeypatch):
    monkeypatch.setitem(device_triton._HEAVY_FROM, codec.replace("flat", "f32").replace("fp16", "f16"), 1)
    index = small(codec, "ip", n=60, nlist=1)
    queries = clustered(4, 20, seed=5)
    with scanning(index, device) as scanner:
        distances, ids = scanner.scan(queries, np.zeros((4, 1), np.int64), np.zeros((4, 1), np.float32), 60)
    rows = index.decode_list(0).astype(np.float64)[np.argsort(index.list_ids(0))]
    products = queries.astype(np.float64)[:, None, :] * rows[np.searchsorted(np.sort(index.list_ids(0)), ids)]
    assert (np.abs(distances - products.sum(axis=2)) <= 1e-6 * np.abs(products).sum(axis=2)).all()


@pytest.mark.parametrize("codec", CODECS)
def test_more_queries_than_a_group(small, device, codec, monkeypatch):
    monkeypatch.setitem(device_triton._HEAVY_FROM, "f32", 5)
    index = small(codec, "ip", n=60, nlist=2)
    with scanning(index, device) as scanner:
        checked(index, scanner, *everything(index, 2 * GROUP + 3), 3)


@pytest.mark.parametrize("dim", [1, 7, 16, 33, 72])
@pytest.mark.parametrize("codec", ["flat", "bf16", "sq8"])
def test_any_number_of_dimensions(small, device, codec, dim):
    index = small(codec, "ip", n=40, dim=dim, nlist=2)
    with scanning(index, device, page_bytes=16 * index.code_size) as scanner:
        checked(index, scanner, *everything(index, 6), 3)


@pytest.mark.parametrize(("metric", "n"), [("ip", 2), ("ip", 8), ("l2", 2)])
@pytest.mark.parametrize("codec", CODECS)
def test_rows_longer_than_a_program_holds(small, device, codec, metric, n, monkeypatch):
    monkeypatch.setitem(device_triton._HEAVY_FROM, "f32", 5)
    index = small(codec, metric, n=48, dim=1100, nlist=2)
    with scanning(index, device, page_bytes=16 * index.code_size) as scanner:
        scanner.workspace._ints.fill_(0x7FC00000)
        checked(index, scanner, *everything(index, n), 7)


@pytest.mark.parametrize(("codec", "n"), [("flat", 3), ("flat", 12), ("sq8", 2), ("sq8", 8)])
@pytest.mark.parametrize("metric", METRICS)
def test_residual_codes_have_their_centroid_added(small, device, tmp_path, metric, codec, n):
    import faiss

    from hybridindex.api import from_faiss

    vectors = clustered(240, 20, n_centers=8, seed=1)
    name = faiss.METRIC_INNER_PRODUCT if metric == "ip" else faiss.METRIC_L2
    quantizer = faiss.IndexFlat(20, name)
    kind = faiss.ScalarQuantizer.QT_8bit if codec == "sq8" else faiss.ScalarQuantizer.QT_fp16
    ivf = faiss.IndexIVFScalarQuantizer(quantizer, 20, 6, kind, name, True)
    ivf.train(vectors)
    ivf.add(vectors)
    faiss.write_index(ivf, str(tmp_path / "x.faiss"))
    index = from_faiss(tmp_path / "x.faiss", tmp_path / "x").ivf
    assert index.device_codec().by_residual
    with scanning(index, device) as scanner:
        checked(index, scanner, *everything(index, n), 5)
    index.close()


@pytest.mark.parametrize("codec", ["flat", "sq8"])
def test_data_far_from_the_origin(small, device, codec):
    index = small(codec, "l2", offset=300.0)
    with scanning(index, device) as scanner:
        checked(index, scanner, *everything(index, 3, offset=300.0), 10)


@pytest.mark.parametrize(("scratch", "k"), [(6_000, 3), (6_500, 17), (9_300, 200)])
def test_a_tiny_scratch_is_scanned_in_tiles_with_the_same_answer(small, device, scratch, k, monkeypatch):
    index = small()
    queries, probes = everything(index, 5)
    # The interpreter's time goes by pages.
    with scanning(index, device, page_bytes=2048) as scanner:
        whole = checked(index, scanner, queries, probes, k)
    tiles = []
    scan = device_triton.Workspace.scan
    monkeypatch.setattr(device_triton.Workspace, "scan", lambda self, *a: tiles.append(a[1]) or scan(self, *a))
    with scanning(index, device, scratch=scratch, page_bytes=2048) as scanner:
        cut = checked(index, scanner, queries, probes, k)
    assert len(tiles) > 2
    assert any(one.first_query + one.n_queries > other.first_query for one, other in itertools.pairwise(tiles)), (
        "no query was cut in two"
    )
    for one, other in zip(whole, cut, strict=True):
        np.testing.assert_array_equal(one, other)


#: (codec, metric, rows, columns of a block): light and heavy kernels; rows that a light program takes in two blocks.
SOME = [("flat", "ip", 48, 1024), ("sq8", "ip", 240, 1024), ("flat", "l2", 48, 16)]


@pytest.mark.parametrize(("codec", "metric", "n", "columns"), SOME)
def test_what_lies_in_the_scratch_before_a_scan_does_not_matter(small, device, codec, metric, n, columns, monkeypatch):
    """Of an earlier scan, or of whoever had the memory before: a number, no number, infinity, the smallest distance."""
    monkeypatch.setattr(launch_shapes, "_MOST_COLUMNS", columns)
    index = small(codec, metric, n=n, nlist=max(2, n // 40))
    queries, probes = everything(index, 8)
    with scanning(index, device) as scanner:
        before = checked(index, scanner, queries, probes, 20)
        for word in (0, -1, 0x7FC00000, 0x7F800000, -0x00800000, 0x7FFFFFFF, -0x80000000):
            scanner.workspace._ints.fill_(word)
            for one, other in zip(before, checked(index, scanner, queries, probes, 20), strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("codec", "metric", "n", "columns"), SOME)
def test_the_order_in_which_programs_run_does_not_matter(small, codec, metric, n, columns, monkeypatch):
    require_triton("cpu")
    from triton.runtime.interpreter import interpreter_builder

    rng, places = np.random.default_rng(0), []
    set_grid_dim, set_grid_idx = interpreter_builder.set_grid_dim, interpreter_builder.set_grid_idx

    def in_any_order(*grid):
        set_grid_dim(*grid)
        every = list(itertools.product(*map(range, grid)))
        places[:] = [every[at] for at in rng.permutation(len(every))]

    monkeypatch.setattr(interpreter_builder, "set_grid_dim", in_any_order)
    monkeypatch.setattr(interpreter_builder, "set_grid_idx", lambda *_: set_grid_idx(*places.pop()))
    monkeypatch.setattr(launch_shapes, "_MOST_COLUMNS", columns)
    index = small(codec, metric, n=n, nlist=max(2, n // 40))
    queries, probes = everything(index, 8)
    with scanning(index, "cpu") as scanner:
        answers = [checked(index, scanner, queries, probes, 20) for _ in range(3)]
    assert not places
    for distances, ids in answers[1:]:
        np.testing.assert_array_equal(distances, answers[0][0])
        np.testing.assert_array_equal(ids, answers[0][1])


def test_a_list_longer_than_the_scratch(small, device):
    index = small(n=1300, dim=2, nlist=1)
    with scanning(index, device, scratch=5_000) as scanner:
        checked(index, scanner, clustered(2, 2, seed=4), np.zeros((2, 1), np.int64), 40)


def test_scratch_without_room_for_one_page_is_refused(small, device):
    index = small()
    with (
        scanning(index, device, scratch=30_000) as scanner,
        pytest.raises(OutOfBudgetError, match="too small for k 2048"),
    ):
        scanner.scan(*everything(index, 1), np.zeros((1, 6), np.float32), 2048)


@pytest.mark.parametrize("k", [1, 16, 17, 300])
def test_k_up_to_more_than_there_is(small, device, k):
    index = small(metric="ip")
    with scanning(index, device) as scanner:
        checked(index, scanner, *everything(index, 2), k)


def test_many_levels_of_selection(small, device):
    index = small("sq8", n=9000, dim=2, nlist=2)
    with scanning(index, device, page_bytes=8192) as scanner:
        for k in (3, 700):
            checked(index, scanner, clustered(2, 2, seed=4), np.array([[0, 1], [1, -1]]), k)


def test_empty_lists_and_queries_without_probes(small, device):
    index = small(vectors=np.repeat(clustered(4, 20, seed=1), 30, axis=0), nlist=6)
    assert (index.list_sizes == 0).any()
    probes = np.array([[-1, -1, -1], [0, 1, 2], [-1, -1, -1], [5, -1, 3], [-1, 4, -1], [-1, -1, -1]])
    with scanning(index, device) as scanner:
        checked(index, scanner, clustered(6, 20, seed=2), probes, 4)


def test_ties_keep_the_earlier_rows(small, device):
    index = small(vectors=np.ones((50, 20), np.float32), nlist=1)
    with scanning(index, device) as scanner:
        distances, ids = scanner.scan(np.zeros((1, 20), np.float32), np.array([[0]]), np.zeros((1, 1), np.float32), 20)
    assert (distances == 20).all()
    assert ids.tolist() == [index.list_ids(0)[:20].tolist()]


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("metric", METRICS)
def test_what_is_no_number_is_no_candidate(small, device, metric):
    vectors = clustered(60, 20, seed=1)
    vectors[::3] = 1e17
    index = small(metric=metric, vectors=vectors, nlist=1)
    query = np.full((1, 20), 3e30, np.float32)
    query[0, ::2] = -3e30
    answers = []
    for kind in (TritonScanner, TorchScanner):
        with scanning(index, device, kind=kind) as scanner:
            answers.append(scanner.scan(query, np.array([[0]]), np.zeros((1, 1), np.float32), 60))
    assert (answers[0][1] == -1).any()
    np.testing.assert_array_equal(answers[0][1] >= 0, answers[1][1] >= 0)
    assert not np.isnan(answers[0][0]).any()


def test_an_answer_does_not_depend_on_who_shares_the_batch(small, device):
    index = small("flat", "ip")
    queries, probes = everything(index, 6)
    with scanning(index, device, page_bytes=2048) as scanner:
        together = scanner.scan(queries, probes, np.zeros(probes.shape, np.float32), 5)
        for row in range(0, 6, 2):
            alone = scanner.scan(queries[row : row + 1], probes[row : row + 1], np.zeros((1, 6), np.float32), 5)
            np.testing.assert_array_equal(alone[0][0], together[0][row])
            np.testing.assert_array_equal(alone[1][0], together[1][row])


class Compiling:
    """A kernel that compiles, where only the interpreter runs: what it returns runs with these constants alone."""

    def __init__(self, kernel):
        self.kernel, self.asked, self.launched = kernel, 0, 0

    def __getitem__(self, grid):
        def launch(*args, **named):
            self.asked += 1
            self.kernel[grid](*args, **named)
            return Compiled(self, {name: value for name, value in named.items() if name in self.kernel.arg_names})

        return launch


class Compiled:
    def __init__(self, source, constants):
        self.source, self.constants = source, constants

    def __getitem__(self, grid):
        def launch(*args):
            named = dict(zip(self.source.kernel.arg_names, args, strict=True))
            assert {name: named[name] for name in self.constants} == self.constants
            assert all(value % 16 == 0 for name, value in named.items() if name.startswith("at_"))
            self.source.launched += 1
            self.source.kernel[grid](**named)

        return launch


def test_a_kernel_is_asked_once_what_it_was_compiled_to(small, monkeypatch):
    require_triton("cpu")
    from hybridindex.tiers.paged import triton_kernels

    kernels = {name: Compiling(getattr(triton_kernels, name)) for name in triton_kernels.__all__}
    for name, kernel in kernels.items():
        monkeypatch.setattr(triton_kernels, name, kernel)
    monkeypatch.setitem(device_triton._HEAVY_FROM, "bf16", 2)
    index = small("bf16", "ip", n=40, nlist=2)
    queries, probes = clustered(2, 20, seed=3), np.array([[0, -1], [0, 1]])
    with scanning(index, "cpu", page_bytes=4096, scatter=False) as scanner:
        answers = [checked(index, scanner, queries, probes, k) for k in (5, 5, 17)]
    np.testing.assert_array_equal(answers[0], answers[1])
    # The selection of 17 is another one.
    assert {name: (kernel.asked, kernel.launched) for name, kernel in kernels.items()} == {
        "scan_heavy": (1, 2),
        "scan_light": (1, 2),
        "select_best": (2, 1),
        "split_queries": (1, 2),
    }


def test_an_absent_list_is_refused(small, device):
    index = small()
    tier = DeviceTier(index, device, 0, budget_bytes=4 << 20, wanted_bytes=1 << 20)
    store = ResidencyStore(index.nlist, lambda _d, pages: tier.arena.pages.free(pages))
    with store.lease() as residency:
        scanner = TritonScanner(index, tier._codec, tier.arena, residency, 0, 1 << 20)
        with pytest.raises(InvalidInputError, match="list 1 is probed"):
            scanner.scan(np.zeros((1, 20), np.float32), np.array([[1]]), np.zeros((1, 1), np.float32), 1)
    tier.close()


def test_a_tier_says_which_kernel_scans_and_why(small, monkeypatch):
    index = small("bf16")
    with scanning(index, "cpu", kind=TorchScanner) as scanner:
        assert scanner.kernel == "torch"
    residency = ResidencyStore(index.nlist, lambda *_: None).current
    for name in ("native", "torch"):
        with closing(DeviceTier(index, "cpu", 0, budget_bytes=4 << 20, wanted_bytes=1 << 20)) as tier:
            assert tier.scanner(residency).kernel == f"{name}: cpu runs no triton kernels"
        monkeypatch.setattr(NativePageScanner, "supports", lambda codec, arena: False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="which kernel a tier on a real GPU gets; there is none")
def test_a_tier_on_a_gpu_scans_with_triton(small):
    require_triton("cuda")
    tier = DeviceTier(small(), "cuda", 0, budget_bytes=4 << 20, wanted_bytes=1 << 20)
    store = ResidencyStore(6, lambda _d, pages: tier.arena.pages.free(pages))
    with store.lease() as residency:
        assert tier.scanner(residency).kernel == "triton"
    tier.close()


def test_closing_a_tier_lets_arena_and_scratch_go(small, device):
    index = small()
    tier = DeviceTier(index, device, 0, budget_bytes=4 << 20, wanted_bytes=1 << 20)
    store = ResidencyStore(index.nlist, lambda _d, pages: tier.arena.pages.free(pages))
    tier.load(range(index.nlist), store).result()
    with store.lease() as residency:
        scanner = TritonScanner(index, tier._codec, tier.arena, residency, 0, 1 << 20)
        checked(index, scanner, *everything(index, 1), 2)
        again = TritonScanner(index, tier._codec, tier.arena, residency, 0, 1 << 20)
        assert again.workspace is scanner.workspace
    left = [weakref.ref(tier.arena.data), weakref.ref(scanner.workspace)]
    del scanner, again
    gc.collect()
    assert all(ref() is not None for ref in left)
    tier.close()
    gc.collect()
    assert all(ref() is None for ref in left)


def test_importing_the_scanner_imports_neither_triton_nor_torch():
    code = "import sys, hybridindex.tiers.paged.device_tier; print(sorted({'triton', 'torch'} & set(sys.modules)))"
    root = Path(__file__).resolve().parents[3]
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert out.stdout.strip() == "[]"


def test_another_scratch_takes_the_place_of_the_old_one(monkeypatch):
    """A device has no room for both."""
    arena = PageArena(torch.device("cpu"), PageGeometry.for_code_size(64), 4)
    codec = DeviceCodec(kind="f32", dim=16, code_size=64, by_residual=False)
    room, empty, taken = 8 << 20, torch.empty, []

    def limited(words, **options):
        if 4 * (words + sum(each().numel() for each in taken if each() is not None)) > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        made = empty(words, **options)
        taken.append(weakref.ref(made))
        return made

    monkeypatch.setattr(torch, "empty", limited)
    scanning_now = Workspace.of(arena, codec, 6 << 20)
    with pytest.raises(OutOfBudgetError):
        Workspace.of(arena, codec, 5 << 20)
    del scanning_now
    assert Workspace.of(arena, codec, 5 << 20).scratch_bytes == 5 << 20
    assert Workspace.of(arena, codec, 6 << 20) is Workspace.of(arena, codec, 6 << 20)
    key = id(arena.data)
    del arena
    gc.collect()
    assert key not in Workspace._made
