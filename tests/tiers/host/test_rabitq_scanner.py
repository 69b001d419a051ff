"""The host scan of codes: the reference and the extension say the same, and nobody's answer depends on the others."""

from __future__ import annotations

import numpy as np
import pytest

from hybridindex.errors import InvalidInputError
from hybridindex.tiers.contract.positions import ids_of_positions
from hybridindex.tiers.host import rabitq_scanner
from hybridindex.tiers.host.rabitq_scanner import HostRabitqScanner
from tests.clustered import NLIST, clustered, small_index
from tests.coded import with_codes


@pytest.fixture(scope="module", params=["ip", "l2"])
def index(request, tmp_path_factory):
    made = small_index(tmp_path_factory.mktemp("idx") / "i", metric=request.param, codec="sq8", n=800)
    with with_codes(made, bits=2) as found:
        yield found


@pytest.fixture
def reference(index, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(rabitq_scanner, "native", None)
        return HostRabitqScanner(index, index.rabitq, threads=1)


@pytest.fixture
def scanner(index):
    made = HostRabitqScanner(index, index.rabitq, threads=2)
    yield made
    made.close()


@pytest.fixture
def asked(index):
    """Queries behind the pre-transforms, and probes with gaps."""
    queries = index.transform(clustered(12, seed=4))
    probes, _ = index.quantize(queries, 9)
    probes[3, 4:] = probes[7] = -1
    return queries, probes


def test_the_extension_says_what_the_reference_says(reference, scanner, asked):
    queries, probes = asked
    products = scanner.centre_products(queries, probes)
    for k in (1, 30, 2048):
        for found, expected in zip(
            scanner.scan(queries, probes, products, k), reference.scan(queries, probes, products, k), strict=True
        ):
            assert found.tobytes() == expected.tobytes()
    np.testing.assert_allclose(products, reference.centre_products(queries, probes), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["reference", "scanner"])
def test_products_depend_on_query_and_centroid_alone(request, index, asked, kind):
    made, (queries, probes) = request.getfixturevalue(kind), asked
    products = made.centre_products(queries, probes)
    assert (products[probes < 0] == 0).all()
    exact = np.einsum("nd,npd->np", queries.astype(np.float64), index.centroids[probes].astype(np.float64))
    np.testing.assert_allclose(products, np.where(probes < 0, 0, exact), rtol=1e-5, atol=1e-5)
    every = made.centre_products(queries, np.tile(np.arange(NLIST), (len(queries), 1)))
    for row, own in enumerate(probes):
        alone = made.centre_products(queries[row : row + 1], own[None, ::-1])
        assert alone[0, ::-1].tobytes() == products[row].tobytes()
        assert every[row, own[own >= 0]].tobytes() == products[row, own >= 0].tobytes()


def test_products_that_the_quantizer_gave_are_not_computed_again(index, scanner, asked):
    queries, _ = asked
    probes, coarse = index.quantize(queries, 9)
    products = scanner.centre_products(queries, probes, coarse)
    assert products.tobytes() == scanner.centre_products(queries, probes).tobytes()
    assert index.coarse.gives_products == (index.metric == "ip") == (products is coarse)


@pytest.mark.parametrize("kind", ["reference", "scanner"])
def test_each_query_is_reported_once_with_its_answer(request, asked, kind):
    made, (queries, probes) = request.getfixturevalue(kind), asked
    products, told = made.centre_products(queries, probes), {}

    def done(rows, estimates, positions):
        for row, one, place in zip(rows.tolist(), estimates, positions, strict=True):
            assert row not in told
            told[row] = one.tobytes(), place.tobytes()

    estimates, positions = made.scan(queries, probes, products, 20, on_done=done)
    assert told == {row: (estimates[row].tobytes(), positions[row].tobytes()) for row in range(len(queries))}
    assert (positions[7] == -1).all()


@pytest.mark.parametrize("kind", ["reference", "scanner"])
def test_candidates_are_compared_with_their_rows(request, index, asked, kind):
    made, (queries, probes) = request.getfixturevalue(kind), asked
    _, positions = made.scan(queries, probes, made.centre_products(queries, probes), 40)
    distances, ids = made.reranker.rerank(queries, positions, 10)
    for row, query in enumerate(queries):
        candidates = ids_of_positions(index, positions[row])
        assert set(ids[row].tolist()) <= set(candidates.tolist())
        alone = made.reranker.rerank(query[None], positions[row : row + 1, ::-1].copy(), 10)
        assert (alone[0].tobytes(), alone[1].tobytes()) == (distances[row].tobytes(), ids[row].tobytes())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["reference", "scanner"])
def test_what_is_infinitely_far_is_no_candidate(request, index, kind):
    list_id = int(np.argmax(index.list_sizes))
    query = np.float32(-1e38) * index.decode_list(list_id)[:1]
    distances, ids = request.getfixturevalue(kind).reranker.rerank(query, np.array([[list_id << 32, -1]]), 2)
    assert ids.tolist() == [[-1, -1]]
    assert (distances == (-np.inf if index.metric == "ip" else np.inf)).all()


def test_filters_are_refused(scanner, asked):
    queries, probes = asked
    products = scanner.centre_products(queries, probes)
    with pytest.raises(InvalidInputError, match="filters need a scan of rows"):
        scanner.scan(queries, probes, products, 5, filter_ids=np.array([1], dtype=np.int64))
    with pytest.raises(InvalidInputError, match="threads is 0"):
        HostRabitqScanner(scanner._index, scanner.codes, threads=0)
    with pytest.raises(InvalidInputError, match="abacus"):
        HostRabitqScanner(scanner._index, scanner.codes, kernels="abacus")
