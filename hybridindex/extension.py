"""The native extension, or the reason why it is missing; callers then use numpy or torch."""

from __future__ import annotations

from types import ModuleType

__all__ = ["import_error", "native"]

#: The compiled module ``hybridindex._native``; None in a pure-Python installation.
native: ModuleType | None
#: Why it could not be imported; empty when it could.
import_error = ""

try:
    import hybridindex._native as native
except ImportError as error:
    native, import_error = None, str(error)
