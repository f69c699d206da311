"""Released clients of NeMo Gym's wire, from PyPI, against `gymsdk serve`: they must give what an episode gives here.

Rows of tool_call are played in this process by a policy that is right about half of the time. Then foreign clients play
them against servers: the reward of each and what each of its tools answered must be the same. So that this can fail,
the same is asked where it must not hold: without cookies, and where nobody listens.

NeMo Gym also profiles the files of a run of ours. NeMo Gym 0.7 collects rows of which two fail, checks the health of
rollouts and exports them as ATIF, each with a control that must fail.

usage: foreign.py [verifiers] [nemo-gym-0.4] [nemo-gym-0.7]      all of them, if none is named

Each client has a venv of its own, made here; with `FOREIGN_VENVS=DIR` they stay in DIR for the next run. NeMo Gym
itself wants another Python than 3.11: where this machine has none, its lines say so. Exits with 1 where a client gives
something else, or a control does not.
"""

from __future__ import annotations

import asyncio
import glob
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from clients.between import forgetful, listening, streaming

from gymsdk import load, model, play
from gymsdk.rollouts import folder as lines
from gymsdk.rollouts.jobs import Job, build_input_row, compute_seed

NAME, ROWS = "tool_call", 8
LONG = "multineedle"
"""The environment whose rollouts are exported: ATIF as NeMo Gym writes it has no developer messages."""

POLICY = "scripted/oracle:0.5"
AGENT = Path(__file__).parent / "clients" / "nemo_agent.py"
COMPLETE = "complete"
"""The file in a venv that has all its packages."""

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
    """Return a venv with *packages*: one of an earlier run in the folder that `FOREIGN_VENVS` names, or a new one."""
    venv = Path(os.environ.get("FOREIGN_VENVS", folder.parent)) / folder.name
    if not (venv / COMPLETE).exists():
        await ran(python, "-m", "venv", "--clear", venv, folder=folder.parent)
        await ran(venv / "bin" / "python", "-m", "pip", "install", "-q", *packages, folder=folder.parent)
        (venv / COMPLETE).touch()
    return venv


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
            row = build_input_row(task.row(), environment=NAME, task=number, sampling={})
            rollout = await play(found, policy, row, seed=compute_seed(0, Job(NAME, number, 0, row)))
            rollouts.append(lines.build_scored_line(rollout, (number, 0)))
            # Agents elsewhere know of no tools but those in the row.
            row["responses_create_params"]["tools"] = [tool.schema for tool in found.tools.values()]
            rows.append(row)
    for name, each in (("rows", rows), ("rollouts", rollouts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in each))
    return [told_of(line) for line in rollouts]


@asynccontextmanager
async def served(
    folder: Path, *options: str, environment: str = NAME, model: str | None = None
) -> AsyncIterator[Servers]:
    """Serve the *environment* with *model*, or with one that says again what was said here."""
    policy = model or f"scripted/replay:{folder}/rollouts.jsonl"
    words = [sys.executable, "-m", "gymsdk", "serve", environment, "--model", policy]
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
        yield Servers(int(told["head"].rsplit(":", 1)[1]), at[environment], at["policy_model"])
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


async def collected(venv: Path, port: int, folder: Path, rows: Path, out: Path, *words: object) -> list[dict[str, Any]]:
    """Collect rollouts of *rows* from running servers with NeMo Gym's command line; return the lines of *out*."""
    at = ["+head_server.host=127.0.0.1", f"+head_server.port={port}"]
    files = ["--input", rows, "--output", out]
    await ran(venv / "bin" / "gym", "eval", "run", "--no-serve", *files, *words, *at, folder=folder)
    # They stand in the order in which they ended.
    return sorted(lines_of(out), key=lambda line: (line["_ng_task_index"], line["_ng_rollout_index"]))


async def by_command(venv: Path, port: int, folder: Path) -> Told:
    """Have the command line of NeMo Gym collect rollouts from running servers."""
    agent = ("--agent", f"{NAME}_simple_agent")
    found = await collected(venv, port, folder, folder / "rows.jsonl", folder / "collected.jsonl", *agent)
    return [told_of(line) for line in found]


async def by_agent(venv: Path, at: Servers, folder: Path) -> Told:
    """Have NeMo Gym's own agent play the rows, its tools and its model asked of our servers."""
    out = await ran(venv / "bin" / "python", AGENT, at.head, NAME, folder / "rows.jsonl", folder=folder)
    answers = [json.loads(line.removeprefix("LINE ")) for line in out.splitlines() if line.startswith("LINE ")]
    if errors := [each["error"] for each in answers if "error" in each]:
        raise Broken(errors[0])
    return [told_of(each) for each in answers]


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a JSONL file, none if there is no such file."""
    return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []


def written(path: Path, lines: Iterable[dict[str, Any]]) -> Path:
    """Write *lines* to a JSONL file."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


async def with_failures(venv: Path, port: int, folder: Path) -> Told:
    """Collect the rows and two that fail: one that does not fit, and one that the model cannot play."""
    rows = lines_of(folder / "rows.jsonl")
    unfit = {**rows[0], "_ng_task_index": ROWS, "expected": 7}
    unplayable = {**rows[0], "_ng_task_index": ROWS + 1}
    unplayable["responses_create_params"] = {**rows[0]["responses_create_params"], "input": "Nobody has recorded this."}
    sent, out = written(folder / "more.jsonl", [unfit, *rows, unplayable]), folder / "more_out.jsonl"
    found = await collected(venv, port, folder, sent, out, "--agent", f"{NAME}_simple_agent")
    failures = {line["_ng_task_index"]: line for line in lines_of(folder / "more_out_failures.jsonl")}
    if sorted(failures) != [ROWS, ROWS + 1] or any("reward" in line for line in failures.values()):
        raise Broken(f"the failures file is not as expected: {json.dumps(failures)[:800]}")
    return [told_of(line) for line in found]


async def played_to(folder: Path, *options: str) -> Path:
    """Play rollouts of `LONG` to a new *folder* with `gymsdk rollout`."""
    words = ["--split", "validation", "--limit", 2, "--repeats", 2, "--output", folder, *options]
    await ran(sys.executable, "-m", "gymsdk", "rollout", LONG, *words, folder=folder.parent)
    return folder


async def profiled(venv: Path, folder: Path, inputs: Path) -> str:
    """Have both commands of NeMo Gym profile a run's rollouts."""
    files = {"materialized_inputs_jsonl_fpath": inputs, "rollouts_jsonl_fpath": folder / "rollouts.jsonl"}
    flags = ("--inputs", inputs, "--rollouts", folder / "rollouts.jsonl")
    await ran(venv / "bin" / "gym", "eval", "profile", *flags, folder=folder)
    await ran(venv / "bin" / "ng_reward_profile", *(f"+{key}={path}" for key, path in files.items()), folder=folder)
    return f"{len(lines_of(folder / 'rollouts_reward_profiling.jsonl'))} tasks profiled"


async def healthy(venv: Path, folder: Path, *, export: bool = True) -> str:
    """Have NeMo Gym check the health of a run's rollouts and *export* them as ATIF."""
    told = await ran(venv / "bin" / "gym", "eval", "health-check", folder, "--json", folder=folder)
    verdicts = json.loads(next(line for line in told.splitlines() if line.startswith("{")))["run"]["verdicts"]
    if set(filter(verdicts.get, verdicts)) != {"healthy"}:
        raise Broken(f"the rollouts are not all healthy: {verdicts}")
    if not export:
        return f"{verdicts['healthy']} rollouts healthy"
    flags = ("--output-dir", folder / "atif", "--session-id", "s", "--agent-version", "1")
    rollouts = ("--rollouts", folder / "rollouts.jsonl")
    await ran(venv / "bin" / "gym", "eval", "export", "--format", "atif", *rollouts, *flags, folder=folder)
    return f"{verdicts['healthy']} rollouts healthy, {len(lines_of(folder / 'atif' / 'manifest.jsonl'))} exported"


async def observed(venv: Path, port: int, folder: Path, captures: Path, *, materialized: bool) -> str:
    """Collect rollouts of `LONG` with observability on, of flat rows or of *materialized* tasks, and check them."""
    tasks = folder.with_suffix(".jsonl")
    words = ("--split", "validation", "-n", 2, "--output", tasks)
    await ran(sys.executable, "-m", "gymsdk", "tasks", LONG, *words, folder=folder.parent)
    rows, routing = lines_of(tasks), f"+agent_name={LONG}_simple_agent"
    if materialized:
        routing = f"+environment_server_routes.{LONG}={LONG}_environment_server"
        rows = [materialized_task(number, row) for number, row in enumerate(rows)]
    options = (routing, "+num_repeats=2", "+observability_enabled=true", f"+model_call_capture_dir={captures}")
    sent = written(folder.with_suffix(".rows.jsonl"), rows)
    await collected(venv, port, folder.parent, sent, folder / "rollouts.jsonl", *options)
    # Of materialized tasks the collector makes the turns itself, and counts the tool calls before each turn. Its own
    # export wants them counted after the turn, and so takes no such rollout that calls a tool, whoever played it.
    return await healthy(venv, folder, export=not materialized)


def materialized_task(number: int, row: dict[str, Any]) -> dict[str, Any]:
    """Return *row* as NeMo Gym 0.7 writes a task of a taskset."""
    params = row["responses_create_params"]
    data = {key: value for key, value in row.items() if key not in {"responses_create_params", "agent_ref"}}
    task_input = {"responses_create_params": params, "task_data": data}
    return {"task_id": {"taskset": LONG, "task_id": str(number)}, "task_input": task_input}


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

    async def goes(self, what: str, doing: Awaitable[str], *, control: bool = False) -> None:
        """Print whether *doing* goes well; a *control* must not."""
        try:
            told, went = await doing, True
        except Broken as error:
            told, went = f"ended with an error{'' if control else f': {error}'}", False
        good = went != control
        self.kept &= good
        print(f"{what:<66} {told}{', as it must' if control and good else ''}{'' if good else '  WRONG'}")


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
        if version == "0.7.0":
            what = f"nemo-gym {version}, gym eval run, two more rows that fail"
            await score.same(what, with_failures(venv, at.head, folder))
    run = await played_to(folder / f"run-{version}", "--trajectories")
    await score.goes(f"nemo-gym {version}, gym eval profile", profiled(venv, run, run / "inputs.jsonl"))
    bare = ({key: line[key] for key in line if key != "_ng_rollout_index"} for line in lines_of(run / "inputs.jsonl"))
    without = profiled(venv, run, written(folder / "bare.jsonl", bare))
    await score.goes("  control: inputs without _ng_rollout_index", without, control=True)
    if version == "0.7.0":
        await observations(score, folder, venv, run)


async def observations(score: Score, folder: Path, venv: Path, run: Path) -> None:
    """Ask NeMo Gym 0.7 what it observes of our rollouts."""
    name = "nemo-gym 0.7.0, health check and ATIF"
    await score.goes(f"{name}, gymsdk rollout --trajectories", healthy(venv, run))
    blind = await played_to(folder / "blind")
    await score.goes("  control: without --trajectories", healthy(venv, blind), control=True)
    captures = folder / "captures"
    async with served(folder, "--capture-dir", str(captures), environment=LONG, model="scripted/oracle") as at:
        for kind, materialized in (("flat rows", False), ("materialized tasks", True)):
            there = folder / kind.replace(" ", "-")
            await score.goes(
                f"{name}, {kind} from servers", observed(venv, at.head, there, captures, materialized=materialized)
            )


async def main() -> int:
    """Ask each client; gives 1 where one gives something else."""
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        expected = await played_here(folder)
        score = Score(expected)
        rewards, calls = [reward for reward, _ in expected], sum(len(outputs) for _, outputs in expected)
        print(f"here: {ROWS} rows, mean reward {sum(rewards) / ROWS:g}, {calls} calls of tools")
        clients: dict[str, Callable[[], Awaitable[None]]] = {
            "verifiers": lambda: verifiers(score, folder),
            "nemo-gym-0.4": lambda: nemo_gym(score, folder, "0.4.0", python_of(12, 13)),
            # It asks for a later 3.13 than some machines have, and runs on earlier ones.
            "nemo-gym-0.7": lambda: nemo_gym(score, folder, "0.7.0", python_of(13), "--ignore-requires-python"),
        }
        for name in sys.argv[1:] or clients:
            try:
                await clients[name]()
            except Broken as error:
                score.kept = False
                print(f"could not be set up: {error}  WRONG")
    return 0 if score.kept else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
