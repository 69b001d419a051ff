"""The tables of docs/settings.md, made from the fields. ``python -m tests.service.settings_reference`` prints them."""

from __future__ import annotations

import json

from hybridindex.refresh.config import RefreshConfig
from hybridindex.service.config import ServiceConfig
from hybridindex.service.settings import Entry, entries
from hybridindex.service.several.config import IndexConfig

__all__ = ["tables"]


def tables() -> dict[str, str]:
    """Title of a table of the settings file ("" for the top level) -> its rows, as markdown."""
    found: dict[str, list[str]] = {}
    of_one = entries(IndexConfig, tables=("indexes", "NAME"))
    for entry in (*entries(ServiceConfig), *of_one, *entries(RefreshConfig, tables=("refresh",))):
        assert entry.setting is not None, f"{entry.name} does not say what it means"
        prefix = f"{entry.tables[-1]}_" if entry.tables[:1] == ("refresh",) else ""
        flag = {"path": "`NAME=INDEX`"}.get(entry.name, "") if "NAME" in entry.tables else _flag(entry, prefix)
        row = f"| `{entry.name}` | {flag} | {_default(entry)} | {entry.setting.help} |"
        found.setdefault(".".join(entry.tables), []).append(row)
    head = "| key | option | default | meaning |\n| --- | --- | --- | --- |\n"
    return {table: head + "\n".join(rows) + "\n" for table, rows in found.items()}


def _flag(entry: Entry, prefix: str) -> str:
    flag = entry.flag_after(prefix)
    return f"`{flag}`" + (f", `--no-{flag[2:]}`" if "bool" in str(entry.type) else "")


def _default(entry: Entry) -> str:
    if entry.default is None or entry.default == ():
        return ""
    if entry.setting is not None and entry.setting.is_bytes and entry.default:
        return f'`"{entry.default >> 20}MiB"`'
    return f"`{json.dumps(entry.default, default=str)}`"


if __name__ == "__main__":
    for title, table in tables().items():
        print(f"## `[{title}]`\n\n{table}" if title else f"## Top level\n\n{table}")
