"""The line of a rollout holds the rewards of its steps, and the requests and answers of judges and user models."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest
from deployed import run_command, serving
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from servers.app_helpers import app_client, serve_app

from gymsdk import Environment, Unscorable, UsageError, episode_record, jsonl, load, model, play, responses
from gymsdk import client as client_module
from gymsdk.episode_record import EpisodeRecord
from gymsdk.gym import policy as gym_policy
from gymsdk.line import StoredRollout, build_line
from gymsdk.models.scripted import ScriptedModel
from gymsdk.responses import build_message
from gymsdk.rollouts.reverify import StoredRun, open_local_judge, reverify
from gymsdk.runs import read
from gymsdk.servers import agent, resources
from gymsdk.servers.remote import RemoteEnvironment
from gymsdk.servers.remote_turns import TurnEnvironment
from gymsdk.types import Budget

KEY = "sk-of-the-judge-4711"

ASKED = """
from typing import Annotated, Any, Literal
from pydantic import BaseModel, SecretStr
from gymsdk import *

class Store(BaseModel):
    pin: SecretStr = SecretStr("sk-of-the-store")

class Settings(Config):
    stores: list[Store] = [Store()]
    judge: Model
    user: Model
    key: SecretStr = SecretStr("sk-of-the-author")
    broken: str = ""
    padding: int = 0

class Said(Task):
    word: str

async def query(model, text, **options):
    answer = await model.respond({"input": [{"role": "user", "content": text}], **options})
    return answer["output"][-1]["content"][0]["text"]

@hookimpl
def tasks(split: Literal["train"], seed):
    yield from (Said.ask(f"Say word-{number}.", word=f"word-{number}") for number in range(60))

async def ask(text: str, config: Settings) -> str:
    "Ask the user."
    return await query(config.user, f"{text} {'.' * config.padding}")

@hookimpl
def tools():
    return [ask]

@hookimpl
async def reset(task: Said, config: Settings):
    ending = config.broken if config.broken == "reset" else ""
    return Reset(messages=[await query(config.user, f"greet {task.word} {ending}")])

@hookimpl
async def step(action, config: Settings, task: Said):
    if isinstance(action, Message):
        await query(config.user, f"part {task.word}")
        return Step(reward=0.5, done=True)

@hookimpl
async def verify(task: Said, transcript, config: Settings):
    secret = f"{config.key.get_secret_value()} {config.stores[0].pin.get_secret_value()}"
    metadata = {"api_key": "hidden-1", "note": f"from http://user:hidden-2@host/ with {secret}"}
    options = {"temperature": 0.25, "metadata": metadata}
    answer = await query(config.judge, f"grade {task.word} {config.broken}", logprobs=True, **options)
    if config.broken == "unsure":
        raise Unscorable("the judge is unsure")
    return Verdict(reward=float(task.word in answer))
"""


def build_judge() -> FastAPI:
    """Return an OpenAI server that repeats the last message and the key; as a policy it calls `ask`, then replies."""
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> JSONResponse:
        body = await request.json()
        text = body["messages"][-1]["content"]
        await asyncio.sleep(random.random() / 100)
        key = request.headers.get("authorization", "")
        if text.rstrip().endswith(("verify", "reset")):
            return JSONResponse({"error": {"message": f"refused for {key}"}}, 400)
        message: dict[str, Any] = {"role": "assistant", "content": f"echo {text} for {key}"}
        if body.get("tools"):
            [word] = re.findall(r"word-\d+", body["messages"][1]["content"])
            call = {"name": "ask", "arguments": json.dumps({"text": word})}
            calls = [{"id": "1", "type": "function", "function": call}]
            is_first = len(body["messages"]) == 2
            message |= {"content": None, "tool_calls": calls} if is_first else {"content": word}
        entry = {"token": "echo", "logprob": -0.5, "bytes": None}
        scores = {"content": [entry | {"top_logprobs": [entry | {"token": "reply"}]}]} if body.get("logprobs") else None
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": scores}
        return JSONResponse({"id": "c1", "object": "chat.completion", "model": "echo", "choices": [choice]})

    return app


@pytest.fixture
async def judge(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    monkeypatch.setenv("GYMSDK_API_KEY", KEY)
    async with serve_app(build_judge()) as url:
        monkeypatch.setenv("GYMSDK_BASE_URL", f"{url}/v1")
        yield f"vllm/echo@{url}/v1"


@pytest.fixture
def asked(made: Callable[..., ModuleType], judge: str) -> Callable[..., Environment]:
    module = made(ASKED)

    def build(**settings: Any) -> Environment:
        return Environment("asked", module, {"judge": judge, "user": judge, **settings})

    return build


AGENT = {"agent_ref": {"name": "asked_simple_agent"}}


def build_row(number: int) -> dict[str, Any]:
    return {"responses_create_params": {"input": "Say it."}, "word": f"word-{number}"}


OURS = {"x-gymsdk-client": "1"}


@pytest.fixture
def player(policy: Callable[..., ScriptedModel]) -> Callable[[int], ScriptedModel]:
    """Return a function that builds a policy for the row with this number."""
    return lambda number: policy([("ask", {"text": f"word-{number}"})], f"word-{number}")


def check_record(line: dict[str, Any], number: int) -> None:
    """Check that *line* has the calls of the episode with this number, and no secret."""
    host = line["gymsdk"]
    assert host["step_rewards"] == [0.0, 0.5]
    assert sum(host["step_rewards"]) == line["reward_components"]["steps"]
    check_calls(host["environment_calls"], number)


def check_calls(calls: list[dict[str, Any]], number: int) -> None:
    word = f"word-{number}"
    assert [(call["role"], call["stage"], call.get("step")) for call in calls] == [
        ("user", "reset", None),
        ("user", "step", 0),
        ("user", "step", 1),
        ("judge", "verify", None),
    ]
    asked = [call["request"]["input"][0]["content"].split() for call in calls]
    assert [words[:2] for words in asked] == [["greet", word], [word], ["part", word], ["grade", word]]
    assert all(
        call["answer"]["output"][-1]["content"][0]["text"].startswith(f"echo {' '.join(words)}")
        for call, words in zip(calls, asked, strict=True)
    )
    assert all(0 < call["seconds"] < 60 for call in calls)
    assert calls[-1]["request"]["temperature"] == 0.25
    [scored] = calls[-1]["answer"]["output"][-1]["content"][0]["logprobs"]
    assert [scored["token"], scored["top_logprobs"][0]["token"]] == ["echo", "reply"]
    # The environment itself shows the policy what its user says.
    text = json.dumps(calls)
    assert "from http://***@host/ with *** ***" in text
    assert not [part for part in (KEY, "sk-of-the-author", "sk-of-the-store", "hidden-1", "hidden-2") if part in text]


def write(rollout: Any) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(jsonl.dump_row(build_line(rollout, (0, 0))))
    return line


async def test_an_episode_that_is_played_through_gymnasium_has_its_calls(
    installed: Callable[..., Path], judge: str
) -> None:
    installed("asked", ASKED)

    def play_through_gymnasium() -> Any:
        env = gym_policy.make_env("asked", settings={"judge": judge, "user": judge})
        try:
            return gym_policy.rollout(env, model("vllm/echo"), seed=1, options={"task": build_row(4)})
        finally:
            env.close()

    check_record(write(await asyncio.to_thread(play_through_gymnasium)), 4)


async def test_the_calls_of_concurrent_episodes_stay_apart(
    asked: Callable[..., Environment], player: Callable[[int], ScriptedModel]
) -> None:
    environment = asked()
    rollouts = await asyncio.gather(*(play(environment, player(number), build_row(number)) for number in range(60)))
    for number, rollout in enumerate(rollouts):
        line = write(rollout)
        check_record(line, number)
        assert write(StoredRollout(line).to_rollout()) == line
        assert line["gymsdk"]["format"] == 1


def test_episodes_that_fail_with_one_error_have_their_own_records() -> None:
    error, records, errors = Unscorable("the batch failed"), [EpisodeRecord([1.0]), EpisodeRecord([2.0])], []
    for record in records:
        with pytest.raises(Unscorable) as raised, episode_record.record_stage("verify", record):
            raise error
        errors.append(raised.value)
    assert [error.record for error in errors] == records


PAYING = """
from gymsdk import *

class Settings(Config):
    judge: Model

async def pay(amount: int, note: str | None = None) -> str:
    "Pay."
    return "paid"

@hookimpl
def tools():
    return [pay]

@hookimpl
async def step(action, config: Settings):
    text = action.arguments if isinstance(action, ToolCall) else action.text
    await config.judge.respond({"input": [{"role": "user", "content": text}]})
    if isinstance(action, ToolCall):
        return Step(reward=float(action.parsed()["amount"]), output="paid")
    return Step(reward=-float(text), messages=["go on"], done=text == "6")

@hookimpl
def verify():
    return Verdict(reward=0.0)
"""


@pytest.mark.parametrize("sent", ["in order", "two in another order"])
async def test_the_rewards_of_steps_are_in_the_order_of_the_steps(
    made: Callable[..., ModuleType],
    judge: str,
    policy: Callable[..., ScriptedModel],
    sent: str,
) -> None:
    environment = Environment("paying", made(PAYING, "made_paying"), {"judge": judge})
    row = {"responses_create_params": {"input": "Pay."}}
    amounts = [{"amount": 2, "note": None}, {"amount": 3, "note": None}, {"amount": 5}]
    turns = ["1", [("pay", amounts[0]), ("pay", amounts[1])], "4", [("steal", {}), ("pay", amounts[2])], "6"]
    local = await play(environment, policy(*turns), row)
    async with serve_app(resources.create_app(environment)) as url, httpx.AsyncClient(headers=OURS) as client:
        body = row | {"response": local.response}
        stateless = (await client.post(f"{url}/verify", json=body)).json()
        await client.post(f"{url}/seed_session", json=row)
        for amount in (2, 3, 5) if sent == "in order" else (3, 5, 2):
            (await client.post(f"{url}/pay", json={"amount": amount})).raise_for_status()
        played = (await client.post(f"{url}/verify", json=body)).json()
        by_turns = await play(TurnEnvironment(url, "paying"), policy(*turns), row)
    async with app_client(agent.create_app(environment, policy(*turns))) as client:
        run = (await client.post("/run", json=row)).json()
    for line in (write(local), stateless, played, run):
        host = line["gymsdk"]
        assert host["step_rewards"] == [-1, 2, 3, -4, 0, 5, -6]
        asked = {call["step"]: call["request"]["input"][0]["content"] for call in host["environment_calls"]}
        words = {step: re.sub(r"\D", "", text) for step, text in asked.items()}
        assert words == dict(zip([0, 1, 2, 3, 5, 6], "123456", strict=True))
    assert by_turns.record.step_rewards == [-1, 5, -4, 5, -6]


async def test_concurrent_episodes_behind_servers_have_the_same_lines(
    asked: Callable[..., Environment], policy: Callable[..., ScriptedModel]
) -> None:
    async def choose(request: dict[str, Any], episode: Any) -> list[dict[str, Any]]:
        word = episode.row["word"]
        saying = policy(word if episode.transcript.items else [("ask", {"text": word})])
        output: list[dict[str, Any]] = (await saying.respond(request, episode=episode))["output"]
        return output

    async with serve_app(resources.create_app(asked())) as url:
        playing = agent.create_app(RemoteEnvironment(url, "asked"), ScriptedModel("says", choose))
        async with app_client(playing) as client:
            answers = await asyncio.gather(*(client.post("/run", json=build_row(number)) for number in range(40)))
    for number, answer in enumerate(answers):
        check_record(answer.json(), number)


async def test_a_verdict_that_is_asked_for_twice_has_its_calls_once_and_none_after_a_while(
    asked: Callable[..., Environment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gymsdk.servers.sessions.SWEEP_SECONDS", 0.05)
    async with app_client(resources.create_app(asked())) as client:
        client.headers["x-gymsdk-client"] = "1"
        row = build_row(3)
        await client.post("/seed_session", json=row)
        await client.post("/ask", json={"text": "word-3"})
        output = [
            responses.build_function_call("ask", {"text": "word-3"}, "1"),
            responses.build_function_call_output("1", "echo"),
            responses.build_message("x"),
        ]
        body = {**row, "response": {"object": "response", "output": output}}
        first, second = [(await client.post("/verify", json=body)).json() for _ in range(2)]
        monkeypatch.setattr("gymsdk.servers.sessions.JUDGED_SESSION_SECONDS", 0.0)
        await asyncio.sleep(0.5)
        late = (await client.post("/verify", json=body)).json()["gymsdk"]
        del client.headers["x-gymsdk-client"]
        hidden = (await client.post("/verify", json=body)).json()["gymsdk"]
    check_record(first, 3)
    assert hidden == late
    assert first["gymsdk"] == second["gymsdk"]
    assert late.pop("environment_calls_left_out") == len(second["gymsdk"].pop("environment_calls"))
    assert late == second["gymsdk"]


async def test_the_policy_of_another_program_does_not_read_the_calls_of_a_judge_through_tools(
    asked: Callable[..., Environment], policy: Callable[..., ScriptedModel]
) -> None:
    environment = asked()
    async with app_client(resources.create_app(environment)) as client:
        await client.post("/seed_session", json=build_row(3))
        answer = await client.post("/ask", json={"text": "reset"})
        invented = {**build_row(3), "response": {"object": "response", "output": []}}
        verdict = (await client.post("/verify", json=invented)).json()
    assert answer.json().keys() == {"detail", "stage", "kind", "retryable", "outcome"}
    assert verdict["gymsdk"]["environment_calls_left_out"] >= 1
    assert "environment_calls" not in verdict["gymsdk"]
    async with serve_app(resources.create_app(environment)) as url:
        failing = policy([("ask", {"text": "reset"})])
        remote = await play(RemoteEnvironment(url, "asked"), failing, build_row(3))
    assert [(call["stage"], "error" in call) for call in remote.record.calls] == [("reset", False), ("step", True)]


async def test_the_answers_of_a_gymnasium_style_server_have_the_calls_since_the_answer_before(
    asked: Callable[..., Environment], player: Callable[[int], ScriptedModel]
) -> None:
    async with serve_app(resources.create_app(asked())) as url:
        for budget, stages in ((Budget(), ["reset", "step", "step", "verify"]), (Budget(turns=1), ["reset", "step"])):
            rollout = await play(TurnEnvironment(url, "asked"), player(5), build_row(5), budget=budget)
            assert [call["stage"] for call in rollout.record.calls] == stages
            if budget.turns != 1:
                check_calls(write(rollout)["gymsdk"]["environment_calls"], 5)
        response = {"object": "response", "output": [build_message("word-5")]}
        async with httpx.AsyncClient(base_url=url) as other, httpx.AsyncClient(base_url=url, headers=OURS) as own:
            for path, body, stages in (
                ("/reset", build_row(5), ["reset"]),
                ("/step", {"response": response, "_ng_step_request_id": "1"}, ["step", "verify"]),
                ("/step", {"response": response, "_ng_step_request_id": "1"}, ["step", "verify"]),
            ):
                sent, shown = [(await client.post(path, json=body)).json() for client in (own, other)]
                assert [call["stage"] for call in sent.pop("gymsdk")["environment_calls"]] == stages
                assert sent == shown


async def test_a_typed_answer_without_a_verdict_has_the_calls(asked: Callable[..., Environment]) -> None:
    ids = {"episode_id": {"rollout_id": "r", "attempt": 0}, "task_id": {"taskset": "t", "task_id": "1"}}
    async with serve_app(resources.create_app(asked(broken="unsure"))) as url:
        answers = []
        for name, headers in (("own", OURS), ("other", {})):
            async with httpx.AsyncClient(base_url=url, headers=headers) as client:
                seed = {"resources_session_id": name, **ids, "task_data": build_row(5)}
                (await client.post("/seed_session", json=seed)).raise_for_status()
                body = {**build_row(5), "response": {"object": "response", "output": [build_message("word-5", id="m")]}}
                answers.append((await client.post("/verify", json=body)).json())
    with pytest.raises(Unscorable, match="the judge is unsure") as raised:
        client_module.parse_verdict(answers[0], build_row(5))
    assert raised.value.record is not None
    assert [call["stage"] for call in raised.value.record.calls] == ["reset", "step", "verify"]
    assert answers[0].pop("gymsdk").keys() == {"step_rewards", "environment_calls"}
    assert answers[0] == answers[1]


@pytest.mark.parametrize("broken", ["reset", "verify"])
async def test_a_failed_rollout_has_the_calls_before_its_failure(
    asked: Callable[..., Environment], player: Callable[[int], ScriptedModel], broken: str
) -> None:
    environment = asked(broken=broken)
    local = await play(environment, player(1), build_row(1))
    async with serve_app(resources.create_app(environment)) as url:
        remote = await play(RemoteEnvironment(url, "asked"), player(1), build_row(1))
    async with app_client(agent.create_app(environment, player(1))) as client:
        answer = (await client.post("/run", json=build_row(1))).json()
    for calls in (local.record.calls, remote.record.calls, answer["gymsdk"]["environment_calls"]):
        assert len(calls) == (1 if broken == "reset" else 4)
        assert (calls[-1]["stage"], calls[-1]["error"]["kind"]) == (broken, "model_refused")
        assert "answer" not in calls[-1]
        assert "refused for " in calls[-1]["error"]["message"]
        assert KEY not in json.dumps(calls)
    assert write(remote)["gymsdk"]["environment_calls"] == remote.record.calls
    assert local.failure is not None


async def test_the_oldest_calls_give_way_to_the_limit_of_bytes(
    asked: Callable[..., Environment], policy: Callable[..., ScriptedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_record, "MAX_CALL_BYTES", 20_000)
    call = [("ask", {"text": "word-1"})]
    rollout = await play(asked(padding=3000), policy(*[call] * 9, "word-1"), build_row(1))
    host = write(rollout)["gymsdk"]
    calls = host["environment_calls"]
    assert len(json.dumps(calls, separators=(",", ":"))) <= 20_100
    assert host["environment_calls_left_out"] + len(calls) == 12
    assert [call["stage"] for call in calls[-2:]] == ["step", "verify"]
    assert calls[0]["step"] > 0
    # A request that is too large by itself leaves the other calls their place.
    monkeypatch.setattr("gymsdk.models.registry.MAX_CALL_BYTES", 2000)
    rollout = await play(asked(padding=3000), policy(call, "word-1"), build_row(1))
    assert ["left_out" in call["request"] for call in rollout.record.calls] == [False, True, False, False]


async def test_a_task_that_outlives_its_stage_adds_no_calls(
    made: Callable[..., ModuleType], judge: str, policy: Callable[..., ScriptedModel]
) -> None:
    module = made(
        ASKED.replace(
            "async def reset(task: Said, config: Settings):",
            "async def reset(task: Said, config: Settings):\n"
            "    later.append(asyncio.ensure_future(ask_late(config)))\n    await asyncio.sleep(0)",
        )
        + "\nlater, gate = [], asyncio.Event()\n"
        "async def ask_late(config):\n    await gate.wait()\n    await query(config.user, 'late')\n"
    )
    environment = Environment("asked", module, {"judge": judge, "user": judge})
    rollout = await play(environment, policy("word-1"), build_row(1))
    module.gate.set()
    await module.later[0]
    assert "late" not in json.dumps(rollout.record.calls)


async def test_an_environment_without_models_and_rewards_of_steps_writes_no_record(
    policy: Callable[..., ScriptedModel], environment: Callable[..., Environment]
) -> None:
    plain = environment("@hookimpl\ndef verify():\n    return Verdict(reward=1.0)\n")
    rollout = await play(plain, policy("x"), {"responses_create_params": {"input": "Hi"}})
    assert not {key for key in write(rollout)["gymsdk"] if key.startswith(("step_rewards", "environment_calls"))}
    assert rollout.record.step_rewards == [0.0]


async def test_verifying_again_replaces_the_calls_of_the_judge(
    installed: Callable[..., Path], judge: str, player: Callable[[int], ScriptedModel], tmp_path: Path
) -> None:
    installed("asked", ASKED)
    async with load("asked", judge=judge, user=judge) as environment:
        line = write(await play(environment, player(2), build_row(2)))
    stored = json.loads(json.dumps(line))
    stored["gymsdk"]["environment_calls"][-1]["answer"] = "an old answer"
    path = tmp_path / "old.jsonl"
    path.write_text(json.dumps(stored | AGENT) + "\n")
    run = StoredRun(path)
    settings = {"asked": {"judge": judge, "user": judge}}
    async with open_local_judge(run, settings) as local_judge:
        [result] = [result async for result in reverify(run.iter_rollouts(), local_judge, concurrency=1)]
    written = result.build_line()
    assert written is not None
    check_record(written, 2)
    assert written["gymsdk"]["environment_calls"][:3] == line["gymsdk"]["environment_calls"][:3]


async def test_stored_calls_are_shown_and_the_rewards_of_steps_are_a_table(
    asked: Callable[..., Environment],
    player: Callable[[int], ScriptedModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "run.jsonl"
    plain = {"reward": 1.0, "gymsdk": {"step_rewards": "none", "environment_calls": [3, {"request": []}]}}
    path.write_bytes(jsonl.dump_row(write(await play(asked(), player(2), build_row(2)))) + jsonl.dump_row(plain))
    _, output = await run_command("show", path, "0:0")
    assert "rewards of the steps: 0, 0.5\n" in output
    assert re.findall(r"^(\w+) at (\w+(?: \d)?), [0-9.e-]+ s$", output, re.MULTILINE) == [
        ("user", "reset"),
        ("user", "step 0"),
        ("user", "step 1"),
        ("judge", "verify"),
    ]
    assert "user\n  grade word-2 \n\nassistant\n  echo grade word-2 " in output
    assert (await run_command("show", path, "1:0"))[0] == 0
    with read(path) as run:
        rows = run.arrow("steps").to_pylist()
        run.write_parquet(tmp_path / "steps.parquet", "steps")
        with pytest.raises(UsageError, match="no step of the chosen rollouts has a reward"):
            run.write_parquet(tmp_path / "none.parquet", "steps", where=["task=1"])
    assert [(row["task"], row["index"], row["step_reward"]) for row in rows] == [(0, 0, 0.0), (0, 1, 0.5)]
    assert {row["reward"] for row in rows} == {1.5}
    assert pq.read_table(tmp_path / "steps.parquet").to_pylist() == rows


@pytest.mark.slow
async def test_every_way_to_play_a_run_stores_the_calls(
    installed: Callable[..., Path], judge: str, tmp_path: Path
) -> None:
    installed("asked", ASKED)
    settings = ("--set", f"judge={judge}", "--set", f"user={judge}")
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(build_row(number) | AGENT) + "\n" for number in range(20)))
    model = ("--model", "vllm/echo")

    async def check(name: str, *options: str) -> None:
        code, output = await run_command("rollout", "asked", "--tasks", tasks, *options, "--output", tmp_path / name)
        assert code == 0, output
        lines = [line for _, line in jsonl.read_rows(tmp_path / name / "rollouts.jsonl")]
        assert len(lines) == 20
        for line in lines:
            check_record(line, line["_ng_task_index"])

    await check("local", *settings, *model)
    for options in (["--workers", "2"], ["--separate"]):
        async with serving("asked", *model, *settings, "--port", 0, *options) as deployment:
            await check(options[0].strip("-"), "--head", deployment.head)
