from __future__ import annotations

import numpy as np

from hybridindex.profiler.checkpoint import Checkpoint


def test_finished_stages_come_back_for_the_same_key(tmp_path):
    path = tmp_path / "kept"
    first = Checkpoint(path, "key")
    assert first.get("access") is None
    first.put("recall", {"nprobe": 3, "points": [{"recall": 0.1 + 0.2}]})
    first.put("access", {}, {"probes": np.arange(6, dtype=np.int32).reshape(2, 3)})
    again = Checkpoint(path, "key")
    assert again.get("recall") == ({"nprobe": 3, "points": [{"recall": 0.1 + 0.2}]}, {})
    facts, arrays = again.get("access")
    assert facts == {}
    np.testing.assert_array_equal(arrays["probes"], [[0, 1, 2], [3, 4, 5]])
    assert arrays["probes"].dtype == np.int32
    again.remove()
    assert list(tmp_path.iterdir()) == []
    again.remove()


def test_another_key_starts_anew_and_overwrites(tmp_path):
    path = tmp_path / "kept"
    Checkpoint(path, "one").put("recall", 1)
    other = Checkpoint(path, "two")
    assert other.get("recall") is None
    other.put("access", 2)
    assert Checkpoint(path, "one").get("recall") is None
    assert Checkpoint(path, "two").get("access") == (2, {})


def test_a_damaged_file_is_not_used(tmp_path, caplog):
    path = tmp_path / "kept"
    Checkpoint(path, "key").put("recall", 1)
    whole = path.read_bytes()
    for bad in (b"", b"nonsense", whole[: len(whole) // 2]):
        path.write_bytes(bad)
        assert Checkpoint(path, "key").get("recall") is None
    assert "damaged" in caplog.text


def test_without_a_path_or_with_an_unwritable_one_nothing_is_kept_and_nothing_breaks(tmp_path, caplog):
    Checkpoint(None, "key").put("recall", 1)
    nowhere = Checkpoint(tmp_path / "missing" / "kept", "key")
    nowhere.put("recall", 1)
    assert nowhere.get("recall") == (1, {})
    assert "no checkpoint" in caplog.text
    nowhere.remove()
