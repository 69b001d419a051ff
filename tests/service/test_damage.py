"""A service whose lists are damaged says so everywhere, refuses what needs them, and answers the rest."""

from __future__ import annotations

import logging

import pytest

from hybridindex.client.messages import error_of
from hybridindex.errors import DamagedListsError
from hybridindex.service.core import Service
from hybridindex.service.status import status_of
from tests.service.conftest import ask


@pytest.fixture
def damaged(make_service, queries, caplog):
    """(service, a query that needs the damaged list, one that does not)."""
    caplog.set_level(logging.CRITICAL, logger="hybridindex")
    service: Service = make_service(router={"scrub_bytes_per_s": 0, "devices": ()})
    index = service.index.ivf
    probes, _ = index.quantize(index.transform(queries), 3)
    list_id = int(probes[0, 0])
    start = int(index.integrity.spans[list_id, 1, 0])
    file = index.integrity.file
    good = file.read_bytes()
    with file.open("r+b") as out:
        out.seek(start)
        out.write(b"\x7f")
    yield service, list_id, queries[:1], queries[~(probes == list_id).any(axis=1)][:1]
    with file.open("r+b") as out:
        out.write(good)
    assert service.router.scrub().ok
    assert ask(service, "GET", "/healthz").status_code == 200
    assert status_of(service)["note"] is None


def search(service, query):
    return ask(service, "POST", "/v1/search", json={"queries": query.tolist(), "k": 3, "nprobe": 3})


def test_it_is_told_everywhere(damaged):
    service, list_id, *_ = damaged
    before = service.router.damage
    assert ask(service, "GET", "/healthz").status_code == 200
    service.router.scrub()
    health = ask(service, "GET", "/healthz")
    [check] = [check for check in health.json()["checks"] if not check["ok"]]
    assert health.status_code == 503
    assert check["name"] == "lists"
    assert check["detail"].startswith(f"damaged in lists.bin: list {list_id}: searches that probe them fail; restore")
    status = ask(service, "GET", "/v1/status").json()
    assert f"list {list_id}:" in status["note"]
    assert status["damage"] == {
        "passes": before.passes + 1,
        "scrubbed_bytes": service.router.damage.nbytes,
        "found": 1,
        "quarantined": 1,
        "mended": 0,
    }
    metrics = ask(service, "GET", "/metrics").text.splitlines()
    assert "hybridindex_quarantined_lists 1.0" in metrics
    assert "hybridindex_damage_found_total 1.0" in metrics
    assert f"hybridindex_scrubbed_bytes_total {float(service.router.damage.nbytes)}" in metrics


def test_a_search_that_needs_the_list_is_refused_by_name_and_others_are_answered(damaged):
    service, list_id, needs, needs_not = damaged
    service.router.scrub()
    refused = search(service, needs)
    assert refused.status_code == 503
    problem = refused.json()
    assert problem["type"] == "urn:hybridindex:problem:damaged-lists"
    assert f"needs list {list_id} of lists.bin" in problem["detail"]
    assert str(service.index.path) not in problem["detail"]
    # A client does not ask this daemon again and again.
    assert isinstance(error_of(503, refused.headers, refused.content), DamagedListsError)
    answered = search(service, needs_not)
    assert answered.status_code == 200
    assert min(answered.json()["ids"][0]) >= 0
