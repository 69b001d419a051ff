"""How many examples property tests take: three profiles, and tests that need more or can afford fewer than others."""

from __future__ import annotations

from typing import Any, Final

from hypothesis import settings

__all__ = ["PROFILES", "examples"]

#: Examples of a test by profile: before a commit, of the whole suite, overnight.
PROFILES: Final = {"quick": 10, "ci": 100, "deep": 1000}


def examples(number: int, **options: Any) -> settings:
    """So many examples under the profile ``ci``, in proportion under the others; 5 at least.

    Args:
        options: of :class:`hypothesis.settings`.
    """
    profile = settings.default
    assert profile is not None
    scaled = number * profile.max_examples // PROFILES["ci"]
    return settings(max_examples=max(min(5, number), scaled), **options)
