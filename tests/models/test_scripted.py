from __future__ import annotations

import json
import random
from typing import Literal

import pytest

from gymsdk import Environment, Failed, Message, Reset, State, Step, Task, ToolCall, Verdict, hookimpl, jsonl, play
from gymsdk import responses as wire
from gymsdk.errors import BadModelOption, UnknownModel
from gymsdk.line import build_line
from gymsdk.models.options import ModelOptions
from gymsdk.models.scripted import build
from gymsdk.tools import build_tool


class Total(State):
    value: int = 0


class Sum(Task):
    numbers: list[int]


def add(state: Total, number: int) -> int:
    """Add a number to the total."""
    state.value += number
    return state.value


class Adding:
    """An environment in which the policy adds numbers by tool calls and replies with their sum."""

    @hookimpl
    def tasks(self, split: Literal["train"], seed):
        rng = random.Random(f"{split}:{seed}")
        while True:
            numbers = [rng.randint(1, 99) for _ in range(3)]
            yield Sum.ask(f"Add {numbers}.", numbers=numbers)

    @hookimpl
    def reset(self):
        return Reset(state=Total())

    @hookimpl
    def tools(self):
        return [add]

    @hookimpl
    def step(self, action):
        return Step(messages=["Sure?"]) if isinstance(action, Message) and action.text.endswith("?") else None

    @hookimpl
    async def verify(self, task: Sum, transcript):
        return Verdict(reward=float(transcript.reply == str(sum(task.numbers))))

    @hookimpl
    async def solve(self, task: Sum, state: Total, transcript):
        if not transcript.calls():
            return [ToolCall(name="add", arguments={"number": number}) for number in task.numbers]
        return Message(content=str(state.value))


@pytest.fixture
def adding():
    return Environment("adding", Adding())


@pytest.fixture
def row(adding):
    return next(adding.tasks("train", seed=1)).row()


def list_output(rollout):
    return [(item["type"], item.get("arguments") or item.get("content")) for item in rollout.response["output"]]


async def test_the_oracle_plays_the_solution_of_the_environment(adding, row):
    rollout = await play(adding, build("oracle"), row)
    assert (rollout.reward, rollout.turns) == (1.0, 2)
    assert [item["type"] for item in rollout.response["output"]].count("function_call") == 3


async def test_an_oracle_with_a_share_is_right_in_about_that_share(adding, row):
    model = build("oracle:0.7")
    rewards = [(await play(adding, model, row, seed=seed)).reward for seed in range(200)]
    assert 0.6 < sum(rewards) / len(rewards) < 0.8


async def test_an_oracle_with_a_share_decides_once_per_episode(adding, row):
    for share, expected in (("0.5", {(1.0, 2), (0.0, 1)}), ("1", {(1.0, 2)}), ("0", {(0.0, 1)})):
        rollouts = [await play(adding, build(f"oracle:{share}"), row, seed=seed) for seed in range(40)]
        assert {(rollout.reward, rollout.turns) for rollout in rollouts} == expected


@pytest.mark.parametrize("share", ["1.5", "-1", "half", "nan"])
def test_an_invalid_share_is_rejected(share):
    with pytest.raises(
        BadModelOption, match=f"scripted/oracle:{share}: the share of right episodes must be a number from 0"
    ):
        build(f"oracle:{share}")


async def test_the_oracle_needs_an_environment_with_solve(row):
    class Unsolved:
        @hookimpl
        def verify(self): ...

    rollout = await play(Environment("unsolved", Unsolved()), build("oracle"), row)
    assert (
        rollout.failure.message
        == "environment 'unsolved' provides no solution for this turn: its `solve` is missing or returned None"
    )
    assert (rollout.failure.kind, rollout.failure.retryable) == ("no_solution", False)
    message = r"needs an episode that is played in this process, .* write Policy\(model, env\), over HTTP query"
    with pytest.raises(Failed, match=message):
        await build("oracle").respond({"input": "?"})


async def test_null_returns_an_empty_reply(adding, row):
    rollout = await play(adding, build("null"), row)
    assert (rollout.reward, rollout.turns) == (0.0, 1)
    assert list_output(rollout)[0][1][0]["text"] == ""


async def test_echo_repeats_the_last_message_of_the_user(adding, row):
    rollout = await play(adding, build("echo"), row | {"responses_create_params": {"input": "Really?"}})
    texts = [content[0]["text"] if isinstance(content, list) else content for _, content in list_output(rollout)]
    assert texts == ["Really?"] + ["Sure?"] * 63
    # Tokens are counted as bytes.
    response = await build("echo").respond({"input": "Zürich"})
    assert response["usage"]["input_tokens"] == response["usage"]["output_tokens"] == 7


async def test_random_calls_tools_and_replies(adding, row):
    rollouts = [await play(adding, build("random"), row, seed=seed) for seed in range(30)]
    kinds = {item["type"] for rollout in rollouts for item in rollout.response["output"]}
    assert kinds >= {"function_call", "function_call_output", "message"}
    assert {rollout.outcome for rollout in rollouts} == {"scored"}
    # It needs no episode.
    request = {"input": "?", "tools": [{"name": "add", "parameters": {"properties": {"number": {"type": "integer"}}}}]}
    answers = [await build("random").respond(request) for _ in range(2)]
    assert answers[0]["output"] == answers[1]["output"]


def pick(colour: Literal["red", "green"], sizes: list[int], whole: bool, weight: float | None = None) -> None: ...


async def test_random_arguments_match_the_schema():
    picking, policy = build_tool(pick), build("random")
    responses = [await policy.respond({"input": str(seed), "tools": [picking.schema]}) for seed in range(60)]
    items = [item for response in responses for item in response["output"] if item["type"] == "function_call"]
    read = [picking.parse_arguments(call["arguments"]) for call in items]
    assert {arguments["colour"] for arguments in read} == {"red", "green"}
    assert {arguments["whole"] for arguments in read} == {True, False}
    assert {len(arguments["sizes"]) for arguments in read} == {0, 1, 2, 3}


@pytest.mark.parametrize("name", ["oracle:0.5", "random", "echo", "null"])
async def test_a_policy_behaves_the_same_for_the_same_seed(adding, row, name):
    for seed in range(5):
        one, other = [await play(adding, build(name), row, seed=seed, repeat=2) for _ in range(2)]
        assert list_output(one) == list_output(other)


@pytest.mark.parametrize("name", ["oracle:0.5", "random"])
async def test_a_policy_behaves_differently_for_another_seed_or_repeat(adding, row, name):
    by_seed = [list_output(await play(adding, build(name), row, seed=seed)) for seed in range(20)]
    by_repeat = [list_output(await play(adding, build(name), row, repeat=repeat)) for repeat in range(20)]
    assert any(output != by_seed[0] for output in by_seed)
    assert any(output != by_repeat[0] for output in by_repeat)


@pytest.mark.parametrize("name", ["oracel", "echo:1", "random:x", ""])
def test_an_unknown_policy_error_lists_the_known_ones(name):
    with pytest.raises(UnknownModel) as caught:
        build(name)
    message = str(caught.value)
    assert message.startswith(f"no scripted policy named {name!r}")
    assert message.lower().endswith("there are oracle, oracle:share, null, echo, random, script:file, replay:file")


@pytest.fixture
async def recorded(adding, tmp_path):
    """Write and return a rollouts file with two tasks and three repeats of each."""
    tasks = adding.tasks("train", seed=1)
    rollouts = [
        (index, repeat, await play(adding, build("oracle:0.5"), task, seed=index, repeat=repeat))
        for index, task in zip(range(2), tasks, strict=False)
        for repeat in range(3)
    ]
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(
        b"".join(jsonl.dump_row(build_line(rollout, (index, repeat))) for index, repeat, rollout in rollouts)
    )
    return path, rollouts


async def test_replay_plays_the_episodes_of_a_rollouts_file(adding, recorded):
    path, rollouts = recorded
    model = build(f"replay:{path}")
    for index, repeat, original in rollouts:
        replayed = await play(adding, model, original.row, seed=index + 100, repeat=repeat)
        assert list_output(replayed) == list_output(original)
        assert replayed.reward == original.reward
    # Without an episode, the opening finds it.
    first = rollouts[0][2]
    response = await model.respond({"input": first.opening})
    assert response["output"] == first.response["output"][: len(response["output"])]


async def test_replay_of_a_missing_episode_or_beyond_the_recorded_end_fails_with_a_message(adding, recorded):
    path, [(_, _, first), *_] = recorded
    rollout = await play(adding, build(f"replay:{path}"), Sum.ask("Something else.", numbers=[]))
    assert rollout.failure.message == f"{path} has no episode with the same opening"
    assert rollout.failure.kind == "not_recorded"
    history = [*first.opening, *first.response["output"], {"role": "user", "content": "And?"}]
    with pytest.raises(Failed, match=r"the recorded episode ends after [12] turns"):
        await build(f"replay:{path}").respond({"input": history})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory; name a JSONL file that can be read"),
        ("{", "rollouts.jsonl:1: not valid JSON"),
        (json.dumps({"responses_create_params": {"input": "?"}}), "rollouts.jsonl:1 is not a line of a rollouts file"),
        ('{"responses_create_params": 5, "response": null}', "rollouts.jsonl:1 is not a line of a rollouts file"),
    ],
)
def test_replay_of_an_invalid_file_is_rejected(tmp_path, text, message):
    path = tmp_path / "rollouts.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadModelOption) as caught:
        build(f"replay:{path}")
    assert str(caught.value).startswith("scripted/replay: ")
    assert message in str(caught.value)


async def test_a_recording_is_found_by_content_not_by_encoding(tmp_path):
    opening = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]
    line = {"responses_create_params": {"input": opening}, "response": {"output": [wire.build_message("Hi.")]}}
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(jsonl.dump_row(line))
    request_input = [
        {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": "Hello?"},
    ]
    response = await build(f"replay:{path}").respond({"input": request_input})
    assert response["output"][0]["content"][0]["text"] == "Hi."


@pytest.mark.parametrize("fields", [{"arguments": {"a": 1}}, {"output": ["x", None]}, {"content": 7}])
async def test_any_history_is_accepted(fields: dict[str, object]) -> None:
    history = [{"type": "function_call", "name": "add", "call_id": "c1"} | fields]
    assert (await build("random", ModelOptions()).respond({"input": history}))["usage"]["input_tokens"] >= 0
