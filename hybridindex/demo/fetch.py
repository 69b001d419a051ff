"""Debian packages through a private apt state.

Packages are unpacked with ``dpkg-deb -x``, never installed. The hosts are those that the machine's own apt is set up to
use. apt works on lists and caches of its own: nothing of the system changes and no privileges are needed.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from hybridindex import filesystem
from hybridindex.demo import cache
from hybridindex.rag.wheels import FetchError, run_command

__all__ = ["AptArchive", "Progress"]

#: progress(stage, done, total); total is 0 where it is not known beforehand.
Progress = Callable[[str, int, int], None]

_APT_UPDATE_TIMEOUT_S = 180.0
_APT_DOWNLOAD_TIMEOUT_S = 900.0
_UNPACK_TIMEOUT_S = 300.0
_APT_HELPER = Path("/usr/lib/apt/apt-helper")


class AptArchive:
    """The Debian (or Ubuntu) archive that this machine is set up for, through lists and caches in ``folder``.

    One user at a time (the dataset's lock sees to that); :meth:`update` alone may also run on another thread. Every
    method raises FetchError.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._tried, self._problem = False, ""
        self._updating = threading.Lock()

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
            filesystem.make_folder(self._folder / sub, parents=True, exist_ok=True)
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
        filesystem.write_bytes(config, ("\n".join(lines) + "\n").encode())
        return str(config)

    def update(self) -> None:
        """Fetch the package lists, once per object also where that fails: if no list at all is there afterwards."""
        with self._updating:
            if not self._tried:
                self._tried = True
                try:
                    self._fetch_lists()
                except FetchError as error:
                    self._problem = str(error)
        if self._problem:
            raise FetchError(self._problem)

    def _fetch_lists(self) -> None:
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
        if not filesystem.list_folder(self._lists, "*_Packages*"):
            raise complaint or FetchError("apt-get update (private lists): no package list could be fetched")

    def translations(self) -> list[Path]:
        """The English description files among the lists, in a fixed order: the main archive first."""
        self.update()
        found = filesystem.list_folder(self._lists, "*_Translation-en*")
        return sorted(found, key=lambda path: (-filesystem.stat(path).st_size, path.name))

    def read_list(self, path: Path) -> str:
        """The content of a list file, however apt keeps it (plain, lz4, gz, xz)."""
        if path.suffix not in (".lz4", ".gz", ".xz", ".bz2", ".zst"):
            return filesystem.read_text(path, errors="replace")
        done = run_command(
            [str(_APT_HELPER), "-c", self._config(), "cat-file", str(path)],
            timeout_s=_UNPACK_TIMEOUT_S,
            what=f"apt-helper cat-file {path.name}",
        )
        return done.stdout.decode("utf-8", errors="replace")

    def download(self, package: str) -> Path:
        """The .deb file of ``package``; an intact one of an earlier call is used again."""
        folder = self._folder / "debs"
        filesystem.make_folder(folder, parents=True, exist_ok=True)
        if (path := self._present(folder, package)) is not None:
            return path
        self.update()
        with filesystem.scratch_folder(".tmp-", folder) as scratch:
            run_command(
                ["apt-get", "-c", self._config(), "-q", "download", package],
                timeout_s=_APT_DOWNLOAD_TIMEOUT_S,
                cwd=Path(scratch),
                what=f"apt-get download {package}",
            )
            for found in filesystem.list_folder(scratch, "*.deb"):
                filesystem.replace(found, folder / found.name)
                cache.seal(folder / found.name, {"package": found.name.partition("_")[0]})
        if (path := self._present(folder, package)) is None:
            raise FetchError(f"{package}: apt-get download left no package")
        return path

    @staticmethod
    def _present(folder: Path, package: str) -> Path | None:
        for path in reversed(filesystem.list_folder(folder, f"{package}_*.deb")):
            if cache.check(path, {"package": package}) is not None:
                return path
        return None

    def unpack(self, deb: Path, folder: Path) -> None:
        """Unpack the files of a package; its scripts are not run."""
        run_command(
            ["dpkg-deb", "-x", str(deb), str(folder)], timeout_s=_UNPACK_TIMEOUT_S, what=f"dpkg-deb -x {deb.name}"
        )
