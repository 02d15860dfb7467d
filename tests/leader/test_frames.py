"""Frames come out as they went in, however the stream is cut."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as some

from keepstep.errors import ProtocolError
from keepstep_sidecar.tiers.peer.member_frames import FrameKind, FrameParser, pack_frame

FRAMES = some.lists(
    some.tuples(some.sampled_from(FrameKind), some.binary(max_size=300)), max_size=8
)


def cut(stream: bytes, at: list[int]) -> list[bytes]:
    places = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in at)})
    return [stream[begin:end] for begin, end in itertools.pairwise(places)]


@given(FRAMES, some.lists(some.integers(0, 5000)))
def test_frames_are_parsed_correctly_wherever_the_stream_is_split(
    frames: list[tuple[FrameKind, bytes]], at: list[int]
) -> None:
    parser, found = FrameParser(), []
    for piece in cut(b"".join(pack_frame(kind, body) for kind, body in frames), at):
        found += parser.feed(piece)
    assert found == frames
    assert parser.held_bytes == 0


@given(FRAMES, some.binary(max_size=40), some.lists(some.integers(0, 5000)))
def test_arbitrary_bytes_parse_to_frames_or_a_protocol_error_and_are_not_buffered(
    frames: list[tuple[FrameKind, bytes]], noise: bytes, at: list[int]
) -> None:
    parser, stream = (
        FrameParser(largest_bytes=256),
        noise + b"".join(pack_frame(*frame) for frame in frames),
    )
    try:
        for piece in cut(stream, at):
            for _, body in parser.feed(piece):
                assert len(body) <= 256
            assert parser.held_bytes <= 256 + 5
    except ProtocolError:
        pass


def test_a_frame_that_is_too_long_is_refused_once_its_header_has_arrived() -> None:
    longest = pack_frame(FrameKind.MESSAGE, b"x" * 256)
    assert list(FrameParser(256).feed(longest)) == [(FrameKind.MESSAGE, b"x" * 256)]
    with pytest.raises(ProtocolError, match="257 bytes; 256 bytes are the most"):
        list(FrameParser(256).feed(struct.pack(">BI", 0, 257)))
