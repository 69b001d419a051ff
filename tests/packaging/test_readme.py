"""Every command and every snippet of the README, as they stand there, one after another in one folder.

A block that cannot run here is marked in the README's source with a comment that says why.
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

import pytest

from tests.packaging.forked_commands import forked_commands

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
#: (reason why it is not run, language, text) of each fenced block; pictures in characters are no commands.
BLOCKS = [
    (match[1] or "", match[2], match[3])
    for match in re.finditer(r"(?:<!-- not run: (.*?) -->\n)?^```(\w*)\n(.*?)^```", README, flags=re.M | re.S)
    if "┌" not in match[3]
]
RUN = [(language, text) for reason, language, text in BLOCKS if not reason]


def test_what_is_not_run_is_marked_and_says_why():
    reasons = [reason for reason, _, _ in BLOCKS if reason]
    assert reasons == [
        "minutes, and the second is the suite itself",
        "installs; a test follows what each line brings",
        "needs a server of an LLM",
    ]
    assert README.count("<!-- not run:") == len(reasons)
    assert {language for language, _ in RUN} == {"", "python"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("readme")


@pytest.fixture(scope="module")
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
def test_every_block_runs(folder, shell, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    names: dict[str, object] = {}
    for language, text in RUN:
        if language == "python":
            # As in a notebook: await stands outside of functions.
            code = compile(text, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            if code.co_flags & inspect.CO_COROUTINE:
                asyncio.run(eval(code, names))
            else:
                exec(code, names)
        else:
            shell(text)
    assert len(names["result"].ids) == 1
    assert "feasible" in capsys.readouterr().out
    assert (folder / "report/report.html").exists()
    names["index"].close()


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
    lines = re.findall(r"^pip install '\.\[([\w,]+)\]'", README, flags=re.M)
    alone, gpu = (set(line.split(",")) for line in lines)
    assert alone - {"cpu"} == gpu - {"gpu"}
    assert "faiss-cpu" in brought(alone)
    assert {"torch", "triton"}.isdisjoint(brought(alone))
    assert {"torch", "triton", "faiss-gpu"} <= brought(gpu)
    assert {"fastapi", "httpx", "matplotlib", "pyyaml"} <= brought(alone)
