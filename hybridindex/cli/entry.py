"""The console script: sets what must be set before faiss is loaded, and answers Ctrl-C while modules still load.

Everything else is in :mod:`hybridindex.cli.main`.
"""

from __future__ import annotations

import os
import sys

__all__ = ["run"]

_INTERRUPTED = 130


def run() -> None:
    """Entry point. Ctrl-C during start-up is one line and exit status 130, as it is later on."""
    # Spinning OpenMP threads on a busy machine make every timing meaningless. An entry point may decide this; the
    # library only warns.
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
    run_command()
