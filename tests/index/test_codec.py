"""Codec names, their defaults, and how a device decodes what faiss encoded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import InvalidInputError
from hybridindex.index import IVFIndex
from hybridindex.index.codec import DeviceCodec, parse_codec
from hybridindex.types import F32, U8


def decode_as_device(codec: DeviceCodec, codes: U8) -> F32:
    if codec.kind == "f32":
        return codes.copy().view(np.float32)
    if codec.kind == "f16":
        return codes.copy().view(np.float16).astype(np.float32)
    if codec.kind == "bf16":
        return (codes.copy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return codec.vmin + codec.vdiff * (codes.astype(np.float32) + 0.5) / 255


@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize("codec", ["flat", "fp16", "bf16", "sq8"])
def test_device_decode_equals_the_decode_of_faiss(make_index: Callable[..., IVFIndex], codec: str, metric: str) -> None:
    index = make_index(codec, metric)
    device = index.device_codec()
    assert device is not None
    assert (device.dim, device.code_size, device.by_residual) == (index.dim, index.code_size, False)
    for list_id in range(index.nlist):
        decoded = decode_as_device(device, np.asarray(index.list_codes(list_id)))
        np.testing.assert_allclose(decoded, index.decode_list(list_id), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("codec", ["pq", "pqfs"])
def test_product_quantizers_are_scanned_by_their_form(make_index: Callable[..., IVFIndex], codec: str) -> None:
    index = make_index(codec)
    device = index.device_codec()
    assert device is not None
    assert (device.kind, device.dim, device.code_size, device.pq) == ("pq", 16, 4, index.pq_form)
    assert index.pq_form is not None
    assert (index.pq_form.parts, index.pq_form.residual) == ((4, True) if codec == "pq" else (8, False))


@given(st.integers(1, 4096))
def test_default_pq_sizes_divide_the_dimension(dim: int) -> None:
    pq, pqfs = parse_codec("pq", dim), parse_codec("pqfs", dim)
    assert dim % pq.m == 0
    assert dim % pqfs.m == 0
    assert pq.m <= max(1, dim // 4)
    assert pqfs.m <= max(1, dim // 2)
    assert pq.code_size == pq.m
    assert pqfs.code_size == (pqfs.m + 1) // 2
    assert parse_codec(pq.name, dim) == pq


@pytest.mark.parametrize("name", ["", "float", "pq0", "pq5", "pq-4", "pqfs32", "PQ8", "pq8x", "pq99999"])
def test_unknown_codec_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidInputError, match="codec is"):
        parse_codec(name, 16)
