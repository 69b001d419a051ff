"""Keyword arguments of a :class:`DeviceTier`, given flat."""

from __future__ import annotations

from dataclasses import fields

from hybridindex.tiers.paged.device_tier import PagedMemory


def tier_options(**options):
    """``options`` with those of :class:`PagedMemory` gathered in one."""
    memory = {field.name: options.pop(field.name) for field in fields(PagedMemory) if field.name in options}
    return {**options, "memory": PagedMemory(**memory)}


def hold_lists(memory, index, lists):
    """Has these lists of ``index`` in ``memory``, and no others."""
    lists = [int(list_id) for list_id in lists]
    n_pages = memory.geometry.pages_for(index.list_sizes[lists]).tolist()
    return memory.hold(lists, n_pages, index.list_codes, lambda: False)
