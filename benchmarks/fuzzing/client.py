"""A small HTTP/1.1 client that sends exactly the bytes that it is told."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass

from .mutations import HttpRequest

SECONDS = 30.0
"""Seconds after which a request counts as hanging."""

MAX_READ_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Answer:
    """An answer.

    Attributes:
        status: The status, or -1 if the connection was closed without an answer, or -2 after a timeout.
        body: The body.
        cookies: The cookies that the answer sets.
    """

    status: int
    body: bytes = b""
    cookies: tuple[str, ...] = ()


class Client:
    """Sends requests to one server, on one connection as long as the server keeps it open."""

    def __init__(self, url: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        host, _, port = url.removeprefix("http://").rstrip("/").partition(":")
        self._address = host, int(port)
        self._headers = headers
        self._socket: socket.socket | None = None

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def send(self, request: HttpRequest, cookies: tuple[str, ...] = ()) -> Answer:
        """Send a request, and again on a new connection if the server closed the idle one."""
        content = self._encode(request, cookies)
        was_open = self._socket is not None
        answer = self._exchange(content, is_head=request.method == "HEAD")
        if answer.status == -1 and was_open:
            answer = self._exchange(content, is_head=request.method == "HEAD")
        return answer

    def leave(self, request: HttpRequest) -> None:
        """Send a part of a request, and disconnect."""
        content = self._encode(request, ())
        with contextlib.suppress(OSError), socket.create_connection(self._address, timeout=SECONDS) as connection:
            connection.sendall(content[: max(1, len(content) * 2 // 3)])

    def send_twice(self, request: HttpRequest, cookies: tuple[str, ...] = ()) -> tuple[Answer, Answer]:
        """Send a request on two connections at once."""
        other = Client(f"{self._address[0]}:{self._address[1]}", self._headers)
        content = self._encode(request, cookies)
        other._socket = socket.create_connection(self._address, timeout=SECONDS)  # the same class
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            other._socket.sendall(content)  # the same class
        first = self.send(request, cookies)
        second = other._exchange(b"", is_head=request.method == "HEAD")  # the same class
        other.close()
        return first, second

    def _encode(self, request: HttpRequest, cookies: tuple[str, ...]) -> bytes:
        content = request.content
        headers = [("host", f"{self._address[0]}:{self._address[1]}"), *self._headers, *request.headers]
        if cookies:
            headers.append(("cookie", "; ".join(cookies)))
        names = {name for name, _ in request.headers}
        if content and "content-type" not in names:
            headers.append(("content-type", "application/json"))
        if content or request.method in {"POST", "PUT", "PATCH"}:
            headers.append(("content-length", str(len(content))))
        lines = [
            f"{request.method} {request.target} HTTP/1.1",
            *(f"{name}: {value}" for name, value in headers),
            "",
            "",
        ]
        return "\r\n".join(lines).encode("utf-8", "surrogatepass") + content

    def _exchange(self, content: bytes, *, is_head: bool) -> Answer:
        try:
            if self._socket is None:
                self._socket = socket.create_connection(self._address, timeout=SECONDS)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                # The server may have answered before it has read the whole request.
                self._socket.sendall(content)
            return self._receive(self._socket, is_head=is_head)
        except TimeoutError:
            self.close()
            return Answer(-2)
        except (OSError, ValueError, IndexError):
            self.close()
            return Answer(-1)

    def _receive(self, connection: socket.socket, *, is_head: bool) -> Answer:
        with connection.makefile("rb") as file:
            status = int(file.readline().split()[1])
            headers: list[tuple[str, str]] = []
            while (line := file.readline()) not in {b"\r\n", b""}:
                name, _, value = line.decode("latin-1").partition(":")
                headers.append((name.lower(), value.strip()))
            known = dict(headers)
            cookies = tuple(value.partition(";")[0] for name, value in headers if name == "set-cookie")
            if "text/event-stream" in known.get("content-type", "") and "content-length" not in known:
                # The viewer's stream of events has no end.
                self.close()
                return Answer(status, b"", cookies)
            if is_head or status in {204, 304}:
                body = b""
            elif known.get("transfer-encoding") == "chunked":
                body = b"".join(_read_chunks(file))
            elif "content-length" in known:
                body = file.read(int(known["content-length"]))
            else:
                body = file.read(MAX_READ_BYTES)
        if known.get("connection", "").lower() == "close":
            self.close()
        return Answer(status, body, cookies)


def _read_chunks(file: object) -> list[bytes]:
    chunks = []
    while size := int(file.readline().split(b";")[0], 16):  # type: ignore[attr-defined]  # a binary file
        chunks.append(file.read(size))  # type: ignore[attr-defined]  # a binary file
        file.readline()  # type: ignore[attr-defined]  # a binary file
    file.readline()  # type: ignore[attr-defined]  # a binary file
    return chunks
