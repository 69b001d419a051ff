"""Changes of one generation: durable before they are seen, and seen by everybody in their order."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex import filesystem
from hybridindex.errors import BuildError, CorruptIndexError, FileError, NotWritableError
from hybridindex.index.live.deleted import Deleted
from hybridindex.index.live.state import LiveState
from tests.examples import examples
from tests.index.live_logs import NLIST, apply, change, store_at

WAIT_S = 60


def live_ids(store):
    rows = store.current()
    return [] if rows is None or rows.added is None else sorted(rows.added.ids.tolist())


def gone_ids(store):
    rows = store.current()
    return [] if rows is None or rows.deleted is None else rows.deleted.ids.tolist()


def test_a_state_in_which_changes_undo_each_other_is_newer_than_those_before(tmp_path):
    """Searches that wait together are answered by the newest state that any of them was made with."""
    store = store_at(tmp_path)
    assert store.seen() is None
    apply(store, change([], [50]))
    before = store.seen()
    apply(store, change([50], []))
    after = store.seen()
    assert store.current() is None
    assert (before.number, before.differs) == (1, True)
    assert (after.number, after.differs, after.deleted, after.added) == (2, False, None, None)


def test_a_change_has_its_number_when_searches_see_it(tmp_path, monkeypatch):
    store, other = store_at(tmp_path), store_at(tmp_path)
    apply(other, change([], [50]))
    seen, rows_at = [], LiveState.rows_at
    monkeypatch.setattr(LiveState, "rows_at", lambda *given: (seen.append(store.number), rows_at(*given))[1])
    store.read_now()
    assert seen == [0]
    assert store.number == 1


@pytest.mark.parametrize("call", ["write_at", "sync"])
def test_what_cannot_be_written_has_not_happened(tmp_path, monkeypatch, call):
    store = store_at(tmp_path)
    apply(store, change([1, 2], [50]))
    before = store.file.path.read_bytes()

    def fails(*_args):
        raise FileError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(filesystem.File, call, fails)
        with pytest.raises(NotWritableError, match="nothing was changed"):
            apply(store, change([3, 50], [51]))
    assert store.file.path.read_bytes() == before
    assert (gone_ids(store), live_ids(store)) == ([1, 2], [50])
    apply(store, change([4], [52]))
    for each in (store, store_at(tmp_path)):
        assert (gone_ids(each), live_ids(each)) == ([1, 2, 4], [50, 52])


def test_others_see_what_was_changed_and_what_was_taken_back(tmp_path, caplog):
    writer, reader = store_at(tmp_path), store_at(tmp_path)
    assert writer.current() is reader.current() is None
    apply(writer, change([9, 4], [70, 71]))
    reader._look_again_s = 0.0
    assert (gone_ids(reader), live_ids(reader)) == ([4, 9], [70, 71])
    # A second writer appends behind the first.
    apply(reader, change([1, 70]))
    apply(writer, change([30]))
    for each in (writer, reader):
        each._look_again_s = 0.0
        assert (gone_ids(each), live_ids(each), each.number) == ([1, 4, 9, 30], [71], 3)
    # What could not be synced was cut off again.
    raw = writer.file.path.read_bytes()
    writer.file.path.write_bytes(raw[:-72])
    reader._look_again_s = 0.0
    assert gone_ids(reader) == [1, 4, 9]
    assert "no whole change" not in caplog.text
    # Half of it: being written; then, since nothing comes, torn.
    writer.file.path.write_bytes(raw[:-1])
    for _ in range(2):
        reader._look_again_s = 0.0
        assert gone_ids(reader) == [1, 4, 9]
    assert caplog.text.count("the last 71 bytes are ignored, because they are not a whole change") == 1
    # Damage while it serves, in a file that is another: what is known stays, and the log says so, once.
    reader._log_state = None
    writer.file.path.write_bytes(raw[:129] + b"x" + raw[130:])
    for _ in range(3):
        reader._look_again_s = 0.0
        assert gone_ids(reader) == [1, 4, 9]
    assert caplog.text.count("changes by other processes are not seen") == 1


def test_a_log_that_is_gone_brings_nothing_back(tmp_path, caplog):
    store = store_at(tmp_path)
    apply(store, change([1, 2], [60]))
    store.file.path.unlink()
    for _ in range(2):
        store._look_again_s = 0.0
        assert (gone_ids(store), live_ids(store)) == ([1, 2], [60])
    assert caplog.text.count("which says what was changed, is gone") == 1
    for ask in (store.read_now, lambda: apply(store, change([3]))):
        with pytest.raises(CorruptIndexError, match="is gone"):
            ask()
    assert gone_ids(store) == [1, 2]


def test_an_interrupted_change_leaves_the_next_one_its_own_number(tmp_path, monkeypatch):
    store = store_at(tmp_path)
    apply(store, change([1]))

    def interrupted(*_args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "_publish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            apply(store, change([2], [80]))
    apply(store, change([4]))
    for each in (store, store_at(tmp_path)):
        assert (gone_ids(each), live_ids(each), each.number) == ([1, 2, 4], [80], 3)


def test_calls_of_many_threads_share_writes_and_each_has_its_own_answer(tmp_path):
    store = store_at(tmp_path)
    syncs, start = [], threading.Barrier(8)

    def seen(call):
        if call.name == "sync":
            syncs.append(call)

    def one(number):
        start.wait(WAIT_S)
        for i in range(20):
            made = change([], [1000 * number + i])
            assert store.commit(lambda state, made=made: (made, len(state.added))) >= 0
            assert 1000 * number + i in live_ids(store)

    def refused(_state):
        raise BuildError("mine alone")

    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    with filesystem.watched_by(seen):
        for each in threads:
            each.start()
        for _ in range(5):
            with pytest.raises(BuildError, match="mine alone"):
                store.commit(refused)
        for each in threads:
            each.join(WAIT_S)
    assert len(live_ids(store)) == 160 == store.number
    assert len(syncs) < 160
    assert live_ids(store_at(tmp_path)) == live_ids(store)


def test_a_log_of_few_rows_and_many_changes_is_rewritten(tmp_path):
    store, reader = store_at(tmp_path), store_at(tmp_path)
    for i in range(50):
        apply(store, change([] if i == 0 else [5], [5], seed=i))
    codes = store.current().added.codes()
    before = store.log_bytes
    assert not store.rewrite(least_bytes=10 * before)
    assert store.rewrite(least_bytes=0)
    assert store.log_bytes < before / 10
    assert not store.rewrite(least_bytes=0)
    apply(store, change([], [6]))
    for each in (store, reader, store_at(tmp_path)):
        each._look_again_s = 0.0
        assert (live_ids(each), each.number) == ([5, 6], 51)
        at = each.current().added.ids.tolist().index(5)
        assert np.array_equal(each.current().added.codes()[at], codes[0])


@examples(60)
@given(seed=st.integers(0, 2**32))
def test_added_rows_are_those_of_a_dictionary(seed):
    """Whatever comes and goes, each id has its list and its code; and no snapshot changes."""
    rng = np.random.default_rng(seed)
    state, model = LiveState(NLIST, 12, keep_max=False), {}
    snapshots = []
    for step in range(40):
        gone = [each for each in model if rng.random() < 0.2]
        ids = [each for each in rng.integers(0, 500, rng.integers(0, 60)).tolist() if each not in model or each in gone]
        made = change(gone, list(dict.fromkeys(ids)), seed=seed + step)
        state.apply(made)
        for each in gone:
            del model[each]
        for each, code, list_id in zip(made.ids.tolist(), made.codes, made.lists.tolist(), strict=True):
            model[each] = (list_id, code.tobytes())
        rows = state.rows_at(step)
        snapshots.append((rows, dict(model)))
    for rows, expected in snapshots:
        added = rows.added
        if added is None:
            assert not expected
            continue
        assert added.count == len(expected) == int(added.sizes.sum())
        codes = added.codes()
        found = {
            each: (list_id, code.tobytes())
            for each, list_id, code in zip(added.ids.tolist(), added.lists.tolist(), codes, strict=True)
        }
        assert found == expected
        assert len(np.unique(added.numbers)) == added.count


@pytest.mark.parametrize("by_extension", [True, False])
@examples(200)
@given(seed=st.integers(0, 2**32), k=st.integers(1, 6), spare=st.integers(0, 5), keep_max=st.booleans())
def test_an_answer_without_deleted_rows(by_extension, seed, k, spare, keep_max):
    rng = np.random.default_rng(seed)
    n, width = 3, k + spare
    ids = np.array([rng.permutation(20)[:width] for _ in range(n)])
    distances = np.sort(rng.integers(0, 9, (n, width)).astype(np.float32), axis=1)
    distances = -distances if keep_max else distances
    worst = -np.inf if keep_max else np.inf
    for row in range(n):
        empty = rng.integers(0, width + 1)
        ids[row, width - empty :], distances[row, width - empty :] = -1, worst
    gone = np.unique(rng.integers(0, 20, rng.integers(1, 12)))
    deleted = Deleted(ids=gone, keep_max=keep_max)
    found = (deleted.leave_out if by_extension else deleted.leave_out_reference)(distances, ids, k)
    pairs = [list(zip(*row, strict=True)) for row in zip(distances.tolist(), ids.tolist(), strict=True)]
    left = [[(d, i) for d, i in row if i >= 0 and i not in gone] for row in pairs]
    short = [len(some) < k and ids[row, -1] >= 0 for row, some in enumerate(left)]
    if any(short):
        assert found is None
        return
    for row, some in enumerate(left):
        some = (some + [(worst, -1)] * k)[:k]
        assert list(zip(found[0][row].tolist(), found[1][row].tolist(), strict=True)) == some
