"""Devices: the stand-in, and a GPU where there is one."""

from __future__ import annotations

import pytest

from tests.tiers.triton_here import require_triton


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def any_device(request):
    if request.param == "cuda":
        import torch

        if not torch.cuda.is_available():
            pytest.skip("of a real GPU, and torch sees none here; the same runs on the stand-in")
    return request.param


@pytest.fixture
def device(any_device):
    """One on which triton kernels run."""
    require_triton(any_device)
    return any_device
