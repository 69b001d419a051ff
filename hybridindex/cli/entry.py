"""The console script: answers ``--version``, and Ctrl-C while modules load; leaves output that nothing takes.

Everything else is in :mod:`hybridindex.cli.main`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys

from hybridindex import __version__

__all__ = ["run"]

_INTERRUPTED, _TERMINATED = 130, 143


def run() -> None:
    """Entry point. Ctrl-C during start-up prints one line and exits with 130, as it does later."""
    if os.getpid() == 1:
        # The first process of a container: SIGTERM does nothing to it that it does not ask for.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    if sys.argv[1:] == ["--version"]:
        _print_version()
        return
    try:
        from hybridindex.cli.main import run as run_command
    except KeyboardInterrupt:
        message = "interrupted while starting"
        if "--json" in sys.argv[1:]:
            import json

            error = {"type": "KeyboardInterrupt", "message": message, "exit_code": _INTERRUPTED}
            with contextlib.suppress(OSError, AttributeError):
                sys.stdout.write(json.dumps({"error": error}) + "\n")
        sys.stderr.write(f"KeyboardInterrupt: {message}\n")
        sys.exit(_INTERRUPTED)
    try:
        run_command()
    finally:
        _flush()
        # The interpreter ends with a collection over all objects of all modules, which takes seconds on a busy machine.
        gc.freeze()


def _print_version() -> None:
    try:
        if sys.stdout is None:  # closed, as by >&-
            raise OSError("standard output is closed")
        print(f"hybridindex {__version__}", flush=True)
    except OSError as error:
        _flush()
        sys.exit(f"OSError: {error}")


def _flush() -> None:
    """Leaves what standard output does not take: the interpreter would try again, complain, and exit with 120."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        sys.stdout = None
