"""Changes of one generation as another one of the same lineage has them: its lists may be others."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from hybridindex.index.coarse import CoarseQuantizer
from hybridindex.index.codec import DeviceCodec
from hybridindex.index.log.change import Change
from hybridindex.index.storage.manifest import Manifest
from hybridindex.types import F32, I64

__all__ = ["OpenIndex", "converted", "keeps_lists"]


class OpenIndex(Protocol):
    """What is asked of an open index here."""

    manifest: Manifest

    @property
    def is_closed(self) -> bool: ...

    @property
    def pq_form(self) -> Any: ...

    @property
    def coarse(self) -> CoarseQuantizer: ...

    @property
    def centroids(self) -> F32: ...

    def device_codec(self) -> DeviceCodec | None: ...

    def quantize(self, transformed: F32, nprobe: int) -> tuple[I64, F32]: ...


def keeps_lists(index: OpenIndex) -> bool:
    """Whether compaction leaves centroids as they are: codes that hold differences to these would lose with each
    change, and a quantizer that is no plain table of centroids is not ours to change."""
    return index.manifest.by_residual or index.pq_form is not None or not index.coarse.is_flat


def converted(change: Change, index: OpenIndex) -> Change:
    """``change``, of a generation before or after ``index``, with its lists. Codes are the same."""
    if not len(change.ids) or keeps_lists(index):
        return change
    codec = index.device_codec()
    assert codec is not None
    rows = codec.decode(change.codes, index.centroids[:1])
    return dataclasses.replace(change, lists=index.quantize(rows, 1)[0][:, 0])
