"""Write the stored files that later versions must read: runs, annotations, an index and token captures.

usage: python tests/stored/write.py FOLDER      (with gymsdk, gym-env-math and gym-env-tool-call installed)

Run it with the last version before a change of the formats, and commit its files as a new folder. Then
`python tests/test_stored.py FOLDER` records the answers of that version's commands about the files.

- `scored`: maths and tool calls, right and wrong answers, two repeats, annotations.
- `tokens`: a task with token ids, log-probabilities and trajectories.
- `mixed`: scored with components and rewards of steps, unscorable, failed for good, failed in the policy, budget spent.
- `killed`: a run that was killed in the middle, with a torn last line.
- `lines.jsonl`: lines as NeMo Gym writes them, without the key of the host.
- `captures`: the token ids of model calls, as NeMo Gym 0.7 stores them; one rollout has lost a call.
- `index.sqlite`: the viewer's index of `scored`.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx

from gymsdk.runs.index import RunIndex
from gymsdk.runs.notes import RunNotes
from gymsdk.runs.source import find_run

OUTCOMES = '''
import json, time
from typing import Literal
from gymsdk import Config, Failed, Message, Reset, State, Step, Task, ToolCall, Unscorable, Verdict, hookimpl

class Settings(Config):
    pause: float = 0.0

class Case(Task):
    kind: str

class Count(State):
    calls: int = 0

class Graded(Verdict):
    note: str = ""
    share: float | None = None

def count(amount: int, state: Count) -> str:
    """Count up."""
    state.calls += amount
    return str(state.calls)

@hookimpl
def tools():
    return [count]

@hookimpl
def reset():
    return Reset(state=Count())

@hookimpl
def tasks(split: Literal["train"]):
    for kind in ("plain", "parts", "undecided", "raises", "failed", "negative"):
        yield Case.ask(f"Count {kind}", kind=kind)

@hookimpl
def step(task: Case, state: Count, action):
    if isinstance(action, ToolCall):
        state.calls += json.loads(action.arguments)["amount"]
        return Step(output=str(state.calls), reward=0.125 if task.kind == "plain" else 0.0)
    return Step(done=True)

@hookimpl
def verify(task: Case, transcript, state: Count, config: Settings):
    time.sleep(config.pause)
    if task.kind == "undecided":
        raise Unscorable("the reply has two answers")
    if task.kind == "raises":
        raise ValueError("the grader divided by zero")
    if task.kind == "failed":
        raise Failed("the judge is away", kind="judge_failed")
    if task.kind == "parts":
        return Graded(reward=0.75, components={"form": 0.25, "sum": 0.5}, note="two parts", share=0.5)
    return Graded(reward=-1.5 if task.kind == "negative" else 1.0, note=f"{state.calls} counted")

@hookimpl
def solve(task: Case):
    return Message(content="done")
'''
"""An environment whose tasks end in every way: scored, unscorable, failed."""

SCRIPT = [
    {"calls": [{"name": "count", "arguments": {"amount": 2}}]},
    {"calls": [{"name": "count", "arguments": {"amount": 3}}, {"name": "gone", "arguments": {}}]},
    {"text": "done", "reasoning": "2 + 3 = 5"},
]


def run(*words: object, folder: Path, code: int = 0, **environment: str) -> str:
    """Run a command of gymsdk; raise `SystemExit` if its exit code is not *code*."""
    command = [sys.executable, "-m", "gymsdk", *map(str, words)]
    ended = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    if ended.returncode != code:
        raise SystemExit(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")
    return ended.stdout


@contextmanager
def started(*words: object, folder: Path) -> Iterator[dict[str, Any]]:
    """Start a server of gymsdk, yield its output once it is ready, and stop it."""
    command = [sys.executable, "-m", "gymsdk", *map(str, words), "--port", "0", "--json"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield json.loads(server.stdout.readline())
        finally:
            server.terminate()


def install(site: Path) -> str:
    """Install the environment of all outcomes in *site*; return the value of PYTHONPATH."""
    about = site / "env_outcomes-1.0.dist-info"
    about.mkdir(parents=True)
    (site / "env_outcomes.py").write_text(OUTCOMES)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: env_outcomes\nVersion: 1.0\nSummary: Outcomes.\n")
    (about / "entry_points.txt").write_text("[gymsdk.environments]\noutcomes = env_outcomes\n")
    return str(site)


def write(target: Path) -> None:
    """Write all stored files to the new folder *target*."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        os.environ["PYTHONPATH"] = install(folder / "site")
        (folder / "script.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in SCRIPT))
        write_scored(folder)
        write_mixed(folder)
        write_killed(folder)
        write_lines(folder)
        write_captures(folder)
        write_notes_and_index(folder)
        target.mkdir(parents=True)
        for name in ("scored", "tokens", "mixed", "killed", "lines.jsonl", "captures", "index.sqlite"):
            (folder / name).rename(target / name)
    for path in target.rglob("*.lock"):
        path.unlink()
    for path in target.glob("*/run.json"):
        remove_machine(path)


def remove_machine(path: Path) -> None:
    """Leave out the folder, the system and the other distributions of the machine that wrote the run at *path*."""
    about = json.loads(path.read_bytes())
    kept = {name: version for name, version in about["distributions"].items() if name.startswith(("gym-env", "gymsdk"))}
    path.write_text(json.dumps(about | {"folder": "/runs", "platform": "Linux", "distributions": kept}, indent=2))


def write_scored(folder: Path) -> None:
    """Play a task of tool calls and one of maths twice, then the maths task with token ids in another run."""
    rows = ("--split", "validation", "--repeats", 2, "--seed", 5, "--limit", 1)
    run("rollout", "math", "tool_call", *rows, "--model", "scripted/oracle:0.6", "--output", "scored", folder=folder)
    with started("policy", "serve", "oracle:0.6", "--env", "math", "--seed", 5, folder=folder) as policy:
        engine = ("--model", "vllm/policy", "--base-url", policy["url"], "--token-ids")
        run("rollout", "math", *rows, *engine, "--trajectories", "--output", "tokens", folder=folder)


def write_mixed(folder: Path) -> None:
    """Play tasks that end in all ways, then another task whose episode exceeds its budget."""
    rows = ("outcomes", "--split", "train", "--model", "scripted/script:script.jsonl", "--attempts", 2)
    run("rollout", *rows, "--output", "mixed", folder=folder, code=1)
    run("rollout", *rows, "--turns", 2, "--limit", 1, "--output", "short", folder=folder)
    with (folder / "mixed" / "rollouts.jsonl").open("ab") as mixed:
        line = json.loads((folder / "short" / "rollouts.jsonl").read_bytes())
        mixed.write(json.dumps(line | {"_ng_rollout_index": 1}).encode() + b"\n")


def write_killed(folder: Path) -> None:
    """Kill a run after a third of its rollouts, and tear its last line."""
    words = ["rollout", "outcomes", "--split", "train", "--repeats", "4", "--concurrency", "2", "--set", "pause=0.1"]
    words += ["--model", "scripted/oracle", "--attempts", "1", "--output", "killed"]
    path = folder / "killed" / "rollouts.jsonl"
    with subprocess.Popen([sys.executable, "-m", "gymsdk", *words], cwd=folder) as process:
        while not path.exists() or path.read_bytes().count(b"\n") < 6:
            if process.poll() is not None:
                raise SystemExit("the run ended before it was killed")
            time.sleep(0.005)
        process.kill()
    data = path.read_bytes()
    path.write_bytes(data[: data.rstrip(b"\n").rindex(b"\n") + 400])


def write_lines(folder: Path) -> None:
    """Write lines of NeMo Gym: no key of the host, and failures with the keys of NeMo Gym alone."""
    lines = []
    for name in ("scored", "mixed", "tokens"):
        for file in ("rollouts.jsonl", "failures.jsonl"):
            if (folder / name / file).exists():
                lines += [json.loads(line) for line in (folder / name / file).read_bytes().splitlines()]
    with (folder / "lines.jsonl").open("w") as file:
        for line in lines[::3]:
            del line["gymsdk"]
            file.write(f"{json.dumps(line)}\n")


def write_captures(folder: Path) -> None:
    """Write the token ids of two rollouts: three calls of a conversation, and a rollout that lost a call."""
    with (
        started("policy", "serve", "echo", folder=folder) as policy,
        started(
            *("serve", "--role", "model", "--model", "vllm/policy", "--base-url", policy["url"], "--token-ids"),
            *("--token-capture-dir", "captures"),
            folder=folder,
        ) as server,
    ):
        base = server["servers"]["policy_model"]["url"].removesuffix("/v1")
        for name in ("whole", "lost"):
            url = f"{base}/ng-rollout/{name}/training-token-capture/v1/chat/completions"
            messages = [{"role": "user", "content": "Think of a number."}]
            for question in ("Is it even?", "Then double it.", "Which number is it now?"):
                answer = httpx.post(url, json={"model": "policy", "messages": messages}, timeout=60).raise_for_status()
                content = answer.json()["choices"][0]["message"]["content"]
                messages += [{"role": "assistant", "content": content}, {"role": "user", "content": question}]
    entries = folder / "captures" / "lost.tokens.jsonl"
    entries.write_bytes(b"".join(entries.read_bytes().splitlines(keepends=True)[:-1]))


def write_notes_and_index(folder: Path) -> None:
    """Annotate two rollouts of `scored`, and write the viewer's index of the run."""
    source = find_run(folder / "scored")
    notes = RunNotes(source)
    notes.add({"id": "0:0", "tags": ["clear", "keep"], "text": "right at once", "author": "reader"})
    notes.add({"id": "1:1", "item": 1, "tags": ["odd"], "text": "why this tool?", "author": "reader"})
    notes.add({"id": "0:0", "tags": ["keep"], "text": "right at once", "author": "reader"})
    index = RunIndex(source, folder / "index.sqlite")
    index.update()
    index.update_texts()
    with closing(sqlite3.connect(folder / "index.sqlite")) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("PRAGMA page_size = 1024")
        connection.execute("VACUUM")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
