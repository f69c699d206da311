"""Admission: which servers of a node a head takes in, by how they are reached."""

from __future__ import annotations

from collections.abc import Sequence

from gymsdk.addresses import is_loopback
from gymsdk.servers.app import Refused
from gymsdk.servers.nodes.service import Service


def check(services: Sequence[Service], address: str, *, own: str, scheme: str) -> None:
    """Refuse a node at *address* whose *services* nobody else would reach, or whom a token would be told in the clear.

    The head was asked at its *own* address, by *scheme*. Raises `Refused`.
    """
    for each in services:
        if is_loopback(each.host) and not is_loopback(address) and address != own:
            nowhere = f"{each.name!r} listens at {each.host}, where only the machine {address} reaches it"
            raise Refused(422, f"{nowhere}; serve it with --host 0.0.0.0, or tell where it is with --advertise-host")
        if scheme == "https" and each.scheme != "https":
            plain = (
                f"{each.name!r} speaks plain HTTP, and this head TLS: its clients would send their token in the clear"
            )
            raise Refused(422, f"{plain}; serve it with --tls-cert and --tls-key")
