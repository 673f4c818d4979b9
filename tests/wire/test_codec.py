"""Messages and values survive the wire exactly; what cannot is refused by name."""

from __future__ import annotations

from typing import Any, get_type_hints

import msgpack
import numpy as np
import pytest

from zagent.errors import DecodeError, EncodeError, VersionMismatch
from zagent.wire import codec
from zagent.wire.codec import (
    MAX_ARRAYS,
    MAX_HEADER,
    SMALL_VECTOR,
    decode_body,
    decode_header,
    encode_body,
    encode_header,
)
from zagent.wire.messages import KINDS, WIRE_VERSION, Call, Cancel, Failure, Goodbye, Message

SAMPLES: dict[type, Any] = {bytes: b"\x00call\xff", int: 7, str: "naïve 你好", bool: False}


def filled(kind: type[Message]) -> Message:
    return kind(*(SAMPLES[hint] for hint in get_type_hints(kind).values()))


def through(value: Any) -> Any:
    return decode_body(encode_body(value))


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.__name__)
def test_every_kind_comes_back_equal(kind: type[Message]) -> None:
    """Each message is read back as the same kind with the same fields."""
    message = filled(kind)
    back = decode_header(encode_header(message))
    assert type(back) is kind
    assert back == message


def test_the_header_begins_with_the_version() -> None:
    """The header is a positional list led by the wire version and the kind's number."""
    values = msgpack.unpackb(encode_header(Cancel(b"id", 3)))
    assert values == [WIRE_VERSION, 4, b"id", 3]


def test_kind_numbers_are_fixed() -> None:
    """A kind's number never changes meaning."""
    names = (
        "Call Reply Failure Cancel EndSession Hello Welcome Goodbye Drain Exited Abandoned Progress HelloWanted Pulse"
        " Health Outdated Passed"
    )
    assert {number: kind.__name__ for number, kind in KINDS.items()} == dict(enumerate(names.split(), 1))


def test_more_fields_than_known_are_ignored() -> None:
    """A header grows at its end only, so a newer peer's extra fields do not matter."""
    frame = msgpack.packb([WIRE_VERSION, 4, b"id", 3, "new", {"and": "improved"}])
    assert decode_header(frame) == Cancel(b"id", 3)


def test_missing_optional_fields_take_their_defaults() -> None:
    """An older peer's shorter header is filled up."""
    frame = msgpack.packb([WIRE_VERSION, 1, b"id", 1, "engine", "generate"])
    assert decode_header(frame) == Call(b"id", 1, "engine", "generate")


def test_fewer_fields_than_required_are_refused() -> None:
    """A header without a required field is no message; the error names kind and count."""
    frame = msgpack.packb([WIRE_VERSION, 1, b"id", 1, "engine"])
    with pytest.raises(DecodeError, match="Call with 3 fields") as caught:
        decode_header(frame)
    assert caught.value.frames == (frame,)


@pytest.mark.parametrize("wrong", [5, None, "text", True, 1.0, [1]])
def test_a_field_of_another_type_is_refused(wrong: Any) -> None:
    """Types are exact: not even a bool passes for bytes or an int."""
    with pytest.raises(DecodeError, match="where bytes belongs"):
        decode_header(msgpack.packb([WIRE_VERSION, 2, wrong, 1]))
    with pytest.raises(DecodeError):
        decode_header(msgpack.packb([WIRE_VERSION, 2, b"id", True]))


@pytest.mark.parametrize("version", [0, 2, "1", None, [1]])
def test_another_version_is_a_mismatch(version: Any) -> None:
    """Both versions are named."""
    with pytest.raises(VersionMismatch, match=f"this side {WIRE_VERSION}"):
        decode_header(msgpack.packb([version, 4, b"id", 3]))


@pytest.mark.parametrize("kind", [0, 1000, -1, "Call", None, 4.0, True, [4], 2**63])
def test_an_unknown_kind_is_refused(kind: Any) -> None:
    """The error names what stood in the kind's place."""
    with pytest.raises(DecodeError, match="unknown kind"):
        decode_header(msgpack.packb([WIRE_VERSION, kind, b"id", 3]))


def test_a_huge_header_is_refused_unread() -> None:
    """Beyond the limit nothing is parsed."""
    with pytest.raises(DecodeError, match=f"header of {MAX_HEADER + 1} bytes"):
        decode_header(b"\x93" * (MAX_HEADER + 1))


def test_a_header_nobody_could_read_is_not_sent() -> None:
    """A session name beyond the limit, or with a lone surrogate, fails at the sender instead of waiting for ever."""
    with pytest.raises(EncodeError, match="Call with a header of"):
        encode_header(Call(b"id", 1, "engine", "generate", "s" * MAX_HEADER))
    with pytest.raises(EncodeError, match="Call cannot cross the wire"):
        encode_header(Call(b"id", 1, "engine", "generate", "\ud800"))
    assert decode_header(encode_header(Goodbye())) == Goodbye()  # the shared packer is clean again


PLAIN = [
    None,
    True,
    0,
    -(2**63),
    2**64 - 1,
    1.5,
    float("inf"),
    "naïve 你好 👩‍💻",
    b"\x00\xff",
    [],
    {},
    {"a": [1, {"b": None}]},
    {1: "int keys", b"k": 2},
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_come_back_equal(value: Any) -> None:
    """None, bools, 64-bit ints, floats, strings, bytes, lists and dicts keep value and type."""
    back = through(value)
    assert back == value
    assert type(back) is type(value)


def test_tuples_become_lists() -> None:
    """msgpack knows one kind of sequence."""
    assert through((1, (2, "x"))) == [1, [2, "x"]]


def test_numpy_scalars_become_python_ones() -> None:
    """A numpy number in a value is that number."""
    back = through([np.int64(5), np.float32(0.5), np.bool_(True), np.str_("x")])
    assert back == [5, 0.5, True, "x"]
    assert [type(v) for v in back] == [int, float, bool, str]


DTYPES = [
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]


@pytest.mark.parametrize("dtype", [*DTYPES, ">i4", ">f8"])
def test_arrays_of_every_dtype_are_exact(dtype: str) -> None:
    """Dtype (byte order included), shape and every bit come back."""
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    back = through({"a": array})["a"]
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()


def test_nan_and_infinities_keep_their_bits() -> None:
    """Also a NaN's payload."""
    bits = np.array([0x7FC00001, 0xFF800000, 0x7F800000, 0x80000000, 0x00000001], np.uint32)
    back = through(bits.view(np.float32))
    assert back.dtype == np.float32
    assert (back.view(np.uint32) == bits).all()


LAYOUTS = {
    "empty": np.empty(0, np.int32),
    "empty with a shape": np.empty((0, 3), np.int16),
    "0-d": np.array(7, np.int64),
    "strided": np.arange(10, dtype=np.int32)[::3],
    "reversed": np.arange(5, dtype=np.int32)[::-1],
    "Fortran": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
    "transposed": np.arange(24, dtype=np.int16).reshape(2, 3, 4).transpose(2, 0, 1),
    "broadcast": np.broadcast_to(np.int32(3), (2, 2)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_memory_layout_arrives_in_order(name: str) -> None:
    """What is equal here is equal there, however it lies in memory."""
    array = LAYOUTS[name]
    back = through([array])[0]
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert (back == array).all()


def test_arrays_are_read_only_views_of_their_frames() -> None:
    """Receiving copies nothing."""
    frames = encode_body([np.arange(2000, dtype=np.int32)])
    received = [bytes(frame) for frame in frames]
    back = decode_body(received)[0]
    assert not back.flags.writeable
    assert back.__array_interface__["data"][0] == np.frombuffer(received[1], np.uint8).__array_interface__["data"][0]


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
@pytest.mark.parametrize(("values", "frames"), [(0, 1), (1, 1), (SMALL_VECTOR // 4, 1), (SMALL_VECTOR // 4 + 1, 2)])
def test_a_small_vector_takes_no_frame_of_its_own(dtype: type, values: int, frames: int) -> None:
    """It is part of the skeleton, and comes back read-only and aligned as a larger one does."""
    vector = np.arange(values).astype(dtype)
    body = encode_body({"x": vector})
    back = decode_body([bytes(frame) for frame in body])["x"]
    assert len(body) == frames
    assert (back.dtype, back.flags.writeable, back.flags.aligned) == (vector.dtype, False, True)
    assert np.array_equal(back, vector)


@pytest.mark.parametrize("vector", [np.arange(8, dtype=np.int32)[::2], np.arange(4, dtype=">i4"), np.float32(3)[None]])
def test_small_vectors_of_any_layout(vector: np.ndarray) -> None:
    """With gaps, of the other byte order, or of one value."""
    back = through(vector)
    assert (back.dtype, back.tolist()) == (vector.dtype, vector.tolist())


def test_several_arrays_keep_their_places() -> None:
    """Arrays of equal shape are not mixed up."""
    arrays = [np.full(3, i, np.int32) for i in range(5)]
    back = through({"x": arrays[:3], "y": {"z": arrays[3:]}})
    assert [int(a[0]) for a in back["x"] + back["y"]["z"]] == [0, 1, 2, 3, 4]


class Custom:
    """No value of ours."""


REFUSED = {
    "object array": (np.array([{}], object), "dtype object"),
    "text array": (np.array(["a"]), "dtype <U1"),
    "date array": (np.array(["2020-01-01"], "M8[D]"), "dtype datetime64"),
    "record array": (np.zeros(1, "i4,f4"), "dtype"),
    "set": ({1, 2}, "builtins.set"),
    "object": (Custom(), "Custom"),
    "function": (print, "builtin_function_or_method"),
    "complex": (1j, "builtins.complex"),
    "exception": (ValueError("x"), "builtins.ValueError"),
    "beyond 64 bits": (2**64, "cannot cross the wire"),
    "surrogate": ("\ud800", "cannot cross the wire"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_cross_is_refused_by_name(name: str) -> None:
    """No pickle: the type is named, however deep the value sits."""
    value, text = REFUSED[name]
    with pytest.raises(EncodeError, match=text):
        encode_body({"deep": [1, [value]]})


def test_a_value_that_contains_itself_is_refused() -> None:
    """Endless nesting is an error, not a crash."""
    value: list[Any] = []
    value.append(value)
    with pytest.raises(EncodeError):
        encode_body(value)


def test_too_many_arrays_are_refused_by_the_sender() -> None:
    """Both sides keep the same limit."""
    arrays = [np.empty(0, np.int8), np.empty(0, np.int32)] * (MAX_ARRAYS // 2) + [np.empty(0, np.int32)]
    with pytest.raises(EncodeError, match=f"more than {MAX_ARRAYS} arrays"):
        encode_body(arrays)
    assert len(through(arrays[:-1])) == MAX_ARRAYS


def test_what_no_receiver_would_take_is_refused_by_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """An array beyond a frame, a skeleton beyond its limit; with the sizes."""
    monkeypatch.setattr(codec, "MAX_FRAME", 100)
    monkeypatch.setattr(codec, "MAX_SKELETON", 50)
    assert len(through([np.zeros(100, np.int8)])[0]) == 100
    with pytest.raises(EncodeError, match="an array of 101 bytes cannot cross the wire, 100 at most"):
        encode_body([np.zeros(101, np.int8)])
    assert through("x" * 48) == "x" * 48
    with pytest.raises(EncodeError, match="a value of 51 bytes beside its arrays, 50 at most"):
        encode_body("x" * 49)


def test_changing_what_was_sent_changes_nothing_that_arrives() -> None:
    """The sender may go on using its arrays, lists and dicts (pitfall C13)."""
    array, ids, params = np.arange(3, dtype=np.int32), [1, 2], {"n": 1}
    frames = encode_body([array, ids, params])
    array[:] = 9
    ids.append(3)
    params["n"] = 2
    back = decode_body(frames)
    assert back[0].tolist() == [0, 1, 2]
    assert back[1:] == [[1, 2], {"n": 1}]


def test_a_failure_says_by_default_that_it_was_accepted() -> None:
    """Only a refusal undoes a session's binding."""
    assert Failure(b"", 1).accepted
