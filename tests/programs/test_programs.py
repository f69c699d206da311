"""Resources servers that are programs of their own run behind our agents, collector and status."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deployed import run_command, serving, start_command, wait_until
from nemo_compat.conftest import find_free_port, parse

from gymsdk.config import load_config
from gymsdk.deploy import programs
from gymsdk.errors import UsageError
from nemo_gym.cli import RunHelper
from nemo_gym.server_utils import HEAD_SERVER_KEY_NAME, BaseServerConfig, ServerClient
from programs.counting import AGENT, write_counting

pytestmark = pytest.mark.timeout(150)

APP = Path(__file__).with_name("app.py")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository in NeMo Gym's form, with a model that counts to three, and rows."""
    server = tmp_path / "resources_servers" / "counting"
    (server / "configs").mkdir(parents=True)
    shutil.copy(APP, server / "app.py")
    write_counting(tmp_path, server / "configs" / "counting.yaml", "app.py")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def get_config(folder: Path) -> Path:
    return folder / "resources_servers" / "counting" / "configs" / "counting.yaml"


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def list_programs() -> set[int]:
    """Return the process IDs of the programs of this test, which run in the program's folder."""
    here = str(Path.cwd() / "resources_servers" / "counting")
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if str((folder / "cwd").readlink()) == here:
                found.add(int(folder.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("options", [[], ["--separate"]])
async def test_a_program_is_played_as_any_resources_server(folder: Path, options: list[str]) -> None:
    async with serving("--config", get_config(folder), "--port", "0", *options) as deployed:
        assert {"counter", AGENT, "policy_model"} <= set(deployed.ready["servers"])
        code, output = await run_command(
            "rollout", "--head", deployed.head, "--tasks", "rows.jsonl", "-k", "3", "--output", "run"
        )
        assert code == 0, output
        lines = read(folder / "run" / "rollouts.jsonl")
        assert sorted(line["reward"] for line in lines) == [0.0] * 3 + [1.0] * 3
        calls = [item["output"] for item in lines[0]["response"]["output"] if item["type"] == "function_call_output"]
        assert [json.loads(call) for call in calls] == [
            {"count": 1, "unit": "apples"},
            {"count": 3, "unit": "apples"},
        ]
        assert {"counter", AGENT, "policy_model"} <= set(lines[0]["servers"]), "the program knows all servers"
        code, output = await run_command("status", "--head", deployed.head)
        assert code == 0, output
        assert "counter" in output
        assert list_programs()
    assert not list_programs()


async def test_a_trainer_starts_programs_too(folder: Path) -> None:
    config = {
        "config_paths": [str(get_config(folder))],
        "default_host": "127.0.0.1",
        HEAD_SERVER_KEY_NAME: {"host": "127.0.0.1", "port": find_free_port()},
    }
    helper = RunHelper()
    await asyncio.to_thread(helper.start, parse(config))
    try:
        rows = read(folder / "rows.jsonl")
        client = ServerClient.load_from_global_config(BaseServerConfig(**config[HEAD_SERVER_KEY_NAME]))
        answers = [await (await client.post(AGENT, "/run", json=row)).json() for row in rows]
    finally:
        await asyncio.to_thread(helper.shutdown)
    assert [answer["reward"] for answer in answers] == [1.0, 0.0]
    assert not list_programs()


async def test_a_killed_program_is_started_again(folder: Path) -> None:
    async with serving("--config", get_config(folder), "--port", "0") as deployed:
        (old,) = list_programs()
        os.kill(old, signal.SIGKILL)
        await wait_until(lambda: not list_programs() <= {old})
        command = ["rollout", "--head", deployed.head, "--tasks", "rows.jsonl", "--attempts", "20", "--output", "run"]
        code, output = await run_command(*command)
        assert code == 0, output
        assert sorted(line["reward"] for line in read(folder / "run" / "rollouts.jsonl")) == [0.0, 1.0]
        _, output = await run_command("status", "--head", deployed.head)
        assert "SIGKILL" in output
    assert not list_programs()


async def test_programs_end_with_a_killed_server(folder: Path) -> None:
    process = await start_command("serve", "--config", get_config(folder), "--port", "0", "--json")
    assert process.stdout is not None
    assert await process.stdout.readline()
    assert list_programs()
    process.kill()
    await process.communicate()
    await wait_until(lambda: not list_programs())


WAIT = """
import pathlib, time
pathlib.Path("{own}.started").touch()
while not pathlib.Path("{other}.started").exists():
    time.sleep(0.05)
"""


def add_code(code: str) -> str:
    """Return the text of the program that runs *code* before it serves."""
    head, main = APP.read_text().split("if __name__", 1)
    return f"{head}\n{code}\nif __name__{main}"


def add_second_program(folder: Path, code: str = "") -> Path:
    """Return a configuration file with a second program, which runs *code* before it serves."""
    program = folder / "resources_servers" / "counting" / "second.py"
    program.write_text(add_code(code))
    file = folder / "second.yaml"
    settings = f"{{entrypoint: {program}, domain: agent, unit: pears, python: {sys.executable}}}"
    file.write_text(f"second: {{resources_servers: {{counting: {settings}}}}}\n")
    return file


async def test_programs_start_and_stop_together_and_know_each_other(folder: Path) -> None:
    app = folder / "resources_servers" / "counting" / "app.py"
    # Each program waits for the other one, so that programs that start one after the other would not become ready.
    second = add_second_program(folder, WAIT.format(own="second", other="first"))
    app.write_text(add_code(WAIT.format(own="first", other="second")))
    options = ["--config", get_config(folder), "--config", second, "--port", "0"]
    async with serving(*options) as deployed:
        assert {"counter", "second", AGENT, "second_simple_agent"} <= set(deployed.ready["servers"])
        row = read(folder / "rows.jsonl")[0]
        rows = [row, {**row, "agent_ref": {"name": "second_simple_agent"}}]
        (folder / "both.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        code, output = await run_command("rollout", "--head", deployed.head, "--tasks", "both.jsonl", "--output", "run")
        assert code == 0, output
        lines = read(folder / "run" / "rollouts.jsonl")
        assert [line["reward"] for line in lines] == [1.0, 1.0]
        assert all({"counter", "second"} <= set(line["servers"]) for line in lines)
        assert sorted(line["entrypoint"] for line in lines) == ["app.py", "second.py"]
    assert not list_programs()


async def test_a_program_that_does_not_start_ends_the_others(folder: Path) -> None:
    second = add_second_program(folder, "raise SystemExit('no luck')")
    code, output = await run_command(
        "serve", "--config", get_config(folder), "--config", second, "--port", "0", "--ray-address", "none"
    )
    assert code == 1
    assert "'second' ended 3 times" in output.splitlines()[-1]
    assert "no luck" in output.splitlines()[-1]
    assert not list_programs()


def test_an_installed_environment_replaces_a_program_without_a_folder(folder: Path) -> None:
    server = folder / "resources_servers" / "tool_call"
    server.mkdir()
    (server / "app.py").touch()
    file = folder / "tool_call.yaml"
    text = "t: {resources_servers: {tool_call: {entrypoint: ENTRYPOINT}}}\n"
    for entrypoint, expected in (("app.py", []), (str(server / "app.py"), [server / "app.py"])):
        file.write_text(text.replace("ENTRYPOINT", entrypoint))
        _, found = programs.split_programs(load_config([file], []))
        assert [program.path for program in found] == expected


def test_the_program_beside_the_configuration_file_has_precedence_over_that_of_the_working_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = folder / "elsewhere"
    shutil.copytree(folder / "resources_servers", elsewhere / "resources_servers")
    monkeypatch.chdir(elsewhere)
    server = load_config([get_config(folder)], []).servers[0]
    assert programs.find_program(server) == folder / "resources_servers" / "counting" / "app.py"
    (folder / "resources_servers" / "counting" / "app.py").unlink()
    assert programs.find_program(server) == elsewhere / "resources_servers" / "counting" / "app.py"


def test_the_interpreter_is_the_named_one_or_that_of_the_folder(folder: Path) -> None:
    _, (program,) = programs.split_programs(load_config([get_config(folder)], []))
    assert programs.choose_python(program) == Path(sys.executable)
    own = program.folder / ".venv" / "bin" / "python"
    unnamed = programs.Program(program.server.model_copy(update={"written": {}}), program.path)
    assert programs.choose_python(unnamed) == Path(sys.executable)
    own.parent.mkdir(parents=True)
    own.symlink_to(sys.executable)
    assert programs.choose_python(unnamed) == own
    (folder / "python").symlink_to(sys.executable)
    relative = programs.Program(program.server.model_copy(update={"written": {"python": "./python"}}), program.path)
    assert programs.choose_python(relative) == folder / "python"
    wrong = programs.Program(program.server.model_copy(update={"written": {"python": "/nowhere"}}), program.path)
    with pytest.raises(UsageError, match="no interpreter /nowhere"):
        programs.choose_python(wrong)


@pytest.mark.parametrize(
    ("line", "has_repository", "expected"),
    [
        ("-e nemo-gym[dev] @ ../../", False, "nemo-gym"),
        ("-e nemo-gym[dev] @ ../../", True, "-e ROOT"),
        ("nemo-gym>=0.7", False, "nemo-gym>=0.7"),
        ("pandas==2.3", True, "pandas==2.3"),
    ],
)
def test_the_requirement_of_the_repository_is_rewritten(
    folder: Path, line: str, has_repository: bool, expected: str
) -> None:
    if has_repository:
        (folder / "pyproject.toml").touch()
    requirements = folder / "resources_servers" / "counting" / "requirements.txt"
    requirements.write_text(f"{line}\ntiktoken\n")
    assert programs.rewrite_requirements(requirements) == f"{expected}\ntiktoken\n".replace("ROOT", str(folder))


def test_requirements_are_installed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    _, (program,) = programs.split_programs(load_config([get_config(folder)], []))
    program = programs.Program(program.server.model_copy(update={"written": {}}), program.path)
    (program.folder / "requirements.txt").write_text("# nothing\n")
    python = programs.choose_python(program)
    assert python.is_relative_to(folder / "cache")
    before = python.parent.stat().st_mtime_ns
    assert programs.choose_python(program) == python
    assert python.parent.stat().st_mtime_ns == before
    (program.folder / "requirements.txt").write_text("no-such-package @ file:///nowhere\n")
    with pytest.raises(UsageError, match=r"counter: .* failed; its last lines"):
        programs.choose_python(program)


@pytest.mark.parametrize(
    ("requirements", "is_newest"),
    [
        ("-e nemo-gym[dev] @ ../../\ntiktoken\n", True),
        ("tiktoken\nnemo_gym==0.7.0\n", True),
        ("# nemo-gym is not needed\ntiktoken\n-e ../other\n", False),
    ],
)
def test_nemo_gym_is_installed_with_the_newest_interpreter_whatever_its_patch_release(
    folder: Path, monkeypatch: pytest.MonkeyPatch, requirements: str, is_newest: bool
) -> None:
    commands = folder / "commands"
    commands.mkdir()
    # Of two newer versions, the newest has a command that does not run, as those of version managers.
    for name, code in (("python3.14", "exit 127"), ("python3.13", f'exec {sys.executable} "$@"')):
        (commands / name).write_text(f"#!/bin/sh\n{code}\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(commands), prepend=os.pathsep)
    base = programs.get_base_python(requirements)
    newest = sys.executable if sys.version_info >= (3, 13) else str(commands / "python3.13")
    assert base == (newest if is_newest else None)
    if is_newest and sys.version_info < (3, 12):
        with monkeypatch.context() as without:
            without.setenv("PATH", str(folder))
            with pytest.raises(UsageError, match=r"needs Python 3\.12"):
                programs.get_base_python(requirements)
    *_, install = programs.build_install_commands(folder / "environment", folder / "listed.txt", base)
    assert ("--ignore-requires-python" in install) == is_newest


@pytest.mark.parametrize(
    ("entrypoint", "expected"),
    [("app.py", "app.py"), ("./app.py", "app.py"), ("../counting/app.py", "app.py"), ("FOLDER/app.py", "app.py")],
)
def test_a_program_gets_its_file_as_nemo_gym_names_it(folder: Path, entrypoint: str, expected: str) -> None:
    file = get_config(folder)
    home = file.parent.parent
    file.write_text(file.read_text().replace("app.py", entrypoint.replace("FOLDER", str(home))))
    _, (program,) = programs.split_programs(load_config([file], []))
    assert program.path.samefile(home / "app.py")
    # NeMo Gym imports `resources_servers.NAME.FILE` in each worker of a server with `num_workers`.
    assert program.relative_path == expected


def test_the_configuration_of_many_servers_fits_into_a_variable() -> None:
    entry = {"resources_servers": {"counting": {"judge_model_server": {"name": "judge 7"}}}}
    others = {f"judge {number}": {"responses_api_models": {"m": {"host": "127.0.0.1"}}} for number in range(3_000)}
    config = {"head_server": {"port": 1}, **others}
    text = programs.write_config(config, "counter", entry)
    assert json.loads(text) == {
        "head_server": {"port": 1},
        "judge 7": others["judge 7"],
        "counter": entry,
    }
    code = "import os; print(len(os.environ['NEMO_GYM_CONFIG_DICT']))"
    variables = {**os.environ, "NEMO_GYM_CONFIG_DICT": text}
    assert int(subprocess.check_output([sys.executable, "-c", code], env=variables)) == len(text)
    with pytest.raises(OSError, match="Argument list too long"):
        subprocess.check_output([sys.executable, "-c", code], env={**variables, "ALL": json.dumps(config)})
    few = dict([*config.items()][:100])
    assert json.loads(programs.write_config(few, "counter", entry)) == {**few, "counter": entry}
