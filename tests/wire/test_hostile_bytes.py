"""A peer's bytes can at worst be refused: nothing but the typed errors comes out of the decoder."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zagent.errors import DecodeError, ProtocolError
from zagent.wire.codec import (
    LIST_VALUES,
    MAX_ARRAYS,
    MAX_HEADER_VALUES,
    MAX_VALUES,
    UNCOUNTED,
    decode_body,
    decode_header,
    encode_body,
    encode_header,
)
from zagent.wire.messages import WIRE_VERSION, Call

GOOD_HEADER = encode_header(Call(b"0123456789abcdef", 1, "engine", "generate", "session", 1000))
GOOD_BODY = encode_body([np.arange(5, dtype=np.int32), np.arange(5, dtype=np.int64), {"temperature": 1.0}, None])


def readable(read: Any, data: Any) -> bool:
    """Whether ``read(data)`` gives a value; any error but ours fails the test."""
    try:
        read(data)
    except ProtocolError:
        return False
    return True


@given(st.binary(max_size=200))
def test_random_bytes_in_the_header(data: bytes) -> None:
    """Bytes make a message or a typed error."""
    readable(decode_header, data)


@given(st.lists(st.binary(max_size=100), max_size=4))
def test_random_bytes_in_the_body(frames: list[bytes]) -> None:
    """Bytes make a value or a typed error."""
    readable(decode_body, frames)


numbers = st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats()
anything = st.recursive(
    st.none() | numbers | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(st.sampled_from([WIRE_VERSION, 0, "x"]), st.integers(0, 16), st.lists(anything, max_size=10))
def test_well_formed_headers_of_wrong_things(version: Any, kind: int, fields: list[Any]) -> None:
    """Right msgpack with wrong contents is refused as well."""
    readable(decode_header, msgpack.packb([version, kind, *fields]))


@given(st.integers(1, 127), st.binary(max_size=30), st.binary(max_size=16))
def test_random_extensions(code: int, data: bytes, frame: bytes) -> None:
    """An extension of any code with any payload makes an array or a typed error."""
    readable(decode_body, [msgpack.packb([msgpack.ExtType(code, data)]), frame])


@given(anything, anything, anything)
def test_array_descriptions_of_wrong_things(number: Any, dtype: Any, shape: Any) -> None:
    """Frame number, dtype and shape may be anything."""
    payload = msgpack.packb([number, dtype, shape])
    readable(decode_body, [msgpack.packb(msgpack.ExtType(1, payload)), b"\0" * 16])


def array_of(dtype: Any, shape: Any, number: Any = 1, data: bytes = b"\0" * 16) -> list[bytes]:
    payload = msgpack.packb([number, dtype, shape])
    return [msgpack.packb(msgpack.ExtType(1, payload)), data]


@pytest.mark.parametrize(
    "dtype", ["O", "|O8", "V8", "M8[ns]", "m8[s]", "U4", "S4", "i4,i4", "(2,)i4", "", "nonsense", 5]
)
def test_dtypes_that_are_no_plain_numbers(dtype: Any) -> None:
    """Object pointers above all: a peer cannot make this process follow an address."""
    with pytest.raises(DecodeError):
        decode_body(array_of(dtype, [2]))


SHAPES = [[-1], [2, -1], [3], [5, 5], [2**62, 2**62], [2**64 - 1], [1.5], ["2"], None, {"a": 1}, 2, [[4]], [None]]


@pytest.mark.parametrize("shape", SHAPES, ids=repr)
def test_shapes_that_do_not_fit(shape: Any) -> None:
    """A negative, huge or otherwise wrong shape is refused."""
    with pytest.raises(DecodeError):
        decode_body(array_of("<i4", shape))


@pytest.mark.parametrize("number", [0, 2, -1, None, "1", True, 1.0, 2**63])
def test_frames_that_are_not_there(number: Any) -> None:
    """Frame 0 is the skeleton; the array's frame must exist."""
    with pytest.raises(DecodeError, match="array frame"):
        decode_body(array_of("<i4", [4], number))


def test_data_that_are_no_whole_number_of_items() -> None:
    """A truncated array is refused."""
    with pytest.raises(DecodeError):
        decode_body(array_of("<i4", [4], data=b"\0" * 15))


@pytest.mark.parametrize(
    "bomb", [b"\x91" * 60_000, b"\x81\xa1k" * 20_000, b"\xc7\xff\xff" * 10], ids=["list", "map", "ext"]
)
def test_depth_bombs(bomb: bytes) -> None:
    """Endless nesting ends in an error, not in a stack overflow."""
    with pytest.raises(DecodeError):
        decode_header(bomb)
    with pytest.raises(DecodeError):
        decode_body([bomb])


@pytest.mark.parametrize(
    "bomb", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
)
def test_length_bombs(bomb: bytes) -> None:
    """Four billion announced entries allocate nothing."""
    with pytest.raises(DecodeError):
        decode_body([bomb])
    with pytest.raises(DecodeError):
        decode_header(bomb)


def declared(count: int, marker: int = 0xDD) -> bytes:
    """The head of a list (0xDD) or map (0xDF) of ``count`` entries."""
    return bytes([marker]) + count.to_bytes(4, "big")


#: A byte, or two, that take 40 to 72 bytes when they are read.
SMALL = {
    "lists": (0xDD, b"\x90"),
    "maps": (0xDD, b"\x80"),
    "lists of one": (0xDD, b"\x91\xc0"),
    "maps of one": (0xDD, b"\x81\xc0\xc0"),
}


@pytest.mark.parametrize("kind", SMALL)
def test_many_small_things(kind: str) -> None:
    """What would take a hundred times its size in memory is not read to its end."""
    marker, small = SMALL[kind]
    count = MAX_VALUES // LIST_VALUES
    with pytest.raises(DecodeError, match=f"more than {MAX_VALUES} values"):
        decode_body([declared(count, marker) + small * count])


@pytest.mark.parametrize("marker", [0xDD, 0xDF])
def test_more_values_than_the_limit_are_not_even_made_room_for(marker: int) -> None:
    """One list or map that says it has more of them, in a skeleton that could hold them."""
    with pytest.raises(DecodeError, match="exceeds max_"):
        decode_body([declared(MAX_VALUES + 1, marker) + b"\xc0" * (2 * MAX_VALUES + 2)])


def test_large_values_of_honest_people_are_read() -> None:
    """A million numbers, ten thousand messages of a chat."""
    value = [list(range(1_000_000)), [{"role": "user", "content": f"{i}"} for i in range(10_000)]]
    assert decode_body(encode_body(value)) == value


def test_a_header_of_lists_is_not_read_to_its_end() -> None:
    """A reader of headers has other things to do; and long names are no lists."""
    sixty = bytes([0xDC, 0, 60])
    for small in (b"\x90", b"\x80", b"\x91\xc0", b"\x81\xa0\xc0"):
        head = b"\x9f" + msgpack.packb([WIRE_VERSION, 1])[1:]
        with pytest.raises(DecodeError, match=f"more than {MAX_HEADER_VALUES} values"):
            decode_header(head + (sixty + (sixty + small * 60) * 5) * 13)
    with pytest.raises(DecodeError, match="exceeds max_array_len"):
        decode_header(msgpack.packb([WIRE_VERSION, 1, *range(100)]))
    long = Call(b"id", 1, "engine", "generate", "s" * 60_000)
    assert decode_header(encode_header(long)) == long


@pytest.mark.parametrize("size", [UNCOUNTED, UNCOUNTED + 1])
def test_nested_heads_that_make_room_again_and_again(size: int) -> None:
    """500 lists in each other, each of as many entries as the limits allow: refused before room is made for all."""
    for read, most in ((decode_header, MAX_HEADER_VALUES), (lambda frame: decode_body([frame]), MAX_VALUES)):
        bomb = declared(min(most, size)) * (size // 5)
        assert not readable(read, bomb.ljust(size, b"\xc0"))


def test_each_frame_makes_one_array() -> None:
    """A thousand arrays cannot be made of one frame; and they come in the order of their frames."""
    one = msgpack.ExtType(1, msgpack.packb([1, "<i4", [4]]))
    two = msgpack.ExtType(1, msgpack.packb([2, "<i4", [4]]))
    frames = [bytes(16), bytes(16)]
    assert len(decode_body([msgpack.packb([one, two]), *frames])) == 2
    for wrong in ([one] * 2, [two, one], [one, two, two]):
        with pytest.raises(DecodeError, match="array frame"):
            decode_body([msgpack.packb(wrong), *frames])


def test_what_a_peer_sent_is_quoted_shortly() -> None:
    """Errors go to logs, and some of them back to who sent it."""
    long = "x" * 60_000
    for header in ([long], [long, 1], [WIRE_VERSION, long], [WIRE_VERSION, 99, long]):
        with pytest.raises(ProtocolError) as caught:
            decode_header(msgpack.packb(header))
        assert len(str(caught.value)) < 200
    for dtype, shape, number in ((long, [4], 1), ("<i4", [long], 1), ("<i4", [4], long)):
        with pytest.raises(DecodeError) as caught:
            decode_body(array_of(dtype, shape, number))
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize("length", range(len(GOOD_HEADER)))
def test_truncated_headers(length: int) -> None:
    """Every prefix of a header is refused."""
    assert not readable(decode_header, GOOD_HEADER[:length])


def test_truncated_bodies() -> None:
    """Every body with a shortened frame, or one frame fewer, is refused."""
    for number, frame in enumerate(GOOD_BODY):
        for length in range(len(frame)):
            frames = [*GOOD_BODY[:number], frame[:length], *GOOD_BODY[number + 1 :]]
            assert not readable(decode_body, frames), (number, length)
    assert not readable(decode_body, GOOD_BODY[:1])
    assert not readable(decode_body, [])


def test_too_many_small_vectors() -> None:
    """Two bytes each in a skeleton, a hundred as arrays: as many as there may be of the large ones."""
    for number in (2, 3):
        vectors = [msgpack.ExtType(number, b"")] * MAX_ARRAYS
        assert len(decode_body([msgpack.packb(vectors)])) == MAX_ARRAYS
        with pytest.raises(DecodeError, match=f"more than {MAX_ARRAYS} arrays"):
            decode_body([msgpack.packb([*vectors, vectors[0]])])


@pytest.mark.parametrize("number", [2, 3])
def test_small_vectors_of_no_whole_number_of_values(number: int) -> None:
    """Are refused."""
    with pytest.raises(DecodeError, match="cannot be read"):
        decode_body([msgpack.packb([msgpack.ExtType(number, bytes(7))])])


def test_too_many_frames() -> None:
    """More arrays than the limit are refused unread, with the count."""
    with pytest.raises(DecodeError, match=f"body of {MAX_ARRAYS + 2} frames"):
        decode_body([b"\xc0"] * (MAX_ARRAYS + 2))


def test_a_reader_may_take_less() -> None:
    """Who needs but a few facts says so; arrays do not count."""
    frames = encode_body(["x" * 100, np.zeros(1000)])
    assert decode_body(frames, len(frames[0]))[0] == "x" * 100
    with pytest.raises(DecodeError, match=f"skeleton of {len(frames[0])} bytes"):
        decode_body(frames, len(frames[0]) - 1)


def test_an_error_keeps_the_bytes() -> None:
    """For the log."""
    with pytest.raises(DecodeError) as caught:
        decode_body([b"\xc1", b"x"])
    assert caught.value.frames == (b"\xc1", b"x")
