from __future__ import annotations

from gymsdk import Task
from gymsdk.checks.phases import GARBAGE_TURNS, Performance, Script, build_scripts, record_turns

from .healthy import HEALTHY


async def test_a_performance_records_each_phase(subject):
    shelf = subject(HEALTHY)
    async with shelf.enter_environment() as environment:
        script = await record_turns(shelf, environment, shelf.tasks[0], "oracle")
        performance = Performance(script, environment)
        phases = [await performance.advance() for _ in range(5)]
    assert phases == ["reset", "turn 1", "turn 2", "verify", "close"]
    assert performance.is_closed
    assert performance.observations["turn 1"]["state"] == {"books": [shelf.tasks[0].book]}
    assert performance.observations["verify"]["verdict"]["reward"] == 1.0


async def test_a_failure_is_part_of_the_record(subject):
    source = HEALTHY.replace("return Reset(state=Shelf())", "raise OSError('no shelf')")
    shelf = subject(source)
    async with shelf.enter_environment() as environment:
        recorded = await Performance(Script("garbage", shelf.tasks[0], 0, GARBAGE_TURNS), environment).play_all()
    assert recorded == {"reset": {"failure": "hook_raised"}}


async def test_a_policy_that_cannot_play_a_task_gives_no_script(subject):
    shelf = subject(HEALTHY[: HEALTHY.rindex("@hookimpl")])
    async with shelf.enter_environment() as environment:
        assert await record_turns(shelf, environment, shelf.tasks[0], "oracle") is None
        names = [script.name for script in await build_scripts(shelf, environment, tasks=2)]
    assert names == ["scripted/random", "scripted/random", "garbage"]


async def test_a_state_that_json_cannot_hold_is_recorded(subject):
    source = HEALTHY.replace("books: list[str] = []", 'books: list[str] = []\n    cover: bytes = b"\\x89PNG"')
    shelf = subject(source)
    async with shelf.enter_environment() as environment:
        script = await record_turns(shelf, environment, shelf.tasks[0], "oracle")
        recorded = await Performance(script, environment).play_all()
    assert recorded["reset"]["state"]["cover"] == "89504e47"


async def test_a_script_of_a_task_without_a_prompt_is_named_by_its_fields(subject):
    row = {"responses_create_params": {"input": []}, "book": "atlas"}
    assert Script("oracle", Task.model_validate(row), 0, ()).title == """oracle on "{'book': 'atlas'}\""""
