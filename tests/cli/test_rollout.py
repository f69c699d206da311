from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from sums_environment import PLAIN

from cli.conftest import Command, Start
from gymsdk.cli.progress import format_resume_command
from gymsdk.rollouts.folder import FILES, create_dated_folder

GOOD = '{"responses_create_params": {"input": "What is 2 + 2?"}, "answer": 4}\n'


@pytest.mark.slow
def test_a_run_ends_with_a_table_and_its_paths(gymsdk: Command) -> None:
    result = gymsdk("rollout", "sums", "--limit", 5, "-k", 2, "-o", "out")
    lines = result.out.splitlines()
    assert lines[0].split() == ["sums"]
    assert lines[1].split() == ["scored", "10", "of", "10"]
    assert lines[2].split() == ["mean", "reward", "±", "standard", "error", "1.000", "±", "0.000"]
    shown = [line.split("  ")[0] for line in lines]
    for name in ("pass@1", "pass@2", "majority@2", "vote@2", "tokens in, policy", "tokens out, policy"):
        assert name in shown
    assert [name for name in shown if name.startswith("seconds in")] == [
        f"seconds in {stage} (with waiting)" for stage in ("reset", "model", "step", "verify", "close")
    ]
    assert lines[-4:] == [f"out/{name}" for name in FILES if name != "failures.jsonl"]
    assert (result.code, result.err) == (0, "")
    note = "scripted/oracle, the environment's own solution, has played; evaluate a model with --model"
    assert note in lines
    named = gymsdk("rollout", "sums", "--limit", 1, "-o", "named", "--model", "scripted/oracle")
    assert note not in named.out


@pytest.mark.slow
def test_several_environments_have_one_column_and_settings_of_their_own(
    gymsdk: Command, installed: Callable[..., Path]
) -> None:
    installed("more.sums")
    settings = ("--set", "more.sums.digits=1", "--set", "sums.digits=2")
    lines = gymsdk("rollout", "sums", "more.sums", "--limit", 2, "-o", "out", *settings).out.splitlines()
    assert lines[0].split() == ["sums", "more.sums"]
    assert lines[1].split() == ["scored", "2", "of", "2", "2", "of", "2"]


def test_json_output_is_one_object_and_a_run_without_output_gets_a_new_folder(gymsdk: Command) -> None:
    output = json.loads(gymsdk("rollout", "sums", "--limit", 3, "--json").out)
    assert output["output"].startswith("rollouts/sums-20")
    assert output["environments"][0]["agent_metrics"]["mean/reward"] == 1.0


@pytest.mark.slow
def test_failures_are_reported_with_exit_code_1(gymsdk: Command, workdir: Path) -> None:
    (workdir / "tasks.jsonl").write_text(GOOD)
    result = gymsdk("rollout", "sums", "--tasks", "tasks.jsonl", "--set", "breaks=[4]", "-o", "out", "--attempts", 1)
    assert "no reward: hook_raised" in result.out
    assert "hook_raised: hook 'verify' of environment 'sums' raised ValueError: cannot add to 4" in result.out
    assert result.err == (
        "1 of 1 rollouts without a reward: the environment's own code raised an exception; fix the lines that the table"
        " names, then the same command with --output out --resume plays them again\n"
    )
    assert result.code == 1


SPLITS = f"""{PLAIN}
@hookimpl
def tasks(split: Literal["example", "train", "test"]):
    for number in range({{"example": 3, "train": 9, "test": 2}}[split]):
        yield Task.ask(f"Say {{number}}.")
"""


@pytest.mark.slow
def test_a_split_with_fewer_tasks_than_the_limit_is_reported_once(
    gymsdk: Command, installed: Callable[..., Path]
) -> None:
    installed("splits", SPLITS)
    others = "its other splits: 'train', 'test' (choose with --split)"
    result = gymsdk("rollout", "splits", "--limit", 5, "-o", "out")
    assert result.err.splitlines() == [
        f"split 'example' of environment 'splits' has 3 tasks, fewer than --limit 5; {others}"
    ]
    assert result.code == 0
    assert gymsdk("rollout", "splits", "--limit", 5, "--split", "train", "-o", "train").err == ""


@pytest.mark.slow
def test_a_failure_inside_a_library_names_the_authors_line_first(
    gymsdk: Command, installed: Callable[..., Path]
) -> None:
    calls = "import lib_of_sums\n@hookimpl\ndef verify():\n    return Verdict(reward=lib_of_sums.share(1, 0))\n"
    site = installed("calling", PLAIN + calls)
    (site / "lib_of_sums.py").write_text("def share(one, other):\n    return one / other\n")
    arguments = ("rollout", "calling", "--limit", 1, "--attempts", 1, "--overwrite", "-o", "out")
    result = gymsdk(*arguments)
    line = len((PLAIN + calls).splitlines())
    position = f"(env_calling.py:{line}, in a call that ended at lib_of_sums.py:2)"
    assert f"raised ZeroDivisionError: division by zero {position}" in result.out
    assert "Traceback" not in result.err
    shown = gymsdk(*arguments, "--traceback")
    assert "Traceback (most recent call last):" in shown.err
    assert 'lib_of_sums.py", line 2, in share' in shown.err
    assert "Traceback" not in gymsdk(*arguments).err


def test_resuming_a_finished_run_prints_its_table_again(gymsdk: Command) -> None:
    arguments = ("rollout", "sums", "--limit", 3, "-o", "out")
    first, again = gymsdk(*arguments), gymsdk(*arguments, "--resume")
    assert again.out == first.out
    assert again.err == "resumed: 3 of 3 rollouts were finished before\n"


@pytest.mark.slow
def test_no_key_is_written_to_disk(gymsdk: Command, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYMSDK_API_KEY", "hush-1")
    address = f"http://127.0.0.1:{_free_port()}/v1"
    model = ("--model", "endpoint/x", "--base-url", address, "--timeout", 0.2, "--attempts", 1)
    result = gymsdk("rollout", "sums", "--limit", 1, "-o", "out", "--set", "key=hush-2", *model)
    written = result.out + result.err + "".join(path.read_text() for path in (workdir / "out").iterdir())
    assert "model_unreachable" in written
    assert "hush" not in written


@pytest.mark.parametrize(
    "arguments",
    [("rollout", "--limit", 3, "--attempts", 1), pytest.param(("play",), marks=pytest.mark.slow)],
    ids=["rollout", "play"],
)
def test_a_command_says_that_it_waits_for_an_unreachable_model(start: Start, arguments: tuple[object, ...]) -> None:
    host = f"127.0.0.1:{_free_port()}"
    process = start(*arguments, "sums", "--model", "endpoint/x", "--base-url", f"http://{host}/v1")
    expected = f"trying again, up to 4 times per request: cannot reach {host}: nothing listens there; is the server"
    assert process.stderr is not None
    line = next(line for line in process.stderr if line.startswith("trying"))
    assert (process.poll(), line.startswith(expected)) == (None, True)
    _, rest = process.communicate(timeout=60)
    assert (process.returncode, "trying again" in rest) == (1, False)


@pytest.mark.slow
def test_pinned_keys_reach_the_running_replica(gymsdk: Command) -> None:
    with _serve_rejections() as (address, bodies):
        servers = ("--base-url", f"http://127.0.0.1:{_free_port()}/v1", "--base-url", address)
        pins = ("--pin", "temperature=0.5", "--pin", "stop=END", "--pin", "top_p=null", "--temperature", 0.9)
        model = ("--model", "vllm/x", "--attempts", 1, *servers, *pins)
        result = gymsdk("rollout", "sums", "--limit", 4, "-o", "out", *model)
    assert len(bodies) == 4
    assert {tuple(body.get(key) for key in ("temperature", "stop", "top_p")) for body in bodies} == {(0.5, "END", None)}
    # A refused request is not retried.
    assert result.err.endswith(
        "4 of 4 rollouts without a reward fail again until the cause is fixed;"
        " then the same command with --output out --resume plays them again\n"
    )


@pytest.mark.slow
def test_a_model_server_that_is_down_ends_the_run(gymsdk: Command) -> None:
    address = f"http://127.0.0.1:{_free_port()}/v1"
    model = ("--model", "endpoint/x", "--base-url", address, "--timeout", 0.5, "--attempts", 1)
    result = gymsdk("rollout", "sums", "--limit", 1000, "-o", "out", *model)
    sampling, error = result.err.splitlines()
    assert sampling == "sampling: the engine's defaults"
    assert error.startswith("Error: stopped: the last 16 rollouts failed for the same reason (cannot reach 127.0.0.1")
    assert error.endswith("the finished rollouts are in out; correct the cause, then use --resume")
    assert result.code == 1


@contextmanager
def _serve_rejections() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the URL of a model server that rejects every request, and the list of request bodies."""
    bodies: list[dict[str, Any]] = []

    class RejectingHandler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(400)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), RejectingHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1", bodies
        server.shutdown()


def _free_port() -> int:
    with socket.socket() as find_free_port:
        find_free_port.bind(("127.0.0.1", 0))
        port: int = find_free_port.getsockname()[1]
        return port


def _wait_for_rollouts(process: subprocess.Popen[str], out: Path, rollouts: int = 1) -> None:
    """Wait until a process has written that many rollouts."""
    for _ in range(6000):
        if (out / "rollouts.jsonl").exists() and (out / "rollouts.jsonl").read_bytes().count(b"\n") >= rollouts:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    raise AssertionError("the process has played too few rollouts")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_folder_that_can_be_resumed(start: Start, workdir: Path, number: signal.Signals) -> None:
    arguments = ("rollout", "sums", "--limit", 40, "-o", "out", "--concurrency", 4, "--set", "pause=0.2")
    process = start(*arguments, "--set", "notes=notes")
    _wait_for_rollouts(process, workdir / "out", 5)
    # By then the next rollouts have started together and are being verified; the run closes the ones it stops.
    time.sleep(0.1)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (128 + number, "")
    assert "Traceback" not in err
    assert "stopped; the finished rollouts are in out; resume with:\n  python -m gymsdk rollout sums --limit 40" in err
    assert err.endswith("--resume\n")
    finished = (workdir / "out" / "rollouts.jsonl").read_text().count("\n")
    assert 5 <= finished < 40
    opened, closed = (count_notes(workdir, word) for word in ("opened", "closed"))
    # On a busy machine the signal may arrive before the host sees the `reset` of some of the four episodes, never of
    # all.
    assert finished <= closed
    assert opened - 3 <= closed <= opened

    out, err = start(*arguments, "--set", "notes=notes", "--resume").communicate(timeout=60)
    assert err == f"resumed: {finished} of 40 rollouts were finished before\n"
    assert out.splitlines()[1].split() == ["scored", "40", "of", "40"]


def count_notes(workdir: Path, word: str) -> int:
    return (workdir / "notes").read_text().split().count(word)


@pytest.mark.slow
def test_a_second_signal_exits_if_the_work_does_not_stop(start: Start, workdir: Path) -> None:
    process = start("rollout", "sums", "--limit", 4, "-o", "out", "--set", "hangs=true")
    for _ in range(6000):
        if (workdir / "out" / "inputs.jsonl").exists():
            break
        time.sleep(0.005)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "stopping" not in process.stderr.readline():
        pass
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.endswith("-o out --set hangs=true --resume\n")


def test_the_resume_command_is_the_same_command_with_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/gymsdk"])
    named = format_resume_command(["rollout", "sums", "--set", "a=b c", "-o", "out", "--overwrite"], Path("out"))
    assert named == "gymsdk rollout sums --set 'a=b c' -o out --resume"
    assert format_resume_command(["rollout", "sums"], Path("a b")) == "gymsdk rollout sums --output 'a b' --resume"
    assert format_resume_command(["rollout", "sums", "-oout"], Path("out")) == "gymsdk rollout sums -oout --resume"


def test_two_runs_in_one_second_get_different_folders(workdir: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        folders = list(threads.map(lambda _: create_dated_folder(["sums"]), range(8)))
    assert len(set(folders)) == 8
    assert all(folder.parent == workdir / "rollouts" and folder.is_dir() for folder in folders)


@pytest.mark.slow
def test_a_terminal_shows_a_live_bar(installed: object, workdir: Path) -> None:
    assert callable(installed)
    installed()
    reader, writer = pty.openpty()
    command = [sys.executable, "-m", "gymsdk", "rollout", "sums", "--limit", "30", "-o", "out"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(command, stderr=writer, stdout=subprocess.DEVNULL, env=environment)
    os.close(writer)
    shown = b""
    try:
        while chunk := os.read(reader, 65536):
            shown += chunk
    except OSError:  # the read error of a terminal whose other end is closed
        pass
    os.close(reader)
    assert process.wait(timeout=30) == 0
    assert b"30/30" in shown
    assert b"reward 1.000" in shown
    assert b"failed 0" in shown
    assert b"\x1b[" in shown


def test_episodes_that_ran_out_of_a_budget_are_shown(gymsdk: Command, installed: Callable[..., Path]) -> None:
    installed("talkative", f'{PLAIN}\n@hookimpl\ndef step():\n    return Step(messages=["And then?"])\n')
    arguments = ("--limit", 1, "-o", "out", "--model", "scripted/echo", "--turns", 3)
    assert "out of turns" in gymsdk("rollout", "talkative", *arguments).out


@pytest.mark.slow
def test_a_token_limit_that_ends_nearly_all_episodes_is_reported_once_during_the_run_and_in_its_summary(
    gymsdk: Command, start: Start
) -> None:
    policy = start("policy", "serve", "oracle", "--env", "tool_call", "--port", 0, "--json")
    assert policy.stdout is not None
    model = ["--model", "vllm/policy", "--base-url", json.loads(policy.stdout.readline())["url"], "--split", "train"]
    sentence = (
        "of {} episodes ended because a reply reached its token limit (2 tokens; the mean length of a reply is 2);"
        " raise the limit with --max-output-tokens"
    )
    cut = gymsdk("rollout", "tool_call", *model, "--max-output-tokens", 2, "--limit", 24, "-o", "cut")
    assert cut.err.count("token limit") == 1
    assert f"warning: 16 {sentence.format(16)}" in cut.err
    assert f"24 {sentence.format(24)}" in cut.out
    few = gymsdk("rollout", "tool_call", *model, "--max-output-tokens", 2, "--limit", 15, "-o", "few")
    whole = gymsdk("rollout", "tool_call", *model, "--max-output-tokens", 600, "--limit", 24, "-o", "whole")
    for result in (few, whole):
        assert "token limit" not in result.out + result.err
