from __future__ import annotations

import pytest

from hybridindex.studies.hardware import chip, model, server
from hybridindex.studies.schedule import Resources


@pytest.fixture
def xpu():
    return chip("xpu-c")


@pytest.fixture
def milan():
    return server("epyc-milan")


@pytest.fixture
def llm():
    return model("llama3-8b")


@pytest.fixture
def large(xpu, milan):
    """What the paper gives its cases."""
    return Resources(chip=xpu, chips=128, server=milan, servers=32)
