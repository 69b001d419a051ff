"""Every command and every snippet of the README, and of docs/start.md, as they stand there, one after another in a
folder for each.

A block that cannot run here is marked in the page's source with a comment that says why.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.forked_commands import forked_commands

ROOT = Path(__file__).resolve().parents[2]
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "docs/start.md")}
#: Why blocks of a page are not run.
NOT_RUN = {
    "README.md": ["installs; a test follows what each line brings", "minutes, and the second is the suite itself"],
    "docs/start.md": ["installs; a test follows what each line brings", "downloads", "needs a server of an LLM"],
}
#: For people who meet it for the first time.
MOST_WORDS = 800


def blocks_of(page: str) -> list[tuple[str, str, str]]:
    """(reason why it is not run, language, text) of each fenced block."""
    fenced = r"(?:<!-- not run: (.*?) -->\n)?^```(\w*)\n(.*?)^```"
    return [(match[1] or "", match[2], match[3]) for match in re.finditer(fenced, PAGES[page], flags=re.M | re.S)]


def run_of(page: str) -> list[tuple[str, str]]:
    return [(language, text) for reason, language, text in blocks_of(page) if not reason]


@pytest.mark.parametrize("page", PAGES)
def test_what_is_not_run_is_marked_and_says_why(page):
    reasons = [reason for reason, _, _ in blocks_of(page) if reason]
    assert reasons == NOT_RUN[page]
    assert PAGES[page].count("<!-- not run:") == len(reasons)
    assert {language for language, _ in run_of(page)} == {"", "python"}


def test_the_readme_is_short():
    assert len(PAGES["README.md"].split()) <= MOST_WORDS


@pytest.fixture
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("page")


@pytest.fixture
def shell(folder, tmp_path_factory):
    """Runs a block in bash; any command that fails ends it."""
    with forked_commands(tmp_path_factory.mktemp("bin")) as programs:
        environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "COLUMNS": "120"}

        def run(text: str) -> None:
            output = folder / "output.txt"
            with output.open("w") as file:
                done = subprocess.run(
                    ["bash", "-euo", "pipefail", "-c", text],
                    cwd=folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=900,
                )
            assert done.returncode == 0, f"{text}\n{output.read_text()}"

        yield run


@pytest.mark.timeout(1800)  # a dozen processes beside other tests
def test_every_block_of_the_first_page_runs(folder, shell, monkeypatch, capsys):
    names = run_page("docs/start.md", folder, shell, monkeypatch)
    assert len(names["result"].ids) == 1
    assert "feasible" in capsys.readouterr().out
    assert (folder / "report/report.html").exists()
    names["index"].close()


@pytest.mark.timeout(600)
def test_every_block_of_the_readme_runs(folder, shell, monkeypatch, capsys):
    names = run_page("README.md", folder, shell, monkeypatch)
    assert names["result"].ids.shape == (16, 10)
    assert "feasible" in capsys.readouterr().out
    names["index"].close()


def run_page(page, folder, shell, monkeypatch):
    """What its Python named."""
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    for language, text in run_of(page):
        if language == "python":
            # As in a notebook: await stands outside of functions.
            code = compile(text, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            if code.co_flags & inspect.CO_COROUTINE:
                asyncio.run(eval(code, names))
            else:
                exec(code, names)
        else:
            shell(text)
    return names


def brought(extras: set[str]) -> set[str]:
    """Names of the packages that pip brings for extras of ours, as far as they are installed here."""
    found: set[str] = set()
    waiting = [
        re.split(r"[^\w.-]", entry)[0].lower()
        for extra in extras
        for entry in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][extra]
    ]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        try:
            needed = requires(name) or []
        except PackageNotFoundError:
            continue
        waiting += [re.split(r"[^\w.-]", entry)[0].lower() for entry in needed if "extra ==" not in entry]
    return found


def test_the_lines_that_install_bring_what_the_rest_needs():
    lines = re.findall(r"^pip install '\.\[([\w,]+)\]'", PAGES["README.md"], flags=re.M)
    alone, gpu = (set(line.split(",")) for line in lines)
    assert f"pip install '.[{lines[0]}]'" in PAGES["docs/start.md"]
    assert f"pip install '.[{lines[1]}]'" in PAGES["docs/start.md"]
    assert alone - {"cpu"} == gpu - {"gpu"}
    assert "faiss-cpu" in brought(alone)
    assert {"torch", "triton"}.isdisjoint(brought(alone))
    assert {"torch", "triton", "faiss-gpu"} <= brought(gpu)
    assert {"fastapi", "httpx", "matplotlib", "pyyaml"} <= brought(alone)
