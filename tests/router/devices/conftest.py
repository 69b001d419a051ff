"""Devices whose recovery a test leads itself."""

from __future__ import annotations

import threading

import pytest

from hybridindex.tiers.contract.tier import Tier


@pytest.fixture
def by_hand():
    """A trial is due whenever this thread looks, and at no look of the router's own."""
    here = threading.get_ident()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tier, "retry_due", lambda tier, now: threading.get_ident() == here and tier.failure is not None)
        yield
