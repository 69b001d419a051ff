"""Files that other programs read: workflows, the compose file, what a release builds. By ``make recipes``."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHECK, BUILD = shutil.which("check-jsonschema"), shutil.which("cibuildwheel")
RELEASE = ROOT / ".github/workflows/release.yml"


def run(*words):
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.skipif(CHECK is None, reason="make recipes installs check-jsonschema for it")
@pytest.mark.parametrize(
    ("schema", "files"),
    [("github-workflows", sorted(RELEASE.parent.glob("*.yml"))), ("compose-spec", [ROOT / "examples/compose.yml"])],
)
def test_who_reads_them_takes_them(schema, files):
    done = run(CHECK, "--builtin-schema", f"vendor.{schema}", *map(str, files))
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(BUILD is None, reason="make recipes installs cibuildwheel for it")
def test_a_release_has_wheels_for_each_python_on_both_architectures():
    done = run(BUILD, "--print-build-identifiers", "--platform", "linux", "--archs", "x86_64,aarch64", ".")
    assert done.returncode == 0, done.stderr
    versions = re.findall(r"Programming Language :: Python :: 3\.(\d+)", (ROOT / "pyproject.toml").read_text())
    wanted = {f"cp3{v}-manylinux_{machine}" for v in versions for machine in ("x86_64", "aarch64")}
    assert set(done.stdout.split()) == wanted
    machines = yaml.safe_load(RELEASE.read_text())["jobs"]["wheels"]["strategy"]["matrix"]["machine"]
    assert machines == ["ubuntu-24.04", "ubuntu-24.04-arm"]


def test_the_first_search_of_a_wheel_finds():
    done = run(sys.executable, str(ROOT / "tests/packaging/first_search.py"))
    assert (done.returncode, done.stdout) == (0, "first search: ok\n")
