"""benchmarks.rag: what it is not told to do is a usage error, before anything is loaded or written."""

from __future__ import annotations

import pytest

from benchmarks.rag import __main__ as rag


def test_nothing_to_do_is_a_usage_error(monkeypatch, capsys, tmp_path):
    # Without it the benchmark would start this process again.
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    words = ["--index", "nowhere", "--llm", "http://127.0.0.1:9", "--kept", tmp_path / "kept"]
    monkeypatch.setattr("sys.argv", ["benchmarks.rag", *map(str, words)])
    with pytest.raises(SystemExit) as stopped:
        rag.main()
    assert stopped.value.code == 2
    assert "give --record, --measure or both" in capsys.readouterr().err
    assert not (tmp_path / "kept").exists()
