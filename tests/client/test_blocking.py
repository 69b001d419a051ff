"""The blocking client is what the asynchronous one makes."""

from __future__ import annotations

import pytest

from tests.client.blocking import MADE, SOURCE, blocking


def test_the_blocking_client_is_up_to_date():
    assert MADE.read_text() == blocking(SOURCE.read_text()), "run: python -m tests.client.blocking"


def test_nothing_asynchronous_is_left():
    with pytest.raises(AssertionError, match="async_timeout"):
        blocking(SOURCE.read_text() + "\nasync_timeout = 1\n")
