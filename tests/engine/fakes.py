"""A program that passes for `vllm`: it serves an echo, and has an engine process of its own."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

SOURCE = f"""#!{sys.executable}
import asyncio, os, subprocess, sys, time
from pathlib import Path

folder = Path(os.environ["FAKE_VLLM"])
with (folder / "lives").open("a") as lives:
    # An engine of its own, in a session of its own: no signal to a group finds it.
    engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    lives.write(f"{{os.getpid()}} {{engine.pid}} {{os.getppid()}}\\n")
(folder / "argv").write_text("\\0".join(sys.argv[1:]))
life = len((folder / "lives").read_text().splitlines())
print("life", life, flush=True)
exec((folder / "first").read_text())

from gymsdk import model
from gymsdk import testing as policy

given = dict(zip(sys.argv[3::2], sys.argv[4::2]))

async def serve():
    served = policy.build_app(model("scripted/echo"), name=given["--served-model-name"])
    async with policy.serve(served, given["--host"], int(given["--port"])):
        await asyncio.Event().wait()

asyncio.run(serve())
"""


@dataclass(frozen=True)
class Fake:
    """A folder in which the program tells of itself."""

    folder: Path

    def first(self, source: str) -> None:
        """Have it do *source* before it serves."""
        (self.folder / "first").write_text(source)

    @property
    def argv(self) -> list[str]:
        return (self.folder / "argv").read_text().split("\0")

    @property
    def lives(self) -> list[list[int]]:
        """Each process that it was: itself, its engine, its warden."""
        path = self.folder / "lives"
        return [[int(pid) for pid in line.split()] for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def left(self) -> list[int]:
        """The processes of all lives that are there."""
        return [pid for life in self.lives for pid in life if runs(pid)]


def runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
