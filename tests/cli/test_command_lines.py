"""Compare the options of all commands, and what command lines print and return, with the files in this folder.

`python tests/cli/test_command_lines.py` writes the files `options.txt` and `command_lines.txt`. Add a command line as
`$ ARGUMENTS` to the second one. The texts of the help are in docs/commands.md.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from packaging.version import Version

FOLDER = Path(__file__).resolve().parent
OPTIONS = FOLDER / "options.txt"
COMMAND_LINES = FOLDER / "command_lines.txt"
MESSAGE = re.compile(r"^(Error|Warning): .*|^[^\s:]+\.yaml:\d+: .*", re.MULTILINE)
CHANGING = re.compile(r"(?<=port )\d{4,}|(?<=127\.0\.0\.1:)\d{4,}")
MADE = re.compile(r"OUT|\bm\.yaml")
"""Files that command lines of the file write."""

SECONDS = 40
CODE = ("environ_key", "environments", "gymsdk", "servers")
"""The parts of stored settings that identify code."""

PRELOADED = ("rollouts.run", "deploy.plan", "cli.deployment", "cli.progress", "checks.run", "runs", "cli.serve")
"""The modules that are imported once for all command lines."""

FILES = {
    "bad.yaml": "head_server: {prt: 1}\nworkers: many\nlog_levle: info\nmath:\n  resources_servers:\n    math:"
    " {entrypoint: app.py, prot: 3}\n",
    "keys.yaml": "log_level: loud\nlog_format: xml\nport_range_low: 70000\nhead_server: {port: 70000}\nworkers: 0\n"
    "insecure: maybe\n",
    "rows.jsonl": '{"nothing": 1}\n',
    "broken.jsonl": '{"responses_create_params": {"input": "?"}, "expected_answer": "4", "question": "?"}\n{broken\n',
    "foreign.jsonl": '{"responses_create_params": {"input": "?"}, "response": {"output": []}, "reward": 1.0}\n',
    "empty.jsonl": "",
    "empty.yaml": "",
}

ATTRIBUTES = (
    *("default", "show_default", "metavar", "rich_help_panel", "min", "max"),
    *("multiple", "nargs", "required", "hidden", "is_flag", "is_eager"),
)
USUAL = {"show_default": True, "nargs": 1}

is_oldest = Version(typer.__version__) < Version("0.29")


def list_options() -> list[str]:
    """Return a line for each command and for each of its parameters."""
    from gymsdk.cli import app

    return [*_list_options(typer.main.get_command(app), "gymsdk", None)]


def _list_options(command: Any, name: str, parent: Any) -> Iterator[str]:
    context = typer.Context(command, info_name=name.rsplit(maxsplit=1)[-1], parent=parent)
    yield name
    yield from sorted(f"  {_describe(parameter)}" for parameter in command.get_params(context))
    for child, subcommand in getattr(command, "commands", {}).items():
        yield from _list_options(subcommand, f"{name} {child}", context)


def _describe(parameter: Any) -> str:
    """Return names, type, default, bounds and panel of a parameter."""
    kind = parameter.type_descriptor.annotation
    values = ((name, getattr(parameter, name, None)) for name in ATTRIBUTES)
    unusual = ((name, value) for name, value in values if value is not None and value is not USUAL.get(name, False))
    described = (f"{name}={value}" for name, value in unusual)
    type_name = kind.__name__ if isinstance(kind, type) and not getattr(kind, "__args__", ()) else str(kind)
    type_name = type_name.replace("typing.", "").replace("pathlib.", "")
    return " ".join(["/".join([*parameter.opts, *parameter.secondary_opts]), type_name, *described])


def read_command_lines() -> dict[str, list[str]]:
    """Return the expected exit code and messages by the arguments of the command line."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in COMMAND_LINES.read_text().splitlines():
        if line.startswith("$ "):
            found[line[2:]] = lines = []
        else:
            lines.append(line)
    return found


def run_command_lines() -> None:
    """Print the exit code and the messages of each command line as JSON. Each runs in a fork of this process."""
    import_module("gymsdk.cli")
    for module in PRELOADED:
        import_module(f"gymsdk.{module}")
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    for name in [name for name in os.environ if name.startswith(("GYMSDK_", "RAY_"))]:
        del os.environ[name]
    os.environ["COLUMNS"] = "200"
    for name, text in FILES.items():
        Path(name).write_text(text)
    results = {words: _run_command_line(shlex.split(words), folder) for words in read_command_lines()}
    results["(stored settings)"] = [
        f"{path} {json.dumps({key: value for key, value in settings.items() if key not in CODE}, sort_keys=True)}"
        for path in sorted(Path().glob("OUT*/run.json"))
        for settings in [json.loads(path.read_text())["settings"]]
    ]
    shutil.rmtree(folder)
    sys.stdout.write(json.dumps(results))


def _run_command_line(words: list[str], folder: str) -> list[str]:
    from gymsdk.cli import main

    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        for number in (1, 2):
            os.dup2(writing, number)
        signal.alarm(SECONDS)
        code = 77
        try:
            sys.argv = ["gymsdk", *words]
            main(words)
        except SystemExit as stopped:
            code = stopped.code if isinstance(stopped.code, int) else 1
        finally:
            sys.stdout.flush()
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return _describe_result(code, text, folder)


def _describe_result(code: int, text: str, folder: str) -> list[str]:
    """Return the exit code and the messages in the output *text* without what changes from run to run."""
    text = CHANGING.sub("PORT", text.replace(os.path.realpath(folder), "FOLDER").replace(folder, "FOLDER"))
    return [str(code), *(match[0] for match in MESSAGE.finditer(text))]


@pytest.mark.skipif(is_oldest, reason="older versions of Typer describe types differently")
def test_the_options_of_all_commands_are_those_of_the_file() -> None:
    expected, found = OPTIONS.read_text().splitlines(), list_options()
    assert [*_compare(expected, found)] == [], "run python tests/cli/test_command_lines.py if this is wanted"


def _compare(expected: list[str], found: list[str]) -> Iterator[str]:
    yield from (f"missing: {line}" for line in _name(expected) if line not in set(_name(found)))
    yield from (f"new: {line}" for line in _name(found) if line not in set(_name(expected)))


def _name(lines: list[str]) -> list[str]:
    """Return *lines* with the name of the command before each of its options."""
    command, named = "", []
    for line in lines:
        command = command if line.startswith("  ") else line
        named.append(f"{command} {line.strip()}" if line != command else line)
    return named


def group_wrong_usage() -> dict[str, list[str]]:
    """Return by command the command lines with exit code 2 that need no file of an earlier command line."""
    groups: dict[str, list[str]] = {}
    for words, lines in read_command_lines().items():
        if lines[:1] == ["2"] and not MADE.search(words):
            groups.setdefault(words.split()[0], []).append(words)
    return groups


@pytest.mark.skipif(is_oldest, reason="older versions of Typer describe wrong values in different words")
@pytest.mark.parametrize("command", group_wrong_usage())
def test_wrong_usage_prints_what_the_file_says_and_writes_no_files(
    command: str, workdir: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gymsdk.cli import main

    for name in [name for name in os.environ if name.startswith(("GYMSDK_", "RAY_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")
    for name, text in FILES.items():
        Path(name).write_text(text)
    expected = read_command_lines()
    found: dict[str, list[str]] = {}
    for words in group_wrong_usage()[command]:
        monkeypatch.setattr(sys, "argv", ["gymsdk", *shlex.split(words)])
        with pytest.raises(SystemExit) as stopped:
            main(sys.argv[1:])
        found[words] = _describe_result(stopped.value.code, capfd.readouterr().err, str(workdir))
    assert {words: (expected[words], lines) for words, lines in found.items() if lines != expected[words]} == {}
    assert {path.name for path in workdir.iterdir()} == {*FILES}


def run_in_process() -> dict[str, list[str]]:
    code = f"import runpy; runpy.run_path({__file__!r})['run_command_lines']()"
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True, timeout=550)
    results: dict[str, list[str]] = json.loads(found.stdout)
    return results


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_command_lines_print_and_return_what_the_file_says() -> None:
    expected, found = read_command_lines(), run_in_process()
    if is_oldest:
        # click and Typer's own parser describe wrong values in different words.
        expected, found = ({key: lines[:1] for key, lines in results.items()} for results in (expected, found))
        found |= {"(stored settings)": expected["(stored settings)"]}
    assert {key: (lines, found[key]) for key, lines in expected.items() if lines != found[key]} == {}


if __name__ == "__main__":
    OPTIONS.write_text("\n".join(list_options()) + "\n")
    written = run_in_process()
    COMMAND_LINES.write_text("".join(f"$ {key}\n" + "".join(f"{line}\n" for line in written[key]) for key in written))
