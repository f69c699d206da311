"""Decompression of what servers send, within a bound: a megabyte of gzip can hold a gigabyte of zeros."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterable

ACCEPT_ENCODING = "gzip, deflate"
"""The value of `Accept-Encoding`: what can be decompressed piece by piece with the standard library."""

MAX_STEP_BYTES = 2**20
"""Bytes that are decompressed at once, before the event loop gets its turn."""

_GZIP_WBITS = 16 + zlib.MAX_WBITS
_GZIP_MAGIC = b"\x1f\x8b"
"""The bytes that a member of a gzip file begins with."""


class TooLarge(Exception):
    """An answer has more bytes than allowed, after decompression."""


class BadEncoding(Exception):
    """An answer is compressed in a way nobody asked for, or its compressed data is damaged or incomplete."""


async def decompress_chunks(
    chunks: AsyncIterable[bytes], encoding: str, max_bytes: int, *, truncate: bool = False
) -> bytes:
    """Give what *chunks* hold, decompressed.

    Args:
        chunks: The body as it arrives.
        encoding: The value of its `Content-Encoding`, empty if there is none.
        largest: How many bytes it may have after decompression.
        truncate: Give the first *largest* bytes of a larger body instead of raising `TooLarge`.

    Raises:
        TooLarge: It has more than *largest* bytes. The rest of *chunks* is not read.
        BadEncoding: It cannot be decompressed.
    """
    decoder = _create_decoder(encoding)
    body = bytearray()
    async for chunk in chunks:
        pending = chunk
        while pending:
            # One byte more than allowed tells that there is more.
            room = max_bytes + 1 - len(body)
            if decoder is None:
                body += pending[:room]
                pending = b""
            else:
                body += decoder.decompress(pending, min(room, MAX_STEP_BYTES))
                pending = decoder.pending
            if len(body) > max_bytes:
                if truncate:
                    return bytes(body[:max_bytes])
                raise TooLarge
            if pending:
                await asyncio.sleep(0)
    if decoder is not None and not decoder.finished:
        raise BadEncoding("its compressed data ends too early")
    return bytes(body)


class _ZlibDecoder:
    """A decompressor of gzip, of which there may be several one after another, or of deflate with or without header."""

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._state = zlib.decompressobj(bits)
        self._has_begun = False
        self.pending = b""

    @property
    def finished(self) -> bool:
        return self._state.eof or not self._has_begun

    def decompress(self, data: bytes, most: int) -> bytes:
        if self._state.eof and self._is_padding(data):
            self.pending = b""
            return b""
        if self._state.eof:
            self._state = zlib.decompressobj(self._bits)
        try:
            return self._step(data, most)
        except zlib.error as error:
            raise BadEncoding(f"its compressed data is damaged ({error})") from None

    def _is_padding(self, data: bytes) -> bool:
        """Return whether *data*, which follows complete data, is to be ignored: only gzip may have another member."""
        return self._bits != _GZIP_WBITS or not _GZIP_MAGIC.startswith(data[: len(_GZIP_MAGIC)])

    def _step(self, data: bytes, most: int) -> bytes:
        try:
            found = self._state.decompress(data, most)
        except zlib.error:
            if self._has_begun or self._bits != zlib.MAX_WBITS:
                raise
            # Some servers send deflate without the header that the standard asks for.
            self._bits = -zlib.MAX_WBITS
            self._state = zlib.decompressobj(self._bits)
            found = self._state.decompress(data, most)
        self._has_begun = True
        self.pending = self._state.unconsumed_tail or self._state.unused_data
        if self._state.eof and self._is_padding(self.pending):
            self.pending = b""
        return found


def _create_decoder(encoding: str) -> _ZlibDecoder | None:
    match encoding.strip().lower():
        case "" | "identity":
            return None
        case "gzip" | "x-gzip":
            return _ZlibDecoder(_GZIP_WBITS)
        case "deflate":
            return _ZlibDecoder(zlib.MAX_WBITS)
        case other:
            raise BadEncoding(f"it is encoded as {other[:40]!r}, which was not asked for")
