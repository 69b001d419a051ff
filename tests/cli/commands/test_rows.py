"""The commands add, delete and compact: directly, and through the daemon that serves the index."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.cli import row_parts
from hybridindex.config import RouterConfig
from hybridindex.service.auth import KeyFile, Keyring
from hybridindex.service.config import Limits, ServiceConfig
from hybridindex.service.core import Service
from hybridindex.service.daemon_address import DaemonAddress
from tests.service.live import live

DIM = 16
ROWS = np.random.default_rng(0).standard_normal((600, DIM)).astype(np.float32)
NEW = (20 + np.random.default_rng(1).standard_normal((25, DIM))).astype(np.float32)


@pytest.fixture
def path(tmp_path):
    hx.build(ROWS, tmp_path / "idx", nlist=6, metric="l2").close()
    return tmp_path / "idx"


@pytest.fixture
def files(tmp_path):
    np.save(tmp_path / "new.npy", NEW)
    (tmp_path / "ids.txt").write_text("\n".join(map(str, range(5000, 5025))))
    return tmp_path


@contextmanager
def daemon(path, keyring=None, **config):
    """In the test's own process, found by its address file as one in another process is."""
    address = DaemonAddress(path)
    service = Service.open(path, ServiceConfig(router=RouterConfig(devices=()), **config))
    try:
        with live(service, keyring) as port:
            announce = lambda generation: address.announce((f"http://127.0.0.1:{port}",), generation)  # noqa: E731
            announce(1)
            service.generations.on_generation.append(announce)
            yield service
    finally:
        service.close()
        address.leave()


def nearest(path):
    with hx.open(path, verify="quick") as index:
        return index.search(NEW, 1, 6).ids[:, 0].tolist()


def test_rows_are_added_replaced_deleted_and_compacted(cli, path, files):
    done = cli("add", path, files / "new.npy", "--batch", 10, "--json").json
    assert done == {
        "path": str(path),
        "rows": 25,
        "replaced": 0,
        "count": 600,
        "added": 25,
        "deleted": 0,
        "live": 625,
    }
    assert nearest(path) == list(range(600, 625))
    assert cli("delete", path, "--ids", _ids(files, range(600, 625)), "--json").json["deleted"] == 25
    for _ in range(2):
        done = cli("add", path, files / "new.npy", "--ids", files / "ids.txt", "--upsert", "--json").json
    assert done["replaced"] == 25
    assert done["live"] == 625
    assert nearest(path) == list(range(5000, 5025))
    done = cli("compact", path, "--json").json
    assert done["compacted"]
    assert (done["generation"], done["count"]) == (2, 625)
    assert cli("compact", path, "--json").json["compacted"] is False
    assert nearest(path) == list(range(5000, 5025))
    shown = cli("add", path, files / "new.npy")
    assert "added 25 rows, replaced 0; 650 rows in all" in shown.out


def _ids(folder, ids):
    (folder / "some.txt").write_text("\n".join(map(str, ids)))
    return folder / "some.txt"


def test_files_of_columns_and_attributes(cli, path, tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    with hx.open(path) as index:
        index.set_attributes({"year": np.arange(600)})
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(NEW.ravel()), DIM)
    parquet.write_table(pa.table({"v": vectors, "n": np.arange(5000, 5025)}), tmp_path / "new.parquet")
    (tmp_path / "years.csv").write_text("year\n" + "\n".join(map(str, range(3000, 3025))))
    done = cli(
        "add", path, tmp_path / "new.parquet", "--column", "v", "--ids-column", "n",
        "--attributes", tmp_path / "years.csv", "--upsert", "--batch", 7, "--json",
    )  # fmt: skip
    assert done.json["rows"] == 25
    assert nearest(path) == list(range(5000, 5025))
    assert cli("delete", path, "--where", "year >= 3000", "--json").json["deleted"] == 25
    with daemon(path):
        done = cli(
            "add", path, tmp_path / "new.parquet", "--column", "v", "--ids-column", "n",
            "--attributes", tmp_path / "years.csv", "--batch", 7, "--json",
        )  # fmt: skip
        assert done.json["rows"] == 25
        assert cli("delete", path, "--where", "year >= 3020", "--json").json["deleted"] == 5


def test_a_daemon_that_serves_the_index_does_it(cli, path, files):
    with daemon(path) as service:
        done = cli("add", path, files / "new.npy", "--ids", files / "ids.txt", "--batch", 10, "--json").json
        assert (done["rows"], done["live"]) == (25, 625)
        assert service.rows.counts.added == 25
        assert service.router.search(NEW, 1, 6).ids[:, 0].tolist() == list(range(5000, 5025))
        again = cli("add", path, files / "new.npy", "--ids", files / "ids.txt", "--json")
        assert again.code == 3
        assert "exist already: 5000" in again.err
        assert (
            cli("add", path, files / "new.npy", "--ids", files / "ids.txt", "--upsert", "--json").json["replaced"] == 25
        )
        assert "1 compactions" not in cli("status", path).out
        done = cli("compact", path, "--json").json
        assert done["compacted"]
        assert done["serves"]
        assert service.index.ivf.generation == done["generation"] == 2
        assert cli("delete", path, "--ids", files / "ids.txt", "--json").json["deleted"] == 25
        assert service.rows.counts.deleted == 25
        assert "600 live" in cli("status", path).out


def test_a_daemon_that_takes_little_at_once_gets_it_in_parts(cli, path, files):
    for limits in ({"max_rows": 7}, {"max_body_bytes": 1500}):
        with daemon(path, limits=Limits(**limits)) as service:
            done = cli("add", path, files / "new.npy", "--ids", files / "ids.txt", "--upsert", "--json")
            assert done.json["rows"] == 25
            assert service.rows.state(service.index)["number"] > 2


def test_a_key_is_needed_where_the_daemon_needs_one(cli, path, files, tmp_path, monkeypatch):
    keys = KeyFile(tmp_path / "keys.json")
    writer, searcher = keys.add("w", "write"), keys.add("s", "search")
    with daemon(path, Keyring(keys.path)):
        refused = cli("add", path, files / "new.npy")
        assert refused.code == 8
        assert "HYBRIDINDEX_KEY" in refused.err
        assert "role write" in cli("add", path, files / "new.npy", "--key", searcher).err
        monkeypatch.setenv("HYBRIDINDEX_KEY", writer)
        assert cli("add", path, files / "new.npy", "--json").json["rows"] == 25
        assert "role admin" in cli("compact", path).err


@pytest.mark.parametrize("command", ["status", "drain", "history"])
def test_a_key_that_is_missing_is_asked_for_as_the_command_takes_it(cli, path, tmp_path, monkeypatch, command):
    monkeypatch.delenv("HYBRIDINDEX_KEY", raising=False)
    keys = KeyFile(tmp_path / "keys.json")
    keys.add("someone", "admin")
    with daemon(path, Keyring(keys.path)):
        refused = cli(command, path, "--json")
    assert refused.code == 8
    assert refused.json["error"]["message"].endswith("; pass a key with --key or HYBRIDINDEX_KEY")


def test_beside_a_daemon_that_takes_no_changes(cli, path, files):
    with daemon(path, write=False):
        done = cli("add", path, files / "new.npy", "--json")
        assert done.json["rows"] == 25
        assert "accepts no changes" in done.err
        assert "hybridindex reload" in cli("compact", path).err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("new.npy", "--upsert"), "--ids is missing"),
        (("new.npy", "--ids", "few.txt"), "--ids has 3 rows"),
        (("wide.npy",), "expected (n, 16)"),
        (("nan.npy",), "holds NaN"),
        (("none.npy",), "none.npy"),
        (("twice.npy", "--ids", "same.txt"), "ids are given twice: 7"),
    ],
)
def test_what_is_wrong_is_named(cli, path, files, words, said):
    np.save(files / "wide.npy", np.zeros((3, 5), dtype=np.float32))
    np.save(files / "nan.npy", np.full((3, DIM), np.nan, dtype=np.float32))
    np.save(files / "twice.npy", NEW[:2])
    (files / "few.txt").write_text("1\n2\n3")
    (files / "same.txt").write_text("7\n7")
    words = [files / word if "." in word else word for word in words]
    found = cli("add", path, *words)
    assert found.code in (2, 3)
    assert said in found.err
    with hx.open(path) as index:
        assert index.n_live == 600


def test_where_it_ends_early_it_says_what_is_there(cli, path, files):
    (files / "ids.txt").write_text("\n".join(map(str, [*range(5000, 5024), 5])))
    found = cli("add", path, files / "new.npy", "--ids", files / "ids.txt", "--batch", 10)
    assert "20 rows are already in the index; with ids, repeat the command with --upsert" in found.err
    assert "exist already: 5;" in found.err
    assert cli("add", path, files / "new.npy", "--ids", files / "ids.txt", "--upsert", "--json").json["replaced"] == 21


def test_too_much_at_once_is_compacted(cli, path, files, monkeypatch):
    monkeypatch.setattr("hybridindex.index.changes.writer._MOST_BYTES", 800)
    monkeypatch.setattr("hybridindex.index.changes.writer._MOST_TIMES", 0.0)
    found = cli("add", path, files / "new.npy", "--batch", 10, "--json")
    assert found.json["live"] == 625
    assert "compacting" in found.err


def test_parts_are_no_larger_than_memory_should_hold(path, monkeypatch):
    monkeypatch.setattr(row_parts, "_MOST_BYTES", 4 * DIM * 4)
    with row_parts.open_target(path, None) as target:
        assert target.most_rows == 4
