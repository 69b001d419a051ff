"""The host's scanner is the one that was named, or the native one where it can."""

from __future__ import annotations

from contextlib import closing

import pytest

from hybridindex.errors import InvalidInputError, UnsupportedIndexError
from hybridindex.tiers.host import native_scanner
from hybridindex.tiers.host.decoded_scanner import HostDecodedScanner
from hybridindex.tiers.host.faiss_scanner import HostFaissScanner
from hybridindex.tiers.host.host_scanner import open_host_scanner
from hybridindex.tiers.host.native_scanner import HostNativeScanner
from tests.clustered import small_index


@pytest.mark.parametrize(
    ("codec", "name", "kind"),
    [
        ("flat", "auto", HostNativeScanner),
        ("flat", "native", HostNativeScanner),
        ("flat", "faiss", HostFaissScanner),
        ("bf16", "auto", HostNativeScanner),
        ("bf16", "faiss", HostDecodedScanner),
        ("pq8", "auto", HostNativeScanner),
        ("pqfs12", "native", HostNativeScanner),
        ("pq8", "faiss", HostFaissScanner),
        ("pqfs12", "faiss", HostFaissScanner),
        ("faiss:SQ4", "auto", HostFaissScanner),
    ],
)
def test_the_scanner_is_the_one_asked_for(tmp_path, codec, name, kind):
    with (
        small_index(tmp_path / "i", codec=codec, n=600) as index,
        closing(open_host_scanner(index, threads=2, name=name)) as scanner,
    ):
        assert type(scanner) is kind
        assert scanner.threads == 2


def test_what_cannot_be_is_refused(tmp_path):
    with small_index(tmp_path / "i", codec="faiss:SQ4", n=600) as index:
        with pytest.raises(UnsupportedIndexError, match="native host scanner cannot"):
            open_host_scanner(index, name="native")
        with pytest.raises(InvalidInputError, match="host_scanner is 'gpu'"):
            open_host_scanner(index, name="gpu")


@pytest.mark.parametrize("codec", ["pq8", "pqfs12"])
def test_beside_devices_faiss_scans_no_product_quantizers(tmp_path, codec, monkeypatch):
    with small_index(tmp_path / "i", codec=codec, n=600) as index:
        with pytest.raises(
            InvalidInputError, match=f"host_scanner is 'faiss', .* codec {codec} are not those of devices"
        ):
            open_host_scanner(index, name="faiss", beside_devices=True)
        monkeypatch.setattr(native_scanner, "native", None)
        with closing(open_host_scanner(index, name="faiss", beside_devices=True)) as scanner:
            # No scan rounds tables.
            assert type(scanner) is (HostDecodedScanner if codec == "pqfs12" else HostFaissScanner)
