from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from hybridindex.errors import MissingDependencyError
from hybridindex.rag import wheels
from hybridindex.rag.wheels import FetchError, WheelSpec, fetch_wheel, run_command
from tests.fake_run import FakeRun

_CONTENT = b"a wheel"
_SPEC = WheelSpec(name="some-thing", version="1.0", sha256=hashlib.sha256(_CONTENT).hexdigest(), size_mb=0.1)
_FILE = "some_thing-1.0-py3-none-any.whl"


def _pip_that_writes(content: bytes) -> FakeRun:
    def act(arguments: list[str], cwd: Path | None) -> tuple[int, bytes, bytes]:
        if "download" in arguments:
            (Path(arguments[arguments.index("--dest") + 1]) / _FILE).write_bytes(content)
        return 0, b"", b""

    return FakeRun(act)


def test_a_wheel_is_downloaded_once_and_without_dependencies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _pip_that_writes(_CONTENT)
    monkeypatch.setattr(wheels.subprocess, "run", run)
    path = fetch_wheel(_SPEC, tmp_path / "wheels")
    assert path.read_bytes() == _CONTENT
    downloads = [command for command in run.commands if "download" in command]
    assert len(downloads) == 1
    assert downloads[0][:2] == [sys.executable, "-m"]
    assert {"--no-deps", "--only-binary=:all:", "some-thing==1.0"} <= set(downloads[0])
    assert fetch_wheel(_SPEC, tmp_path / "wheels") == path
    assert len([command for command in run.commands if "download" in command]) == 1


def test_a_damaged_wheel_is_downloaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels.subprocess, "run", _pip_that_writes(_CONTENT))
    (tmp_path / _FILE).write_bytes(b"a wheeL")
    assert fetch_wheel(_SPEC, tmp_path).read_bytes() == _CONTENT


def test_a_wheel_of_other_content_is_refused_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels.subprocess, "run", _pip_that_writes(b"something else"))
    with pytest.raises(FetchError, match="SHA-256"):
        fetch_wheel(_SPEC, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_where_only_uv_is_uv_runs_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _pip_that_writes(_CONTENT)
    monkeypatch.setattr(wheels.subprocess, "run", run)
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("UV", "/opt/uv")
    assert fetch_wheel(_SPEC, tmp_path).read_bytes() == _CONTENT
    (command,) = run.commands
    assert command[:3] == ["/opt/uv", "tool", "run"]
    assert command[command.index("pip") + 1] == "download"


def test_a_python_without_pip_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(wheels.shutil, "which", lambda program: None)
    monkeypatch.delenv("UV", raising=False)
    with pytest.raises(MissingDependencyError, match="ensurepip"):
        fetch_wheel(_SPEC, tmp_path)


def test_failures_of_programs_are_quoted() -> None:
    with pytest.raises(FetchError, match=r"trial failed \(exit 3\): last words"):
        run_command(
            [sys.executable, "-c", "import sys; sys.stderr.write('last words'); sys.exit(3)"],
            timeout_s=60,
            what="trial",
        )
    with pytest.raises(FetchError, match="not installed"):
        run_command(["no-such-program-anywhere"], timeout_s=60, what="trial")


def test_a_program_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def never_ends(arguments: list[str], *, timeout: float, **_options: object) -> None:
        raise subprocess.TimeoutExpired(arguments, timeout)

    monkeypatch.setattr(wheels.subprocess, "run", never_ends)
    with pytest.raises(FetchError, match="no end after 5 s"):
        run_command(["x"], timeout_s=5, what="trial")
