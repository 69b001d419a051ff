"""A service over a share of an index: what is not held is refused by name and is no damage."""

from __future__ import annotations

import numpy as np
import pytest

from hybridindex.client.messages import error_of
from hybridindex.errors import NotHeldError
from hybridindex.index import open_index
from hybridindex.index.share.share import create_share
from hybridindex.index.share.source import FolderSource
from tests.clustered import NLIST, clustered, small_index
from tests.service.conftest import ask

QUERIES = clustered(20, seed=3)


@pytest.fixture
def index_path(tmp_path):
    small_index(tmp_path / "whole").close()
    source = FolderSource(tmp_path / "whole")
    create_share(tmp_path / "share", source)
    with open_index(tmp_path / "share") as index:
        probes, _ = index.quantize(index.transform(QUERIES), 3)
        assert index.share is not None
        index.share.hold(probes[0].tolist(), source)
    return tmp_path / "share"


def search(service, row):
    return ask(service, "POST", "/v1/search", json={"queries": QUERIES[[row]].tolist(), "k": 3, "nprobe": 3})


def test_what_is_not_held_is_no_damage(make_service):
    service = make_service(router={"scrub_bytes_per_s": 0, "devices": ()})
    assert service.ready
    service.router.scrub()
    assert ask(service, "GET", "/healthz").status_code == 200
    status = ask(service, "GET", "/v1/status").json()
    assert (status["ready"], status["note"]) == (True, None)
    assert (status["damage"]["found"], status["damage"]["quarantined"]) == (0, 0)
    assert "hybridindex_quarantined_lists 0.0" in ask(service, "GET", "/metrics").text.splitlines()


def test_searches_are_answered_or_refused_by_name(make_service):
    service = make_service(router={"devices": ()})
    index = service.index.ivf
    probes, _ = index.quantize(index.transform(QUERIES), 3)
    with open_index(service.index.path.parent / "whole") as whole:
        source = FolderSource(whole.path)
        refused = 0
        for row in range(len(QUERIES)):
            lacking = probes[row][~index.share.held[probes[row]]]
            answer = search(service, row)
            if not len(lacking):
                assert answer.status_code == 200
                continue
            refused += 1
            problem = answer.json()
            assert (answer.status_code, problem["type"]) == (503, "urn:hybridindex:problem:not-held")
            assert all(str(list_id) in problem["detail"] for list_id in lacking)
            assert str(service.index.path) not in problem["detail"]
            assert isinstance(error_of(503, answer.headers, answer.content), NotHeldError)
        assert 0 < refused < len(QUERIES)
        index.share.hold(range(NLIST), source)
        for row in range(len(QUERIES)):
            found = np.array(search(service, row).json()["ids"])
            exact = np.concatenate([whole.list_ids(int(list_id)) for list_id in probes[row]])
            assert np.isin(found, exact).all()
