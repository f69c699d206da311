"""The cached view of the head's instances: fresh if the head answers, the last known state otherwise."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest
from fastapi import FastAPI

from gymsdk.errors import Failed
from gymsdk.http import client
from gymsdk.servers import instances as waiting
from gymsdk.servers.instances import InstanceDirectory
from gymsdk.servers.reports import HeadSnapshot, Instance

from .nodes import free, listening, until


def instance(id: str, url: str | None = None) -> Instance:
    return Instance(id=id, name="lamp", kind="resources_servers", implementation="lamp", url=url or f"http://{id}")


class Head:
    """A head that lists instances, or does not answer."""

    def __init__(self, *ids: str) -> None:
        self.ids = list(ids)
        self.asked = 0
        self.urls: dict[str, str] = {}
        self.settled = True
        self.fails = False

    async def look(self) -> HeadSnapshot:
        self.asked += 1
        if self.fails:
            raise Failed("nobody there", kind="model_unreachable", retryable=True)
        return HeadSnapshot(settled=self.settled, instances=[instance(each, self.urls.get(each)) for each in self.ids])


async def ids(instances: InstanceDirectory) -> list[str]:
    return [each.id for each in await instances.find_by_name("lamp", "resources_servers")]


async def url(instances: InstanceDirectory, id: str) -> str | None:
    return await instances.find_url(id, name="lamp", kind="resources_servers")


def living(status: int = 200, *, seconds: float = 0.0) -> tuple[FastAPI, list[float]]:
    """A server that says how it is with *status*, after some *seconds*, and when it was asked."""
    app, asked = FastAPI(), []

    @app.get("/livez", status_code=status)
    async def livez() -> str:
        asked.append(time.monotonic())
        await asyncio.sleep(seconds)
        return "ok"

    return app, asked


async def out_of_sight(head: Head, *, fresh: float = 0) -> InstanceDirectory:
    """A directory whose head has lost all its instances."""
    instances = InstanceDirectory(head.look, max_age=fresh)
    await instances.renew()
    head.ids.clear()
    await asyncio.sleep(0.11)
    await instances.renew()
    return instances


async def test_the_head_is_asked_no_more_often_than_configured() -> None:
    head = Head("a")
    instances = InstanceDirectory(head.look, max_age=60)
    assert [await ids(instances) for _ in range(3)] == [["a"]] * 3
    assert head.asked == 1


async def test_known_instances_remain_while_the_head_is_down_and_one_line_is_logged(caplog) -> None:
    head = Head("a")
    instances = InstanceDirectory(head.look, max_age=0)
    await instances.renew()
    head.fails = True
    with caplog.at_level(logging.WARNING, "gymsdk"):
        for _ in range(3):
            assert await ids(instances) == ["a"]
            await asyncio.sleep(0.01)
    assert [each.getMessage() for each in caplog.records] == ["the head does not list its servers: nobody there"]


async def test_a_hanging_head_delays_callers_only_until_the_timeout() -> None:
    async def look() -> HeadSnapshot:
        await asyncio.sleep(60)
        return HeadSnapshot()

    instances = InstanceDirectory(look, timeout=0.1)
    began = time.monotonic()
    assert await ids(instances) == []
    assert time.monotonic() - began < 5


async def test_a_head_that_has_just_started_removes_no_instance() -> None:
    head = Head("a", "b")
    instances = InstanceDirectory(head.look, max_age=0)
    await instances.renew()
    head.ids, head.settled = ["b", "c"], False
    await asyncio.sleep(0.11)
    await instances.renew()
    assert sorted(await ids(instances)) == ["a", "b", "c"]
    head.settled = True
    await asyncio.sleep(0.11)
    await instances.renew()
    assert sorted(await ids(instances)) == ["b", "c"]


async def test_an_instance_that_registers_just_after_the_lookup_is_found() -> None:
    head = Head("a")
    instances = InstanceDirectory(head.look)
    await instances.renew()
    finding = asyncio.ensure_future(url(instances, "b"))
    await asyncio.sleep(0.2)
    head.ids.append("b")
    assert await finding == "http://b"


async def test_a_former_instance_that_is_gone_is_not_waited_for() -> None:
    head = Head("a")
    head.urls["a"] = f"http://127.0.0.1:{free()}"
    instances = InstanceDirectory(head.look, max_age=0)
    await instances.renew()
    head.ids.clear()
    await asyncio.sleep(0.11)
    await instances.renew()
    asked = head.asked
    assert await url(instances, "a") is None
    assert head.asked <= asked + 1
    await client.aclose()


async def test_an_instance_that_only_the_head_lost_remains_until_it_is_silent() -> None:
    head = Head("a")
    async with listening(living()[0]) as port:
        head.urls["a"] = f"http://127.0.0.1:{port}"
        instances = await out_of_sight(head)
        assert await ids(instances) == []
        assert await url(instances, "a") == head.urls["a"]
        assert await instances.find_url("a", name="bulb", kind="resources_servers") is None
    await client.aclose()
    assert await url(instances, "a") is None


@pytest.mark.parametrize(("status", "there"), [(200, True), (401, True), (404, False), (503, False)])
async def test_only_a_gymsdk_server_counts_as_alive(status: int, there: bool) -> None:
    head = Head("a")
    async with listening(living(status)[0]) as port:
        head.urls["a"] = f"http://127.0.0.1:{port}"
        assert (await url(await out_of_sight(head), "a") is not None) is there
        assert await waiting.is_alive(head.urls["a"]) is there
    await client.aclose()


async def test_a_former_instance_is_asked_once_for_all_callers_and_waits_for_no_head() -> None:
    head, (app, asked) = Head("a"), living(seconds=0.2)
    async with listening(app) as port:
        head.urls["a"] = f"http://127.0.0.1:{port}"
        instances = await out_of_sight(head, fresh=60)
        looks = head.asked
        assert await asyncio.gather(*(url(instances, "a") for _ in range(20))) == [head.urls["a"]] * 20
        assert await url(instances, "a") == head.urls["a"]
        assert (len(asked), head.asked) == (1, looks)
    await client.aclose()


async def test_a_caller_that_disconnects_does_not_cancel_the_lookup_of_others() -> None:
    head, (app, asked) = Head("a"), living(seconds=0.2)
    async with listening(app) as port:
        head.urls["a"] = f"http://127.0.0.1:{port}"
        instances = await out_of_sight(head, fresh=60)
        first, second = (asyncio.ensure_future(url(instances, "a")) for _ in range(2))
        await until(lambda: asked)
        first.cancel()
        assert (await second, len(asked)) == (head.urls["a"], 1)
    await client.aclose()


async def test_a_busy_instance_is_asked_again_sooner_than_one_that_refuses(monkeypatch) -> None:
    monkeypatch.setattr(waiting, "PROBE_SECONDS", 0.1)
    head, app = Head("a", "b"), living(seconds=0.3)[0]
    async with listening(app) as port:
        head.urls = {"a": f"http://127.0.0.1:{port}", "b": f"http://127.0.0.1:{free()}"}
        instances = await out_of_sight(head)
        assert (await url(instances, "a"), await url(instances, "b")) == (None, None)
        monkeypatch.setattr(waiting, "PROBE_SECONDS", 5.0)

        async def found() -> bool:
            return await url(instances, "a") == head.urls["a"]

        began = time.monotonic()
        await until(found)
        assert time.monotonic() - began < 4
    await client.aclose()


async def test_the_head_is_rarely_asked_about_known_instances() -> None:
    head = Head("a")
    instances = InstanceDirectory(head.look, max_age=0.2)
    await instances.renew()
    ends = time.monotonic() + 0.6
    while time.monotonic() < ends:
        assert await url(instances, "a") == "http://a"
        await asyncio.sleep(0.05)
    assert head.asked == 1


async def test_a_lost_instance_is_noticed_by_lookups_alone() -> None:
    head = Head("a")
    head.urls["a"] = f"http://127.0.0.1:{free()}"
    instances = InstanceDirectory(head.look, max_age=0)
    assert await url(instances, "a") == head.urls["a"]
    head.ids.clear()
    await until(lambda: is_gone(instances, "a"))
    await client.aclose()


async def is_gone(instances: InstanceDirectory, id: str) -> bool:
    return await url(instances, id) is None


async def test_an_instance_whose_address_another_has_taken_is_gone() -> None:
    head = Head("a")
    async with listening(FastAPI()) as port:
        head.urls = dict.fromkeys("ab", f"http://127.0.0.1:{port}")
        instances = InstanceDirectory(head.look, max_age=0)
        await instances.renew()
        head.ids = ["b"]
        await asyncio.sleep(0.11)
        await instances.renew()
        assert (await url(instances, "a"), await url(instances, "b")) == (None, head.urls["b"])
    await client.aclose()


async def test_unknown_ids_are_not_looked_up_continuously() -> None:
    head = Head("a")
    instances = InstanceDirectory(head.look)
    assert await asyncio.gather(*(url(instances, f"made-up-{number}") for number in range(50))) == [None] * 50
    assert head.asked < 20


async def test_a_recently_unknown_id_is_not_waited_for_again() -> None:
    head = Head("a")
    instances = InstanceDirectory(head.look)
    assert await url(instances, "made-up") is None
    asked = head.asked
    assert [await url(instances, "made-up") for _ in range(20)] == [None] * 20
    assert head.asked <= asked + 1
    head.ids.append("made-up")
    await asyncio.sleep(0.11)
    await instances.renew()
    assert await url(instances, "made-up") == "http://made-up"


async def test_only_a_server_of_the_same_name_and_kind_is_found() -> None:
    instances = InstanceDirectory(Head("a").look)
    assert await url(instances, "a") == "http://a"
    assert await instances.find_url("a", name="bulb", kind="resources_servers") is None
    assert await instances.find_url("a", name="lamp", kind="responses_api_models") is None
