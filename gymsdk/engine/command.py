"""A command: the words that start `vllm serve`, made of a model's name and of what its user adds."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict, Field

from gymsdk.addresses import is_loopback
from gymsdk.engine import families
from gymsdk.errors import UsageError

PROGRAM = "vllm"
KEY = "VLLM_API_KEY"
"""The variable by which vLLM is told the key it asks for."""

AUTO, PARSER, NAMES = "--enable-auto-tool-choice", "--tool-call-parser", "--served-model-name"
REFUSED = {
    "--api-key": f"whoever may list processes reads it there; put it into {KEY}",
    "--uds": "it is asked over HTTP; leave that out",
    "--headless": "it has to be there to be asked; leave that out",
    "--grpc": "it is asked over HTTP; leave that out",
    "--ssl-keyfile": "it is asked without TLS, as on one machine; leave that out",
    "--ssl-certfile": "it is asked without TLS, as on one machine; leave that out",
}
"""Flags that cannot be meant for a vLLM that is launched, and why."""

log = logging.getLogger("gymsdk")


class Launch(BaseModel):
    """A vLLM to be: of the model *name*, with the user's own *flags* of `vllm serve`, which win over ours.

    *tools* says whether it will be offered tools, *insecure* that it may be reached from elsewhere without a key. It
    has *starting* seconds to be ready, for a large model is long in coming, and *ending* to end.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    flags: tuple[str, ...] = ()
    tools: bool = True
    insecure: bool = False
    starting: float = Field(600.0, gt=0)
    ending: float = Field(6.0, gt=0)

    @property
    def given(self) -> dict[str, tuple[str, ...]]:
        """The values of each flag, by its name."""
        return given(self.flags)


def program() -> str:
    """Give the path of `vllm`, beside this Python or on the PATH; raises `UsageError` where there is none."""
    places = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])  # noqa: PTH120  # no resolving: a venv's Python is a link
    found = shutil.which(PROGRAM, path=places)
    if found is None:
        raise UsageError(
            "--launch-vllm needs vLLM, which is not installed here: pip install 'gymsdk[vllm]', or name a server that"
            " runs elsewhere with --base-url"
        )
    return found


def given(flags: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Give the values of each of *flags* by its name, which vLLM reads with dashes and with underscores."""
    found: dict[str, tuple[str, ...]] = {}
    name = ""
    for word in flags:
        if re.match(r"--?[^\d\W]", word):
            name, equals, value = word.partition("=")
            name = name.replace("_", "-")
            found[name] = (value,) if equals else ()
        elif name:
            found[name] += (word,)
    return found


def checked(launch: Launch) -> None:
    """Refuse flags by which it could not be used; raises `UsageError`."""
    flags = launch.given
    if wrong := next((flag for flag in REFUSED if flag in flags), None):
        raise UsageError(f"{wrong} is not for a vLLM that gymsdk launches: {REFUSED[wrong]}")
    if NAMES in flags and launch.name not in flags[NAMES]:
        raise UsageError(
            f"{NAMES} {' '.join(flags[NAMES])} leaves out {launch.name!r}, by which it will be asked; add it, or leave"
            f" {NAMES} out"
        )
    at = host(flags)
    if not (is_loopback(at) or launch.insecure or os.environ.get(KEY)):
        raise UsageError(
            f"anybody who reaches {at!r} could use this vLLM, which asks for no key; leave --host out, or put a key"
            f" into {KEY}, or let anybody in with --insecure"
        )


def host(flags: Mapping[str, tuple[str, ...]]) -> str:
    """Give where it listens."""
    return (flags.get("--host") or ("127.0.0.1",))[-1]


def port(flags: Mapping[str, tuple[str, ...]]) -> int | None:
    """Give the port its user chose, `None` where there is none; raises `UsageError` where that is no port."""
    if "--port" not in flags:
        return None
    written = "".join(flags["--port"])
    if not re.fullmatch("[0-9]{1,5}", written) or not 0 < int(written) <= 65535:  # noqa: PLR2004  # the last one
        raise UsageError(f"--port {written} is no port; write a number from 1 to 65535, or leave it out")
    return int(written)


def words(launch: Launch, path: str, at: int) -> list[str]:
    """Give the words that start the program at *path*, to listen at the port *at*."""
    flags = launch.given
    ours = [] if "--host" in flags else ["--host", host(flags)]
    ours += [] if "--port" in flags else ["--port", str(at)]
    ours += [] if NAMES in flags else [NAMES, launch.name]
    # The user's come last: of a flag given twice vLLM takes the last one.
    return [path, "serve", launch.name, *ours, *tool_flags(launch), *launch.flags]


def tool_flags(launch: Launch) -> list[str]:
    """Give the flags by which it reads calls of tools, as far as its user says nothing of that.

    There is none for thoughts: its parsers take them out of the text, each in its own way, while gymsdk reads
    `<think>` of all models alike, and gives them back as it got them.
    """
    flags = launch.given
    if "--config" in flags or "--no-enable-auto-tool-choice" in flags:
        return []
    auto = [] if AUTO in flags else [AUTO]
    if PARSER in flags:
        return auto
    family = families.of(launch.name)
    return [*auto, PARSER, family.parser] if family else []


def told(launch: Launch) -> str:
    """Give one line on who reads its calls of tools, and why; warns where nobody does and there are tools."""
    flags = launch.given
    if PARSER in flags or "--config" in flags or "--no-enable-auto-tool-choice" in flags:
        return f"starting vLLM with {launch.name}; how it reads calls of tools is as you say"
    if family := families.of(launch.name):
        wanted = f"; vLLM advises --chat-template with its examples/{family.template}" if family.template else ""
        template = "" if "--chat-template" in flags else wanted
        return (
            f"starting vLLM with {launch.name}; its calls of tools are read by {family.parser!r}, for it is of the"
            f" family {family.name} (another: -- {PARSER} NAME){template}"
        )
    if launch.tools:
        log.warning(
            "no parser is known for the calls of tools of %r: vLLM refuses requests that offer tools, until you name"
            " one of its parsers with -- %s NAME",
            launch.name,
            PARSER,
        )
    return f"starting vLLM with {launch.name}, without a parser of calls of tools"
