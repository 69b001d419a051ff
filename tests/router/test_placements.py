"""Every codec, metric, host scanner and placement gives the same answer: that of the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from hybridindex.errors import InvalidInputError, UnsupportedIndexError
from hybridindex.index import from_faiss
from hybridindex.index.codec import DEVICE_KINDS
from hybridindex.router import Router
from hybridindex.router.batch import merge, split
from hybridindex.tiers.host import native_scanner
from hybridindex.tiers.host.faiss_scanner import HostFaissScanner
from hybridindex.tiers.paged import native_scanner as page_scanner
from tests.clustered import NLIST, clustered, hand_made_plan, small_index
from tests.oracle import check_answer

#: A multiple of 32: faiss takes other instructions there.
DIM = 64
CODECS = (*DEVICE_KINDS, "import:IVF32,SQbf16", "pq16", "pqfs32", "import:IVF32,SQfp16", "import:IVF32,SQ8")
#: Where lists lie: all on the host, all on a device, half of them on two.
PLACEMENTS = {
    "host": np.full(NLIST, -1),
    "device": np.zeros(NLIST),
    "mixed": np.tile([0, 1, -1, -1], NLIST // 4),
}
EXTENSION = [native_scanner, page_scanner, split, merge]


@pytest.fixture(scope="module", params=[(c, m) for c in CODECS for m in ("ip", "l2")], ids="-".join)
def index(request, tmp_path_factory):
    codec, metric = request.param
    folder = tmp_path_factory.mktemp("idx")
    kind, _, factory = codec.partition(":")
    if not factory:
        with small_index(folder / "i", codec=kind, metric=metric, dim=DIM) as index:
            yield index
        return
    import faiss

    made = faiss.index_factory(DIM, factory, faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT)
    data = clustered(3000, DIM, seed=1)
    made.train(data)
    made.add(data)
    with from_faiss(made, folder / "i", nprobe=8) as index:
        yield index


@pytest.fixture(autouse=True)
def bfloat16_instructions(monkeypatch):
    """A CPU that has them: there faiss rounds the queries of bf16, where the dimension is a multiple of 32."""
    scan = HostFaissScanner._search

    def rounding(self, x, *rest):
        if self._index.codec == "bf16":
            # Half of the last bit that stays, and one more where that is odd: to the nearest, ties to even.
            bits = x.view(np.uint32)
            x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
        scan(self, x, *rest)

    monkeypatch.setattr(HostFaissScanner, "_search", rounding)


@pytest.mark.parametrize("host_scanner", ["native", "faiss", "without the extension"])
def test_no_placement_and_no_scanner_changes_an_answer(index, host_scanner, monkeypatch):
    if host_scanner == "without the extension":
        for module in EXTENSION:
            monkeypatch.setattr(module, "native", None)
    elif host_scanner == "native" and native_scanner.HostNativeScanner.unsupported(index):
        with pytest.raises(UnsupportedIndexError), Router(index, host_scanner=host_scanner):
            pass
        return
    elif host_scanner == "faiss" and index.pq_form is not None:
        plan = hand_made_plan(index, PLACEMENTS["mixed"], n_devices=2)
        with (
            pytest.raises(InvalidInputError, match="host_scanner is 'faiss'"),
            Router(index, plan=plan, devices=["cpu", "cpu"], host_scanner=host_scanner),
        ):
            pass
        return
    name = "auto" if host_scanner == "without the extension" else host_scanner
    queries = clustered(40, DIM, seed=5)
    transformed = index.transform(queries)
    probes, _ = index.quantize(transformed, 8)
    answers = {}
    for placement, list_device in PLACEMENTS.items():
        plan = hand_made_plan(index, list_device, n_devices=2)
        with Router(index, plan=plan, devices=["cpu", "cpu"], host_scanner=name) as router:
            assert router.stats().unplaced_lists == 0
            result = router.search(queries, 11, 8)
        check_answer(index, transformed, probes, 11, result.distances, result.ids)
        answers[placement] = result
    host = answers["host"]
    # Two sums of the same products differ in their last digits: what is that near may change places.
    near = np.abs(np.diff(host.distances, axis=1)) <= 1e-5 * (1 + np.abs(host.distances[:, 1:]))
    clear = ~near
    clear[:, 1:] &= ~near[:, :-1]
    assert clear.mean() > 0.98
    for placement, result in answers.items():
        if host_scanner == "native":  # the stand-in's scan is made of the same sums
            np.testing.assert_array_equal(result.ids, host.ids, err_msg=placement)
            np.testing.assert_array_equal(result.distances, host.distances, err_msg=placement)
        np.testing.assert_array_equal(result.ids[:, :-1][clear], host.ids[:, :-1][clear], err_msg=placement)
        np.testing.assert_allclose(result.distances, host.distances, rtol=1e-5, atol=1e-5, err_msg=placement)
