"""The import of a package, watched: another interpreter tells what it cost, printed, started and brought along."""

from __future__ import annotations

import asyncio
import sys

from pydantic import BaseModel

SECONDS = 45.0
"""Seconds an import may take."""

PROGRAM = """
import json, sys, threading, time
import gymsdk
for name in gymsdk.__all__:
    getattr(gymsdk, name)
import importlib
known, began = set(sys.modules), time.process_time()
importlib.import_module(sys.argv[1])
told = {
    "cpu": time.process_time() - began,
    "modules": sorted({name.split(".")[0] for name in set(sys.modules) - known}),
    "threads": [each.name for each in threading.enumerate() if each is not threading.main_thread()],
}
sys.stdout.flush()
print("\\n" + json.dumps(told), flush=True)
"""


class Seen(BaseModel):
    """What an import did: seconds of *cpu*, the top *modules* and *threads* it left behind, what it *printed*."""

    cpu: float = 0.0
    modules: list[str] = []
    threads: list[str] = []
    printed: str = ""


async def watched(module: str) -> Seen:
    """Give what importing *module* did beyond importing gymsdk; raises `ImportError` where it cannot be imported."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, module),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(SECONDS):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    printed, _, told = output.decode(errors="replace").strip().rpartition("\n")
    if process.returncode:
        raise ImportError(told)
    return Seen.model_validate_json(told).model_copy(update={"printed": printed.strip()})
