"""Whose idempotency keys a node takes as they are."""

from __future__ import annotations

import pytest
from fastapi import Request

from hybridindex.service.auth import Caller, Role
from hybridindex.service.http.middleware import CALLER
from hybridindex.service.http.nodes.writes import NodeWrites


@pytest.mark.parametrize(("role", "is_believed"), [(Role.ADMIN, True), (Role.WRITE, False)])
def test_only_another_node_may_say_that_it_forwards(role, is_believed):
    """Whoever could would take a key of another client, which is made of its name."""
    scope = {"type": "http", "headers": [(b"x-hybridindex-forwarded", b"1")], CALLER: Caller(name="a", role=role)}
    assert (NodeWrites.key_of(Request(scope), "a", "chosen") == "chosen") == is_believed


def test_keys_of_different_clients_are_different():
    request = Request({"type": "http", "headers": [], CALLER: Caller(name="a", role=Role.WRITE)})
    assert NodeWrites.key_of(request, "a", "one") != NodeWrites.key_of(request, "b", "one")
