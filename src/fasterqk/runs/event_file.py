"""The file format of TensorBoard, as much of it as curves need; the package itself is not needed to write.

A file is a sequence of records (length, checksum, data, checksum), and the data of each is an ``Event``
message of protocol buffers: a time, a step, and named numbers.
"""

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

_POLYNOMIAL = 0x82F63B78  # CRC-32C, reflected
_MASK = 0xA282EAD8


def _table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE = _table()


class EventFile:
    """A new event file in ``folder``, to which scalars are appended."""

    def __init__(self, folder: Path, time: float, host: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"events.out.tfevents.{int(time)}.{host}"
        self._append([_double(1, time) + _bytes(3, b"brain.Event:2")])

    def add(self, time: float, scalars: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        """Append the named numbers of each step."""
        events = []
        for step, numbers in scalars:
            values = [_bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in numbers.items()]
            events.append(_double(1, time) + _whole(2, step) + _bytes(5, b"".join(values)))
        self._append(events)

    def _append(self, events: list[bytes]) -> None:
        with self._path.open("ab") as stream:
            stream.write(b"".join(map(record, events)))


def record(data: bytes) -> bytes:
    """``data`` between its length and the checksums of both."""
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def crc32c(data: bytes) -> int:
    """The CRC-32C of ``data``.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    value = 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def _checksum(data: bytes) -> bytes:
    # Rotated and shifted, so that a checksum of data that holds checksums is no weaker.
    value = crc32c(data)
    return struct.pack("<I", (((value >> 15) | (value << 17)) + _MASK) & 0xFFFFFFFF)


# The four kinds of fields in these messages: a key (number and kind) and a value.
def _whole(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _double(number: int, value: float) -> bytes:
    return _varint(number << 3 | 1) + struct.pack("<d", value)


def _bytes(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _float(number: int, value: float) -> bytes:
    return _varint(number << 3 | 5) + struct.pack("<f", value)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])
