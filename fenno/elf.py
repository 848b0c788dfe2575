"""Reads what a shared library needs, what it offers and for which GPUs it has code, from its file alone: nothing is loaded or run.

Little-endian 64-bit ELF, which is all that vLLM and torch have wheels for. A file that is something else raises `ValueError`.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FATBIN = 0xBA55ED50
PTX = 1
# Names that torch's libraries have to bring: c10, at, torch, caffe2.
TORCH = re.compile(r"_ZN?K?T?[ISV]?N?K?(?:3c10|2at|5torch|5caffe)")


@dataclass(frozen=True)
class _Section:
    kind: int
    offset: int
    size: int
    link: int


class Library:
    """One shared library, mapped into memory while the block lasts."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            try:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise ValueError(f"{path} is empty") from error
        try:
            self._sections = self._table()
        except struct.error as error:
            self._bytes.close()
            raise ValueError(f"{path} is cut off") from error

    def __enter__(self) -> Library:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._bytes.close()

    def _table(self) -> dict[str, _Section]:
        if self._bytes[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a 64-bit ELF file")
        (start,) = struct.unpack_from("<Q", self._bytes, 0x28)
        size, count, names = struct.unpack_from("<HHH", self._bytes, 0x3A)
        rows = [struct.unpack_from("<IIQQQQI", self._bytes, start + size * i) for i in range(count)]
        if not rows:
            return {}
        text = rows[names][4]
        return {self._word(text + row[0]): _Section(row[1], row[4], row[5], row[6]) for row in rows}

    def _word(self, offset: int) -> str:
        return self._bytes[offset : self._bytes.find(b"\0", offset)].decode(errors="replace")

    def _symbols(self) -> Iterator[tuple[int, int, int]]:
        """Name's offset in the string table, binding and section of each dynamic symbol."""
        table = self._sections.get(".dynsym")
        if table is not None:
            for name, info, _, section, _, _ in struct.iter_unpack(
                "<IBBHQQ", self._bytes[table.offset : table.offset + table.size]
            ):
                yield name, info >> 4, section

    def undefined(self) -> list[str]:
        """The symbols that another library has to bring; weak ones, which may be absent, are left out."""
        strings = self._sections.get(".dynstr")
        return [
            self._word(strings.offset + n) for n, bind, section in self._symbols() if strings and n and not section and bind == 1
        ]

    @property
    def indexed(self) -> bool:
        """Whether it has the table by which `offers` finds symbols; one without it says nothing."""
        return ".gnu.hash" in self._sections

    def offers(self, symbol: str) -> bool:
        """Whether the library defines `symbol`, by its GNU hash table: a handful of reads however large the library."""
        table, strings, symbols = (self._sections.get(name) for name in (".gnu.hash", ".dynstr", ".dynsym"))
        if not (table and strings and symbols):
            return False
        buckets, first, blooms, _ = struct.unpack_from("<IIII", self._bytes, table.offset)
        value = gnu_hash(symbol)
        start = table.offset + 16 + 8 * blooms
        (index,) = struct.unpack_from("<I", self._bytes, start + 4 * (value % buckets)) if buckets else (0,)
        while index >= first and index:
            (link,) = struct.unpack_from("<I", self._bytes, start + 4 * buckets + 4 * (index - first))
            if link | 1 == value | 1:
                name, _, _, section = struct.unpack_from("<IBBH", self._bytes, symbols.offset + 24 * index)
                if section and self._word(strings.offset + name) == symbol:
                    return True
            if link & 1:
                return False
            index += 1
        return False

    def archs(self) -> tuple[str, ...]:
        """The GPUs it has machine code for ("sm_80") and the PTX that a driver may compile ("ptx_90"), sorted."""
        section = self._sections.get(".nv_fatbin")
        if section is None:
            return ()
        found: set[tuple[int, str]] = set()
        end, position = section.offset + section.size, section.offset
        magic = struct.pack("<I", FATBIN)
        while (position := self._bytes.find(magic, position, end)) >= 0:
            _, header, size = struct.unpack_from("<HHQ", self._bytes, position + 4)
            found |= set(self._images(position + header, position + header + size))
            position += header + size
        return tuple(f"{word}_{arch}" for arch, word in sorted(found))

    def _images(self, position: int, end: int) -> Iterator[tuple[int, str]]:
        """The images of one fat binary: kind at 0, header's size at 4, payload's at 8, architecture at 28."""
        while position + 32 <= end:
            kind, _, header, size = struct.unpack_from("<HHIQ", self._bytes, position)
            (arch,) = struct.unpack_from("<I", self._bytes, position + 28)
            if not header:
                return
            yield arch, "ptx" if kind == PTX else "sm"
            position += header + size


def torch_lacks(library: Library, torch: Sequence[Library]) -> tuple[str, ...]:
    """What a library wants of torch and torch's own libraries do not offer. Without any of those nothing is said to be missing."""
    known = any(other.indexed for other in torch)
    wanted = [symbol for symbol in library.undefined() if TORCH.match(symbol)] if known else []
    return tuple(symbol for symbol in wanted if not any(other.offers(symbol) for other in torch))


def gnu_hash(name: str) -> int:
    value = 5381
    for byte in name.encode():
        value = (value * 33 + byte) & 0xFFFFFFFF
    return value
