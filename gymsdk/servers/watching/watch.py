"""Watch: what a head knows of its servers, as figures that alerts can be made of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import TypeAlias

from gymsdk.servers.nodes.reports import Instance, Nodes
from gymsdk.servers.watching.figures import Figures, Sample

Look: TypeAlias = Callable[[str], Awaitable[Nodes]]
"""Gives all a head knows, for somebody who calls its machine by that name."""


def watched(figures: Figures, look: Look) -> None:
    """Have *figures* tell what *look* finds whenever somebody reads them."""
    watch = Watch(look)
    figures.looks.append(watch.refresh)
    figures.gauges["expected_servers"] = lambda: len(expected(watch.nodes))
    figures.gauges["registered_servers"] = lambda: len(expected(watch.nodes)) - len(missing(watch.nodes))
    figures.gauges["lost_nodes"] = lambda: len(watch.nodes.lost)
    figures.samples["server_up"] = watch.up
    figures.samples["round_trip_seconds"] = watch.round_trips
    figures.samples["last_exit_code"] = watch.exit_codes
    figures.samples["last_exit_time_seconds"] = watch.exit_times
    figures.samples["restarts"] = watch.restarts


def beside(nodes: Nodes) -> int:
    """Give how many nodes have servers: a supervisor joins, too, and has none of its own."""
    return sum(bool(each.get("servers")) for each in nodes.nodes)


def expected(nodes: Nodes) -> list[str]:
    """Give the names of the servers that are to be there: those that are told of, and the head's own."""
    own = [each.name for each in nodes.instances if not each.node]
    return list(dict.fromkeys([*nodes.expected, *own]))


def missing(nodes: Nodes) -> list[str]:
    """Give the names of the servers that are to be there, and of which there is none."""
    there = {each.name for each in nodes.instances}
    return [name for name in expected(nodes) if name not in there]


class Watch:
    """What *look* has *found* last."""

    def __init__(self, look: Look) -> None:
        self.nodes = Nodes()
        self._look = look

    async def refresh(self) -> None:
        """Look again."""
        self.nodes = await self._look("127.0.0.1")

    def up(self) -> list[Sample]:
        """Give for each instance whether it answers."""
        return [Sample(float(each.status == "success"), _labels(each)) for each in self._checked_instances()]

    def round_trips(self) -> list[Sample]:
        """Give the seconds each instance took to answer last."""
        return [Sample(each.round_trip, _labels(each)) for each in self._checked_instances() if each.round_trip is not None]

    def exit_codes(self) -> list[Sample]:
        """Give how each server ended last that did."""
        return [Sample(ended.code, {"name": name}) for name, ended in self.nodes.exits.items()]

    def exit_times(self) -> list[Sample]:
        """Give when, in seconds since the epoch."""
        return [Sample(ended.at, {"name": name}) for name, ended in self.nodes.exits.items()]

    def restarts(self) -> list[Sample]:
        """Give how often each server has been started anew."""
        return [Sample(ended.restarts, {"name": name}) for name, ended in self.nodes.exits.items()]

    def _checked_instances(self) -> Iterator[Instance]:
        return (each for each in self.nodes.instances if each.status is not None)


def _labels(instance: Instance) -> dict[str, str]:
    return {"name": instance.name, "id": instance.id}
