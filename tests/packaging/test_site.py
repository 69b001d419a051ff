"""The documentation as a site: it builds without a warning, and has every command, option, route and public name."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

import hybridindex

ROOT = Path(__file__).resolve().parents[2]
#: Modules whose public names programs use; the site shows them.
PUBLIC = ("hybridindex", "hybridindex.client", "hybridindex.cluster")


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs/hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Text of each page by its name."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    pages = {file.stem: file.read_text() for file in folder.glob("*.html")}
    return {name: unescape(re.sub(r"<[^>]+>", "", text)) for name, text in pages.items()}


@pytest.mark.timeout(1000)
def test_every_page_is_there(site):
    pages = {file.stem for file in (ROOT / "docs").glob("*.md")}
    assert pages <= set(site)
    for name in pages:
        assert "<!-- reference" not in site[name], name


@pytest.mark.timeout(1000)
def test_every_command_and_option_is_there_with_its_help(site, hooks):
    page, leaves = site["commands"], list(hooks.leaves(hooks.typer.main.get_command(hooks.make_app())))
    assert len(leaves) > 30
    for name, command in leaves:
        assert name in page
        assert command.help, f"{name} does not say what it does"
        for each in command.params:
            assert each.help, f"{each.name} of {name} does not say what it means"
            if each.param_type_name == "option" and not each.hidden:
                assert each.opts[0] in page, f"{each.opts[0]} of {name} is missing"


@pytest.mark.timeout(1000)
def test_every_route_is_there(site, hooks):
    routes = [(path, method) for path, methods in hooks.openapi()["paths"].items() for method in methods]
    assert len(routes) > 20
    for path, method in routes:
        assert f"{method.upper()} {path}" in site["http"]


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_there_and_says_what_it_is(site, module):
    names = importlib.import_module(module)
    for name in names.__all__:
        if name == "__version__":
            continue
        each = getattr(names, name)
        assert each.__doc__, f"{module}.{name} has no docstring"
        assert each.__name__ in site["python"], f"{module}.{name} is missing"


def test_what_is_named_here_is_public():
    assert "open" in hybridindex.__all__
    assert hybridindex.open.__name__ == "open_index"
