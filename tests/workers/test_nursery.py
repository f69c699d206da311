from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from workers.conftest import read_note, wait_until_gone


def run_program(*arguments: str, folder: Path, text: str = "", errors: str = "") -> str:
    """Run Python with one worker and return its output."""
    completed = subprocess.run(
        [sys.executable, *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=folder,
        env=os.environ | {"GYMSDK_WORKERS": "1"},
    )
    assert (completed.returncode, completed.stderr) == (0, errors)
    return completed.stdout


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


@pytest.mark.parametrize(
    "arguments",
    [["script.py"], ["-m", "script"], ["-c", SCRIPT], ["-"]],
    ids=["file", "module", "-c", "standard input"],
)
def test_a_program_without_a_main_guard_works_and_runs_once(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    assert run_program(*arguments, folder=tmp_path, text=SCRIPT) == "YES wrong\n" * 2
    assert (tmp_path / "ran").read_text() == "x"


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
    assert run_program("-c", cell, folder=tmp_path) == "old\nnew\n"


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
    assert run_program("-c", script, folder=tmp_path) == "True\n"


def test_what_a_worker_prints_goes_to_standard_error_and_the_start_method_stays_open(tmp_path: Path) -> None:
    script = """if True:
        import asyncio, multiprocessing
        from gymsdk import offload
        @offload(timeout=20)
        def speak(): print("worker")
        asyncio.run(speak())
        multiprocessing.set_start_method("spawn")
        print("host")
    """
    assert run_program("-c", script, folder=tmp_path, errors="worker\n") == "host\n"


def test_workers_do_not_outlive_a_killed_host(tmp_path: Path) -> None:
    script = """if True:
        import asyncio, os, time
        from gymsdk import offload
        @offload(timeout=900)
        def hang(): open("worker", "w").write(str(os.getpid())); time.sleep(900)
        asyncio.run(hang())
    """
    host = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path)
    worker = asyncio.run(read_note(tmp_path / "worker"))
    host.kill()
    host.wait(10)
    asyncio.run(wait_until_gone(worker))


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
    assert run_program("-c", cell, folder=tmp_path) == "found found True\n"


@pytest.mark.parametrize(
    ("preload", "expected"), [(["heavy"], "False"), pytest.param(["crash", "nowhere"], "True", marks=pytest.mark.slow)]
)
def test_a_new_worker_has_the_preloaded_modules_and_starts_although_a_module_fails(
    tmp_path: Path, preload: list[str], expected: str
) -> None:
    (tmp_path / "crash.py").write_text("import os; os.kill(os.getpid(), 9)")
    (tmp_path / "heavy.py").write_text("import os; imported_by = os.getpid()")
    script = f"""if True:
        import asyncio, os
        from gymsdk import offload
        @offload(timeout=20, preload={preload})
        def is_imported_here():
            import heavy
            return heavy.imported_by == os.getpid()
        print(asyncio.run(is_imported_here()))
    """
    assert run_program("-c", script, folder=tmp_path) == f"{expected}\n"
