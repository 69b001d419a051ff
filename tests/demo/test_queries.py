from __future__ import annotations

from pathlib import Path

from hybridindex.demo.queries import read_log
from tests.demo.small_files import write_pyserini_wheel


def test_the_log_is_read_from_the_jar_in_the_wheel(tmp_path: Path) -> None:
    assert read_log(write_pyserini_wheel(tmp_path)) == ["delta air lines", "hsn", "delta air lines", "at 9:30"]
