from __future__ import annotations

import numpy as np

from hybridindex.profiler.checkpoint import MAX_AGE_S, Checkpoint


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


def test_no_flipped_bit_of_the_file_ends_a_profile(tmp_path):
    path = tmp_path / "kept"
    first = Checkpoint(path, "key")
    first.put("access", {}, {"probes": np.arange(6, dtype=np.int32)})
    whole = path.read_bytes()
    for place in range(len(whole)):
        for bit in range(8):
            spoilt = bytearray(whole)
            spoilt[place] ^= 1 << bit
            path.write_bytes(spoilt)
            found = Checkpoint(path, "key").get("access")
            assert found is None or found[1]["probes"].tolist() == [0, 1, 2, 3, 4, 5], (place, bit)


def test_without_a_path_or_with_an_unwritable_one_nothing_is_kept_and_nothing_breaks(tmp_path, caplog):
    Checkpoint(None, "key").put("recall", 1)
    nowhere = Checkpoint(tmp_path / "missing" / "kept", "key")
    nowhere.put("recall", 1)
    assert nowhere.get("recall") == (1, {})
    assert "no checkpoint" in caplog.text
    nowhere.remove()


def test_stages_older_than_an_hour_are_measured_again(tmp_path, caplog):
    path = tmp_path / "kept"
    first = Checkpoint(path, "key", clock=lambda: 1000.0)
    first.put("old", 1, {"of": np.arange(2)})
    Checkpoint(path, "key", clock=lambda: 1500.0).put("new", 2)
    later = Checkpoint(path, "key", clock=lambda: 1001.0 + MAX_AGE_S)
    assert later.get("old") is None
    assert later.get("new") == (2, {})
    assert "old" in caplog.text
    # A clock that was set back says nothing of the age.
    assert Checkpoint(path, "key", clock=lambda: 900.0).get("new") is None
    assert (
        Checkpoint(path, "key", clock=lambda: 1000.0 + 1.5 * MAX_AGE_S, max_age_s=2 * MAX_AGE_S).get("old") is not None
    )


def test_what_was_resumed_is_told_with_its_time_and_load(tmp_path, caplog):
    path = tmp_path / "kept"
    first = Checkpoint(path, "key", clock=lambda: 1000.0, load=lambda: 9.5)
    first.put("host", 1)
    assert first.get("host") == (1, {})
    assert first.resumed == {}
    again = Checkpoint(path, "key", clock=lambda: 1060.0, load=lambda: 0.5)
    assert again.resumed == {}
    assert again.get("host") == (1, {})
    assert again.resumed == {"host": {"measured_at": "1970-01-01T00:16:40+00:00", "load_average": 9.5}}
    assert "host was measured at 1970-01-01T00:16:40+00:00" in caplog.text
    again.put("host", 2)
    assert again.resumed == {}


def test_forgotten_stages_are_measured_again(tmp_path):
    path = tmp_path / "kept"
    Checkpoint(path, "key").put("access", 1, {"probes": np.arange(3)})
    again = Checkpoint(path, "key")
    again.forget()
    assert again.get("access") is None
    again.put("recall", 2)
    assert Checkpoint(path, "key").get("access") is None
