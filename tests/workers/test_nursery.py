from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest


async def written(note: Path) -> int:
    async with asyncio.timeout(20):
        while not note.exists() or not note.read_text():  # noqa: ASYNC110, ASYNC240 - another process writes it
            await asyncio.sleep(0.01)
    return int(note.read_text())  # noqa: ASYNC240 - a few bytes


async def gone(process: int) -> bool:
    async with asyncio.timeout(20):
        while _lives(process):  # noqa: ASYNC110 - another process ends
            await asyncio.sleep(0.01)
    return True


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def played(script: str, *, given: list[str] | None = None, folder: Path, typed: bool = False) -> str:
    command = [sys.executable, *(given or ["-"] * typed or ["-c", script])]
    environment = os.environ | {"GYMSDK_WORKERS": "1"}
    done = subprocess.run(
        command,
        input=script if typed else "",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=folder,
        env=environment,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


SCRIPT = """
import asyncio, dataclasses
from gymsdk import offload

open("ran", "a").write("x")

@dataclasses.dataclass
class Answer:
    text: str

class Wrong(Exception):
    pass

def shared(answer):
    return Answer(answer.text.upper())

@offload(timeout=20)
def grade(answer):
    if answer.text == "wrong":
        raise Wrong(answer)
    return shared(answer)

async def main():
    answer = await grade(Answer("yes"))
    assert type(answer) is Answer, type(answer)
    try:
        await grade(Answer("wrong"))
    except Wrong as wrong:
        print(answer.text, wrong.args[0].text)

asyncio.run(main())
asyncio.run(main())
"""


def test_a_script_without_a_main_guard_works_and_runs_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    assert played(SCRIPT, given=["script.py"], folder=tmp_path) == "YES wrong\n" * 2
    assert (tmp_path / "ran").read_text() == "x"


def test_a_module_run_by_name_works_and_runs_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    assert played(SCRIPT, given=["-m", "script"], folder=tmp_path) == "YES wrong\n" * 2
    assert (tmp_path / "ran").read_text() == "x"


@pytest.mark.parametrize("typed", [False, True], ids=["python -c", "standard input"])
def test_code_without_a_file_works(tmp_path: Path, typed: bool) -> None:
    assert played(SCRIPT, folder=tmp_path, typed=typed) == "YES wrong\n" * 2


def test_a_notebook_that_defines_a_function_anew_gets_the_new_one(tmp_path: Path) -> None:
    cell = """if True:
        import asyncio
        from gymsdk import offload
        helper = lambda: "old"
        @offload(timeout=20)
        def grade(): return helper()
        print(asyncio.run(grade()))
        helper = lambda: "new"
        print(asyncio.run(grade()))
    """
    assert played(cell, folder=tmp_path) == "old\nnew\n"


@pytest.mark.slow
def test_a_forked_process_has_workers_of_its_own_and_leaves_its_parents_alone(tmp_path: Path) -> None:
    script = """if True:
        import asyncio, os, sys, warnings
        from gymsdk import offload
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        @offload(timeout=20)
        def worker(): return os.getpid()
        mine = asyncio.run(worker())
        child = os.fork()
        if child == 0:
            assert asyncio.run(worker()) != mine
            sys.exit()
        assert os.waitpid(child, 0)[1] == 0
        print(asyncio.run(worker()) == mine)
    """
    assert played(script, folder=tmp_path) == "True\n"


@pytest.mark.slow
def test_what_a_worker_prints_goes_to_standard_error(tmp_path: Path) -> None:
    script = """if True:
        import asyncio
        from gymsdk import offload
        @offload(timeout=20)
        def speak(): print("worker")
        asyncio.run(speak())
        print("host")
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("host\n", "worker\n")


def test_starting_workers_leaves_the_programs_start_method_open(tmp_path: Path) -> None:
    script = """if True:
        import asyncio, multiprocessing
        from gymsdk import offload
        @offload(timeout=20)
        def one(): return 1
        asyncio.run(one())
        multiprocessing.set_start_method("spawn")
    """
    assert played(script, folder=tmp_path) == ""


def test_workers_do_not_outlive_a_killed_host(tmp_path: Path) -> None:
    script = """if True:
        import asyncio, os, time
        from gymsdk import offload
        @offload(timeout=900)
        def hang(): open("worker", "w").write(str(os.getpid())); time.sleep(900)
        asyncio.run(hang())
    """
    host = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path)
    worker = asyncio.run(written(tmp_path / "worker"))
    host.kill()
    host.wait(10)
    assert asyncio.run(gone(worker))


def test_a_worker_finds_what_a_notebook_puts_on_the_path_after_its_first_call(tmp_path: Path) -> None:
    later = tmp_path / "later"
    later.mkdir()
    (later / "inner.py").write_text("TOLD = 'found'\n")
    (later / "graded.py").write_text(
        "from gymsdk import offload\n\n@offload()\ndef grade():\n    import inner\n    return inner.TOLD\n"
    )
    cell = f"""if True:
        import asyncio, os, sys
        from gymsdk import offload
        @offload()
        def worker():
            return os.getpid()
        @offload()
        def lazy():
            import inner
            return inner.TOLD
        async def main():
            before = await worker()
            sys.path.append({str(later)!r})
            import graded
            print(await graded.grade(), await lazy(), await worker() == before)
        asyncio.run(main())
    """
    assert played(cell, folder=tmp_path) == "found found True\n"


@pytest.mark.slow
def test_a_module_that_fails_to_preload_affects_only_functions_that_need_it(tmp_path: Path) -> None:
    (tmp_path / "crash.py").write_text("import os; os.kill(os.getpid(), 9)")
    script = """if True:
        import asyncio
        from gymsdk import offload
        @offload(timeout=20, preload=["crash", "nowhere"])
        def one(): return 1
        print(asyncio.run(one()))
    """
    assert played(script, folder=tmp_path) == "1\n"


def test_a_new_worker_has_the_preloaded_modules(tmp_path: Path) -> None:
    (tmp_path / "heavy.py").write_text("import os; imported_by = os.getpid()")
    script = """if True:
        import asyncio, os
        from gymsdk import offload
        @offload(timeout=20, preload=["heavy"])
        def imported_here():
            import heavy
            return heavy.imported_by == os.getpid()
        print(asyncio.run(imported_here()))
    """
    assert played(script, folder=tmp_path) == "False\n"
