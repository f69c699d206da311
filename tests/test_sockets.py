"""The acceptor of connections closes those that it drops, on each event loop."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator

import pytest
import uvloop
from servers.test_tls import OPENSSL, issue_certificate

from gymsdk.sockets import Acceptor

pytestmark = pytest.mark.skipif(OPENSSL is None, reason="no openssl here that could make a certificate")


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    tls = issue_certificate(tmp_path_factory.mktemp("certificate"), "DNS:localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.certificate, tls.key)
    return context


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner


async def begin_handshake(client: socket.socket) -> None:
    """Send the first message of a TLS handshake, and wait for the answer."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    handshake = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        handshake.do_handshake()
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(client, outgoing.read())
    assert await loop.sock_recv(client, 1)


async def drop_connection(context: ssl.SSLContext, *, in_handshake: bool) -> None:
    """Close an acceptor with one open connection, in the TLS handshake or before, and check that the client notices."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        acceptor = Acceptor(listener, asyncio.Protocol, context)
        acceptor.open()
        with socket.create_connection(listener.getsockname()) as client:
            client.setblocking(False)
            if in_handshake:
                await begin_handshake(client)
                acceptor.close()
            else:
                # Both ends are connected without a pass of the event loop, so that no task has begun.
                loop.remove_reader(listener)
                listener.setblocking(True)
                connection, _ = listener.accept()
                acceptor.adopt(connection)
                acceptor.close()
            async with asyncio.timeout(10):
                while await loop.sock_recv(client, 65536):
                    pass
            if not in_handshake:
                assert connection.fileno() == -1


@pytest.mark.parametrize("in_handshake", [True, False])
def test_a_closed_acceptor_closes_connections_without_a_finished_tls_handshake(
    runner: asyncio.Runner, context: ssl.SSLContext, in_handshake: bool
) -> None:
    runner.run(drop_connection(context, in_handshake=in_handshake))
