"""The import of a package, watched: another interpreter tells what it cost, printed, started and brought along."""

from __future__ import annotations

from pydantic import BaseModel

from gymsdk.checks import interpreter

SECONDS = 45.0
"""Seconds an import may take."""

PROGRAM = """
import json, os, sys, threading, time
os.dup2(1, 2)
import gymsdk
for name in gymsdk.__all__:
    getattr(gymsdk, name)
import importlib
known, began, entered = set(sys.modules), time.process_time(), time.monotonic()
try:
    importlib.import_module(sys.argv[1])
except SyntaxError as error:
    sys.exit(f"SyntaxError: {error.msg} ({error.filename}:{error.lineno})")
told = {
    "cpu": time.process_time() - began,
    "wall": time.monotonic() - entered,
    "modules": sorted({name.split(".")[0] for name in set(sys.modules) - known}),
    "threads": [each.name for each in threading.enumerate() if each is not threading.main_thread()],
}
sys.stdout.flush()
print("\\n" + json.dumps(told), flush=True)
"""


class Seen(BaseModel):
    """What an import did: seconds of *cpu* and on the *wall*, *modules* and *threads* it left, what it *printed*."""

    cpu: float = 0.0
    wall: float = 0.0
    modules: list[str] = []
    threads: list[str] = []
    printed: str = ""


async def watched(module: str) -> Seen:
    """Give what importing *module* did beyond importing gymsdk; raises `ImportError` where it cannot be imported."""
    ended = await interpreter.run(PROGRAM, module, seconds=SECONDS)
    printed, _, told = ended.output.decode(errors="replace").strip().rpartition("\n")
    if ended.code:
        raise ImportError(told)
    return Seen.model_validate_json(told).model_copy(update={"printed": printed.strip()})
