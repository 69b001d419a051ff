from __future__ import annotations

from pathlib import Path

import pytest

from hybridindex.demo import fetch
from hybridindex.demo.fetch import AptArchive
from hybridindex.rag import wheels
from hybridindex.rag.wheels import FetchError
from tests.fake_run import FakeRun


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
    monkeypatch.setattr(wheels.subprocess, "run", run)
    monkeypatch.setattr(fetch.shutil, "which", lambda tool: f"/usr/bin/{tool}")
    return AptArchive(folder), run


def test_an_unknown_package_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apt, _ = _archive(tmp_path, monkeypatch, {"good"})
    assert apt.download("good").read_text() == "good"
    with pytest.raises(FetchError, match="Unable to locate package"):
        apt.download("unknown")


def test_intact_packages_are_not_downloaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apt, run = _archive(tmp_path, monkeypatch, {"good"})
    path = apt.download("good")
    before = len(run.commands)
    assert apt.download("good") == path
    assert len(run.commands) == before
    path.write_text("gooD")
    assert apt.download("good") == path
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
    monkeypatch.setattr(wheels.subprocess, "run", FakeRun())
    monkeypatch.setattr(fetch.shutil, "which", lambda tool: f"/usr/bin/{tool}")
    with pytest.raises(FetchError, match="no package list"):
        AptArchive(tmp_path).update()


def test_lists_that_cannot_be_fetched_are_not_waited_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeRun(lambda _arguments, _cwd: (100, b"", b"E: no network"))
    monkeypatch.setattr(wheels.subprocess, "run", run)
    monkeypatch.setattr(fetch.shutil, "which", lambda tool: f"/usr/bin/{tool}")
    apt = AptArchive(tmp_path / "apt")
    for _ in range(3):
        with pytest.raises(FetchError, match="no network"):
            apt.download("good")
    assert len(run.commands) == 1
