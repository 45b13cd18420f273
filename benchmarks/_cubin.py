"""What of a cubin a GPU reads. Needs nothing but Python."""

from __future__ import annotations

import struct

_HEADER = struct.Struct("<IIQQQQIIQQ")  # of a section of an ELF file: name, kind, flags, address, offset, size, ...
_WITHOUT_BYTES = 8  # a kind of section that only says how large it is
SYMBOLS = (".symtab", ".strtab")  # names of functions and constants, and where these are


def without_symbols(cubin: bytes) -> list[tuple[str, int, bytes]]:
    """Each section but the SYMBOLS: its name, how large it is, and its bytes."""
    begin = struct.unpack_from("<Q", cubin, 40)[0]
    size, count, of_names = struct.unpack_from("<3H", cubin, 58)
    headers = [_HEADER.unpack_from(cubin, begin + i * size) for i in range(count)]
    names = headers[of_names][4]
    found = []
    for name, kind, _, _, offset, length, *_ in headers:
        called = cubin[names + name : cubin.index(b"\0", names + name)].decode()
        if called not in SYMBOLS:
            found.append((called, length, b"" if kind == _WITHOUT_BYTES else cubin[offset : offset + length]))
    return found
