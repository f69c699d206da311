"""Released clients of NeMo Gym's wire, from PyPI, against `gymsdk serve`: they must give what an episode gives here.

Rows of tool_call are played in this process by a policy that is right about half of the time. Then foreign clients play
them against servers: the reward of each and what each of its tools answered must be the same. So that this can fail,
the same is asked where it must not hold: without cookies, and where nobody listens.

Each client has a venv of its own, made here. NeMo Gym itself wants another Python than 3.11: where this machine has
none, its lines say so. Exits with 1 where a client gives something else, or a control does not.
"""

from __future__ import annotations

import asyncio
import glob
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from clients.between import forgetful, listening, streaming

from gymsdk import load, model, play
from gymsdk.rollouts import lines
from gymsdk.rollouts.jobs import Job, seed_of, stamped

NAME, ROWS = "tool_call", 8
POLICY = "scripted/oracle:0.5"
AGENT = Path(__file__).parent / "clients" / "nemo_agent.py"
PATIENCE = 600.0
"""Seconds that one command may take."""

Told = list[tuple[float, list[str]]]
"""The reward of each row, and what its tools answered."""

EVAL = """
model = "policy"
push = false
clean = true
max_concurrent = 4
output_dir = "{folder}/verifiers"
[client]
base_url = "{policy}/v1"
api_key_var = "OPENAI_API_KEY"
[env.taskset]
id = "nemo-gym"
dataset = "{folder}/rows.jsonl"
[env.taskset.task]
resources_url = "{resources}"
[env.agent]
runtime = {{ type = "subprocess" }}
[env.agent.harness]
id = "null"
"""


class Broken(Exception):
    """A command ended with an error; the text is what it said last."""


@dataclass(frozen=True)
class Servers:
    """Where the servers are: the head's port, the resources server, the model."""

    head: int
    resources: str
    policy: str


async def ran(*words: object, folder: Path) -> str:
    """Run a command in *folder*, and give what it prints; raises `Broken`."""
    names = os.environ | {"OPENAI_API_KEY": "none", "PATH": f"{Path(str(words[0])).parent}:{os.environ['PATH']}"}
    process = await asyncio.create_subprocess_exec(
        *map(str, words), cwd=folder, env=names, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(PATIENCE):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise Broken(out.decode(errors="replace")[-1500:])
    return out.decode(errors="replace")


async def made(python: str, folder: Path, *packages: str) -> Path:
    """Give the folder of a new venv with *packages*."""
    await ran(python, "-m", "venv", folder, folder=folder.parent)
    await ran(folder / "bin" / "python", "-m", "pip", "install", "-q", *packages, folder=folder.parent)
    return folder


def python_of(*minors: int) -> str | None:
    """Give a Python of one of these minor versions, if this machine has any."""
    root = os.environ.get("PYENV_ROOT", str(Path.home() / ".pyenv"))
    for minor in minors:
        for found in (shutil.which(f"python3.{minor}"), *glob.glob(f"{root}/versions/3.{minor}.*/bin/python")):  # noqa: PTH207 - the folder may not be there
            if found and "shims" not in found:
                return found
    return None


def told_of(line: dict[str, Any]) -> tuple[float, list[str]]:
    """Give what came of a rollout, as our own lines and NeMo Gym's have it."""
    items = line["response"]["output"]
    return line["reward"], [item["output"] for item in items if item["type"] == "function_call_output"]


async def played_here(folder: Path) -> Told:
    """Play the rows in this process, and write them and their rollouts to *folder*."""
    found, policy = load(NAME), model(POLICY)
    rows, rollouts = [], []
    async with found:
        for number, task in enumerate(islice(found.tasks("validation", seed=3), ROWS)):
            row = stamped(task.row(), environment=NAME, task=number, sampling={})
            rollout = await play(found, policy, row, seed=seed_of(0, Job(NAME, number, 0, row)))
            rollouts.append(lines.scored(rollout, (number, 0)))
            # Agents elsewhere know of no tools but those in the row.
            row["responses_create_params"]["tools"] = [tool.schema for tool in found.tools.values()]
            rows.append(row)
    for name, each in (("rows", rows), ("rollouts", rollouts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in each))
    return [told_of(line) for line in rollouts]


@asynccontextmanager
async def served(folder: Path, *options: str) -> AsyncIterator[Servers]:
    """Serve the environment, its model one that says again what was said here."""
    words = [sys.executable, "-m", "gymsdk", "serve", NAME, "--model", f"scripted/replay:{folder}/rollouts.jsonl"]
    with (folder / "serve.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *words, "--port", "0", "--json", *options, stdout=asyncio.subprocess.PIPE, stderr=log
        )
    assert process.stdout is not None, "it is a pipe"
    try:
        line = await process.stdout.readline()
        if not line:
            raise Broken((folder / "serve.log").read_text()[-1500:])
        told = json.loads(line)
        at = {name: each["url"] for name, each in told["servers"].items()}
        yield Servers(int(told["head"].rsplit(":", 1)[1]), at[NAME], at["policy_model"])
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def by_verifiers(venv: Path, at: Servers, folder: Path, resources: str) -> Told:
    """Have the `nemo-gym` taskset of verifiers play the rows."""
    shutil.rmtree(folder / "verifiers", ignore_errors=True)
    async with listening(streaming(at.policy)) as policy:
        (folder / "eval.toml").write_text(EVAL.format(folder=folder, policy=policy, resources=resources))
        await ran(venv / "bin" / "vf-eval", "@", folder / "eval.toml", folder=folder)
    (written,) = (folder / "verifiers").glob("*/traces.jsonl")
    found = {}
    for line in written.read_text().splitlines():
        (trace,) = json.loads(line)["traces"]
        if trace["errors"]:
            raise Broken(str(trace["errors"])[-500:])
        said = [node["message"] for node in trace["nodes"] if node["message"]["role"] == "tool"]
        number = int(trace["task"]["data"]["name"].rsplit(":", 1)[1])
        found[number] = (trace["rewards"]["nemo_gym"]["score"], [each["content"] for each in said])
    return [found[number] for number in sorted(found)]


async def by_command(venv: Path, port: int, folder: Path) -> Told:
    """Have the command line of NeMo Gym collect rollouts from running servers."""
    out = folder / "collected.jsonl"
    words = ["--agent", f"{NAME}_simple_agent", "--input", folder / "rows.jsonl", "--output", out]
    at = ["+head_server.host=127.0.0.1", f"+head_server.port={port}"]
    await ran(venv / "bin" / "gym", "eval", "run", "--no-serve", *words, *at, folder=folder)
    # In the order in which they ended.
    collected = sorted(map(json.loads, out.read_text().splitlines()), key=lambda line: line["_ng_task_index"])
    return [told_of(line) for line in collected]


async def by_agent(venv: Path, at: Servers, folder: Path) -> Told:
    """Have NeMo Gym's own agent play the rows, its tools and its model asked of our servers."""
    out = await ran(venv / "bin" / "python", AGENT, at.head, NAME, folder / "rows.jsonl", folder=folder)
    answers = [json.loads(line.removeprefix("LINE ")) for line in out.splitlines() if line.startswith("LINE ")]
    if errors := [each["error"] for each in answers if "error" in each]:
        raise Broken(errors[0])
    return [told_of(each) for each in answers]


@dataclass
class Score:
    """What was expected of each client, and whether all of it came true."""

    expected: Told
    kept: bool = True

    async def same(self, what: str, telling: Awaitable[Told], *, control: bool = False) -> None:
        """Print whether *telling* gives what an episode gives here; a *control* must not."""
        try:
            found = await telling
            right = sum(one == other for one, other in zip(found, self.expected, strict=False))
            told = f"{right} of {len(self.expected)} rows the same"
            held = right == len(found) == len(self.expected)
        except Broken as error:
            told, held = f"ended with an error{'' if control else f': {error}'}", False
        good = held != control
        self.kept &= good
        print(f"{what:<66} {told}{', as it must not be' if control and good else ''}{'' if good else '  WRONG'}")


async def verifiers(score: Score, folder: Path) -> None:
    """Ask the verifiers package."""
    venv = await made(sys.executable, folder / "verifiers-venv", "verifiers==0.4.0", "uv")
    name = "verifiers 0.4.0, taskset nemo-gym"
    async with served(folder) as at, listening(forgetful(at.resources)) as broken:
        await score.same(f"{name}, tools by POST", by_verifiers(venv, at, folder, at.resources))
        await score.same("  control: no cookies", by_verifiers(venv, at, folder, broken), control=True)
        nobody = "http://127.0.0.1:9"
        await score.same("  control: nobody there", by_verifiers(venv, at, folder, nobody), control=True)
    async with served(folder, "--mcp") as at:
        await score.same(f"{name}, tools by MCP", by_verifiers(venv, at, folder, at.resources))


async def nemo_gym(score: Score, folder: Path, version: str, python: str | None, *options: str) -> None:
    """Ask NeMo Gym itself in this *version*."""
    if python is None:
        print(f"nemo-gym {version}: not asked; this machine has no Python that it could run on")
        return
    venv = await made(python, folder / f"nemo-{version}", *options, f"nemo-gym=={version}")
    async with served(folder) as at:
        await score.same(f"nemo-gym {version}, gym eval run --no-serve", by_command(venv, at.head, folder))
        await score.same(f"nemo-gym {version}, its simple_agent", by_agent(venv, at, folder))
        await score.same("  control: nobody there", by_command(venv, 9, folder), control=True)


async def main() -> int:
    """Ask each client; gives 1 where one gives something else."""
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        expected = await played_here(folder)
        score = Score(expected)
        rewards, calls = [reward for reward, _ in expected], sum(len(outputs) for _, outputs in expected)
        print(f"here: {ROWS} rows, mean reward {sum(rewards) / ROWS:g}, {calls} calls of tools")
        asked: tuple[Callable[[], Awaitable[None]], ...] = (
            lambda: verifiers(score, folder),
            lambda: nemo_gym(score, folder, "0.4.0", python_of(12, 13)),
            # It asks for a later 3.13 than some machines have, and runs on earlier ones.
            lambda: nemo_gym(score, folder, "0.7.0", python_of(13), "--ignore-requires-python"),
        )
        for ask in asked:
            try:
                await ask()
            except Broken as error:
                score.kept = False
                print(f"could not be set up: {error}  WRONG")
    return 0 if score.kept else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
