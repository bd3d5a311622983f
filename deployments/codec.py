"""Round messages as bytes: msgpack, with every array as one extension value.

An array's extension code names its dtype; its payload is one byte of rank, the shape as little-endian uint32 and the
raw elements in C order. No pickle: decoding untrusted bytes can fail, but never runs code.
"""

import struct
from dataclasses import dataclass
from typing import Any, TypeVar, get_origin

import msgspec
import numpy as np
import numpy.typing as npt

from specserve.service.errors import ChannelError
from specserve.service.messages import Features

T = TypeVar("T")

_DTYPE_BY_CODE: dict[int, np.dtype[Any]] = {
    1: np.dtype("<f4"),
    2: np.dtype("<f8"),
    3: np.dtype("<u2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
}
_CODE_BY_DTYPE = {dtype: code for code, dtype in _DTYPE_BY_CODE.items()}


@dataclass(frozen=True, slots=True)
class _FeaturesOnWire:
    """`Features` with an untyped array: msgspec refuses a union of three array types, which is how ours is typed."""

    round: int
    bfloat16: bool
    hidden: np.ndarray


def encode(message: object) -> bytes:
    """The bytes of one message of `service.messages`.

    Raises: TypeError for an array whose dtype is not on the list, or for a field msgpack cannot carry.
    Cost: two copies of every array.
    """
    return _ENCODER.encode(message)


def decode(data: bytes, type: type[T]) -> T:
    """The message of class `type` in `data`; its arrays are read-only, and views of `data` where it aligns them.

    Raises: ChannelError when `data` is not such a message.
    """
    try:
        if type is Features:
            wire = _decoder(_FeaturesOnWire).decode(data)
            return type(wire.round, wire.bfloat16, wire.hidden)  # type: ignore[call-arg]
        message: T = _decoder(type).decode(data)
    except (msgspec.DecodeError, ValueError, struct.error) as error:  # DecodeError is also a failed validation
        raise ChannelError(f"not a {type.__name__}: {error}") from error
    return message


def _decoder(type: type[Any]) -> msgspec.msgpack.Decoder[Any]:
    if type not in _DECODERS:  # building one costs far more than a decode
        _DECODERS[type] = msgspec.msgpack.Decoder[Any](type, dec_hook=_check_array, ext_hook=_unpack_array)
    return _DECODERS[type]


def _pack(value: object) -> object:
    if isinstance(value, np.ndarray):
        code = _CODE_BY_DTYPE.get(value.dtype)
        if code is None:
            raise TypeError(f"arrays of {value.dtype} do not travel")
        header = struct.pack(f"<B{value.ndim}I", value.ndim, *value.shape)
        return msgspec.msgpack.Ext(code, b"".join((header, np.ascontiguousarray(value).data)) if value.size else header)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} does not travel")


def _unpack_array(code: int, payload: memoryview) -> npt.NDArray[Any]:
    dtype = _DTYPE_BY_CODE.get(code)
    if dtype is None or not len(payload):
        raise ValueError(f"extension {code} is not an array")
    rank = payload[0]
    shape = struct.unpack_from(f"<{rank}I", payload, 1)
    array = np.frombuffer(payload[1 + 4 * rank :], dtype).reshape(shape)
    if not array.flags.aligned:  # about as fast as one memcpy; kernels may not be given unaligned elements
        array = array.copy()
    array.flags.writeable = False
    return array


def _check_array(type: Any, value: Any) -> npt.NDArray[Any]:
    """`value`, an array already unpacked, if the annotation `type` (ndarray, perhaps with a dtype) admits it."""
    if not isinstance(value, np.ndarray):
        raise ValueError("expected an array")
    if get_origin(type) is np.ndarray:
        (scalar,) = type.__args__[1].__args__
        if value.dtype != np.dtype(scalar):
            raise ValueError(f"expected an array of {np.dtype(scalar)}, got {value.dtype}")
    return value


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_pack)
_DECODERS: dict[type[Any], msgspec.msgpack.Decoder[Any]] = {}
