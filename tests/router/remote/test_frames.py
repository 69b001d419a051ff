"""Frames: whatever parts they come in, each comes whole, once, in order; what is not wanted is skipped."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.router.remote.frames import ANSWER, ASK, HEAD_BYTES, FrameReader, frame
from tests.examples import examples

sent_frames = st.lists(
    st.tuples(st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**16 - 1), st.binary(max_size=60)),
    max_size=8,
)


@examples(200)
@given(sent_frames, st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_frames_come_whole_whatever_parts_they_come_in(sent, seed, longest):
    rng = np.random.default_rng(seed)
    skipped = {i for i in range(len(sent)) if rng.random() < 0.3}
    heads, found = [], []

    def on_head(kind, number, length):
        heads.append((kind, number, length))
        return len(heads) - 1 not in skipped

    reader = FrameReader(on_head, lambda kind, number, extra, payload: found.append((kind, number, extra, payload)))
    data = b"".join(frame(kind, number, payload, extra=extra) for kind, number, extra, payload in sent)
    at = 0
    while at < len(data):
        size = int(rng.integers(1, longest + 1))
        reader.feed(data[at : at + size])
        at += size
    assert heads == [(kind, number, len(payload)) for kind, number, _, payload in sent]
    assert found == [each for i, each in enumerate(sent) if i not in skipped]
    assert not reader.within


def test_a_frame_that_has_begun_is_known():
    reader = FrameReader(lambda *_: True, lambda *_: None)
    data = frame(ASK, 1, b"abc")
    for n in range(1, len(data)):
        reader.feed(data[n - 1 : n])
        assert reader.within
    reader.feed(data[-1:])
    assert not reader.within


def test_parts_of_a_payload_are_joined():
    assert frame(ANSWER, 7, b"ab", b"", b"c", extra=2) == frame(ANSWER, 7, b"abc", extra=2)
    assert len(frame(ANSWER, 7)) == HEAD_BYTES
