"""The oracle without an episode: it finds the row of a conversation and returns the next turn."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sums_environment import PLAIN

import gymsdk
from gymsdk import Environment, Failed, UsageError, jsonl, responses
from gymsdk.errors import BadRow, UnknownSplit
from gymsdk.testing.oracle import Oracle, open_oracle, read_all_splits
from gymsdk.types import Item, extract_text

DOORS = """
import random, threading
threads = set()
opened = []

class Door(Task):
    secret: str

class Room(State):
    code: int = 0

@hookimpl
def tasks(split: Literal["train", "test", "none"], seed):
    for number in range(30 if split == "train" else 3 if split == "test" else 0):
        threads.add(threading.current_thread())
        yield Door.ask(f"Open door {number % 20} of {split}{seed or ''}.", secret=str(number))

@hookimpl
async def reset(task: Door, seed):
    opened.append(task.secret)
    return Reset(state=Room(code=random.Random(seed).randrange(10**6)))

async def knock(task: Door) -> str:
    "Knock."
    return f"door {task.secret}"

async def read_code(state: Room) -> int:
    "Read the code at the wall."
    return state.code

@hookimpl
def tools():
    return [knock, read_code]

@hookimpl
def solve(task: Door, transcript: Transcript):
    if not transcript.calls():
        return [ToolCall(name="knock"), ToolCall(name="read_code")]
    code = transcript.output(transcript.calls("read_code")[0].call_id)
    return Message(content=f"{task.secret} {code}")

@hookimpl
def verify(transcript: Transcript):
    return Verdict(reward=1.0)
"""
"""An environment with pairs of rows that have equal openings; a tool output distinguishes the rows of a pair.

The output of the other tool differs per episode.
"""

CALLS = (
    PLAIN
    + """
async def knock() -> str: "Knock."

@hookimpl
def tools():
    return [knock]

@hookimpl
def tasks(split: Literal["train"]):
    number = 0
    while number := number + 1:
        yield Task.ask(f"Knock {number} times.")
"""
)
"""An endless environment that offers a tool."""

SLOW = """
@hookimpl
def tasks(split: Literal["train"]):
    gate.wait()
    yield Task.ask("Well?")
"""
"""Tasks that are not yielded until the event `gate` is set."""

UNSOLVED = """
@hookimpl
def tasks(split: Literal["train"]):
    yield Task.ask("Well?")
    raise ValueError("no more")

@hookimpl
def verify():
    return Verdict(reward=1.0)
"""

Opening = Callable[..., AbstractAsyncContextManager[Oracle]]


@pytest.fixture
def doors_module(made: Callable[..., ModuleType]) -> ModuleType:
    return made(DOORS, "doors_env")


@pytest.fixture
def doors(doors_module: ModuleType) -> Environment:
    return Environment("made", doors_module)


@pytest.fixture
def open_with() -> Opening:
    def make(*environments: Environment, **options: Any) -> AbstractAsyncContextManager[Oracle]:
        named = {environment.name: environment for environment in environments}
        return open_oracle(named, gymsdk.model("scripted/oracle"), **options)

    return make


def question(text: str) -> Item:
    return {"input": [{"role": "user", "content": text}]}


def follow_up(request: Item, output: list[Item], *answers: str) -> Item:
    """Return the next request after *output*, with the tool outputs *answers*."""
    calls = [item for item in output if item["type"] == "function_call"]
    answered = [
        responses.build_function_call_output(call["call_id"], text) for call, text in zip(calls, answers, strict=True)
    ]
    return {"input": [*request["input"], *output, *answered]}


def text_of(response: Item) -> str:
    return extract_text(response["output"][0]["content"])


async def test_a_conversation_gets_the_recorded_answer_of_its_row(
    installed: Callable[..., Path], open_with: Opening
) -> None:
    installed()
    sums = gymsdk.load("sums")
    tasks = [task for task, _ in zip(sums.tasks("test"), range(20), strict=False)]
    async with open_with(sums) as oracle:
        answers = await asyncio.gather(*(oracle.respond({"input": task.input}) for task in tasks))
    assert [text_of(answer) for answer in answers] == [str(task.row()["answer"]) for task in tasks]
    assert answers[0]["usage"]["output_tokens"] == len(text_of(answers[0]))


async def test_rows_with_equal_openings_are_distinguished_by_tool_outputs(
    doors: Environment, open_with: Opening
) -> None:
    first = question("Open door 4 of train.")
    async with open_with(doors) as oracle:
        with pytest.raises(Failed):
            await oracle.respond(question("Have every row read."))
        output = (await oracle.respond(first))["output"]
        found = [
            await oracle.respond(follow_up(first, output, f"door {secret}", code))
            for secret, code in (("4", code_of(oracle, "4")), ("24", code_of(oracle, "24")))
        ]
    assert [text_of(answer).split()[0] for answer in found] == ["4", "24"]


def code_of(oracle: Oracle, secret: str) -> str:
    """Return the recorded code of the door with this *secret*."""
    for recordings in oracle._recorder.found._by_first_digest.values():
        texts = [extract_text(recording.get_turn(1)[0]["content"]) for recording in recordings]
        answers = [text for text in texts if text.startswith(f"{secret} ")]
        if answers:
            break
    [answer] = answers
    return answer.split()[1]


@pytest.mark.parametrize(("first_call", "answers"), [(0, ["door 4", "of no seed"]), (1, ["17"])])
async def test_an_episode_that_differs_from_the_recording_is_solved_live(
    doors: Environment, open_with: Opening, first_call: int, answers: list[str]
) -> None:
    first = question("Open door 4 of train.")
    async with open_with(doors) as oracle:
        output = (await oracle.respond(first))["output"]
        answer = await oracle.respond(follow_up(first, output[first_call:], *answers))
    assert text_of(answer) == f"4 {answers[-1]}"


FINISHED = [
    *question("Open door 1 of test.")["input"],
    responses.build_message("1 0"),
    {"role": "user", "content": "?"},
]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"input": FINISHED}, "the episode is over"),
        (
            question("Open door 99."),
            "(read: 33 of made); start the oracle with the --env, --seed, --set and --split of the client",
        ),
    ],
)
async def test_a_finished_or_unknown_conversation_is_rejected(
    doors: Environment, open_with: Opening, request_: Item, message: str
) -> None:
    async with open_with(doors) as oracle:
        with pytest.raises(Failed) as caught:
            await oracle.respond(request_)
    assert (caught.value.kind, caught.value.retryable) == ("not_recorded", False)
    assert message in str(caught.value)


async def test_rows_are_read_on_demand_outside_the_event_loop_and_shared_by_all_requests(
    doors_module: ModuleType, doors: Environment, open_with: Opening
) -> None:
    async with open_with(doors) as oracle:
        await asyncio.gather(*(oracle.respond(question("Open door 0 of train.")) for _ in range(50)))
        few = len(doors_module.opened)
        with pytest.raises(Failed):
            await oracle.respond(question("Open door 99."))
    assert (few, len(doors_module.opened)) == (8, 33)
    async with open_with(doors, limit=10) as oracle:
        with pytest.raises(Failed, match=r"read: 10 of made"):
            await oracle.respond(question("Open door 12 of train."))
    assert doors_module.threads
    assert threading.main_thread() not in doors_module.threads


@pytest.mark.parametrize(("solves", "asks"), [("sums", "calls"), ("calls", "sums")])
async def test_a_client_of_another_environment_is_rejected_before_all_rows_are_read(
    installed: Callable[..., Path], open_with: Opening, solves: str, asks: str
) -> None:
    installed()
    installed("calls", CALLS)
    task = next(gymsdk.load(asks).tasks("train"))
    async with gymsdk.load(asks) as environment:
        episode = await environment.reset(task)
    async with open_with(gymsdk.load(solves), limit=10**6) as oracle:
        with pytest.raises(Failed) as caught:
            await oracle.respond({"input": task.input, "tools": episode.tools})
    assert (caught.value.kind, caught.value.retryable) == ("not_recorded", False)
    offered = "the tools knock, and no row does" if asks == "calls" else "no tools, and every row does"
    assert str(caught.value).startswith(f"this conversation offers {offered} (read: ")
    assert f" of {solves}); start the oracle with the --env" in str(caught.value)


async def test_rows_come_from_a_split_a_seed_or_a_file(doors: Environment, open_with: Opening, tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(jsonl.dump_row({"responses_create_params": {"input": "Open mine."}, "secret": "0"}) + b"{torn\n")
    for options, known in (
        ({"split": "test"}, "Open door 2 of test."),
        ({"seed": 7}, "Open door 2 of train7."),
        ({"tasks": path}, "Open mine."),
    ):
        async with open_with(doors, **options) as oracle:
            assert (await oracle.respond(question(known)))["output"][0]["name"] == "knock"
            with pytest.raises(Failed, match="no row opens like this conversation"):
                await oracle.respond(question("Open door 2 of train."))


async def test_unavailable_rows_are_rejected_immediately(
    doors: Environment, open_with: Opening, tmp_path: Path
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    cases: list[tuple[dict[str, Any], type[UsageError], str]] = [
        ({"split": "tset"}, UnknownSplit, "no split 'tset' in made"),
        ({"tasks": empty}, BadRow, "holds no valid row"),
        ({"tasks": tmp_path / "none.jsonl"}, BadRow, "No such file"),
        ({"tasks": empty, "split": "test"}, UsageError, "choose one of them"),
    ]
    for options, error, message in cases:
        with pytest.raises(error, match=message):
            async with open_with(doors, **options):
                pass


SOLVED = "@hookimpl\ndef solve():\n    return Message(content='Well.')"


@pytest.mark.parametrize(("source", "read", "reason"), [("", 0, "its `solve` is missing"), (SOLVED, 1, "no more")])
async def test_rows_that_cannot_be_played_are_reported(
    environment: Callable[..., Environment], open_with: Opening, source: str, read: int, reason: str
) -> None:
    async with open_with(environment(UNSOLVED + source)) as oracle:
        with pytest.raises(Failed, match=f"read: {read} of made; the last error: .*{reason}"):
            await oracle.respond(question("How so?"))


@pytest.mark.slow
async def test_a_request_times_out_while_rows_are_read_and_can_be_retried(
    made: Callable[..., ModuleType], stuck: threading.Event
) -> None:
    module = made(PLAIN + SLOW, "slow_env")
    module.__dict__["gate"] = stuck
    model, named = gymsdk.model("scripted/oracle"), {"made": Environment("made", module)}
    async with Oracle(model, named, read_all_splits(named), wait=0.05) as oracle:
        with pytest.raises(Failed) as caught:
            await oracle.respond(question("Well?"))
        stuck.set()
        await oracle._recorder.wait_for_more(60)
        answer = await oracle.respond(question("Well?"))
    assert (caught.value.kind, caught.value.retryable, text_of(answer)) == ("still_reading", True, "yes")


@pytest.mark.parametrize("field", ["system", "developer", "instructions"])
async def test_a_harness_may_insert_a_system_prompt(doors: Environment, open_with: Opening, field: str) -> None:
    prompt = "You are a helpful agent.\nUse the tools."
    first = question("Open door 4 of train.")
    if field == "instructions":
        first["instructions"] = prompt
    else:
        first["input"].insert(0, {"role": field, "content": prompt})
    async with open_with(doors) as oracle:
        output = (await oracle.respond(first))["output"]
        later = {**first, **follow_up(first, output, "door 24", "77")}
        answer = await oracle.respond(later)
    assert [item["name"] for item in output] == ["knock", "read_code"]
    assert text_of(answer).split()[0] in {"4", "24"}


SYSTEM_PROMPTS = """
class Door(Task):
    secret: str

@hookimpl
def tasks(split: Literal["train"]):
    for number in range(5):
        rule = {"role": "system", "content": f"The code is {number} times 7."}
        asked = {"role": "user", "content": "What is the code?"}
        yield {"responses_create_params": {"input": [rule, asked]}, "secret": str(7 * number)}

@hookimpl
def solve(task: Door):
    return Message(content=task.secret)
"""
"""Rows that differ only in their system prompt."""


async def test_rows_are_distinguished_by_the_end_of_a_harness_system_prompt(
    made: Callable[..., ModuleType], open_with: Opening
) -> None:
    rule = "The code is 3 times 7."
    user = {"role": "user", "content": "What is the code?"}
    apart = [{"role": "system", "content": "Be brief."}, {"role": "system", "content": rule}, user]
    merged = [{"role": "system", "content": f"Be brief.\n\n{rule}"}, user]
    other = [{"role": "system", "content": "Be brief."}, user]
    async with open_with(Environment("made", made(PLAIN + SYSTEM_PROMPTS, "spoken_env"))) as oracle:
        assert [text_of(await oracle.respond({"input": items})) for items in (apart, merged)] == ["21", "21"]
        with pytest.raises(Failed, match="no row opens like this conversation"):
            await oracle.respond({"input": other})
