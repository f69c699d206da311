"""Restarts: the processes of supervised servers that are to be started anew, those of one name one after another."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gymsdk.servers.nodes.member import Member, Order

LAPSED = 600.0
"""Seconds after its time to drain in which a server has to be there again: if not, no other of its name is ended."""

log = logging.getLogger("gymsdk")


def ordered(members: Sequence[Member], name: str, drain: float) -> list[Order]:
    """Give the orders to start every process of the server *name* anew, each within *drain* seconds of its turn."""
    told = [each for each in members if name in each.registration.restarts]
    for each in told:
        pid = each.registration.restarts[name]
        each.orders[name] = Order(pid, drain, tuple(_instances(members, each, name, pid)))
    return [each.orders[name] for each in told]


def due(member: Member, members: Sequence[Member], now: float) -> list[str]:
    """Give which servers *member* is to start anew: it is told until it says that it has, for an answer may be lost."""
    mine = [(name, order) for name, (whose, order) in _turns(members, now).items() if whose is member]
    running = [(name, order) for name, order in mine if member.registration.restarts.get(name) == order.pid]
    return sorted(name for name, order in running if _may_end(members, member, name, order, now))


def draining(members: Sequence[Member], now: float) -> set[str]:
    """Give the ids of the instances that are to be given nothing new, as their process is about to end."""
    turns = _turns(members, now).items()
    return {one for name, (whose, order) in turns for one in _instances(members, whose, name, order.pid)}


def _turns(members: Sequence[Member], now: float) -> dict[str, tuple[Member, Order]]:
    """Give whose turn it is, by name; an order is over once another process has its server."""
    turns: dict[str, tuple[Member, Order]] = {}
    for member in members:
        for name, order in [*member.orders.items()]:
            if _is_back(members, member, name, order):
                del member.orders[name]
            elif name not in turns:
                order.until = now + order.drain if order.until is None else order.until
                turns[name] = member, order
    for name, (_, order) in [*turns.items()]:
        if order.until is not None and now >= order.until + LAPSED:
            _lapse(members, name, order)
            del turns[name]
    return turns


def _lapse(members: Sequence[Member], name: str, order: Order) -> None:
    """Drop every order of *name*, as whoever had this *order* is not there again: nobody expects the others later."""
    dropped = [each.orders.pop(name) for each in members if name in each.orders]
    log.warning(
        "the restart of %r is given up: what was to come after its process %d is not there %g s later; "
        "of its processes, %d are left as they are: restart it again once that one is mended",
        name,
        order.pid,
        order.drain + LAPSED,
        len(dropped) - 1,
    )


def _is_back(members: Sequence[Member], member: Member, name: str, order: Order) -> bool:
    pid = member.registration.restarts.get(name)
    return pid is not None and pid != order.pid and bool(_instances(members, member, name, pid))


def _may_end(members: Sequence[Member], member: Member, name: str, order: Order, now: float) -> bool:
    having = _having(members, member, name, order.pid)
    sessions = sum(each.registration.loads[name].sessions for each in having if name in each.registration.loads)
    return not sessions or (order.until is not None and now >= order.until)


def _instances(members: Sequence[Member], member: Member, name: str, pid: int) -> list[str]:
    having = _having(members, member, name, pid)
    return [one.id for each in having for one in each.services if (one.name, one.pid) == (name, pid)]


def _having(members: Sequence[Member], member: Member, name: str, pid: int) -> list[Member]:
    # Another machine's processes, and another container's, have the same numbers.
    beside = [each for each in members if each.registration.supervisor == member.registration.supervisor]
    return [each for each in beside if any((one.name, one.pid) == (name, pid) for one in each.services)]
