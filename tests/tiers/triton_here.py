"""Whether tests can run triton kernels on a device here."""

from __future__ import annotations

import pytest

__all__ = ["require_triton"]


def require_triton(device: str) -> None:
    """Skips the test, saying why, unless triton compiles for ``device`` ("cuda") or interprets on it ("cpu")."""
    pytest.importorskip("triton", reason="triton is not installed")
    from triton import knobs

    if device == "cuda" and knobs.runtime.interpret:
        pytest.skip("triton interprets in this process (TRITON_INTERPRET=1)")
    if device == "cpu" and not knobs.runtime.interpret:
        pytest.skip("triton compiles in this process; its interpreter runs where no GPU is (TRITON_INTERPRET=1)")
