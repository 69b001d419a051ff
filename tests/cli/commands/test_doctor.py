"""``doctor``: what it says where packages are missing, or are there and do not load."""

from __future__ import annotations

import builtins
import re
import tomllib
from pathlib import Path

import pytest
import torch
from rich.console import Group
from rich.text import Text

from hybridindex.cli.commands import doctor
from hybridindex.cli.commands.doctor import Finding, findings_table
from hybridindex.cli.commands.index import index_table
from hybridindex.cli.console import ExitCode, out
from hybridindex.errors import how_to_install

ROOT = Path(__file__).resolve().parents[3]
_NO_CUDART = OSError("libcudart.so.13: cannot open shared object file: No such file or directory")
_NO_GOMP = ImportError(
    "libgomp.so.1: cannot open shared object file: No such file or directory", name="faiss._swigfaiss"
)


@pytest.fixture
def failing_import(monkeypatch):
    """Makes the import of a package end with an error."""
    theirs = builtins.__import__

    def fail(package: str, error: BaseException) -> None:
        def imported(name, *rest, **named):
            if name == package:
                raise error
            return theirs(name, *rest, **named)

        monkeypatch.setattr(builtins, "__import__", imported)

    return fail


def found_of(answer):
    return {finding["what"]: finding for finding in answer.json["findings"]}


@pytest.mark.parametrize("error", [_NO_CUDART, ImportError("undefined symbol: ncclInit", name="torch._C")], ids=repr)
def test_a_torch_that_does_not_load_is_a_finding(cli, failing_import, error):
    failing_import("torch", error)
    answer = cli("doctor", "--json")
    assert answer.code == 0, answer.err
    torch_found = found_of(answer)["torch"]
    assert torch_found["state"] == "note"
    assert torch_found["detail"] == f"installed, but does not load: {error}"
    assert torch_found["remedy"]


def test_a_torch_that_is_not_there_is_not_installed(cli, failing_import):
    failing_import("torch", ModuleNotFoundError("No module named 'torch'", name="torch"))
    found = found_of(cli("doctor", "--json"))["torch"]
    assert found["detail"] == "not installed: no device tier"
    assert found["remedy"] == how_to_install("device")


def test_hardware_that_cannot_be_looked_at_is_a_finding(cli, monkeypatch):
    """Where a driver is, its devices are asked of torch."""

    def broken():
        raise _NO_CUDART

    monkeypatch.setattr("hybridindex.profiler.hardware.hardware_info", broken)
    answer = cli("doctor", "--json")
    assert answer.code == 0, answer.err
    assert found_of(answer)["hardware"]["detail"] == f"cannot be examined: {_NO_CUDART}"


def test_one_device_that_fails_leaves_the_others(cli, monkeypatch):
    def memory(number):
        if number == 0:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        return 1 << 30, 2 << 30

    monkeypatch.setattr("hybridindex.cli.commands.doctor._hardware", list)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "some GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    answer = cli("doctor", "--json")
    assert answer.code == 0, answer.err
    found = found_of(answer)
    assert found["cuda:0"]["state"] == "note"
    assert "uncorrectable ECC" in found["cuda:0"]["detail"]
    assert found["cuda:1"]["detail"] == "some GPU, 1.0 of 2.0 GiB free"


def test_a_faiss_that_does_not_load_is_not_called_missing(cli, failing_import):
    failing_import("faiss", _NO_GOMP)
    answer = cli("doctor", "--json")
    assert answer.code == ExitCode.UNHEALTHY
    found = found_of(answer)["faiss"]
    assert found["detail"] == f"installed, but does not load: {_NO_GOMP}"
    assert found["remedy"] != ""
    assert "not installed" not in found["detail"]


def test_a_faiss_that_is_not_there_is_not_installed(cli, failing_import):
    failing_import("faiss", ModuleNotFoundError("No module named 'faiss'", name="faiss"))
    answer = cli("doctor", "--json")
    assert answer.code == ExitCode.UNHEALTHY
    assert found_of(answer)["faiss"]["detail"].startswith("not installed")


_SHOWN_EXTRAS = ("client", "service", "refresh", "filters", "ingest", "cluster")


@pytest.mark.parametrize("extra", _SHOWN_EXTRAS)
def test_an_extra_names_the_first_package_that_it_lacks(cli, monkeypatch, extra):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = [re.split(r"[\[<>=]", entry)[0] for entry in project["optional-dependencies"][extra]]
    row = f"extra {extra}"
    monkeypatch.setattr(doctor, "_package", lambda name: "1")
    here = found_of(cli("doctor", "--json"))[row]
    assert (here["state"], here["remedy"]) == ("ok", "")
    for first in range(len(packages)):
        gone = packages[first:]
        monkeypatch.setattr(doctor, "_package", lambda name, gone=gone: None if name in gone else "1")
        lacking = found_of(cli("doctor", "--json"))[row]
        assert lacking["state"] == "note"
        assert lacking["detail"].startswith(f"{packages[first]} is not installed: ")
        assert lacking["remedy"] == how_to_install(extra)


def test_a_narrow_terminal_cuts_nothing_off(printed, monkeypatch):
    remedy = "pip install 'apscheduler<4,>=3.10' 'fastapi>=0.115' /a/path/that/is/longer/than/its/column/by/very/much"
    found = findings_table([Finding(what="service", state="note", detail="x" * 100, remedy=remedy)])
    index = index_table({"path": f"/indexes/{'y' * 100}", "count": 12_345}, "built")
    monkeypatch.setattr(out, "_width", 60)
    for shown in (found, index, Group(Text("both"), found, index)):
        assert "…" not in printed(shown)
    assert printed(found).count("x") - printed(findings_table([])).count("x") >= 100
    assert printed(index).count("y") == 100
