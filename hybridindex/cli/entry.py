"""The console script: sets the environment before faiss loads; answers ``--version`` and Ctrl-C while modules load.

Everything else is in :mod:`hybridindex.cli.main`.
"""

from __future__ import annotations

import gc
import os
import sys

from hybridindex import __version__

__all__ = ["run"]

_INTERRUPTED = 130


def run() -> None:
    """Entry point. Ctrl-C during start-up prints one line and exits with 130, as it does later."""
    if sys.argv[1:] == ["--version"]:
        print(f"hybridindex {__version__}")
        return
    # Spinning OpenMP threads distort timings on a busy machine. Only entry points set this; the library warns.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        from hybridindex.cli.main import run as run_command
    except KeyboardInterrupt:
        message = "interrupted while starting"
        if "--json" in sys.argv[1:]:
            import json

            error = {"type": "KeyboardInterrupt", "message": message, "exit_code": _INTERRUPTED}
            sys.stdout.write(json.dumps({"error": error}) + "\n")
        sys.stderr.write(f"KeyboardInterrupt: {message}\n")
        sys.exit(_INTERRUPTED)
    try:
        run_command()
    finally:
        # The interpreter ends with a collection over all objects of all modules, which takes seconds on a busy machine.
        gc.freeze()
