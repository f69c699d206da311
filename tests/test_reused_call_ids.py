"""Engines repeat the ids of tool calls, in later turns and within one; each call keeps its own output."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiohttp import web
from pydantic import Field

from gymsdk import Action, Reset, State, Step, Task, ToolCall, Transcript, Verdict, hookimpl, model, play, responses
from gymsdk.convert.trajectory import build_trajectory
from gymsdk.environment import Environment
from gymsdk.jsonl import dump_row, read_rows
from gymsdk.line import StoredRollout
from gymsdk.runs import read
from gymsdk.runs.records import parse_record
from gymsdk.testing.endpoint import serve
from gymsdk.types import Item, Row, pair_outputs

STATIC = Path(__file__).resolve().parent.parent / "gymsdk" / "studio" / "static"

TURNS = {
    "in each turn": [["a"], ["a"], ["a"]],
    "within a turn": [["a", "a", "a"]],
    "in some turns": [["a", "b"], ["a"]],
    "like a number of gymsdk": [["a", "a"], ["a#2"]],
    "one letter and its copies": [["a#2", "a"], ["a", "a#2"]],
}


def call(call_id: str, name: str = "look_up", arguments: str = "{}") -> Item:
    return responses.build_function_call(name, arguments, call_id)


def output(call_id: str, text: str) -> Item:
    return responses.build_function_call_output(call_id, text)


@pytest.mark.parametrize("turns", TURNS.values(), ids=TURNS)
def test_each_call_of_a_transcript_has_its_own_id_and_output(turns: list[list[str]]) -> None:
    numbers, items = count(), []
    for turn in turns:
        items += [call(call_id) for call_id in turn]
        items += [output(call_id, f"output {next(numbers)}") for call_id in turn]
    transcript = Transcript(items=items)
    call_ids = [call.call_id for call in transcript.calls()]
    assert len(set(call_ids)) == len(call_ids)
    assert call_ids[0] == turns[0][0]
    expected = [f"output {number}" for number in range(len(call_ids))]
    assert [transcript.output(call_id) for call_id in call_ids] == expected == list(transcript.outputs().values())


def test_an_output_belongs_to_the_latest_turn_with_an_open_call_of_its_id() -> None:
    late = [call("a"), {"role": "user", "content": "go on"}, call("a"), output("a", "new"), output("a", "old")]
    unanswered = [call("a"), {"role": "user", "content": "go on"}, call("a"), output("a", "new"), call("a")]
    assert (pair_outputs(late), pair_outputs(unanswered)) == ({2: 3, 0: 4}, {2: 3})
    assert pair_outputs([call("a"), call("b"), output("b", "2"), output("a", "1"), output("c", "3")]) == {1: 2, 0: 3}


class Notes(State):
    by_call: dict[str, str] = Field(default_factory=dict)


def step(state: Notes, action: Action) -> Step:
    if not isinstance(action, ToolCall):
        return Step(done=True)
    state.by_call[action.call_id] = action.arguments
    return Step(output=f"looked up {action.arguments}")


def verify(state: Notes, transcript: Transcript) -> Verdict:
    calls = transcript.calls()
    is_right = all(transcript.output(call.call_id) == f"looked up {call.arguments}" for call in calls)
    return Verdict(reward=float(is_right and state.by_call == {call.call_id: call.arguments for call in calls}))


async def test_an_engine_with_one_id_gets_its_ids_back_and_the_environment_sees_unique_ones() -> None:
    histories: list[list[Any]] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        histories.append([message.get("tool_call_id") for message in body["messages"] if message["role"] == "tool"])
        functions = [{"name": "look_up", "arguments": json.dumps({"number": 2 * turn + place})} for place in (0, 1)]
        message: Item = {"role": "assistant", "content": "Done." if turn == 2 else None}
        if turn < 2:
            message["tool_calls"] = [{"id": "a", "type": "function", "function": function} for function in functions]
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    def look_up(number: int) -> str:
        """Look up a number."""
        return str(number)

    plugin: Any = ModuleType("numbers")
    plugin.tools, plugin.step, plugin.verify = hookimpl(lambda: [look_up]), hookimpl(step), hookimpl(verify)
    plugin.reset = hookimpl(lambda: Reset(state=Notes()))
    app = web.Application()
    app.router.add_post("/{path:.*}", handle)
    async with serve(app) as url, Environment("numbers", plugin) as environment:
        rollout = await play(environment, model("endpoint/m", base_url=url, retries=0), Task.ask("Look up.").row())
    assert (rollout.outcome, rollout.reward) == ("scored", 1.0), rollout.failure
    assert histories[-1] == ["a"] * 4
    trajectory = build_trajectory(rollout, task_id="t", rollout_id="t-0")
    assert trajectory is not None
    assert [call["output"] for call in trajectory["tool_calls"]] == [
        f'looked up {{"number": {number}}}' for number in range(4)
    ]


@pytest.fixture(scope="module")
def unique(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run in which the ids of calls are unique."""
    folder = tmp_path_factory.mktemp("runs") / "unique"
    options = ["tool_call", "--split", "train", "--limit", "12", "--model", "scripted/oracle", "--output", str(folder)]
    subprocess.run([sys.executable, "-m", "gymsdk", "rollout", *options], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def repeated(unique: Path) -> Path:
    """Return a copy of the run in which all calls have the same id, and the last output of each is an error."""
    for folder in (unique, shutil.copytree(unique, unique.with_name("repeated"))):
        lines = [line for _, line in read_rows(folder / "rollouts.jsonl")]
        for line in lines:
            items = line["response"]["output"]
            outputs = [item for item in items if item["type"] == "function_call_output"]
            for item in outputs[-1:]:
                item["output"] = '{"error": "broken"}'
            if folder != unique:
                line["response"]["output"] = [item | {"call_id": "a"} if "call_id" in item else item for item in items]
        (folder / "rollouts.jsonl").write_bytes(b"".join(map(dump_row, lines)))
    return unique.with_name("repeated")


def read_lines(folder: Path) -> list[Row]:
    return [line for _, line in read_rows(folder / "rollouts.jsonl")]


def run_gymsdk(*arguments: object) -> str:
    command = [sys.executable, "-m", "gymsdk", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_tables_counts_and_views_are_those_of_unique_ids(
    unique: Path, repeated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tables = [read(folder).arrow("tool_calls").drop_columns(["call_id"]).to_pylist() for folder in (unique, repeated)]
    assert tables[0] == tables[1]
    assert {row["is_error"] for row in tables[0]} == {False, True}
    counts = [[parse_record(StoredRollout(line)).tools for line in read_lines(folder)] for folder in (unique, repeated)]
    assert counts[0] == counts[1]
    longest = max(read_lines(unique), key=lambda line: len(line["response"]["output"]))["gymsdk"]["id"]
    assert run_gymsdk("show", unique, longest) == run_gymsdk("show", repeated, longest)
    names = []
    for folder in (unique, repeated):
        run_gymsdk("export", folder, "--sft", tmp_path / folder.name, "--min-reward", "0")
        rows = [json.loads(line) for line in (tmp_path / folder.name).read_text().splitlines()]
        names.append([[message.get("name") for message in row["messages"]] for row in rows])
    assert names[0] == names[1]
    assert any(len(set(name)) > 2 for name in names[0])


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_viewer_pairs_outputs_as_python_does(tmp_path: Path) -> None:
    shutil.copy(STATIC / "transcript.js", tmp_path)
    imports = {
        "core.js": ["Failure", "html", "source", "useEffect", "useRequest", "useState"],
        "markdown.js": ["Markdown"],
    }
    for file, names in imports.items():
        (tmp_path / file).write_text("".join(f"export const {name} = null;\n" for name in names))
    (tmp_path / "package.json").write_text('{"type": "module"}')
    conversations: list[list[Item]] = [
        [call("a"), output("a", "1"), call("a"), call("a"), output("a", "2"), output("a", "3")],
        [call("a"), {"role": "user", "content": "hm"}, call("a"), output("a", "2"), output("a", "1"), output("a", "0")],
        [call("b"), responses.build_reasoning("hm"), call("a"), output("a", "1"), output("b", "2"), output("c", "3")],
    ]
    (tmp_path / "main.js").write_text(
        'import { arrangeItems } from "./transcript.js";\n'
        f"const conversations = {json.dumps(conversations)};\n"
        "const arrange = (items) => arrangeItems(items).map(({ index, output }) => [index, items.indexOf(output)]);\n"
        "const rows = conversations.map(arrange);\n"
        "console.log(JSON.stringify(rows));\n"
    )
    shown = json.loads(subprocess.run(["node", "main.js"], cwd=tmp_path, check=True, capture_output=True).stdout)
    for items, rows in zip(conversations, shown, strict=True):
        pairs = pair_outputs(items)
        expected = [[index, pairs.get(index, -1)] for index in range(len(items)) if index not in pairs.values()]
        assert rows == expected
