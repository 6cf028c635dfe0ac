"""Event files: read back by an independent reading of the format, and the published check values."""

import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasterqk.lab.runs._tensorboard import EventFile, crc32c, record


@pytest.mark.parametrize(
    ("data", "value"),
    [  # RFC 3720, B.4
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
    ],
)
def test_the_checksum_is_the_published_one(data: bytes, value: int) -> None:
    assert crc32c(data) == value


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_a_record_holds_its_data_between_two_checksums(data: bytes) -> None:
    text = record(data)
    assert struct.unpack("<Q", text[:8])[0] == len(data)
    assert text[12:-4] == data
    for place, covered in ((8, text[:8]), (len(text) - 4, data)):
        (masked,) = struct.unpack("<I", text[place : place + 4])
        rotated = (masked - 0xA282EAD8) % 2**32
        assert (rotated >> 17 | rotated << 15) % 2**32 == crc32c(covered)


def fields(message: bytes) -> list[tuple[int, int | bytes]]:
    """The fields of a protocol buffer: number and value, the latter as a whole number or as it stands."""
    found: list[tuple[int, int | bytes]] = []
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while place < len(message):
        key = varint()
        if key & 7 == 0:
            found.append((key >> 3, varint()))
            continue
        size = {1: 8, 5: 4}.get(key & 7) or varint()
        found.append((key >> 3, message[place : place + size]))
        place += size
    return found


def events(path: Path) -> list[list[tuple[int, int | bytes]]]:
    data, place, found = path.read_bytes(), 0, []
    while place < len(data):
        (size,) = struct.unpack("<Q", data[place : place + 8])
        found.append(fields(data[place + 12 : place + 12 + size]))
        place += 16 + size
    return found


def test_scalars_come_back(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "run", 1000.5, "host")
    file.add(1001.0, [(0, {"loss": 0.5, "learning_rate/qk": 1e-3})])
    file.add(1002.0, [(300, {"loss": -2.0}), (2**40, {})])
    (path,) = (tmp_path / "run").iterdir()
    assert "tfevents" in path.name
    head, *rest = events(path)
    assert head == [(1, struct.pack("<d", 1000.5)), (3, b"brain.Event:2")]
    assert [dict(event)[1] for event in rest] == [
        struct.pack("<d", time) for time in (1001.0, 1002.0, 1002.0)
    ]
    assert [dict(event)[2] for event in rest] == [0, 300, 2**40]
    values = [
        [(1, fields(value)) for _, value in fields(dict(event)[5])]  # type: ignore[arg-type]
        for event in rest
    ]
    assert values == [
        [
            (1, [(1, b"loss"), (2, struct.pack("<f", 0.5))]),
            (1, [(1, b"learning_rate/qk"), (2, struct.pack("<f", 1e-3))]),
        ],
        [(1, [(1, b"loss"), (2, struct.pack("<f", -2.0))])],
        [],
    ]
