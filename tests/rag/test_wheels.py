from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hybridindex.demo import fetch
from hybridindex.demo.fetch import AptArchive, FetchError, WheelSpec, fetch_wheel, run_command
from hybridindex.errors import MissingDependencyError

_CONTENT = b"a wheel"
_SPEC = WheelSpec(name="some-thing", version="1.0", sha256=hashlib.sha256(_CONTENT).hexdigest(), size_mb=0.1)
_FILE = "some_thing-1.0-py3-none-any.whl"


class FakeRun:
    """Stands for subprocess.run: remembers command lines and lets a function act for the program."""

    def __init__(self, act: Any = None) -> None:
        self.commands: list[list[str]] = []
        self.act = act

    def __call__(self, arguments: Sequence[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        assert options.get("shell") is None
        self.commands.append(list(arguments))
        code, out, err = self.act(list(arguments), options.get("cwd")) if self.act else (0, b"", b"")
        return subprocess.CompletedProcess(list(arguments), code, out, err)


def _pip_that_writes(content: bytes) -> FakeRun:
    def act(arguments: list[str], cwd: Path | None) -> tuple[int, bytes, bytes]:
        if "download" in arguments:
            (Path(arguments[arguments.index("--dest") + 1]) / _FILE).write_bytes(content)
        return 0, b"", b""

    return FakeRun(act)


def test_a_wheel_is_downloaded_once_and_without_dependencies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _pip_that_writes(_CONTENT)
    monkeypatch.setattr(fetch.subprocess, "run", run)
    path = fetch_wheel(_SPEC, tmp_path / "wheels")
    assert path.read_bytes() == _CONTENT
    downloads = [command for command in run.commands if "download" in command]
    assert len(downloads) == 1
    assert downloads[0][:2] == [sys.executable, "-m"]
    assert {"--no-deps", "--only-binary=:all:", "some-thing==1.0"} <= set(downloads[0])
    assert fetch_wheel(_SPEC, tmp_path / "wheels") == path
    assert len([command for command in run.commands if "download" in command]) == 1


def test_a_damaged_wheel_is_downloaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.subprocess, "run", _pip_that_writes(_CONTENT))
    (tmp_path / _FILE).write_bytes(b"a wheeL")
    assert fetch_wheel(_SPEC, tmp_path).read_bytes() == _CONTENT


def test_a_wheel_of_other_content_is_refused_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.subprocess, "run", _pip_that_writes(b"something else"))
    with pytest.raises(FetchError, match="SHA-256"):
        fetch_wheel(_SPEC, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_python_without_pip_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.subprocess, "run", FakeRun(lambda arguments, cwd: (1, b"", b"No module named pip")))
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
    def never_ends(arguments: Sequence[str], **options: Any) -> None:
        raise subprocess.TimeoutExpired(list(arguments), options["timeout"])

    monkeypatch.setattr(fetch.subprocess, "run", never_ends)
    with pytest.raises(FetchError, match="no end after 5 s"):
        run_command(["x"], timeout_s=5, what="trial")


def _archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: set[str]) -> tuple[AptArchive, FakeRun]:
    """An apt that knows some packages; downloads are files with the package's name as content."""
    folder = tmp_path / "apt"

    def act(arguments: list[str], cwd: Path | None) -> tuple[int, bytes, bytes]:
        if "update" in arguments:
            (folder / "lists" / "host_dists_x_Packages").write_text("")
            (folder / "lists" / "host_dists_x_i18n_Translation-en").write_text("Package: a\nDescription-en: A\n")
            return 100, b"", b"E: one third-party source is dead"
        packages = arguments[arguments.index("download") + 1 :]
        if not known.issuperset(packages):
            return 100, b"", b"E: Unable to locate package"
        assert cwd is not None
        for package in packages:
            (cwd / f"{package}_1.0_all.deb").write_text(package)
        return 0, b"", b""

    run = FakeRun(act)
    monkeypatch.setattr(fetch.subprocess, "run", run)
    monkeypatch.setattr(fetch.shutil, "which", lambda tool: f"/usr/bin/{tool}")
    return AptArchive(folder), run


def test_unknown_packages_do_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apt, _ = _archive(tmp_path, monkeypatch, {"good"})
    found = dict(apt.download(["good", "unknown"]))
    assert isinstance(found["unknown"], FetchError)
    good = found["good"]
    assert isinstance(good, Path)
    assert good.read_text() == "good"


def test_intact_packages_are_not_downloaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apt, run = _archive(tmp_path, monkeypatch, {"good"})
    ((_, path),) = apt.download(["good"])
    assert isinstance(path, Path)
    before = len(run.commands)
    assert dict(apt.download(["good"])) == {"good": path}
    assert len(run.commands) == before
    path.write_text("gooD")
    assert dict(apt.download(["good"])) == {"good": path}
    assert len(run.commands) == before + 1
    assert path.read_text() == "good"


def test_apt_works_in_its_own_folders_without_the_systems_hooks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apt, run = _archive(tmp_path, monkeypatch, set())
    (translation,) = apt.translations()
    assert apt.read_list(translation).startswith("Package: a")
    command = run.commands[0]
    config = Path(command[command.index("-c") + 1]).read_text()
    assert f'Dir::State::Lists "{tmp_path}/apt/lists/";' in config
    assert f'Dir::Cache "{tmp_path}/apt/cache/";' in config
    assert "#clear APT::Update::Post-Invoke;" in config


def test_a_machine_without_apt_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.shutil, "which", lambda tool: None)
    with pytest.raises(FetchError, match="apt-get is not installed"):
        AptArchive(tmp_path).translations()


def test_an_update_that_brings_no_list_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.subprocess, "run", FakeRun())
    monkeypatch.setattr(fetch.shutil, "which", lambda tool: f"/usr/bin/{tool}")
    with pytest.raises(FetchError, match="no package list"):
        AptArchive(tmp_path).update()
