"""A fake `vllm` program, which serves an echo model and starts a separate engine process."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

SOURCE = f"""#!{sys.executable}
import asyncio, os, subprocess, sys, time
from pathlib import Path

folder = Path(os.environ["FAKE_VLLM"])
with (folder / "starts").open("a") as starts:
    # The engine runs in a separate session, so a signal to the process group does not reach it.
    engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    starts.write(f"{{os.getpid()}} {{engine.pid}} {{os.getppid()}}\\n")
(folder / "argv").write_text("\\0".join(sys.argv[1:]))
start_number = len((folder / "starts").read_text().splitlines())
print("start", start_number, flush=True)
exec((folder / "startup_code").read_text())

from gymsdk import model
from gymsdk import testing as policy

options = dict(zip(sys.argv[3::2], sys.argv[4::2]))

async def serve():
    app = policy.build_app(model("scripted/echo"), name=options["--served-model-name"])
    async with policy.serve(app, options["--host"], int(options["--port"])):
        await asyncio.Event().wait()

asyncio.run(serve())
"""


@dataclass(frozen=True)
class FakeVllm:
    """The folder to which the fake program writes its arguments and process ids."""

    folder: Path

    def set_startup_code(self, source: str) -> None:
        """Run *source* in the fake program before it serves."""
        (self.folder / "startup_code").write_text(source)

    @property
    def argv(self) -> list[str]:
        return (self.folder / "argv").read_text().split("\0")

    @property
    def starts(self) -> list[list[int]]:
        """The process ids of each start: the program, its engine and its watcher."""
        path = self.folder / "starts"
        return [[int(pid) for pid in line.split()] for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def running(self) -> list[int]:
        """The process ids of all starts that still run."""
        return [pid for pids in self.starts for pid in pids if is_running(pid)]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
