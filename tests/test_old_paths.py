"""Import paths of version 0.1: the same objects, with a warning; what never was a path stays an error."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from hybridindex.old_paths import MOVED, RENAMED


@pytest.fixture(autouse=True)
def _forget():
    """Modules of old paths are made once a process; each test makes its own."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if any(name == old or name.startswith(f"{old}.") for old in MOVED):
            del sys.modules[name]


@pytest.mark.parametrize(("old", "new"), MOVED.items(), ids=lambda value: value)
def test_an_old_path_gives_the_same_objects_and_warns(old, new):
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}"):
        module = import_module(old)
    now = import_module(new)
    assert module.__all__ == now.__all__
    for name in now.__all__:
        assert getattr(module, name) is getattr(now, name)


def test_a_module_of_an_old_package_is_found_too():
    with pytest.warns(DeprecationWarning, match="simulator is now"):
        import_module("hybridindex.simulator")
    with pytest.warns(DeprecationWarning, match="is now hybridindex.studies.simulator.system"):
        module = import_module("hybridindex.simulator.serve")
    assert module.simulate is import_module("hybridindex.studies.simulator.system").simulate


@pytest.mark.parametrize("new", RENAMED.values())
def test_a_renamed_module_is_there(new):
    import_module(new)


@pytest.mark.parametrize("name", ["hybridindex.simulators", "hybridindex.nothing", "hybridindex.partitioner.nothing"])
def test_what_never_was_a_path_is_still_missing(name):
    with pytest.raises(ModuleNotFoundError, match=name.rpartition(".")[2]):
        import_module(name)


def test_the_warning_names_the_line_that_imports():
    code = "import hybridindex\n\nfrom hybridindex.simulator import POLICIES\n"
    ran = subprocess.run([sys.executable, "-W", "always", "-"], input=code, capture_output=True, text=True, check=True)
    assert "<stdin>:3: DeprecationWarning: hybridindex.simulator is now hybridindex.studies.simulator" in ran.stderr
