"""A build reads every format alike, and says file and row of what is wrong. Nothing is left behind."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

import hybridindex as hx
from hybridindex.errors import DuplicateIdError, InvalidInputError, MissingDependencyError, how_to_install
from hybridindex.index import build
from hybridindex.types import VectorFile
from tests.conftest import clustered_vectors

N, DIM = 5000, 16
#: Numbers that every element type holds: small, and with few digits.
X = np.round(clustered_vectors(N, DIM) * 4).astype(np.float32) / 4
IDS = np.random.default_rng(3).permutation(7 * N)[:N]


def bf16(x: np.ndarray) -> np.ndarray:
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def saved(save: Callable[..., object]) -> bytes:
    file = io.BytesIO()
    save(file, X)
    return file.getvalue()


def vecs(x: np.ndarray) -> bytes:
    heads = np.full((len(x), 1), x.shape[1], "<i4").view(np.uint8)
    return np.hstack([heads, np.ascontiguousarray(x).view(np.uint8).reshape(len(x), -1)]).tobytes()


def fixed(x: np.ndarray) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), x.shape[1])


def lists(x: np.ndarray) -> pa.Array:
    offsets = np.arange(len(x) + 1, dtype=np.int32) * x.shape[1]
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(x.ravel()))


def table(column: pa.Array, **others: Any) -> pa.Table:
    return pa.table({"vector": column, **others})


def write_stream(path: Path, rows: pa.Table) -> None:
    with pa.ipc.new_stream(path, rows.schema) as stream:
        stream.write_table(rows, max_chunksize=700)


def write_hdf5(path: Path, **datasets: Any) -> None:
    with h5py.File(path, "w") as file:
        for name, data in datasets.items():
            file[name] = data


PLAIN: dict[str, tuple[str, Callable[[Path], object]]] = {
    "npy": ("x.npy", lambda p: np.save(p, X)),
    "npy fp16": ("x.npy", lambda p: np.save(p, X.astype(np.float16))),
    "npy f64": ("x.npy", lambda p: np.save(p, X.astype(np.float64))),
    "npy bf16 of ml_dtypes": ("x.npy", lambda p: np.save(p, bf16(X).view("V2"))),
    "npy without its ending": ("x.bin", lambda p: p.write_bytes(saved(np.save))),
    "fvecs": ("x.fvecs", lambda p: p.write_bytes(vecs(X))),
    "parquet": ("x.parquet", lambda p: pq.write_table(table(lists(X)), p, row_group_size=1300)),
    "parquet f64": ("x.PARQUET", lambda p: pq.write_table(table(lists(X.astype(np.float64))), p)),
    "parquet fixed fp16": ("x.parquet", lambda p: pq.write_table(table(fixed(X.astype(np.float16))), p)),
    "parquet tensor": (
        "x.parquet",
        lambda p: pq.write_table(table(pa.FixedShapeTensorArray.from_numpy_ndarray(X)), p),
    ),
    "parquet large lists": (
        "x.parquet",
        lambda p: pq.write_table(table(lists(X).cast(pa.large_list(pa.float32()))), p),
    ),
    "feather": ("x.feather", lambda p: pyarrow.feather.write_feather(table(fixed(X)), p, chunksize=900)),
    "arrow stream": ("x.arrow", lambda p: write_stream(p, table(lists(X)))),
    "hdf5": ("x.h5", lambda p: write_hdf5(p, train=X)),
    "hdf5 fp16": ("x.hdf5", lambda p: write_hdf5(p, train=X.astype(np.float16))),
}


@pytest.fixture(scope="module")
def fingerprint(tmp_path_factory):
    return build(X, tmp_path_factory.mktemp("plain") / "i", nlist=8).fingerprint


@pytest.mark.parametrize("kind", PLAIN)
def test_every_format_gives_the_index_of_its_numbers(tmp_path, fingerprint, kind):
    name, write = PLAIN[kind]
    write(tmp_path / name)
    with build(tmp_path / name, tmp_path / "i", nlist=8) as index:
        assert index.fingerprint == fingerprint


@pytest.mark.parametrize("x", [X.astype(np.float16), X.astype(np.float64), bf16(X).view("V2")], ids=str)
def test_arrays_and_batches_may_have_other_elements(tmp_path, fingerprint, x):
    assert build(x, tmp_path / "a", nlist=8).fingerprint == fingerprint
    assert build((x[i : i + 999] for i in range(0, N, 999)), tmp_path / "b", nlist=8).fingerprint == fingerprint


def test_bits_of_bfloat16_are_an_option(tmp_path, fingerprint):
    np.save(tmp_path / "x.npy", bf16(X))
    file = VectorFile(tmp_path / "x.npy", dtype="bf16")
    assert build(file, tmp_path / "i", nlist=8).fingerprint == fingerprint


def test_bvecs_are_numbers_from_0_to_255(tmp_path):
    x = (np.abs(X) * 8).astype(np.uint8)
    (tmp_path / "x.bvecs").write_bytes(vecs(x))
    with build(tmp_path / "x.bvecs", tmp_path / "i", nlist=8) as index:
        assert index.fingerprint == build(x.astype(np.float32), tmp_path / "j", nlist=8).fingerprint


WITH_IDS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "parquet": ("x.parquet", lambda p: pq.write_table(table(lists(X), key=IDS, other=fixed(X[:, :2])), p)),
    "arrow": (
        "x.arrow",
        lambda p: pyarrow.feather.write_feather(table(fixed(X), key=IDS, other=fixed(X[:, :2])), p, "zstd"),
    ),
    "hdf5": ("x.h5", lambda p: write_hdf5(p, vector=X, key=IDS, other=X)),
}


@pytest.mark.parametrize("kind", WITH_IDS)
def test_columns_are_named(tmp_path, kind):
    name, write = WITH_IDS[kind]
    write(tmp_path / name)
    file = hx.VectorFile(tmp_path / name, column="vector", ids_column="key")
    seen = []
    with (
        hx.build(file, tmp_path / "i", nlist=8, progress=lambda *told: seen.append(told)) as index,
        build(X, tmp_path / "j", ids=IDS, nlist=8) as same,
    ):
        assert index.fingerprint == same.fingerprint
    assert ("spool", N, N if kind != "arrow" else None) in seen
    with pytest.raises(InvalidInputError, match=r"2 (columns|datasets) of vectors; name one"):
        build(tmp_path / name, tmp_path / "k", nlist=8)
    with pytest.raises(InvalidInputError, match=r"has no (column|dataset) 'vectors'"):
        build(VectorFile(tmp_path / name, column="vectors"), tmp_path / "k", nlist=8)
    with pytest.raises(InvalidInputError, match=r"(column 'key' holds|no dataset 'key')"):
        build(VectorFile(tmp_path / name, column="key"), tmp_path / "k", nlist=8)
    with pytest.raises(InvalidInputError, match=r"vector.*of ids"):
        build(VectorFile(tmp_path / name, column="vector", ids_column="vector"), tmp_path / "k", nlist=8)
    with pytest.raises(InvalidInputError, match=rf"ids was given and \S*{name} brings ids"):
        build(file, tmp_path / "k", nlist=8, ids=IDS)
    assert not (tmp_path / "k").exists()


def broken(row: int, value: float, dtype: Any = np.float32) -> np.ndarray:
    x = X.astype(dtype)
    x[row, 3] = value
    return x


def with_null_row(row: int) -> pa.Array:
    rows = X.tolist()
    rows[row] = None
    return pa.array(rows, pa.list_(pa.float32()))


def with_null_element(row: int) -> pa.Array:
    rows = X.tolist()
    rows[row][5] = None
    return pa.array(rows, pa.list_(pa.float32()))


def ragged(row: int) -> pa.Array:
    rows = X.tolist()
    rows[row].append(1.0)
    return pa.array(rows, pa.list_(pa.float32()))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def written(write: Callable[..., object], then: Callable[[Path], object] = cut) -> Callable[[Path], object]:
    def both(path: Path) -> None:
        write(path)
        then(path)

    return both


def lead_out(path: Path) -> None:
    """Offsets of lists before the beginning of their buffer."""
    offsets = np.arange(N + 1, dtype="<i4") * DIM
    data = path.read_bytes()
    assert offsets.tobytes() in data
    path.write_bytes(data.replace(offsets.tobytes(), (offsets - (1 << 28)).tobytes()))


def bytes_elsewhere(path: Path) -> None:
    path.with_suffix(".bin").write_bytes(X.tobytes())
    with h5py.File(path, "w") as file:
        file.create_dataset("train", X.shape, X.dtype, external=[(str(path.with_suffix(".bin")), 0, X.nbytes)])


def virtual(path: Path) -> None:
    write_hdf5(path.with_name("other.h5"), train=X)
    layout = h5py.VirtualLayout(X.shape, X.dtype)
    layout[:] = h5py.VirtualSource(str(path.with_name("other.h5")), "train", X.shape)
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("train", layout)


def linked_ids(path: Path) -> None:
    write_hdf5(path.with_name("other.h5"), key=IDS)
    write_hdf5(path, train=X, key=h5py.ExternalLink(str(path.with_name("other.h5")), "key"))


def deep_header(path: Path) -> None:
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': " + b"-" * 5000 + b"1}\n"
    path.write_bytes(np.lib.format.magic(1, 0) + len(header).to_bytes(2, "little") + header)


REPEATED = IDS.copy()
REPEATED[4000] = REPEATED[77]
#: File, what is in it, options, and what the error says beside the file's name.
BAD: dict[str, tuple[str, Callable[[Path], object], dict[str, Any], str]] = {
    "missing": ("x.fvecs", lambda _: None, {}, "cannot be read"),
    "missing parquet": ("x.parquet", lambda _: None, {}, "cannot be read"),
    "missing hdf5": ("x.h5", lambda _: None, {}, "cannot be read"),
    "empty fvecs": ("x.fvecs", lambda p: p.touch(), {}, "is empty"),
    "truncated fvecs": ("x.fvecs", lambda p: p.write_bytes(vecs(X)[:-7]), {}, "truncated: row 4999 has 61 of 68 bytes"),
    "ragged fvecs": (
        "x.fvecs", lambda p: p.write_bytes(vecs(X) + vecs(X[:, :8]) * 3), {},
        "row 5000, has dimension 8; expected 16",
    ),
    "fvecs of bytes": ("x.bvecs", lambda p: p.write_bytes(vecs(X)), {}, r"row 1, has dimension \d+; expected 16"),
    "no dimension": ("x.bvecs", lambda p: p.write_bytes(bytes(40)), {}, "row 0, says that it has dimension 0"),
    "NaN in fvecs": ("x.fvecs", lambda p: p.write_bytes(vecs(broken(4321, np.nan))), {}, "row 4321, holds NaN"),
    "infinite f64": (
        "x.npy", lambda p: np.save(p, broken(33, 1e300, np.float64)), {},
        r"row 33, holds 1e\+300, which float32 cannot hold",
    ),
    "NaN in f64": ("x.npy", lambda p: np.save(p, broken(33, np.nan, np.float64)), {}, "row 33, holds NaN"),
    "integers": ("x.npy", lambda p: np.save(p, X.astype(np.int32)), {}, "dtype int32; expected float32, float16"),
    "bits without the option": ("x.npy", lambda p: np.save(p, bf16(X)), {}, "dtype uint16"),
    "the option without bits": ("x.npy", lambda p: np.save(p, X), {"dtype": "bf16"}, "expected the bits as uint16"),
    "truncated npy": ("x.npy", written(lambda p: np.save(p, X)), {}, "not a readable .npy file"),
    "a deep header": ("x.npy", deep_header, {}, "not a readable .npy file"),
    "an archive": ("x.npy", lambda p: p.write_bytes(saved(np.savez)), {}, "is an archive"),
    "an option of others": ("x.parquet", lambda p: p.touch(), {"dtype": "bf16"}, "not a .npy file; expected no dtype"),
    "a column of a matrix": ("x.npy", lambda p: np.save(p, X), {"column": "v"}, "has no columns"),
    "ids of a matrix": ("x.fvecs", lambda p: p.write_bytes(vecs(X)), {"ids_column": "v"}, "has no columns"),
    "truncated parquet": ("x.parquet", written(lambda p: pq.write_table(table(lists(X)), p)), {}, "cannot be read"),
    "no parquet": ("x.parquet", lambda p: p.write_bytes(b"words" * 9), {}, "cannot be read"),
    "damaged parquet": (
        "x.parquet",
        written(lambda p: pq.write_table(table(lists(X)), p, compression="zstd", use_dictionary=False),
                lambda p: p.write_bytes(p.read_bytes()[:400] + bytes(9000) + p.read_bytes()[9400:])),
        {}, "cannot be read",
    ),
    "null row": ("x.parquet", lambda p: pq.write_table(table(with_null_row(4100)), p), {}, "row 4100, is null"),
    "null element": (
        "x.parquet", lambda p: pq.write_table(table(with_null_element(4100)), p), {}, "row 4100, holds a null",
    ),
    "ragged rows": (
        "x.parquet", lambda p: pq.write_table(table(ragged(2050)), p), {}, "row 2050, has dimension 17; expected 16",
    ),
    "ragged batches": (
        "x.arrow", lambda p: write_stream(p, table(pa.array([*X[:700].tolist(), *X[:9, :4].tolist()]))), {},
        "row 700, has dimension 4; expected 16",
    ),
    "NaN in parquet": (
        "x.parquet", lambda p: pq.write_table(table(lists(broken(2049, np.nan))), p), {}, "row 2049, holds NaN",
    ),
    "ids that are words": (
        "x.parquet", lambda p: pq.write_table(table(lists(X), key=IDS.astype(str)), p), {"ids_column": "key"},
        "'key' of ids holds (large_)?string; expected integers",
    ),
    "no such ids": (
        "x.parquet", lambda p: pq.write_table(table(lists(X)), p), {"ids_column": "key"}, "has no column 'key'",
    ),
    "null id": (
        "x.parquet",
        lambda p: pq.write_table(table(lists(X), key=pa.array([*IDS[:-1].tolist(), None])), p),
        {"ids_column": "key"}, "row 4999, is null",
    ),
    "negative id": (
        "x.parquet", lambda p: pq.write_table(table(lists(X), key=-1 - IDS), p), {"ids_column": "key"},
        "row 0: its id is -",
    ),
    "repeated id": (
        "x.parquet", lambda p: pq.write_table(table(lists(X), key=REPEATED), p), {"ids_column": "key"},
        "more than once .*, first in rows 77 and 4000",
    ),
    "no column of vectors": ("x.parquet", lambda p: pq.write_table(pa.table({"a": IDS}), p), {}, "has 0 columns"),
    "no arrow": ("x.arrow", lambda p: p.write_bytes(b"words" * 9), {}, "cannot be read"),
    "truncated arrow": (
        "x.arrow", written(lambda p: pyarrow.feather.write_feather(table(fixed(X)), p)), {}, "cannot be read",
    ),
    "arrow that leads out of its memory": (
        "x.arrow",
        written(lambda p: pyarrow.feather.write_feather(table(lists(X)), p, compression="uncompressed"), lead_out),
        {}, "cannot be read .* offset",
    ),
    "hdf5 of bytes of another file": ("x.h5", bytes_elsewhere, {}, "'/train' keeps its numbers in other files"),
    "hdf5 of datasets of another file": ("x.h5", virtual, {}, "'/train' keeps its numbers in other files"),
    "hdf5 with ids of another file": ("x.h5", linked_ids, {"ids_column": "key"}, "'/key' keeps its numbers in other"),
    "truncated hdf5": ("x.h5", written(lambda p: write_hdf5(p, train=X)), {}, "cannot be read as HDF5"),
    "damaged hdf5": (
        "x.h5",
        written(lambda p: write_hdf5(p, train=X), lambda p: p.write_bytes(p.read_bytes().replace(b"HEAP", b"heap"))),
        {}, "cannot be read as HDF5",
    ),
    "hdf5 without vectors": ("x.h5", lambda p: write_hdf5(p, train=IDS), {}, "has 0 datasets of vectors"),
    "hdf5 ids of another length": (
        "x.h5", lambda p: write_hdf5(p, train=X, key=IDS[1:]), {"ids_column": "key"}, r"expected \(5000,\) integers",
    ),
    "hdf5 without ids": ("x.h5", lambda p: write_hdf5(p, train=X), {"ids_column": "key"}, "no dataset 'key' of ids"),
    "NaN in hdf5": ("x.h5", lambda p: write_hdf5(p, train=broken(9, np.nan)), {}, "row 9, holds NaN"),
    "no rows": ("x.parquet", lambda p: pq.write_table(table(lists(X))[:0], p), {}, "yielded no rows"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_what_is_wrong_is_said_once_with_file_and_row(tmp_path, kind):
    name, write, options, message = BAD[kind]
    write(tmp_path / name)
    with pytest.raises(InvalidInputError, match=message) as caught:
        build(VectorFile(tmp_path / name, **options), tmp_path / "i", nlist=8)
    assert str(tmp_path / name) in str(caught.value)
    assert not (tmp_path / "i").exists()
    assert (type(caught.value) is DuplicateIdError) == (kind == "repeated id")


def test_a_bad_dtype_is_named(tmp_path):
    np.save(tmp_path / "x.npy", X)
    with pytest.raises(InvalidInputError, match="dtype is 'f8'; expected 'bf16'"):
        build(VectorFile(tmp_path / "x.npy", dtype="f8"), tmp_path / "i", nlist=8)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "package"), [("x.parquet", "pyarrow"), ("x.feather", "pyarrow"), ("x.h5", "h5py")])
def test_a_missing_package_is_named_and_how_to_install_it(tmp_path, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=rf"{package} is needed to read .*{name}: ") as caught:
        build(tmp_path / name, tmp_path / "i", nlist=8)
    assert str(caught.value).endswith(how_to_install("formats"))
    assert not (tmp_path / "i").exists()
