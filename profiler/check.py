"""Refuses profiles of another index or, unless allowed, of another machine."""

from __future__ import annotations

from hybridindex.errors import ProfileMismatchError
from hybridindex.types import Profile

__all__ = ["check_profile"]


def check_profile(
    profile: Profile, index_fingerprint: str, hardware_fingerprint: str, *, allow_other_hardware: bool = False
) -> None:
    """
    Raises:
        ProfileMismatchError: another index or machine; names both fingerprints and what to do.
    """
    which = "the profile" if profile.id is None else f"profile {profile.id}"
    if profile.index_fingerprint != index_fingerprint:
        raise ProfileMismatchError(
            f"{which} was measured on index {profile.index_fingerprint}, this is index {index_fingerprint}; "
            "profile this index"
        )
    measured = profile.hardware
    if measured.fingerprint != hardware_fingerprint and not allow_other_hardware:
        raise ProfileMismatchError(
            f"{which} was measured on machine {measured.fingerprint} ({measured.cpu_model}, {measured.cores} cores), "
            f"this is machine {hardware_fingerprint}; profile the index here, or allow profiles of other hardware"
        )
