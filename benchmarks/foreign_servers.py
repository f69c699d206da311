"""Play resources servers of NeMo Gym's wheel behind gymsdk's agents, and compare the rewards with the recorded ones.

usage: foreign_servers.py [--python PATH] [SERVER...]

The wheel has example rollouts of most servers. A scripted policy repeats their turns, each server grades them, and the
table shows how many rewards are as recorded. Without --python, the script installs the wheel into an environment of the
newest interpreter. The exit status is 1 if a rollout has no reward.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

NEMO_GYM = "nemo-gym==0.7.0"
SERVERS = (
    "calendar",
    "example_multi_step",
    "example_session_state_mgmt",
    "example_single_tool_call",
    "example_tool_call_multireward",
    "mcqa",
    "string_match",
    "workplace_assistant",
    "xlam_fc",
)
INTERPRETERS = ("python3.14", "python3.13", "python3.12")


def starts(interpreter: str) -> bool:
    """Return whether *interpreter* is installed and runs; a version manager has commands for versions that do not."""
    found = shutil.which(interpreter)
    return found is not None and subprocess.run([found, "--version"], capture_output=True, check=False).returncode == 0


def install(folder: Path) -> Path:
    """Install the wheel into an environment in *folder*, and return its interpreter."""
    base = next(filter(starts, INTERPRETERS), sys.executable)
    subprocess.run([base, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    # The wheel asks for a patch release of Python that few machines have.
    command = [str(python), "-m", "pip", "install", "--quiet", "--ignore-requires-python", NEMO_GYM]
    subprocess.run(command, check=True)
    return python


def find_servers(python: Path) -> Path:
    """Return the folder of the wheel's resources servers."""
    code = "import resources_servers; print(list(resources_servers.__path__)[0])"
    found = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return Path(found.stdout.strip())


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines() if line]


def get_input(row: dict[str, Any]) -> str:
    """Return the texts of the messages of a row, by which a row and its rollout are matched."""
    given = row["responses_create_params"]["input"]
    return given if isinstance(given, str) else json.dumps([each.get("content") for each in given])


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of the server in *folder*, from the configuration file with its name."""
    config = yaml.safe_load((folder / "configs" / f"{folder.name}.yaml").read_text())
    (block,) = (each["resources_servers"] for each in config.values() if "resources_servers" in each)
    settings: dict[str, Any] = block[folder.name]
    return settings


def play(name: str, servers: Path, python: Path, folder: Path) -> tuple[float, int, int, int | None]:
    """Return the seconds of the start, and how many rollouts were played, were scored, and have the recorded reward.

    The last number is `None` if no recorded rollout is of an example row; then the policy writes empty replies.
    """
    recorded = read(servers / name / "data" / "example_rollouts.jsonl")
    rows, config, run = folder / "rows.jsonl", folder / "config.yaml", folder / "run"
    replayed = folder / "replayed.jsonl"
    given = [
        {key: row[key] for key in row if key != "agent_ref"} for row in read(servers / name / "data/example.jsonl")
    ]
    rewards = {get_input(each): each["reward"] for each in recorded}
    # The recorded rollouts of a server may be of fewer rows, and of other versions of them.
    repeated = [row for row in given if get_input(row) in rewards]
    replayed.write_text("".join(f"{json.dumps(each)}\n" for each in recorded))
    rows.write_text("".join(f"{json.dumps(each)}\n" for each in repeated or given[:5]))
    program = read_settings(servers / name) | {"entrypoint": str(servers / name / "app.py"), "python": str(python)}
    model = {"gymsdk_model": {"model": f"scripted/replay:{replayed}" if repeated else "scripted/null"}}
    servers_config = {name: {"resources_servers": {name: program}}, "policy_model": {"responses_api_models": model}}
    # JSON is YAML.
    config.write_text(json.dumps(servers_config))
    command = [sys.executable, "-m", "gymsdk"]
    began = time.monotonic()
    with (
        (folder / "log.txt").open("w") as log,
        subprocess.Popen(
            [*command, "serve", "--config", str(config), "--port", "0", "--ray-address", "none", "--json"],
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
            seconds = time.monotonic() - began
            played = [*command, "rollout", "--head", json.loads(line)["head"], "--tasks", str(rows)]
            subprocess.run(
                [*played, "--agent", f"{name}_simple_agent", "--output", str(run), "--json"],
                capture_output=True,
                check=False,
            )
        finally:
            served.terminate()
    lines = read(run / "rollouts.jsonl") if (run / "rollouts.jsonl").exists() else []
    if not repeated:
        return seconds, len(given[:5]), len(lines), None
    same = sum(line["reward"] == rewards[get_input(repeated[line["_ng_task_index"]])] for line in lines)
    return seconds, len(repeated), len(lines), same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="*", default=SERVERS, metavar="SERVER")
    parser.add_argument("--python", type=Path, help="the interpreter of an environment with the wheel")
    options = parser.parse_args()
    complete = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = options.python or install(folder / "environment")
        servers = find_servers(python)
        print(f"{'server':<48}{'start':>8}{'played':>8}{'scored':>8}{'as recorded':>13}")
        for each in options.servers:
            own = folder / each
            own.mkdir()
            seconds, played, scored, same = play(each, servers, python, own)
            complete &= scored == played > 0
            print(f"{each:<48}{seconds:>6.1f} s{played:>8}{scored:>8}{'-' if same is None else same:>13}", flush=True)
    if not complete:
        sys.exit(1)


if __name__ == "__main__":
    main()
