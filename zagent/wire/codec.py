"""Messages to frames and back. No pickle: a peer's bytes can at worst be refused.

Header and body skeleton are msgpack; numpy arrays in the body travel as raw frames of their own behind the skeleton,
which keeps their dtype and shape, and are read back without a copy (read-only). Small vectors are part of the skeleton,
since each frame costs about a microsecond wherever it is sent or received.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from reprlib import repr as shortly  # what a peer sent may be long
from typing import Any, TypeAlias, get_type_hints

import msgpack
import numpy as np

from zagent.errors import DecodeError, EncodeError, VersionMismatch
from zagent.wire.messages import KINDS, WIRE_VERSION, Message

Buffer: TypeAlias = "bytes | memoryview"

#: Largest header: a session or pool name is a few dozen characters; 64 KiB leaves room for any sensible one.
MAX_HEADER = 64 * 1024
#: Largest frame, in bytes; the sockets cut off who sends a larger one. The routed experts of 100 000 tokens (61 layers,
#: 8 each) take 200 MB.
MAX_FRAME = 1024 * 1024 * 1024
#: Arrays in one message. 50 images and their grids stay far below.
MAX_ARRAYS = 4096
#: Largest body skeleton (rows with long histories are some 100 KB).
MAX_SKELETON = 256 * 1024 * 1024
#: Values in one skeleton. An empty map is one byte there and 64 here: the largest skeleton would take 18 GB and a
#: minute, with this limit 0.4 GB and a second, strings aside. An array counts as one value, a list or map as
#: `LIST_VALUES` more than it has, for its memory and for Python's garbage collector.
MAX_VALUES = 4 * 1024 * 1024
LIST_VALUES = 32
#: The same of a header, and its fields. 64 KiB of lists in lists would take its reader milliseconds.
MAX_HEADER_VALUES = 1024
MAX_HEADER_FIELDS = 64
#: Up to these sizes, in bytes, nothing is counted in a header or a skeleton, which costs 0.1 µs a list or map. Most
#: skeletons with small vectors are below; 16 KiB can become 1 MB.
UNCOUNTED_HEADER = 1024
UNCOUNTED = 16 * 1024

# msgpack extensions: [frame number, dtype, shape] of an array, or a small vector's values.
_ARRAY = 1
_VECTORS = {2: np.dtype("<i4"), 3: np.dtype("<f4")}
_VECTOR_NUMBERS = {dtype: number for number, dtype in _VECTORS.items()}
#: Vectors up to this size, in bytes, are small: two of them, ids and log-probabilities, are still copied faster than
#: they are sent as frames.
SMALL_VECTOR = 4096
_DTYPE_KINDS = "biufc"  # bool, ints, floats, complex: plain memory; never objects

_NUMBERS = {cls: number for number, cls in KINDS.items()}
_FIELD_TYPES: dict[type[Message], tuple[type, ...]] = {
    cls: tuple(get_type_hints(cls).values()) for cls in KINDS.values()
}
_REQUIRED = {cls: len(cls._fields) - len(cls._field_defaults) for cls in KINDS.values()}
_DTYPE_MAX = 8  # letters: "<c16"; numpy would parse any number of fields
_packer = msgpack.Packer()


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
        unpack = msgpack.unpackb if len(frame) <= UNCOUNTED_HEADER else _counting(MAX_HEADER_VALUES)
        values = unpack(frame, use_list=False, max_array_len=MAX_HEADER_FIELDS)
    except Exception as error:  # msgpack raises half a dozen unrelated classes
        raise DecodeError(f"header is not msgpack: {error}", [frame]) from error
    if type(values) is not tuple or len(values) < 2:
        raise DecodeError("header is not a list of at least two", [frame])
    if values[0] != WIRE_VERSION:
        raise VersionMismatch(f"peer speaks wire version {shortly(values[0])}, this side {WIRE_VERSION}")
    kind = KINDS.get(values[1]) if type(values[1]) is int else None
    if kind is None:
        raise DecodeError(f"unknown kind {shortly(values[1])}", [frame])
    expected = _FIELD_TYPES[kind]
    fields = values[2 : 2 + len(expected)]
    types = tuple(map(type, fields))
    if types == expected:
        return tuple.__new__(kind, fields)  # what its constructor does, without looking for defaults
    _check_fields(kind, types, frame)
    return kind(*fields)


def _counting(most: int) -> Callable[..., Any]:
    """`msgpack.unpackb` that stops with `DecodeError` where there are more than ``most`` values."""
    left = most

    def count(made: Any) -> Any:
        nonlocal left
        left -= LIST_VALUES + len(made)
        if left < 0:
            raise DecodeError(f"more than {most} values")
        return made

    return partial(msgpack.unpackb, list_hook=count, object_hook=count, max_map_len=most)


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
        EncodeError: something else is in it (the type is named), an integer beyond 64 bits, or it is too large.
    """
    frames: list[Buffer] = [b""]
    try:
        frames[0] = msgpack.Packer(default=_ArrayFrames(frames)).pack(value)
    except EncodeError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise EncodeError(f"value cannot cross the wire: {error}") from error
    if len(frames[0]) > MAX_SKELETON:
        raise EncodeError(f"a value of {len(frames[0])} bytes beside its arrays, {MAX_SKELETON} at most")
    return frames


#: An extension from (code, data), without the checks of its constructor, which take three times as long.
_extension = partial(tuple.__new__, msgpack.ExtType)


class _ArrayFrames:
    """Puts arrays into small extensions, or into ``frames``."""

    def __init__(self, frames: list[Buffer]) -> None:
        self._frames = frames
        self._arrays = 0

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return _plain(value)
        self._arrays += 1
        if self._arrays > MAX_ARRAYS:
            raise EncodeError(f"more than {MAX_ARRAYS} arrays in one message")
        if value.nbytes <= SMALL_VECTOR and value.ndim == 1 and value.dtype in _VECTOR_NUMBERS:
            return _extension((_VECTOR_NUMBERS[value.dtype], value.tobytes()))
        if value.dtype.kind not in _DTYPE_KINDS:
            raise EncodeError(f"an array of dtype {value.dtype} cannot cross the wire")
        if value.nbytes > MAX_FRAME:
            raise EncodeError(f"an array of {value.nbytes} bytes cannot cross the wire, {MAX_FRAME} at most")
        self._frames.append(value.tobytes())  # C order; a copy, so that the caller may go on changing its array
        return _extension((_ARRAY, _packer.pack((len(self._frames) - 1, value.dtype.str, value.shape))))


def _plain(value: Any) -> Any:
    """What msgpack knows, of a numpy scalar. Raises `EncodeError` for anything else."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, int):
        raise EncodeError("an integer beyond 64 bits cannot cross the wire")
    raise EncodeError(f"a value of type {type(value).__module__}.{type(value).__qualname__} cannot cross the wire")


def decode_body(frames: Sequence[Buffer], max_skeleton: int = MAX_SKELETON) -> Any:
    """The value in body frames; arrays are read-only views of their frames. ``max_skeleton`` in bytes.

    Raises:
        DecodeError: carries the frames.
    """
    if not frames:
        raise DecodeError("message without a body")
    if len(frames) > MAX_ARRAYS + 1 or len(frames[0]) > max_skeleton:
        raise DecodeError(f"body of {len(frames)} frames, skeleton of {len(frames[0])} bytes")
    unpack = msgpack.unpackb if len(frames[0]) <= UNCOUNTED else _counting(MAX_VALUES)
    try:
        return unpack(frames[0], strict_map_key=False, ext_hook=_Arrays(frames), max_array_len=MAX_VALUES)
    except DecodeError:
        raise
    except Exception as error:  # as in decode_header
        raise DecodeError(f"body cannot be read: {type(error).__name__}: {error}", frames) from error


class _Arrays:
    """Makes the arrays of a body; each frame once and in order, so that there are no more large ones than frames."""

    def __init__(self, frames: Sequence[Buffer]) -> None:
        self._frames = frames
        self._last = 0
        self._arrays = 0

    def __call__(self, code: int, data: bytes) -> np.ndarray:
        self._arrays += 1
        if self._arrays > MAX_ARRAYS:
            raise DecodeError(f"more than {MAX_ARRAYS} arrays", self._frames)
        if code in _VECTORS:
            return np.frombuffer(data, _VECTORS[code])
        if code != _ARRAY:
            raise DecodeError(f"unknown extension {code}", self._frames)
        number, dtype, shape = msgpack.unpackb(data, use_list=False)
        if type(number) is not int or not self._last < number < len(self._frames):
            raise DecodeError(f"array frame {shortly(number)} of {len(self._frames)}", self._frames)
        self._last = number
        return self._array(self._frames[number], dtype, shape)

    def _array(self, frame: Buffer, dtype: Any, shape: Any) -> np.ndarray:
        if type(dtype) is not str or len(dtype) > _DTYPE_MAX or type(shape) is not tuple or (shape and min(shape) < 0):
            raise DecodeError(f"array of dtype {shortly(dtype)} and shape {shortly(shape)}", self._frames)
        kind = np.dtype(dtype)
        if kind.kind not in _DTYPE_KINDS:
            raise DecodeError(f"array of dtype {kind}", self._frames)
        values = np.frombuffer(frame, kind)
        values.setflags(write=False)  # a frame that was received without a copy would let itself be written to
        return values.reshape(shape)
