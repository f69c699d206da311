"""Check released NeMo Gym clients from PyPI against `gymsdk serve`.

A policy that is correct about half of the time plays rows of tool_call in this process. The foreign clients then play
the same rows against servers: the reward and the tool outputs of each row must be the same. Negative controls check
that the comparison can fail: a client without cookies, and a port without a server.

NeMo Gym also profiles the output files of a gymsdk run. NeMo Gym 0.7 collects rows of which two fail, checks the health
of rollouts and exports them as ATIF. The profile and the health check each have a control that must fail.

usage: foreign.py [verifiers] [nemo-gym-0.4] [nemo-gym-0.7]      default: all clients

The script creates one virtual environment per client. `FOREIGN_VENVS=DIR` keeps the environments in DIR for the next
run. NeMo Gym itself needs a newer Python than 3.11; the script reports if this machine has no such Python. The exit
status is 1 if the result of a client differs, or if a control passes.
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

from clients.between import serve_app, with_streaming, without_cookies

from gymsdk import load, model, play
from gymsdk.line import build_line, compute_seed
from gymsdk.rollouts.jobs import build_input_row

NAME, ROWS = "tool_call", 8
LONG = "multineedle"
"""The environment for the ATIF export. It has no developer messages, which NeMo Gym cannot write as ATIF."""

POLICY = "scripted/oracle:0.5"
AGENT = Path(__file__).parent / "clients" / "nemo_agent.py"
COMPLETE_MARK = "complete"
"""The name of the file that marks a virtual environment with all packages installed."""

COMMAND_SECONDS = 600.0
"""Time limit for one command, in seconds."""

Results = list[tuple[float, list[str]]]
"""The reward and the tool outputs of each row."""

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


class CommandError(Exception):
    """A command failed; the message is the end of its output."""


@dataclass(frozen=True)
class Servers:
    """The port of the head, and the URLs of the resources server and the model server."""

    head: int
    resources: str
    policy: str


async def run_command(*arguments: object, folder: Path) -> str:
    """Run a command in *folder* and return its output.

    Raises:
        CommandError: The command fails.
    """
    names = os.environ | {"OPENAI_API_KEY": "none", "PATH": f"{Path(str(arguments[0])).parent}:{os.environ['PATH']}"}
    process = await asyncio.create_subprocess_exec(
        *map(str, arguments), cwd=folder, env=names, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(COMMAND_SECONDS):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise CommandError(out.decode(errors="replace")[-1500:])
    return out.decode(errors="replace")


async def create_venv(python: str, folder: Path, *packages: str) -> Path:
    """Return a virtual environment with *packages*: from an earlier run in the `FOREIGN_VENVS` folder, or a new one."""
    venv = Path(os.environ.get("FOREIGN_VENVS", folder.parent)) / folder.name
    if not (venv / COMPLETE_MARK).exists():
        await run_command(python, "-m", "venv", "--clear", venv, folder=folder.parent)
        await run_command(venv / "bin" / "python", "-m", "pip", "install", "-q", *packages, folder=folder.parent)
        (venv / COMPLETE_MARK).touch()
    return venv


def find_python(*minors: int) -> str | None:
    """Return a Python interpreter with one of these minor versions, or None."""
    root = os.environ.get("PYENV_ROOT", str(Path.home() / ".pyenv"))
    for minor in minors:
        for found in (shutil.which(f"python3.{minor}"), *glob.glob(f"{root}/versions/3.{minor}.*/bin/python")):  # noqa: PTH207 - the folder may not be there
            if found and "shims" not in found:
                return found
    return None


def row_result(line: dict[str, Any]) -> tuple[float, list[str]]:
    """Return the reward and the tool outputs of a rollout line, from gymsdk or from NeMo Gym."""
    items = line["response"]["output"]
    return line["reward"], [item["output"] for item in items if item["type"] == "function_call_output"]


async def play_in_process(folder: Path) -> Results:
    """Play the rows in this process; write the rows and their rollouts to *folder*."""
    found, policy = load(NAME), model(POLICY)
    rows, rollouts = [], []
    async with found:
        for number, task in enumerate(islice(found.tasks("validation", seed=3), ROWS)):
            row = build_input_row(task.row(), environment=NAME, task=number, sampling={})
            rollout = await play(found, policy, row, seed=compute_seed(0, NAME, number))
            rollouts.append(build_line(rollout, (number, 0)))
            # Agents on other machines know only the tools in the row.
            row["responses_create_params"]["tools"] = [tool.schema for tool in found.tools.values()]
            rows.append(row)
    for name, lines in (("rows", rows), ("rollouts", rollouts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [row_result(line) for line in rollouts]


@asynccontextmanager
async def serve(
    folder: Path, *options: str, environment: str = NAME, model: str | None = None
) -> AsyncIterator[Servers]:
    """Serve the *environment* with *model*, or with a model that replays the rollouts of this process."""
    policy = model or f"scripted/replay:{folder}/rollouts.jsonl"
    arguments = [sys.executable, "-m", "gymsdk", "serve", environment, "--model", policy]
    with (folder / "serve.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *arguments, "--port", "0", "--json", *options, stdout=asyncio.subprocess.PIPE, stderr=log
        )
    assert process.stdout is not None, "stdout is a pipe"
    try:
        line = await process.stdout.readline()
        if not line:
            raise CommandError((folder / "serve.log").read_text()[-1500:])
        ready = json.loads(line)
        urls = {name: server["url"] for name, server in ready["servers"].items()}
        yield Servers(int(ready["head"].rsplit(":", 1)[1]), urls[environment], urls["policy_model"])
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def play_with_verifiers(venv: Path, servers: Servers, folder: Path, resources: str) -> Results:
    """Play the rows with the `nemo-gym` taskset of verifiers."""
    shutil.rmtree(folder / "verifiers", ignore_errors=True)
    async with serve_app(with_streaming(servers.policy)) as policy:
        (folder / "eval.toml").write_text(EVAL.format(folder=folder, policy=policy, resources=resources))
        await run_command(venv / "bin" / "vf-eval", "@", folder / "eval.toml", folder=folder)
    (traces,) = (folder / "verifiers").glob("*/traces.jsonl")
    found = {}
    for line in traces.read_text().splitlines():
        (trace,) = json.loads(line)["traces"]
        if trace["errors"]:
            raise CommandError(str(trace["errors"])[-500:])
        outputs = [node["message"] for node in trace["nodes"] if node["message"]["role"] == "tool"]
        number = int(trace["task"]["data"]["name"].rsplit(":", 1)[1])
        found[number] = (trace["rewards"]["nemo_gym"]["score"], [message["content"] for message in outputs])
    return [found[number] for number in sorted(found)]


async def collect(
    venv: Path, port: int, folder: Path, rows: Path, out: Path, *arguments: object
) -> list[dict[str, Any]]:
    """Collect rollouts of *rows* from running servers with the NeMo Gym command line; return the lines of *out*."""
    head = ["+head_server.host=127.0.0.1", f"+head_server.port={port}"]
    files = ["--input", rows, "--output", out]
    await run_command(venv / "bin" / "gym", "eval", "run", "--no-serve", *files, *arguments, *head, folder=folder)
    # NeMo Gym writes the lines in the order of completion.
    return sorted(lines_of(out), key=lambda line: (line["_ng_task_index"], line["_ng_rollout_index"]))


async def play_with_command_line(venv: Path, port: int, folder: Path) -> Results:
    """Collect rollouts from running servers with the NeMo Gym command line."""
    agent = ("--agent", f"{NAME}_simple_agent")
    found = await collect(venv, port, folder, folder / "rows.jsonl", folder / "collected.jsonl", *agent)
    return [row_result(line) for line in found]


async def play_with_agent(venv: Path, servers: Servers, folder: Path) -> Results:
    """Play the rows with the NeMo Gym agent, which calls the tools and the model of the gymsdk servers."""
    out = await run_command(venv / "bin" / "python", AGENT, servers.head, NAME, folder / "rows.jsonl", folder=folder)
    answers = [json.loads(line.removeprefix("LINE ")) for line in out.splitlines() if line.startswith("LINE ")]
    if errors := [answer["error"] for answer in answers if "error" in answer]:
        raise CommandError(errors[0])
    return [row_result(answer) for answer in answers]


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a JSONL file, or an empty list if the file does not exist."""
    return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> Path:
    """Write *lines* to a JSONL file."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


async def collect_with_failures(venv: Path, port: int, folder: Path) -> Results:
    """Collect the rows and two rows that fail: an invalid row, and a row that the model cannot replay."""
    rows = lines_of(folder / "rows.jsonl")
    invalid = {**rows[0], "_ng_task_index": ROWS, "expected": 7}
    unplayable = {**rows[0], "_ng_task_index": ROWS + 1}
    unplayable["responses_create_params"] = {
        **rows[0]["responses_create_params"],
        "input": "This prompt has no recording.",
    }
    sent, out = write_lines(folder / "more.jsonl", [invalid, *rows, unplayable]), folder / "more_out.jsonl"
    found = await collect(venv, port, folder, sent, out, "--agent", f"{NAME}_simple_agent")
    failures = {line["_ng_task_index"]: line for line in lines_of(folder / "more_out_failures.jsonl")}
    if sorted(failures) != [ROWS, ROWS + 1] or any("reward" in line for line in failures.values()):
        raise CommandError(f"the failures file is not as expected: {json.dumps(failures)[:800]}")
    return [row_result(line) for line in found]


async def run_rollouts(folder: Path, *options: str) -> Path:
    """Play rollouts of `LONG` to a new *folder* with `gymsdk rollout`."""
    arguments = ["--split", "validation", "--limit", 2, "--repeats", 2, "--output", folder, *options]
    await run_command(sys.executable, "-m", "gymsdk", "rollout", LONG, *arguments, folder=folder.parent)
    return folder


async def profile(venv: Path, folder: Path, inputs: Path) -> str:
    """Profile the rollouts of a run with both NeMo Gym commands."""
    files = {"materialized_inputs_jsonl_fpath": inputs, "rollouts_jsonl_fpath": folder / "rollouts.jsonl"}
    flags = ("--inputs", inputs, "--rollouts", folder / "rollouts.jsonl")
    await run_command(venv / "bin" / "gym", "eval", "profile", *flags, folder=folder)
    await run_command(
        venv / "bin" / "ng_reward_profile", *(f"+{key}={path}" for key, path in files.items()), folder=folder
    )
    return f"{len(lines_of(folder / 'rollouts_reward_profiling.jsonl'))} tasks profiled"


async def check_health(venv: Path, folder: Path, *, export: bool = True) -> str:
    """Check the health of the rollouts of a run with NeMo Gym, and *export* them as ATIF."""
    report = await run_command(venv / "bin" / "gym", "eval", "health-check", folder, "--json", folder=folder)
    verdicts = json.loads(next(line for line in report.splitlines() if line.startswith("{")))["run"]["verdicts"]
    if set(filter(verdicts.get, verdicts)) != {"healthy"}:
        raise CommandError(f"the rollouts are not all healthy: {verdicts}")
    if not export:
        return f"{verdicts['healthy']} rollouts healthy"
    flags = ("--output-dir", folder / "atif", "--session-id", "s", "--agent-version", "1")
    rollouts = ("--rollouts", folder / "rollouts.jsonl")
    await run_command(venv / "bin" / "gym", "eval", "export", "--format", "atif", *rollouts, *flags, folder=folder)
    return f"{verdicts['healthy']} rollouts healthy, {len(lines_of(folder / 'atif' / 'manifest.jsonl'))} exported"


async def collect_and_check(venv: Path, port: int, folder: Path, captures: Path, *, materialized: bool) -> str:
    """Collect rollouts of `LONG` with observability on, of flat rows or of *materialized* tasks, and check them."""
    tasks = folder.with_suffix(".jsonl")
    arguments = ("--split", "validation", "-n", 2, "--output", tasks)
    await run_command(sys.executable, "-m", "gymsdk", "tasks", LONG, *arguments, folder=folder.parent)
    rows, routing = lines_of(tasks), f"+agent_name={LONG}_simple_agent"
    if materialized:
        routing = f"+environment_server_routes.{LONG}={LONG}_environment_server"
        rows = [materialized_task(number, row) for number, row in enumerate(rows)]
    options = (routing, "+num_repeats=2", "+observability_enabled=true", f"+model_call_capture_dir={captures}")
    sent = write_lines(folder.with_suffix(".rows.jsonl"), rows)
    await collect(venv, port, folder.parent, sent, folder / "rollouts.jsonl", *options)
    # For materialized tasks, the NeMo Gym collector builds the turns and counts the tool calls before each turn. Its
    # export expects the count after the turn, so the export rejects every rollout of this kind that calls a tool.
    return await check_health(venv, folder, export=not materialized)


def materialized_task(number: int, row: dict[str, Any]) -> dict[str, Any]:
    """Return *row* as NeMo Gym 0.7 writes a task of a taskset."""
    params = row["responses_create_params"]
    data = {key: value for key, value in row.items() if key not in {"responses_create_params", "agent_ref"}}
    task_input = {"responses_create_params": params, "task_data": data}
    return {"task_id": {"taskset": LONG, "task_id": str(number)}, "task_input": task_input}


@dataclass
class Score:
    """The expected results, and whether all checks have passed."""

    expected: Results
    passed: bool = True

    async def check_equal(self, label: str, results: Awaitable[Results], *, control: bool = False) -> None:
        """Print whether *results* equal the expected results; a *control* must differ."""
        try:
            found = await results
            right = sum(one == other for one, other in zip(found, self.expected, strict=False))
            message = f"{right} of {len(self.expected)} rows equal"
            equal = right == len(found) == len(self.expected)
        except CommandError as error:
            message, equal = f"failed{'' if control else f': {error}'}", False
        good = equal != control
        self.passed &= good
        print(
            f"{label:<66} {message}{', different as expected' if control and good else ''}{'' if good else '  WRONG'}"
        )

    async def check_success(self, label: str, operation: Awaitable[str], *, control: bool = False) -> None:
        """Print whether *operation* succeeds; a *control* must fail."""
        try:
            message, succeeded = await operation, True
        except CommandError as error:
            message, succeeded = f"failed{'' if control else f': {error}'}", False
        good = succeeded != control
        self.passed &= good
        print(f"{label:<66} {message}{', as expected' if control and good else ''}{'' if good else '  WRONG'}")


async def verifiers(score: Score, folder: Path) -> None:
    """Check the verifiers package."""
    venv = await create_venv(sys.executable, folder / "verifiers-venv", "verifiers==0.4.0", "uv")
    name = "verifiers 0.4.0, taskset nemo-gym"
    async with serve(folder) as servers, serve_app(without_cookies(servers.resources)) as broken:
        await score.check_equal(f"{name}, tools by POST", play_with_verifiers(venv, servers, folder, servers.resources))
        await score.check_equal(
            "  control: no cookies", play_with_verifiers(venv, servers, folder, broken), control=True
        )
        unreachable = "http://127.0.0.1:9"
        await score.check_equal(
            "  control: no server", play_with_verifiers(venv, servers, folder, unreachable), control=True
        )
    async with serve(folder, "--mcp") as servers:
        await score.check_equal(f"{name}, tools by MCP", play_with_verifiers(venv, servers, folder, servers.resources))


async def nemo_gym(score: Score, folder: Path, version: str, python: str | None, *options: str) -> None:
    """Check NeMo Gym itself in this *version*."""
    if python is None:
        print(f"nemo-gym {version}: skipped; this machine has no suitable Python version")
        return
    venv = await create_venv(python, folder / f"nemo-{version}", *options, f"nemo-gym=={version}")
    async with serve(folder) as servers:
        await score.check_equal(
            f"nemo-gym {version}, gym eval run --no-serve", play_with_command_line(venv, servers.head, folder)
        )
        await score.check_equal(f"nemo-gym {version}, its simple_agent", play_with_agent(venv, servers, folder))
        await score.check_equal("  control: no server", play_with_command_line(venv, 9, folder), control=True)
        if version == "0.7.0":
            label = f"nemo-gym {version}, gym eval run, two more rows that fail"
            await score.check_equal(label, collect_with_failures(venv, servers.head, folder))
    run = await run_rollouts(folder / f"run-{version}", "--trajectories")
    await score.check_success(f"nemo-gym {version}, gym eval profile", profile(venv, run, run / "inputs.jsonl"))
    bare = ({key: line[key] for key in line if key != "_ng_rollout_index"} for line in lines_of(run / "inputs.jsonl"))
    without = profile(venv, run, write_lines(folder / "bare.jsonl", bare))
    await score.check_success("  control: inputs without _ng_rollout_index", without, control=True)
    if version == "0.7.0":
        await check_observability(score, folder, venv, run)


async def check_observability(score: Score, folder: Path, venv: Path, run: Path) -> None:
    """Check the observability commands of NeMo Gym 0.7 on gymsdk rollouts."""
    name = "nemo-gym 0.7.0, health check and ATIF"
    await score.check_success(f"{name}, gymsdk rollout --trajectories", check_health(venv, run))
    without_trajectories = await run_rollouts(folder / "blind")
    await score.check_success(
        "  control: without --trajectories", check_health(venv, without_trajectories), control=True
    )
    captures = folder / "captures"
    async with serve(folder, "--capture-dir", str(captures), environment=LONG, model="scripted/oracle") as servers:
        for kind, materialized in (("flat rows", False), ("materialized tasks", True)):
            there = folder / kind.replace(" ", "-")
            await score.check_success(
                f"{name}, {kind} from servers",
                collect_and_check(venv, servers.head, there, captures, materialized=materialized),
            )


async def main() -> int:
    """Check each client; return 1 if a check fails."""
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        expected = await play_in_process(folder)
        score = Score(expected)
        rewards, calls = [reward for reward, _ in expected], sum(len(outputs) for _, outputs in expected)
        print(f"here: {ROWS} rows, mean reward {sum(rewards) / ROWS:g}, {calls} tool calls")
        clients: dict[str, Callable[[], Awaitable[None]]] = {
            "verifiers": lambda: verifiers(score, folder),
            "nemo-gym-0.4": lambda: nemo_gym(score, folder, "0.4.0", find_python(12, 13)),
            # The package requires a later 3.13 release than some machines have, but runs on earlier releases.
            "nemo-gym-0.7": lambda: nemo_gym(score, folder, "0.7.0", find_python(13), "--ignore-requires-python"),
        }
        for name in sys.argv[1:] or clients:
            try:
                await clients[name]()
            except CommandError as error:
                score.passed = False
                print(f"could not be set up: {error}  WRONG")
    return 0 if score.passed else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
