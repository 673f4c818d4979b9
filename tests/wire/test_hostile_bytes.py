"""A peer's bytes can at worst be refused: nothing but the typed errors comes out of the decoder."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zagent.errors import DecodeError, ProtocolError
from zagent.wire.codec import MAX_ARRAYS, decode_body, decode_header, encode_body, encode_header
from zagent.wire.messages import WIRE_VERSION, Call

GOOD_HEADER = encode_header(Call(b"0123456789abcdef", 1, "engine", "generate", "session", 1000))
GOOD_BODY = encode_body([np.arange(5, dtype=np.int32), {"temperature": 1.0}, None])


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


@given(st.sampled_from([WIRE_VERSION, 0, "x"]), st.integers(0, 12), st.lists(anything, max_size=10))
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


def test_too_many_frames() -> None:
    """More arrays than the limit are refused unread, with the count."""
    with pytest.raises(DecodeError, match=f"body of {MAX_ARRAYS + 2} frames"):
        decode_body([b"\xc0"] * (MAX_ARRAYS + 2))


def test_an_error_keeps_the_bytes() -> None:
    """For the log."""
    with pytest.raises(DecodeError) as caught:
        decode_body([b"\xc1", b"x"])
    assert caught.value.frames == (b"\xc1", b"x")
