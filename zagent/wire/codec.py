"""Messages to frames and back. No pickle: a peer's bytes can at worst be refused.

Header and body skeleton are msgpack; numpy arrays in the body travel as raw frames of their own behind the skeleton,
which keeps their dtype and shape, and are read back without a copy (read-only).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, get_type_hints

import msgpack
import numpy as np

from zagent.errors import DecodeError, EncodeError, VersionMismatch
from zagent.wire.messages import KINDS, WIRE_VERSION, Message

Buffer: TypeAlias = "bytes | memoryview"

#: Largest header: a session or pool name is a few dozen characters; 64 KiB leaves room for any sensible one.
MAX_HEADER = 64 * 1024
#: Arrays in one message. 50 images and their grids stay far below.
MAX_ARRAYS = 4096
#: Largest body skeleton (rows with long histories are some 100 KB).
MAX_SKELETON = 256 * 1024 * 1024

_ARRAY = 1  # msgpack extension: [frame number, dtype, shape]
_DTYPE_KINDS = "biufc"  # bool, ints, floats, complex: plain memory; never objects

_NUMBERS = {cls: number for number, cls in KINDS.items()}
_FIELD_TYPES: dict[type[Message], tuple[type, ...]] = {
    cls: tuple(get_type_hints(cls).values()) for cls in KINDS.values()
}
_REQUIRED = {cls: len(cls._fields) - len(cls._field_defaults) for cls in KINDS.values()}
_packer = msgpack.Packer(use_bin_type=True, autoreset=True)


def encode_header(message: Message) -> bytes:
    """The header frame of ``message``. Raises `EncodeError` where the receiver could not read it."""
    try:
        packed: bytes = _packer.pack((WIRE_VERSION, _NUMBERS[type(message)], *message))
    except (TypeError, ValueError, OverflowError) as error:  # a lone surrogate is a ValueError
        raise EncodeError(f"{type(message).__name__} cannot cross the wire: {error}") from error
    if len(packed) > MAX_HEADER:
        raise EncodeError(f"{type(message).__name__} with a header of {len(packed)} bytes, {MAX_HEADER} at most")
    return packed


def decode_header(frame: Buffer) -> Message:
    """The message in a header frame.

    Raises:
        VersionMismatch: another wire version.
        DecodeError: anything that is no header of ours; carries the frame.
    """
    if len(frame) > MAX_HEADER:
        raise DecodeError(f"header of {len(frame)} bytes")
    try:
        values = msgpack.unpackb(frame, use_list=False)
    except Exception as error:  # msgpack raises half a dozen unrelated classes
        raise DecodeError(f"header is not msgpack: {error}", [frame]) from error
    if type(values) is not tuple or len(values) < 2:
        raise DecodeError("header is not a list of at least two", [frame])
    if values[0] != WIRE_VERSION:
        raise VersionMismatch(f"peer speaks wire version {values[0]!r}, this side {WIRE_VERSION}")
    kind = KINDS.get(values[1]) if type(values[1]) is int else None
    if kind is None:
        raise DecodeError(f"unknown kind {values[1]!r}", [frame])
    expected = _FIELD_TYPES[kind]
    fields = values[2 : 2 + len(expected)]
    types = tuple(map(type, fields))
    if types != expected:
        _check_fields(kind, types, frame)
    return kind(*fields)


def _check_fields(kind: type[Message], types: tuple[type, ...], frame: Buffer) -> None:
    """Fields may only be missing where they have defaults. Raises `DecodeError`."""
    if len(types) < _REQUIRED[kind]:
        raise DecodeError(f"{kind.__name__} with {len(types)} fields", [frame])
    for found, expected in zip(types, _FIELD_TYPES[kind], strict=False):
        if found is not expected:
            raise DecodeError(f"{kind.__name__} with a {found.__name__} where {expected.__name__} belongs", [frame])


def encode_body(value: Any) -> list[Buffer]:
    """Body frames of a value made of None, bools, ints, floats, strings, bytes, lists, dicts and numpy arrays.

    Raises:
        EncodeError: something else is in it (the type is named), or an integer beyond 64 bits.
    """
    frames: list[Buffer] = [b""]
    try:
        frames[0] = msgpack.packb(value, default=_array_hook(frames), use_bin_type=True)
    except EncodeError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise EncodeError(f"value cannot cross the wire: {error}") from error
    return frames


def _array_hook(frames: list[Buffer]) -> Callable[[Any], Any]:
    def hook(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            if value.dtype.kind not in _DTYPE_KINDS:
                raise EncodeError(f"an array of dtype {value.dtype} cannot cross the wire")
            if len(frames) > MAX_ARRAYS:
                raise EncodeError(f"more than {MAX_ARRAYS} arrays in one message")
            frames.append(value.tobytes())  # C order; a copy, so that the caller may go on changing its array
            return msgpack.ExtType(_ARRAY, _packer.pack((len(frames) - 1, value.dtype.str, value.shape)))
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, int):
            raise EncodeError("an integer beyond 64 bits cannot cross the wire")
        raise EncodeError(f"a value of type {type(value).__module__}.{type(value).__qualname__} cannot cross the wire")

    return hook


def decode_body(frames: Sequence[Buffer]) -> Any:
    """The value in body frames; arrays are read-only views of their frames.

    Raises:
        DecodeError: carries the frames.
    """
    if not frames:
        raise DecodeError("message without a body")
    if len(frames) > MAX_ARRAYS + 1 or len(frames[0]) > MAX_SKELETON:
        raise DecodeError(f"body of {len(frames)} frames, skeleton of {len(frames[0])} bytes")

    def hook(code: int, data: bytes) -> Any:
        if code != _ARRAY:
            raise DecodeError(f"unknown extension {code}", frames)
        number, dtype, shape = msgpack.unpackb(data, use_list=False)
        return _array(frames, number, dtype, shape)

    try:
        return msgpack.unpackb(frames[0], ext_hook=hook, strict_map_key=False)
    except DecodeError:
        raise
    except Exception as error:  # as in decode_header
        raise DecodeError(f"body cannot be read: {type(error).__name__}: {error}", frames) from error


def _array(frames: Sequence[Buffer], number: Any, dtype: Any, shape: Any) -> np.ndarray:
    if type(number) is not int or not 1 <= number < len(frames):
        raise DecodeError(f"array frame {number!r} of {len(frames)}", frames)
    if type(dtype) is not str or type(shape) is not tuple or (shape and min(shape) < 0):
        raise DecodeError(f"array of dtype {dtype!r} and shape {shape!r}", frames)
    kind = np.dtype(dtype)
    if kind.kind not in _DTYPE_KINDS:
        raise DecodeError(f"array of dtype {kind}", frames)
    values = np.frombuffer(frames[number], dtype=kind)
    values.flags.writeable = False  # a frame that was received without a copy would let itself be written to
    return values if values.shape == shape else values.reshape(shape)
