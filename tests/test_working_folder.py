"""No command imports from the folder in which it is started, unless the user names code there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from hostile_folder import HostileFolder, build_hostile_folder, find_script, get_variables, list_module_names
from programs.counting import write_counting

pytestmark = pytest.mark.timeout(240)

TESTS = Path(__file__).parent
ORACLE = ("--model", "scripted/oracle")
PLAY = ("rollout", "math", *ORACLE, "--limit", "2", "--output", "run")
CONSOLE_SCRIPT, SAFE_MODULE = (find_script("gymsdk"),), (sys.executable, "-P", "-m", "gymsdk")


@pytest.fixture
def folder(tmp_path: Path) -> HostileFolder:
    return build_hostile_folder(tmp_path)


def test_the_modules_of_the_folder_record_their_import(folder: HostileFolder) -> None:
    assert folder.run(sys.executable, "-c", "import random, gymsdk").returncode == 0
    assert {"gymsdk", "random"} <= {*folder.list_imported()}


@pytest.mark.parametrize("command", [CONSOLE_SCRIPT, SAFE_MODULE], ids=["gymsdk", "python -P -m gymsdk"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["list"],
        ["info", "math"],
        ["tasks", "math", "--limit", "1"],
        [*PLAY],
        [*PLAY, "--view"],
        pytest.param([*PLAY, "--export", "otel"], marks=pytest.mark.services),
        ["play", "math", *ORACLE],
        ["check", "tool_call"],
        ["bench", "tool_call", "--rollouts", "2", "--concurrency", "1"],
        ["bench", "--shape", "simple", "--rollouts", "2", "--concurrency", "1"],
        ["new", "my-env"],
        ["config", "math"],
        pytest.param([*PLAY, "--ray-address", "local", "--offload", "ray"], marks=pytest.mark.ray),
        pytest.param([*PLAY, "--ray-address", "local", "--replicas", "1"], marks=pytest.mark.ray),
    ],
    ids=lambda arguments: " ".join(word for word in arguments if word not in PLAY[1:]),
)
def test_a_command_imports_nothing_from_the_folder(
    folder: HostileFolder, command: tuple[str, ...], arguments: list[str]
) -> None:
    if "--export" in arguments and not find_spec("opentelemetry"):
        pytest.skip("needs the extra otel")
    if "--ray-address" in arguments and not find_spec("ray"):
        pytest.skip("needs the extra ray")
    # No collector listens at port 9: the export fails, the run does not.
    done = folder.run(*command, *arguments, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9", RAY_AUTH_MODE="disabled")
    assert folder.list_imported() == []
    assert done.returncode == 0, done.stdout + done.stderr
    assert "evil" not in done.stdout
    if "--output" in arguments:
        lines = (folder.path / "run" / "rollouts.jsonl").read_text().splitlines()
        assert [json.loads(line)["reward"] for line in lines] == [1.0, 1.0]


@contextmanager
def serving(folder: HostileFolder, *command: str) -> Iterator[dict[str, Any]]:
    """Start servers in *folder*, yield their ready message, and stop them."""
    errors = folder.path.parent / "stderr"
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            command,
            cwd=folder.path,
            env=get_variables(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
    timer = Timer(120, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, errors.read_text()
        yield json.loads(line)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        timer.cancel()
        process.kill()
        process.communicate()


def play(folder: HostileFolder, head: str, *arguments: str) -> list[float]:
    """Play against the servers of *head* from the folder, and return the rewards."""
    command = ("rollout", "--head", head, *arguments, "--output", "remote")
    done = folder.run(*CONSOLE_SCRIPT, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (folder.path / "remote" / "rollouts.jsonl").read_text().splitlines()
    return sorted(json.loads(line)["reward"] for line in lines)


@pytest.mark.parametrize("options", ["", "--workers 2", "--separate"])
def test_servers_import_nothing_from_the_folder(folder: HostileFolder, options: str) -> None:
    arguments = ("serve", "math", *ORACLE, "--port", "0", "--json", *options.split())
    with serving(folder, *CONSOLE_SCRIPT, *arguments) as ready:
        assert play(folder, ready["head"], "math", "--limit", "2") == [1.0, 1.0]
    assert folder.list_imported() == []


def list_modules_of_python(folder: Path) -> set[str]:
    """Return the modules that Python itself imports for `python -m`, before the first line of the program."""
    (folder / "first.py").write_text("import sys; print(*(name.partition('.')[0] for name in [*sys.modules]))")
    done = subprocess.run(
        [sys.executable, "-m", "first"], cwd=folder, env=get_variables(), capture_output=True, text=True, check=True
    )
    return {*done.stdout.split()}


@pytest.mark.parametrize("arguments", [["list"], [*PLAY], [*PLAY, "--view"]], ids=["list", "rollout", "--view"])
def test_python_m_gymsdk_imports_nothing_that_python_does_not_import_itself(
    tmp_path: Path, arguments: list[str]
) -> None:
    folder = build_hostile_folder(tmp_path, without={"gymsdk", *list_modules_of_python(tmp_path)})
    done = folder.run(sys.executable, "-m", "gymsdk", *arguments)
    assert folder.list_imported() == []
    assert done.returncode == 0, done.stdout + done.stderr
    assert "evil" not in done.stdout


def test_python_m_gymsdk_searches_a_folder_that_pythonpath_names(tmp_path: Path) -> None:
    folder = build_hostile_folder(tmp_path, without=list_module_names() - {"evil"})
    done = folder.run(sys.executable, "-m", "gymsdk", "list", PYTHONPATH=str(folder.path))
    assert "evil" in done.stdout, done.stderr


@pytest.fixture
def counting(tmp_path: Path) -> Path:
    """Return the configuration of a program that imports a module beside it, in a separate folder."""
    server = tmp_path / "server"
    server.mkdir()
    (server / "sibling.py").write_text("UNIT = 'apples'\n")
    app = (TESTS / "programs" / "app.py").read_text()
    check = (
        "import sibling\nassert sibling.UNIT == own['unit']\nassert os.path.dirname(sibling.__file__) == os.getcwd()\n"
    )
    (server / "app.py").write_text(app.replace("app = FastAPI()\n", f"{check}app = FastAPI()\n"))
    write_counting(tmp_path, tmp_path / "counting.yaml", f"{server}/app.py")
    return tmp_path / "counting.yaml"


@pytest.mark.parametrize("options", ["", "--separate"])
def test_a_program_imports_from_its_own_folder_only(folder: HostileFolder, counting: Path, options: str) -> None:
    arguments = ("serve", "--config", str(counting), "--ray-address", "none", "--port", "0", "--json", *options.split())
    with serving(folder, *CONSOLE_SCRIPT, *arguments) as ready:
        assert play(folder, ready["head"], "--tasks", str(counting.with_name("rows.jsonl"))) == [0.0, 1.0]
    assert folder.list_imported() == []


def test_a_program_in_the_folder_of_gymsdk_imports_the_modules_beside_it(tmp_path: Path, counting: Path) -> None:
    folder = HostileFolder(tmp_path / "server", tmp_path / "imported")
    with serving(
        folder, *CONSOLE_SCRIPT, "serve", "--config", str(counting), "--ray-address", "none", "--port", "0", "--json"
    ) as ready:
        assert play(folder, ready["head"], "--tasks", str(counting.with_name("rows.jsonl"))) == [0.0, 1.0]


WHEEL = "library-1.0-py3-none-any.whl"


def write_wheel(path: Path, origin: str) -> None:
    """Write a wheel with a module that prints *origin*."""
    about = {"METADATA": "Metadata-Version: 2.1\nName: library\nVersion: 1.0\n", "RECORD": ""}
    about["WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("library.py", f"print({origin!r})\n")
        for name, text in about.items():
            archive.writestr(f"library-1.0.dist-info/{name}", text)


def test_requirements_are_installed_without_the_folder(
    folder: HostileFolder, counting: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative requirement names a package beside the program, and neither `venv` nor `pip` comes from the folder."""
    from gymsdk.config import load_config
    from gymsdk.deploy import programs

    server = counting.parent / "server"
    (server / "requirements.txt").write_text(f"./{WHEEL}\n")
    write_wheel(server / WHEEL, "the program")
    write_wheel(folder.path / WHEEL, "the working folder")
    counting.write_text(counting.read_text().replace(f", python: {sys.executable}", ""))
    block = load_config([counting], []).servers[0]
    # Without uv, which might be installed.
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setenv("XDG_CACHE_HOME", str(counting.parent / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.chdir(folder.path)
    python = programs.choose_python(programs.Program(block, server / "app.py"))
    assert folder.list_imported() == []
    done = subprocess.run([python, "-I", "-c", "import library"], capture_output=True, text=True, check=True)
    assert done.stdout == "the program\n"


def test_ng_run_imports_nothing_from_the_folder(folder: HostileFolder, counting: Path) -> None:
    pytest.importorskip("nemo_gym")
    arguments = (f"+config_paths=[{counting}]", "++ray_head_node_address=none", "--port", "0", "--separate", "--json")
    with serving(folder, find_script("ng_run"), *arguments) as message:
        assert "counter" in message["servers"]
    assert folder.list_imported() == []


SCRIPT = """
import asyncio
from gymsdk import offload
import neighbour

@offload()
def double(value):
    import neighbour
    return neighbour.double(value)

print(asyncio.run(double(21)), asyncio.run(neighbour.triple(14)))
"""

NEIGHBOUR = """
from gymsdk import offload

def double(value):
    return 2 * value

@offload()
def triple(value):
    return 3 * value
"""


@pytest.mark.parametrize(
    "command", [["script.py"], ["-c", SCRIPT], ["-"], ["-m", "script"]], ids=["script", "-c", "standard input", "-m"]
)
def test_the_code_of_a_user_imports_the_modules_of_the_folder(tmp_path: Path, command: list[str]) -> None:
    """Python puts the folder of a script, and the working folder of `-c`, on the path; workers search it, too."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text(NEIGHBOUR)
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env=get_variables(),
        input=SCRIPT if command == ["-"] else "",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "42 42\n", done.stderr
