"""What a plan of nodes is made from: the bytes of lists, and which of them queries probe."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hybridindex.api import Index
from hybridindex.errors import CorruptIndexError, HybridIndexError
from hybridindex.index import Manifest, open_index
from hybridindex.router.remote.cluster_map import ClusterMap, IndexGeneration
from hybridindex.types import F64, I64

__all__ = ["Access", "access_of", "read_access"]

_log = logging.getLogger(__name__)

#: Of the profile, that a plan looks at.
_MOST_QUERIES = 4096


class Access(NamedTuple):
    """Of one generation of an index."""

    manifest: Manifest
    #: (nlist,) int64 bytes that a node needs for each list: codes and ids.
    list_bytes: I64
    #: (nlist,) int64 bytes that a scan reads of each list.
    scanned_bytes: I64
    #: (nlist,) float64 bytes that a query scans of each list, in the mean.
    work: F64
    #: (q, p) int64 lists that queries of the profile probed, -1 = skip; None: there is no profile.
    probes: I64 | None
    #: Of the profile; None: there is none.
    profile_id: int | None
    #: Of the codes beside the rows, of which each node has all; 0: there are none.
    code_bytes: int = 0

    @property
    def of(self) -> IndexGeneration:
        """Which generation."""
        return IndexGeneration(self.manifest.fingerprint, self.manifest.generation)


def access_of(index: Path, map_: ClusterMap | None) -> Access:
    """:func:`read_access` of the generation that a map is of; of the current one where there is no map, or that
    generation was removed."""
    if map_ is not None:
        try:
            found = read_access(index, map_.generation)
            if found.of == map_.of:
                return found
        except CorruptIndexError as error:
            _log.warning("the generation that the nodes serve is not in the index any more: %s", error)
    return read_access(index)


def read_access(index: Path, generation: int | None = None) -> Access:
    """From the newest profile of the index's rows or codes, which say alike what is probed; without one, all lists are
    taken to be probed alike.

    Args:
        generation: None: the current one.

    Raises:
        HybridIndexError: the index cannot be opened.
    """
    ivf = open_index(index, verify="quick", generation=generation)
    with Index(ivf) as opened:  # which may have a newer generation
        spans = ivf.integrity.spans
        list_bytes = (spans[:, :, 1] - spans[:, :, 0]).sum(axis=1)
        code_bytes = 0 if ivf.rabitq is None else ivf.rabitq.spec.file_bytes
        profile = None
        try:
            views = [ivf] if ivf.rabitq is None else [ivf, ivf.by_codes()]
            with opened.store(required=False) as store:
                found = [each.id for view in views for each in store.list_profiles(index_fingerprint=view.fingerprint)]
                # Where there is none, this says so.
                of = None if found else ivf.fingerprint
                profile = store.load_profile(max(found, default=None), index_fingerprint=of)
        except HybridIndexError as error:
            _log.info("the plan is made without a profile: %s", error)
        if profile is None:
            work: F64 = (ivf.list_bytes * min(1.0, ivf.nprobe / ivf.nlist)).astype(np.float64)
            return Access(ivf.manifest, list_bytes, ivf.list_bytes, work, None, None, code_bytes)
        access = profile.access
        probes = np.concatenate([access.fit_probes, access.held_probes]).astype(np.int64)
        # Planning takes seconds for thousands of queries, and the placement hardly changes with more.
        probes = probes[:: max(1, -(-len(probes) // _MOST_QUERIES))]
        counts = np.bincount(probes[probes >= 0], minlength=ivf.nlist)
        return Access(
            ivf.manifest,
            list_bytes,
            ivf.list_bytes,
            counts * ivf.list_bytes / max(1, len(probes)),
            probes,
            profile.id,
            code_bytes,
        )
