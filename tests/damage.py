"""Damage to files, drawn by chance: what a bad disk, a copy that broke off, or a wrong hand could do."""

from __future__ import annotations

from pathlib import Path
from random import Random


def damaged(choose: Random, data: bytes, others: list[bytes]) -> bytes | None:
    """Bytes with one kind of damage; None: the file is gone."""
    kind = choose.choice(
        ["flip", "flip", "truncate", "extend", "delete", "swap", "zero", "insert", "another"]
    )
    at = choose.randrange(max(1, len(data)))
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ 1 << choose.randrange(8)]) + data[at + 1 :]
    if kind == "truncate":
        return data[:at]
    if kind == "extend":
        return data + choose.randbytes(choose.randrange(1, 100))
    if kind == "swap":
        low, high = sorted((at, choose.randrange(len(data))))
        first, last = data[low : low + 1], data[high : high + 1]
        return data[:low] + last + data[low + 1 : high] + first + data[high + 1 :] if low < high else data
    if kind == "zero":
        return data[:at] + bytes(len(data[at : at + 16])) + data[at + 16 :]
    if kind == "insert":
        return data[:at] + choose.choice([b"9", b"-", b"0", b'"', b"e9", b" ", b"\xff", b"["]) + data[at:]
    return choose.choice(others) if kind == "another" else None


def damage(choose: Random, folder: Path) -> str:
    """One file of a folder; returns its name. The others may be put in its place."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    path = choose.choice(paths)
    data = damaged(choose, path.read_bytes(), [other.read_bytes() for other in paths if other != path])
    path.unlink() if data is None else path.write_bytes(data)
    return str(path.relative_to(folder))
