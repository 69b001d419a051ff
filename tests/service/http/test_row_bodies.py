"""What of a body is JSON, of which values take many times its bytes until the rows are written."""

from __future__ import annotations

import json

import numpy as np

from hybridindex.answer_codec import ROWS_TYPE, encode_rows
from hybridindex.service.config import Limits
from hybridindex.service.http.routes.row_bodies import RowsBody
from hybridindex.service.http.wire import parsed_bytes

VECTORS = np.ones((1, 4), dtype=np.float32)


def test_the_json_beside_binary_rows_is_counted():
    body = RowsBody(Limits(), 4)
    more = json.dumps({"attributes": {"x": [[] for _ in range(1000)]}}).encode()
    packed = encode_rows(VECTORS, None, more)
    assert body.json_of(packed, ROWS_TYPE) == more
    assert parsed_bytes(body.json_of(packed, ROWS_TYPE)) > 100_000 > 10 * len(more)
    assert body.json_of(more, "application/json") == more
    assert body.json_of(b"\x93NUMPY", "application/x-npy") == b""
    assert body.json_of(packed[:5], ROWS_TYPE) == b""  # reading it says what is wrong
