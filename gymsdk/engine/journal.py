"""A journal: what vLLM writes, passed on as it comes, and its last lines kept for the day it fails."""

from __future__ import annotations

import io
import re
import sys
from collections import deque
from typing import TextIO

KEPT = 2000
"""Lines that are kept: the cause of an end stands well before its last line."""

SHOWN = 6
"""Lines that an error repeats."""

MENDS = (
    (
        "invalid tool call parser",
        "this vLLM has no such parser of calls; it lists those it has: name one with -- --tool-call-parser NAME",
    ),
    (
        "CUDA out of memory|HIP out of memory|torch.OutOfMemoryError",
        "the GPU has too little memory for it; use less with -- --max-model-len N or --gpu-memory-utilization SHARE",
    ),
    (
        "No available memory for the cache blocks|larger than the available KV cache",
        "what its weights leave is too little; raise -- --gpu-memory-utilization SHARE, or lower --max-model-len N",
    ),
    (
        "Free memory on device .* less than desired",
        "something else uses the GPU; end that, or lower -- --gpu-memory-utilization SHARE",
    ),
    (
        "Failed to infer device type|No CUDA GPUs are available|Found no NVIDIA driver",
        "it finds no GPU; install vLLM's build for CPUs, or name a server that has one with --base-url",
    ),
    (
        "not a valid model identifier|RepositoryNotFoundError|Repository Not Found",
        "the hub knows no such model, or not for you; check its name, and HF_TOKEN in the environment",
    ),
    ("GatedRepoError|gated repo", "the model is given out on conditions; accept them on the hub, and set HF_TOKEN"),
    (
        "outgoing traffic has been disabled|LocalEntryNotFoundError|couldn't connect to .https://huggingface",
        "the hub is not reached, and the model is not here; download it, or name the folder it is in",
    ),
    ("trust[-_]remote[-_]code=True", "the model brings code of its own; to run that, add -- --trust-remote-code"),
    ("unrecognized arguments", "what stands behind -- is vLLM's to know; vllm serve --help=all lists it"),
)
"""What vLLM writes, and what mends it."""

TAKEN = re.compile("address already in use", re.IGNORECASE)


class Journal(io.StringIO):
    """Passes on to *out* what is written to it, and keeps the last lines."""

    def __init__(self, out: TextIO | None) -> None:
        super().__init__()
        self._out = out or sys.stderr
        self._last: deque[str] = deque(maxlen=KEPT)

    def write(self, text: str) -> int:
        """Pass on one line, in its last state where it was written over."""
        name, bar, said = text.partition(" | ")
        line = name + bar + said.rpartition("\r")[2]
        self._last.append(line.rstrip())
        self._out.write(line)
        return len(text)

    def flush(self) -> None:
        """Have what was passed on be seen."""
        self._out.flush()

    @property
    def taken(self) -> bool:
        """Whether it could not listen, somebody else being there."""
        return any(TAKEN.search(line) for line in self._last)

    @property
    def last(self) -> str:
        """The last lines, behind the one that says what is wrong, each on a line of its own."""
        lines = [line for line in self._last if line.partition("|")[2].strip()]
        telling = [line for line in lines[:-SHOWN] if _mend(line)][-1:]
        return "\n".join([*telling, *lines[-SHOWN:]])

    @property
    def mend(self) -> str:
        """What usually mends it, nothing where nobody knows."""
        return next(filter(None, map(_mend, self._last)), "")


def _mend(line: str) -> str:
    return next((mend for pattern, mend in MENDS if re.search(pattern, line)), "")
