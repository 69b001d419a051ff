"""What messages tell to install can be installed: no package index has hybridindex, so its extras are spelt out."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hybridindex.errors import how_to_install

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = {
    file.relative_to(ROOT): file.read_text()
    for room in ("hybridindex", "profiler", "partitioner", "router", "migrations")
    for file in (ROOT / room).rglob("*.py")
}
PACKAGES = {re.split(r"[\[<>=]", entry)[0] for extra in PROJECT["optional-dependencies"].values() for entry in extra}


def test_no_message_names_hybridindex_as_a_package_to_install():
    found = {
        str(file): told for file, text in SOURCES.items() for told in re.findall(r"install[^\n]*hybridindex\[", text)
    }
    assert found == {}


def test_no_message_or_page_asks_a_package_index_for_hybridindex():
    pages = {str(page.relative_to(ROOT)): page.read_text() for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")]}
    texts = {**{str(file): text for file, text in SOURCES.items()}, **pages}
    asks = r"(?:install|--from|uvx)\b[^\n]*?['\" ]hybridindex\["
    assert {name: found for name, text in texts.items() if (found := re.findall(asks, text))} == {}


def test_what_embeds_text_brings_no_faiss():
    """faiss-cpu would take the place of faiss-gpu."""
    extras = PROJECT["optional-dependencies"]
    assert [re.split(r"[<>=]", entry)[0] for entry in extras["words"]] == ["safetensors", "tokenizers"]
    assert set(extras["words"]) < set(extras["demo"])


def test_what_messages_tell_to_install_by_name_is_what_an_extra_brings():
    told = {name for text in SOURCES.values() for name in re.findall(r"pip (?:un)?install ([a-z][\w-]+)", text)}
    assert told
    assert told <= PACKAGES


def test_every_extra_that_a_message_names_exists():
    named = {extra for text in SOURCES.values() for extra in re.findall(r"how_to_install\([\"'](\w+)[\"']\)", text)}
    assert {"client", "service", "report", "device"} <= named <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("extra", ["client", "gpu", "postgres", "refresh"])
def test_an_extra_is_told_by_its_packages(extra):
    told = re.findall(r"'([^']+)'", how_to_install(extra))
    names = [re.split(r"[<>=]", package)[0] for package in told]
    assert names == [re.split(r"[<>=]", entry)[0] for entry in PROJECT["optional-dependencies"][extra]]


def test_only_a_node_of_a_cluster_needs_httptools():
    told = subprocess.run(
        [sys.executable, "-c", _WITHOUT_HTTPTOOLS], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.strip() == f"nodes of a cluster need httptools: {how_to_install('cluster')}"
    assert "httptools" in how_to_install("cluster")


_WITHOUT_HTTPTOOLS = """
import sys
sys.modules["httptools"] = None
import hybridindex.service.daemon, hybridindex.cluster, hybridindex.cli.commands.several.cluster
from hybridindex.errors import MissingDependencyError
from hybridindex.router.remote.connection import response_parser
try:
    response_parser()
except MissingDependencyError as error:
    print(error)
"""
