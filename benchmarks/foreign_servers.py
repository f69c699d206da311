"""Play resources servers of NeMo Gym's wheel behind gymsdk's agents, and compare the rewards with the recorded ones.

usage: foreign_servers.py [--python PATH] [--together N] [--trainer] [SERVER...]

The wheel has example rollouts of most servers. A scripted policy repeats their turns, each server grades them, and the
table shows how many rewards are as recorded. Every server starts from its own configuration file, alone or, with
--together, in one deployment: the first N of the named servers, or with 0 all that start with the wheel alone.
With --trainer, `nemo_gym.cli.RunHelper` starts the deployment and `RolloutCollectionHelper` plays the rows.
Without --python, the script installs the wheel into an environment of the newest interpreter. The exit status is 1 if a
rollout has no reward.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gymsdk.config import load_config_mapping
from gymsdk.deploy.programs import build_install_commands, check_deployment, get_base_python, split_programs
from gymsdk.errors import BadConfig

NEMO_GYM = "nemo-gym==0.7.0"
SERVERS = (
    "calendar",
    "example_multi_step",
    "example_multi_turn_gymnasium",
    "example_session_state_mgmt",
    "example_single_tool_call",
    "example_tool_call_multireward",
    "mcqa",
    "string_match",
    "workplace_assistant",
    "xlam_fc",
)
GYMSDK = [sys.executable, "-m", "gymsdk"]
POLICY = {"policy_model": {"responses_api_models": {"gymsdk_model": {"model": "scripted/null"}}}}
TOLERANCE = 1e-9
AGENTS = ("simple_agent", "gymnasium_agent")
REASONS = (
    (r"ModuleNotFoundError|ImportError|Failed to import|is required to build|libreoffice", "package"),
    (r"URLError|HTTPError|LocalEntryNotFound|clone|client has been closed|exit status 12[78]", "network"),
    (r"FileNotFoundError|there is no file|no answer", "data"),
    (r"no implementation|there is no agent", "agent"),
    (r"responses_api_models|model's name|base_url|local_vllm_model|^judge_model", "model"),
    (r"does not resolve|ValidationError|must be set", "setting"),
    (r"not_recorded|has no episode|recorded episode ends", "recording"),
    (r"url='http://127.0.0.1:\d+/v1/", "judge"),
    (r"[Ss]andbox|[Dd]ocker|apptainer", "sandbox"),
)
"""Patterns of the message with which a server does not start, and what is missing, in one word."""


@dataclass(frozen=True)
class Server:
    """A resources server of the wheel: its *folder*, and the configuration *file* that starts it."""

    folder: Path
    file: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def blocks(self) -> dict[str, dict[str, Any]]:
        """The settings of each resources server in the file, by the name of its block."""
        config = yaml.safe_load(self.file.read_text())
        found = {name: block.get("resources_servers") for name, block in config.items() if isinstance(block, dict)}
        return {name: next(iter(block.values())) for name, block in found.items() if block}

    @property
    def agent(self) -> str:
        config = yaml.safe_load(self.file.read_text())
        agents = [
            name
            for name, block in config.items()
            if isinstance(block, dict) and {*AGENTS} & {*block.get("responses_api_agents", {})}
        ]
        return agents[0] if agents else f"{next(iter(self.blocks))}_simple_agent"

    def build_override(self, python: Path) -> dict[str, Any]:
        """Return the settings that name the program, so that no installed environment replaces it."""
        program = {"entrypoint": str(self.folder / "app.py"), "python": str(python)}
        # More workers than cores would only take memory.
        workers = {name: min(block.get("num_workers", 1), os.cpu_count() or 1) for name, block in self.blocks.items()}
        return {
            name: {"resources_servers": {self.folder.name: {**program, "num_workers": workers[name]}}}
            for name in self.blocks
        }

    def read_rollouts(self) -> list[dict[str, Any]]:
        return [line for line in read_if_any(self.folder / "data" / "example_rollouts.jsonl") if "reward" in line]

    def list_rows(self) -> list[dict[str, Any]]:
        """Return the example rows that have one recorded rollout.

        The rollouts may be of fewer rows, or of other versions of them. Rows with the same input, as those of a game,
        have several, and the policy does not know which to repeat.
        """
        recorded = Counter(get_input(rollout) for rollout in self.read_rollouts())
        rows = [row for row in read(self.folder / "data" / "example.jsonl") if recorded[get_input(row)] == 1]
        return [row | {"agent_ref": {"type": "responses_api_agents", "name": self.agent}} for row in rows]


def install(folder: Path) -> Path:
    """Install the wheel into an environment in *folder*, and return its interpreter."""
    listed = folder.with_suffix(".txt")
    listed.write_text(NEMO_GYM)
    for command in build_install_commands(folder, listed, get_base_python(NEMO_GYM)):
        subprocess.run(command, check=True)
    return folder / "bin" / "python"


def find_servers(python: Path) -> Path:
    """Return the folder of the wheel's resources servers."""
    code = "import resources_servers; print(list(resources_servers.__path__)[0])"
    found = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return Path(found.stdout.strip())


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines() if line]


def read_if_any(file: Path) -> list[dict[str, Any]]:
    return read(file) if file.exists() else []


def get_input(row: dict[str, Any]) -> str:
    """Return the texts of the messages of a row, by which a row and its rollout are matched."""
    given = row["responses_create_params"]["input"]
    return given if isinstance(given, str) else json.dumps([message.get("content") for message in given])


def list_files(folder: Path) -> list[Path]:
    """Return the configuration files of a server, the one with its name first."""
    return sorted((folder / "configs").glob("*.yaml"), key=lambda file: (file.stem != folder.name, file.name))


def load(server: Server, python: Path) -> list[dict[str, Any]]:
    """Return the input of the probe for each program of *server*; raises `BadConfig` if its file needs other files."""
    deployment = load_config_mapping(
        {"config_paths": [str(server.file)], **POLICY, **server.build_override(python)}, reads_env=False
    )
    check_deployment(deployment)
    _, programs = split_programs(deployment)
    model = {"responses_api_models": {"gymsdk_model": {"host": "127.0.0.1", "port": 9}}}
    return [
        {
            "app": str(program.path),
            "name": program.server.name,
            "config": {
                "dry_run": False,
                "head_server": {"host": "127.0.0.1", "port": 9},
                "policy_model": model,
                program.server.name: {"resources_servers": {program.server.implementation: {**program.server.written}}},
            },
        }
        for program in programs
    ]


def choose_file(folder: Path, python: Path) -> tuple[Server, dict[str, Any]]:
    """Return the server in *folder* with the first of its files that needs no other files, and the input of the probe.

    Raises:
        BadConfig: Each file needs others; the message is that of the first.
    """
    errors = [BadConfig("there is no file")]
    for file in list_files(folder):
        try:
            return Server(folder, file), load(Server(folder, file), python)[0]
        except BadConfig as error:
            errors.append(error)
        except IndexError:
            continue
    raise errors[1] if errors[1:] else errors[0]


def find_startable(servers: Path, python: Path) -> tuple[list[Server], dict[str, str]]:
    """Return the servers that start with the wheel alone, and for each of the others what is missing."""
    loaded: list[tuple[Server, dict[str, Any]]] = []
    missing: dict[str, str] = {}
    for folder in sorted(path.parent for path in servers.glob("*/app.py")):
        try:
            loaded.append(choose_file(folder, python))
        except BadConfig as error:
            missing[folder.name] = name_reason(str(error))
    command = [str(python), "-W", "ignore", str(Path(__file__).with_name("wheel_probe.py"))]
    lines = "".join(f"{json.dumps(given)}\n" for _, given in loaded)
    probed = subprocess.run(command, input=lines, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    errors = {server: json.loads(line) for (server, _), line in zip(loaded, probed, strict=True)}
    missing |= {server.name: name_reason(why) for server, why in errors.items() if why is not None}
    return [server for server, why in errors.items() if why is None], missing


def name_reason(why: str) -> str:
    """Return in one word what is missing, or *why* itself if no pattern knows it."""
    return next((word for pattern, word in REASONS if re.search(pattern, why)), why)


@contextmanager
def serve(servers: Sequence[Server], override: Path, folder: Path) -> Iterator[tuple[str, float]]:
    """Run the *servers* with `gymsdk serve`, and yield the URL of the head and the seconds of the start."""
    files = [str(server.file) for server in servers]
    options = [word for file in [*files, str(override)] for word in ("--config", file)]
    began = time.monotonic()
    with (
        (folder / "log.txt").open("w") as log,
        subprocess.Popen(
            [*GYMSDK, "serve", *options, "--port", "0", "--ray-address", "none", "--json"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as served,
    ):
        try:
            assert served.stdout is not None
            line = served.stdout.readline()
            if not line:
                raise SystemExit((folder / "log.txt").read_text()[-2000:])
            yield json.loads(line)["head"], time.monotonic() - began
        finally:
            served.terminate()


def play(head: str, rows: Sequence[dict[str, Any]], folder: Path) -> dict[int, float | str]:
    """Play the *rows* with `gymsdk rollout`, and return by number the reward of each row, or why it has none."""
    file, run = folder / "rows.jsonl", folder / "run"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    command = [*GYMSDK, "rollout", "--head", head, "--tasks", str(file), "--output", str(run), "--json"]
    # Rows that need a sandbox or a network would try for minutes.
    command += ["--deadline", "120", "--attempts", "1"]
    subprocess.run(command, capture_output=True, check=False)
    lines = [line for name in ("failures", "rollouts") for line in read_if_any(run / f"{name}.jsonl")]
    return {line["_ng_task_index"]: read_result(line) for line in lines}


def read_result(line: dict[str, Any]) -> float | str:
    """Return the reward of a rollout, or why it has none."""
    return float(line["reward"]) if "reward" in line else str(line["_ng_failure_message"])


def train(
    servers: Sequence[Server], settings: dict[str, Any], rows: Sequence[dict[str, Any]]
) -> tuple[float, dict[int, float | str]]:
    """Run the *servers* and play the *rows* as a trainer does, with the names of NeMo Gym's Python package."""
    from omegaconf import OmegaConf

    from nemo_gym.cli import RunHelper
    from nemo_gym.global_config import GlobalConfigDictParserConfig
    from nemo_gym.rollout_collection import RolloutCollectionHelper

    with socket.create_server(("127.0.0.1", 0)) as free:
        head = {"host": "127.0.0.1", "port": free.getsockname()[1]}
    given = {"config_paths": [str(server.file) for server in servers], "head_server": head, **settings}
    helper, began = RunHelper(), time.monotonic()
    helper.start(
        GlobalConfigDictParserConfig(initial_global_config_dict=OmegaConf.create(given), skip_load_from_cli=True)
    )
    seconds = time.monotonic() - began
    numbered = [row | {"_rowidx": number} for number, row in enumerate(rows)]

    async def collect() -> dict[int, float | str]:
        waiting = RolloutCollectionHelper().run_examples(numbered, route_failures_to_sidecar=True)
        played = [await future for future in waiting]
        return {row["_rowidx"]: read_result(result) for row, result in played}

    try:
        return seconds, asyncio.run(collect())
    finally:
        helper.shutdown()


def run(servers: Sequence[Server], python: Path, folder: Path, *, trainer: bool) -> tuple[float, list[Counter[str]]]:
    """Start the *servers* together and play their rows; return the seconds of the start, and the counts of each."""
    replayed, override = folder / "replayed.jsonl", folder / "override.yaml"
    rollouts = [rollout for server in servers for rollout in server.read_rollouts()]
    replayed.write_text("".join(f"{json.dumps(rollout)}\n" for rollout in rollouts))
    settings = {"policy_model": {"responses_api_models": {"gymsdk_model": {"model": f"scripted/replay:{replayed}"}}}}
    for server in servers:
        settings |= server.build_override(python)
    # JSON is YAML.
    override.write_text(json.dumps(settings))
    owned = [(number, row) for number, server in enumerate(servers) for row in server.list_rows()]
    rows = [row for _, row in owned]
    if trainer:
        seconds, results = train(servers, settings, rows)
    else:
        with serve(servers, override, folder) as (head, seconds):
            results = play(head, rows, folder) if rows else {}
    counts = [Counter[str]() for _ in servers]
    recorded = [{get_input(rollout): rollout["reward"] for rollout in server.read_rollouts()} for server in servers]
    for position, (number, row) in enumerate(owned):
        result = results.get(position, "lost")
        if isinstance(result, str):
            counts[number] += Counter({"played": 1, f"no {name_reason(result)}": 1})
        else:
            same = abs(result - recorded[number][get_input(row)]) < TOLERANCE
            counts[number] += Counter(played=1, scored=1, same=same)
    return seconds, counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="*", metavar="SERVER")
    parser.add_argument("--python", type=Path, help="the interpreter of an environment with the wheel")
    parser.add_argument("--together", type=int, metavar="N", help="start N servers in one deployment; 0 for all")
    parser.add_argument("--trainer", action="store_true", help="start and play with NeMo Gym's Python names")
    options = parser.parse_args()
    totals: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        python = options.python or install(folder / "environment")
        home = find_servers(python)
        if options.together == 0:
            chosen, missing = find_startable(home, python)
            show_missing(missing)
        else:
            chosen = [choose_file(home / name, python)[0] for name in options.servers or SERVERS]
            chosen = chosen[: options.together]
        groups = [[server] for server in chosen] if options.together is None else [chosen]
        print(f"{'server':<48}{'start':>8}{'played':>8}{'scored':>8}{'as recorded':>13}")
        for number, group in enumerate(groups):
            own = folder / str(number)
            own.mkdir()
            seconds, counts = run(group, python, own, trainer=options.trainer)
            for server, count in zip(group, counts, strict=True):
                shown = f"{seconds:.1f} s" if len(group) == 1 else ""
                print_line(server.name, shown, count)
                totals += count
            if len(group) > 1:
                print_line(f"{len(group)} servers together", f"{seconds:.1f} s", totals)
    if totals["scored"] < totals["played"] or not totals["played"]:
        sys.exit(1)


def show_missing(missing: dict[str, str]) -> None:
    for word in sorted({*missing.values()}):
        names = [name for name, why in missing.items() if why == word]
        print(f"not started, {word} ({len(names)}): {', '.join(names)}")


def print_line(name: str, seconds: str, count: Counter[str]) -> None:
    same = f"{count['same']} of {count['played']}" if count["played"] else "-"
    missing = ", ".join(key for key in count if key.startswith("no "))
    print(f"{name:<48}{seconds:>8}{count['played']:>8}{count['scored']:>8}{same:>13}  {missing}".rstrip(), flush=True)


if __name__ == "__main__":
    main()
