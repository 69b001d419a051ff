"""Every error that hybridindex raises on purpose, and nothing else.

The tree::

    HybridIndexError
    ├── InvalidInputError (also ValueError)   the caller's argument is wrong; names field, value, what would be right
    │   └── DuplicateIdError
    ├── IndexFormatError                      an index directory or faiss file cannot be used
    │   ├── CorruptIndexError                 bytes differ from the checksums, or a file is short
    │   └── UnsupportedIndexError             foreign file, newer format, not an IVF index, metric we do not serve
    ├── BuildError                            a build stopped; the old generation is intact
    │   ├── DiskFullError
    │   └── NotWritableError
    ├── StoreError                            the control store cannot be used
    │   ├── StoreLockedError
    │   └── StoreVersionError                 written by a newer hybridindex
    ├── ProfileError                          a profile is missing, incomplete or too small
    │   └── ProfileMismatchError              it belongs to another index or machine
    ├── DeviceError                           a device cannot be used
    │   ├── DeviceBusyError                   it takes nobody now; later it may
    │   ├── DeviceNotFoundError
    │   ├── DeviceSlowError                   internal to routing: it takes longer than the host would
    │   └── OutOfBudgetError                  internal to placement: pages or scratch exceed the budget
    ├── MissingDependencyError                an extra is not installed; names the extra
    ├── LLMServerError                        an LLM cannot be reached or measured; names address and what came back
    ├── RouterError
    │   ├── RouterClosedError
    │   └── RefreshError                      an update of the plan cannot be made now
    ├── DocumentStoreError                    a document store is missing, foreign, damaged, or of another index
    ├── GenerationError                       an LLM cannot be reached, refused, or answered what cannot be read
    ├── TraceError                            a trace cannot be read, or holds other steps than a pipeline asks for
    └── ServiceError                          a daemon cannot serve the request, or cannot be reached
        ├── AccessDeniedError                 no key, a wrong one, or one without the role
        ├── DeadlineExceededError             the deadline passed before work started
        ├── OverloadedError                   the queue is full, or the daemon drains; says when to come again
        ├── UnknownSessionError               never opened, closed, expired, or another client's
        └── UnreachableError                  nobody answers at the daemon's address

"Infeasible" is a verdict of a plan, never an exception.
"""

from __future__ import annotations

__all__ = [
    "AccessDeniedError",
    "BuildError",
    "CorruptIndexError",
    "DeadlineExceededError",
    "DeviceBusyError",
    "DeviceError",
    "DeviceNotFoundError",
    "DeviceSlowError",
    "DiskFullError",
    "DocumentStoreError",
    "DuplicateIdError",
    "GenerationError",
    "HybridIndexError",
    "IndexFormatError",
    "InvalidInputError",
    "LLMServerError",
    "MissingDependencyError",
    "NotWritableError",
    "OutOfBudgetError",
    "OverloadedError",
    "PlanConflictError",
    "ProfileError",
    "ProfileMismatchError",
    "RefreshError",
    "RouterClosedError",
    "RouterError",
    "ServiceError",
    "StoreError",
    "StoreLockedError",
    "StoreVersionError",
    "TraceError",
    "UnknownSessionError",
    "UnreachableError",
    "UnsupportedIndexError",
]


class HybridIndexError(Exception):
    """Root of all deliberate errors."""


class InvalidInputError(HybridIndexError, ValueError):
    """An argument is wrong. The message names the field, its value and what would be right."""


class PlanConflictError(InvalidInputError):
    """What is asked of the next plan contradicts the plan in force, or itself beside one. The message names both."""


class DuplicateIdError(InvalidInputError):
    """The same id was given to two vectors."""


class IndexFormatError(HybridIndexError):
    """An index directory or file cannot be used."""


class CorruptIndexError(IndexFormatError):
    """Stored bytes differ from their checksum, or a file is truncated."""


class UnsupportedIndexError(IndexFormatError):
    """A foreign file, a newer format version, or an index kind that is not served."""


class BuildError(HybridIndexError):
    """A build stopped before its generation was committed."""


class DiskFullError(BuildError):
    """The file system had no room; the previous generation is untouched."""


class NotWritableError(BuildError):
    """The place may not be written to."""


class StoreError(HybridIndexError):
    """The control store cannot be used."""


class StoreLockedError(StoreError):
    """Another process held the control store past the busy timeout."""


class StoreVersionError(StoreError):
    """The control store was written by a newer version of hybridindex."""


class ProfileError(HybridIndexError):
    """A profile is missing, incomplete or too small."""


class ProfileMismatchError(ProfileError):
    """A profile was measured on another index or another machine."""


class DeviceError(HybridIndexError):
    """A device cannot be used."""


class DeviceBusyError(DeviceError):
    """The device exists and takes nobody now: no memory for a context, or it is another process's alone."""


class DeviceNotFoundError(DeviceError):
    """The named device does not exist here."""


class DeviceSlowError(DeviceError):
    """A device answers, or may still, but takes clearly longer than the host would. What it holds is intact."""


class OutOfBudgetError(DeviceError):
    """Pages or scratch would exceed the byte budget of a device."""


class MissingDependencyError(HybridIndexError, ImportError):
    """An optional package is needed; the message names the extra that brings it."""


class LLMServerError(HybridIndexError):
    """An LLM server cannot be reached, answers wrongly or too slowly, or an LLM engine cannot be run."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        """``status``: of the HTTP answer that refused; 0 where nobody accepted the connection."""
        super().__init__(message)
        self.status = status


class RouterError(HybridIndexError):
    """The router cannot serve the request."""


class RouterClosedError(RouterError):
    """The router or session was closed."""


class RefreshError(RouterError):
    """An update of the plan cannot be made now: another one goes on, or it rests on a plan that serves no more."""


class DocumentStoreError(HybridIndexError):
    """A document store is missing, foreign, damaged, or was written for another index."""


class GenerationError(HybridIndexError):
    """An LLM server cannot be reached, refused the request, or answered something that cannot be read."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        """``status``: of the HTTP answer that refused; 0 where nobody accepted the connection."""
        super().__init__(message)
        self.status = status


class TraceError(HybridIndexError):
    """A trace cannot be read, or holds other steps than the pipeline that replays it asks for."""


class ServiceError(HybridIndexError):
    """A daemon cannot serve the request, or cannot be reached."""


class AccessDeniedError(ServiceError):
    """There is no key, it is wrong or revoked, or its role does not allow the call."""


class DeadlineExceededError(ServiceError):
    """The deadline passed before the search started."""


class OverloadedError(ServiceError):
    """The queue is full, or the daemon drains. Nothing was done; the same request may be sent again."""

    def __init__(self, message: str, *, retry_after_s: float, own_share: bool = False) -> None:
        """``own_share``: only this client's part of the queue is full."""
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.own_share = own_share


class UnknownSessionError(ServiceError):
    """The session was never opened, is closed, has expired, or is another client's."""


class UnreachableError(ServiceError):
    """Nobody answers at the daemon's address."""
