"""The trial of a page scanner at open: what it launches, what it takes, and who scans when it fails."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hybridindex.errors import DeviceError, OutOfBudgetError
from hybridindex.index import build
from hybridindex.tiers.contract.residency import ResidencyStore
from hybridindex.tiers.paged import kernel_choice
from hybridindex.tiers.paged.device_tier import DeviceTier
from hybridindex.tiers.paged.kernel_choice import try_scanner
from hybridindex.tiers.paged.native_scanner import NativePageScanner
from hybridindex.tiers.paged.tables.scan_tables import Selection
from hybridindex.tiers.paged.torch_scanner import TorchScanner
from hybridindex.tiers.paged.triton_scanner import TritonScanner, Workspace
from tests.clustered import NLIST, clustered, small_index
from tests.oracle import check_answer
from tests.tiers.options import tier_options
from tests.tiers.triton_here import require_triton

SCRATCH = 1 << 20


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("trial") / "i", n=600) as index:
        yield index


@pytest.fixture
def triton_first(monkeypatch):
    """Triton is chosen on the stand-in, as it would be on a GPU."""
    monkeypatch.setattr(TritonScanner, "unsupported", staticmethod(lambda _arena: ""))
    monkeypatch.setattr(NativePageScanner, "supports", staticmethod(lambda *_: False))


def open_tier(index, **options):
    options = {"budget_bytes": 4 << 20, "wanted_bytes": 1 << 20, "page_bytes": 1024, **options}
    return DeviceTier(index, "cpu", 0, **tier_options(scratch_bytes=SCRATCH, **options))


def broken(*_args, **_kwargs):
    raise RuntimeError("no kernel image for this device\nand many lines more")


def test_torch_scans_where_the_kernels_cannot_be_launched(index, triton_first, monkeypatch, caplog):
    monkeypatch.setattr(Workspace, "launch", broken)
    with closing(open_tier(index)) as tier:
        assert id(tier.arena.data) not in Workspace._made, "scratch that nobody uses is kept"
        assert "no kernel image" in caplog.text
        store = ResidencyStore(NLIST, lambda _device, pages: tier.arena.pages.free(pages))
        tier.load(range(NLIST), store).result(300)
        queries = index.transform(clustered(3, index.dim, seed=2))
        probes, coarse = index.quantize(queries, 5)
        with store.lease() as residency:
            scanner = tier.scanner(residency)
            assert scanner.kernel == "torch: a trial of triton failed: no kernel image for this device"
            check_answer(index, queries, probes, 4, *scanner.scan(queries, probes, coarse, 4))
        assert tier.n_failures == 0


def test_a_device_on_which_nothing_scans_is_refused(index, triton_first, monkeypatch):
    monkeypatch.setattr(Workspace, "launch", broken)
    monkeypatch.setattr(TorchScanner, "scan", broken)
    with pytest.raises(DeviceError, match="scans nothing, a trial failed: RuntimeError"):
        open_tier(index)


def test_scratch_without_room_is_refused_at_open(index, triton_first, monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("a neighbour was first")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(OutOfBudgetError, match="no room for scratch of 1,048,576 bytes: a neighbour was first"):
        open_tier(index)


def test_scratch_that_has_no_room_now_is_taken_when_there_is(index, triton_first, monkeypatch):
    require_triton("cpu")
    with monkeypatch.context() as patch:

        def full(*args, **kwargs):
            raise torch.OutOfMemoryError("a neighbour was first")

        patch.setattr(torch, "empty", full)
        tier = open_tier(index, without_room="retry")
    with closing(tier):
        assert "a neighbour was first" in str(tier.failure)
        assert len(tier.arena.data) == 0, "pages are kept from the neighbour"
        assert tier.retry_due(1e12)
        assert tier.recover().result(300)
        store = ResidencyStore(NLIST, lambda _device, pages: tier.arena.pages.free(pages))
        assert tier.scanner(store.current).kernel == "triton"
        assert tier.load([0], store).result(300).loaded == (0,)


def test_the_stand_in_s_own_scanners_need_no_trial(index, monkeypatch):
    monkeypatch.setattr(kernel_choice, "try_scanner", broken)
    open_tier(index).close()


def test_every_kernel_runs_before_the_first_query(index, triton_first, monkeypatch):
    require_triton("cpu")
    launched, launch, select = [], Workspace.launch, Workspace.select
    monkeypatch.setattr(Workspace, "launch", lambda self, *a: launched.append(a[1].n_queries) or launch(self, *a))
    monkeypatch.setattr(Workspace, "select", lambda self, *a: launched.append(f"best {a[2].kept}") or select(self, *a))
    with closing(open_tier(index)) as tier:
        assert launched == [1, "best 16", 16, "best 16", 1, "best 32", 1, "best 64", 1, "best 128"]
        assert Workspace._made[id(tier.arena.data)].scratch_bytes == SCRATCH
        assert tier.used_bytes == 0
        scanner = tier.scanner(ResidencyStore(NLIST, lambda *_: None).current)
        assert (scanner.kernel, scanner.workspace) == ("triton", Workspace._made[id(tier.arena.data)])
        assert not np.any(tier.arena.data.numpy())


@pytest.mark.parametrize("k", [10, 250])
def test_a_trial_on_a_gpu_has_rows_for_a_second_selection(index, k, monkeypatch):
    monkeypatch.setattr(Selection, "of", classmethod(lambda cls, k: cls(chunk=2 * k, kept=k)))
    with closing(open_tier(index)) as tier:
        gpu = SimpleNamespace(device=torch.device("cuda"), geometry=tier.arena.geometry, pages=tier.arena.pages)
        lists = kernel_choice._some_lists(index, gpu, k)
        assert index.list_sizes[lists[:-1]].sum() <= 2 * k < index.list_sizes[lists].sum()
        assert len(kernel_choice._some_lists(index, tier.arena, k)) == 1


def test_a_trial_may_find_the_very_first_vector(tmp_path):
    """Its id and its place are 0, which is not nothing."""
    made = build(clustered(1), tmp_path / "i", nlist=1, metric="l2", codec="flat", ids=np.zeros(1, np.int64))
    with made as index, closing(open_tier(index)) as tier:
        try_scanner(TorchScanner, index, index.device_codec(), tier.arena, 0, SCRATCH)
