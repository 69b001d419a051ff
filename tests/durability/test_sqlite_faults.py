"""SQLite's own calls fail, below Python: the store and the documents have their old rows or the new ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def test_every_call_of_sqlite_fails(tmp_path: Path, record_property: Any) -> None:
    library = tmp_path / "failing_calls.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", library, HERE / "failing_calls.c", "-ldl"]
    subprocess.run(command, check=True)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.durability.sqlite_faults",
            tmp_path,
            os.environ.get("HYBRIDINDEX_ALL_FAULTS", ""),
        ],
        env={**os.environ, "LD_PRELOAD": str(library)},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    record_property("cases", found["tried"])
    assert found["tried"] > 100
    assert not found["wrong"], f"{len(found['wrong'])} of {found['tried']}:\n" + "\n".join(found["wrong"])
