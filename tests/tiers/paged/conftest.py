"""Devices on which triton kernels run."""

from __future__ import annotations

import pytest

from tests.tiers.triton_here import require_triton


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda":
        import torch

        if not torch.cuda.is_available():
            pytest.skip("of a real GPU, and torch sees none here; the same runs on the stand-in")
    require_triton(request.param)
    return request.param
