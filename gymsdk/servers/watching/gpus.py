"""GPUs: how much those of this machine are used, as `nvidia-smi` says, where there is one."""

from __future__ import annotations

import asyncio
import shutil
import time

from gymsdk.servers.watching.figures import Figures, Sample

TOOL = "nvidia-smi"
QUERY = ("--query-gpu=index,utilization.gpu", "--format=csv,noheader,nounits")

FRESH = 10.0
"""Seconds for which what it says is believed."""

PATIENCE = 3.0
"""Seconds that it may take."""


def watched(figures: Figures) -> None:
    """Have *figures* tell how much the GPUs of this machine are used; nothing where nobody can say."""
    if shutil.which(TOOL) is not None:
        gpus = Gpus()
        figures.looks.append(gpus.refresh)
        figures.samples["gpu_utilization_ratio"] = gpus.utilization


class Gpus:
    """The GPUs of this machine, asked for every `FRESH` seconds at the soonest."""

    def __init__(self) -> None:
        self._used: list[Sample] = []
        self._at = float("-inf")

    async def refresh(self) -> None:
        """Look again, where that was long ago."""
        if time.monotonic() - self._at >= FRESH:
            self._at = time.monotonic()
            self._used = read(await _said())

    def utilization(self) -> list[Sample]:
        """Give the share of the time in which each was at work."""
        return self._used


def read(said: str) -> list[Sample]:
    """Give what each line of the tool's answer says; a GPU that does not tell, as a part of one may, is left out."""
    rows = (line.split(",") for line in said.splitlines() if line.count(",") == 1)
    return [Sample(int(used) / 100, {"gpu": gpu.strip()}) for gpu, used in rows if used.strip().isdecimal()]


async def _said() -> str:
    try:
        process = await asyncio.create_subprocess_exec(
            TOOL, *QUERY, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
    except OSError:
        # It has been taken away, or may not be run: then nobody can say.
        return ""
    try:
        async with asyncio.timeout(PATIENCE):
            out, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return ""
    return out.decode(errors="replace") if process.returncode == 0 else ""
