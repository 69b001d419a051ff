"""Imports every module of an installed hybridindex, and holds the wheel's content against it.

Run by check_wheel.sh in an environment with the core dependencies only, from outside the checkout.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import zipfile
from pathlib import Path

#: Run by Alembic inside its own context only.
SKIPPED = {"hybridindex.migrations.env"}
#: Modules that import an optional package at once: its kernels are made by decorators. Nobody else may.
NEEDS = {
    "hybridindex.tiers.paged.triton_kernels": "triton",
    "hybridindex.tiers.paged.codes.triton_code_kernels": "triton",
    "hybridindex.tiers.paged.masks.triton_mask_kernel": "triton",
    "hybridindex.tiers.paged.pq.triton_pq_kernels": "triton",
}
#: Need an extra, and have to say so where it is not installed.
NEED_AN_EXTRA = {
    # What is in the package http is behind its own refusal.
    **{
        f"hybridindex.service.{name}": "service" for name in ("daemon", "http", "observe.histograms", "observe.metrics")
    },
    "hybridindex.service.observe.traces": "traces",
    "hybridindex.integrations.vllm_endpoint": "service",
    "hybridindex.integrations.vllm_stats": "vllm",
    **{f"hybridindex.integrations.{name}": name for name in ("langchain", "llamaindex", "haystack")},
    "hybridindex.integrations.haystack_store": "haystack",
}


def sources() -> set[str]:
    """Modules of the checkout that this file lies in, by their names in the wheel."""
    root = Path(__file__).resolve().parents[2]
    rooms = ("profiler", "partitioner", "router", "migrations")
    ours = [p for p in (root / "hybridindex").rglob("*.py") if p.relative_to(root).parts[1] not in rooms]
    linked = [p for room in rooms for p in (root / room).rglob("*.py")]
    return {str(p.relative_to(root)) for p in ours} | {f"hybridindex/{p.relative_to(root)}" for p in linked}


def main(wheel: str) -> None:
    import hybridindex
    from hybridindex.errors import how_to_install

    home = Path(hybridindex.__file__).parent
    assert "site-packages" in home.parts, f"imported from {home}, not from the installed wheel"
    names = sorted(m.name for m in pkgutil.walk_packages([str(home)], "hybridindex.") if m.name not in SKIPPED)
    for name in names:
        refusal = ""
        try:
            importlib.import_module(name)
        except ImportError as error:
            if error.name is not None and error.name == NEEDS.get(name):
                continue
            refusal = repr(error)
        if name in NEED_AN_EXTRA:
            assert refusal.startswith("MissingDependencyError"), f"{name}: {refusal or 'imported without its extra'}"
            assert how_to_install(NEED_AN_EXTRA[name]) in refusal, refusal
        else:
            assert not refusal, f"{name}: {refusal}"
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
    assert len(files) == len(set(files)), "a file is in the wheel twice"
    assert any(f.startswith("hybridindex/_native") and f.endswith(".so") for f in files), "the extension is missing"
    missing = sources() - set(files)
    assert not missing, f"the wheel lacks {sorted(missing)}"
    assert "hybridindex/migrations/env.py" in files
    assert "hybridindex/py.typed" in files
    page = {
        f"hybridindex/service/http/page/{name}"
        for name in ("index.html", "page.css", "page.js", "charts.js", "docs.html", "docs.js", "icon.svg")
    }
    assert page <= set(files), f"the wheel lacks {sorted(page - set(files))}"
    assert "hybridindex/studies/hardware/chips/h100.json" in files
    assert "hybridindex/studies/schedule/cases/case1.yaml" in files
    foreign = {f.split("/")[0] for f in files if not f.startswith(("hybridindex/", "hybridindex-"))}
    assert not foreign, f"the wheel would install top-level names {foreign}"
    print(f"imported {len(names)} modules from the wheel")


if __name__ == "__main__":
    main(sys.argv[1])
