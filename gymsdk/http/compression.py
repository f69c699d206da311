"""Decompress bodies of HTTP messages up to a maximum size, in steps between which the event loop can run."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterable

ACCEPT_ENCODING = "gzip, deflate"
"""The value of `Accept-Encoding`: the encodings that the standard library decompresses incrementally."""

MAX_STEP_BYTES = 2**20
"""Bytes that are decompressed at once, before control returns to the event loop."""

_GZIP_WBITS = 16 + zlib.MAX_WBITS
_GZIP_MAGIC = b"\x1f\x8b"
"""The first bytes of a gzip member."""


class TooLarge(Exception):
    """A body has more bytes after decompression than allowed."""


class BadEncoding(Exception):
    """A body has an encoding that the request did not accept, or its compressed data is damaged or incomplete."""


async def decompress_chunks(
    chunks: AsyncIterable[bytes], encoding: str, max_bytes: int, *, truncate: bool = False
) -> bytes:
    """Return the decompressed content of *chunks*.

    Args:
        chunks: The body as it arrives.
        encoding: The value of its `Content-Encoding`; empty if there is none.
        max_bytes: The maximum size after decompression.
        truncate: Return the first *max_bytes* bytes of a larger body instead of raising `TooLarge`.

    Raises:
        TooLarge: The body is larger than *max_bytes*. The rest of *chunks* is not read.
        BadEncoding: The body cannot be decompressed.
    """
    decoder = _create_decoder(encoding)
    body = bytearray()
    async for chunk in chunks:
        pending = chunk
        while pending:
            # One byte beyond the limit shows that the body is too large.
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
    """A decompressor of gzip, which may have several members, or of deflate with or without a header."""

    def __init__(self, wbits: int) -> None:
        self._wbits = wbits
        self._state = zlib.decompressobj(wbits)
        self._has_begun = False
        self.pending = b""

    @property
    def finished(self) -> bool:
        return self._state.eof or not self._has_begun

    def decompress(self, data: bytes, max_bytes: int) -> bytes:
        if self._state.eof and self._is_padding(data):
            self.pending = b""
            return b""
        if self._state.eof:
            self._state = zlib.decompressobj(self._wbits)
        try:
            return self._step(data, max_bytes)
        except zlib.error as error:
            raise BadEncoding(f"its compressed data is damaged ({error})") from None

    def _is_padding(self, data: bytes) -> bool:
        """Return whether *data*, which follows complete data, must be ignored: only gzip may have another member."""
        return self._wbits != _GZIP_WBITS or not _GZIP_MAGIC.startswith(data[: len(_GZIP_MAGIC)])

    def _step(self, data: bytes, max_bytes: int) -> bytes:
        try:
            content = self._state.decompress(data, max_bytes)
        except zlib.error:
            if self._has_begun or self._wbits != zlib.MAX_WBITS:
                raise
            # Some servers send deflate without the zlib header that RFC 9110 requires.
            self._wbits = -zlib.MAX_WBITS
            self._state = zlib.decompressobj(self._wbits)
            content = self._state.decompress(data, max_bytes)
        self._has_begun = True
        self.pending = self._state.unconsumed_tail or self._state.unused_data
        if self._state.eof and self._is_padding(self.pending):
            self.pending = b""
        return content


def _create_decoder(encoding: str) -> _ZlibDecoder | None:
    match encoding.strip().lower():
        case "" | "identity":
            return None
        case "gzip" | "x-gzip":
            return _ZlibDecoder(_GZIP_WBITS)
        case "deflate":
            return _ZlibDecoder(zlib.MAX_WBITS)
        case other:
            raise BadEncoding(f"it has the encoding {other[:40]!r}, which the request did not accept")
