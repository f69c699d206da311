"""Build the `vllm serve` command for a model: its host, port and name, and the parser of its tool calls."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
from pydantic import BaseModel, ConfigDict, Field

from gymsdk.config.model import Deployment
from gymsdk.errors import UsageError
from gymsdk.http.tls import is_loopback
from gymsdk.interpreter import get_python


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models: a *pattern* of their names, its tool call parser, and a chat *template* if one is needed."""

    name: str
    pattern: str
    parser: str
    template: str | None = None


FAMILIES = (
    # Fine-tunes first: their names also contain the name of the model that they are based on.
    Family("Hermes", "hermes-?[2-4]", "hermes"),
    Family("ToolACE", "toolace", "pythonic", "tool_chat_template_toolace.jinja"),
    Family("xLAM (Llama)", "llama-xlam", "xlam", "tool_chat_template_xlam_llama.jinja"),
    Family("xLAM (Qwen)", "xlam", "xlam", "tool_chat_template_xlam_qwen.jinja"),
    Family("Nemotron 3", "nemotron-?3(?![0-9])", "qwen3_coder"),
    Family("Qwen3-Coder", "qwen-?3-coder", "qwen3_coder"),
    Family("Qwen3.5", r"qwen-?3\.[5-9]|qwen3-5(?![0-9.]*b)", "qwen3_coder"),
    Family("Qwen2.5 and Qwen3", "qwen-?2[.-]5|qwen-?3|qwq", "hermes"),
    Family("Llama 4", "llama-?4", "llama4_pythonic", "tool_chat_template_llama4_pythonic.jinja"),
    Family("Llama 3.1", "llama-?3[.-][13](?![0-9])", "llama3_json", "tool_chat_template_llama3.1_json.jinja"),
    Family("Llama 3.2", "llama-?3[.-]2(?![0-9])", "llama3_json", "tool_chat_template_llama3.2_json.jinja"),
    Family("DeepSeek V4.1", "deepseek-?v4[.-]1(?![0-9])", "deepseek_v41"),
    Family("DeepSeek V4", "deepseek-?v4", "deepseek_v4"),
    Family("DeepSeek V3.1", "deepseek-?v3[.-](1|2-exp)", "deepseek_v31", "tool_chat_template_deepseekv31.jinja"),
    Family("DeepSeek V3.2", "deepseek-?v3[.-]2", "deepseek_v32"),
    Family("DeepSeek V3", "deepseek-?v3", "deepseek_v3", "tool_chat_template_deepseekv3.jinja"),
    Family("DeepSeek R1", "deepseek-?r1", "deepseek_v3", "tool_chat_template_deepseekr1.jinja"),
    Family("GLM-4.7 and GLM-5", "glm-?4[.-]7|glm-?5", "glm47"),
    Family("GLM-4.5", "glm-?4[.-][56]|glm4-moe", "glm45"),
    Family("gpt-oss", "gpt-?oss", "openai"),
    Family(
        "Granite 20B function calling", "granite-20b-f", "granite-20b-fc", "tool_chat_template_granite_20b_fc.jinja"
    ),
    Family("Granite 4", "granite-?4|granitemoehybrid", "granite4"),
    Family("Granite 3.0", "granite-?3[.-]0", "granite", "tool_chat_template_granite.jinja"),
    Family("Granite 3", "granite-?3", "granite"),
    Family("Phi-4-mini", "phi-?4-mini", "phi4_mini_json"),
    Family("Kimi K2", "kimi-?k2", "kimi_k2"),
    Family("Kimi K3", "kimi-?k3", "kimi_k3"),
    Family("MiniMax M2", "minimax-?m2", "minimax_m2"),
    Family("MiniMax M3", "minimax-?m3", "minimax_m3"),
    Family("InternLM 2.5", "internlm-?2", "internlm", "tool_chat_template_internlm2_tool.jinja"),
    Family("Hunyuan A13B", "hunyuan-a13b", "hunyuan_a13b"),
    Family("Mistral", "mistral|ministral|magistral|devstral", "mistral"),
    Family("Jamba", "jamba", "jamba"),
    Family("LongCat", "longcat", "longcat"),
    Family("Olmo 3", "olmo-?3", "olmo3"),
    Family("GigaChat 3", "gigachat-?3", "gigachat3"),
    Family("Apertus", "apertus", "apertus", "tool_chat_template_apertus.jinja"),
    Family("FunctionGemma", "functiongemma", "functiongemma", "tool_chat_template_functiongemma.jinja"),
    Family("Gemma 4", "gemma-?4", "gemma4"),
    Family("Seed-OSS", "seed-?oss", "seed_oss"),
    Family("Step 3.5", "step-?3[.p-]5-flash", "step3p5"),
    Family("ERNIE 4.5", "ernie-?4[.-]5", "ernie45"),
    Family("LFM2", "lfm-?2", "lfm2"),
)
"""The families, in the order in which a name is matched."""

UNSUPPORTED_VARIANTS = re.compile("distill|-r1-.*qwen|openhermes|nemotron(?!-?3(?![0-9]))")
"""Names of models that match a family although the model does not write tool calls in the family's format."""


def find_family(name: str) -> Family | None:
    """Return the family of a model by its *name*, or by the `config.json` of the folder *name*."""
    # The name of an organisation or a folder may contain that of another family.
    *_, last = name.rstrip("/").split("/")
    return (
        _match_name(last)
        or _match_name(name)
        or (None if UNSUPPORTED_VARIANTS.search(name.lower()) else _match_name(_read_model_type(Path(name))))
    )


def _match_name(name: str) -> Family | None:
    plain = re.sub("[_ ]", "-", name.lower())
    if UNSUPPORTED_VARIANTS.search(plain):
        return None
    return next((family for family in FAMILIES if re.search(rf"(?<![a-z])(?:{family.pattern})", plain)), None)


def _read_model_type(folder: Path) -> str:
    try:
        config = orjson.loads((folder / "config.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return ""
    return str(config.get("model_type", "")) if isinstance(config, dict) else ""


PROGRAM = "vllm"
KEY = "VLLM_API_KEY"
"""The environment variable with the key that vLLM requires from clients."""

AUTO, PARSER, NAMES = "--enable-auto-tool-choice", "--tool-call-parser", "--served-model-name"
REFUSED = {
    "--api-key": f"other users of the machine could read it in the list of processes; set {KEY} instead",
    "--uds": "gymsdk sends requests over HTTP; leave it out",
    "--headless": "gymsdk sends requests to this process; leave it out",
    "--grpc": "gymsdk sends requests over HTTP; leave it out",
    "--ssl-keyfile": "gymsdk sends requests without TLS on the same machine; leave it out",
    "--ssl-certfile": "gymsdk sends requests without TLS on the same machine; leave it out",
}
"""Flags that do not work with a vLLM that gymsdk launches, and why."""

log = logging.getLogger("gymsdk")


class Launch(BaseModel):
    """How to launch vLLM.

    Attributes:
        name: The model.
        flags: The user's options of `vllm serve`, which override ours.
        tools: Whether requests will offer tools.
        insecure: Whether other machines may use vLLM without a key.
        starting: Seconds until vLLM must be ready; a large model loads slowly.
        ending: Seconds that vLLM gets to stop.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    flags: tuple[str, ...] = ()
    tools: bool = True
    insecure: bool = False
    starting: float = Field(600.0, gt=0)
    ending: float = Field(6.0, gt=0)

    @property
    def parsed_flags(self) -> dict[str, tuple[str, ...]]:
        """The values of each flag by its name."""
        return parse_flags(self.flags)


def find_program() -> str:
    """Return the path of `vllm`, beside this Python or on the PATH; raises `UsageError` if there is none."""
    folders = os.pathsep.join([os.path.dirname(get_python()), os.environ.get("PATH", os.defpath)])  # noqa: PTH120  # unresolved: a venv's Python is a link
    program = shutil.which(PROGRAM, path=folders)
    if program is None:
        raise UsageError(
            "--launch-vllm needs vLLM, which is not installed; run pip install 'gymsdk[vllm]', or use a running server"
            " with --base-url"
        )
    return program


def parse_flags(flags: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the values of each flag by its name; like vLLM, accept underscores for dashes."""
    values_by_flag: dict[str, tuple[str, ...]] = {}
    name = ""
    for word in flags:
        # A negative number, as in `--seed -1`, is a value and no flag.
        if re.match(r"--?[^\d\W]", word):
            name, equals, value = word.partition("=")
            name = name.replace("_", "-")
            values_by_flag[name] = (value,) if equals else ()
        elif name:
            values_by_flag[name] += (word,)
    return values_by_flag


def build_launch(deployment: Deployment) -> Launch:
    """Return the launch of the vLLM server with the policy's model of *deployment*."""
    assert deployment.model is not None
    assert deployment.vllm_flags is not None
    return Launch(
        name=deployment.model.name.removeprefix("vllm/"),
        flags=deployment.vllm_flags,
        insecure=deployment.insecure,
        ending=5.0,
        starting=deployment.readiness or 600.0,
    )


def check_launch(launch: Launch) -> None:
    """Raise `UsageError` for flags with which gymsdk could not use vLLM."""
    flags = launch.parsed_flags
    if wrong := next((flag for flag in REFUSED if flag in flags), None):
        raise UsageError(f"{wrong} does not work with a vLLM that gymsdk launches: {REFUSED[wrong]}")
    if NAMES in flags and launch.name not in flags[NAMES]:
        raise UsageError(
            f"{NAMES} {' '.join(flags[NAMES])} lacks {launch.name!r}, the name in gymsdk's requests; add it, or leave"
            f" {NAMES} out"
        )
    host = get_host(flags)
    if not (is_loopback(host) or launch.insecure or os.environ.get(KEY)):
        raise UsageError(
            f"anyone who reaches {host!r} could use this vLLM, which requires no key; leave --host out, set {KEY}, or"
            f" allow it with --insecure"
        )


def get_host(flags: Mapping[str, tuple[str, ...]]) -> str:
    """Return the host on which vLLM listens."""
    return (flags.get("--host") or ("127.0.0.1",))[-1]


def get_port(flags: Mapping[str, tuple[str, ...]]) -> int | None:
    """Return the port that the user chose, or `None`; raises `UsageError` if it is not a port."""
    if "--port" not in flags:
        return None
    written = "".join(flags["--port"])
    if not re.fullmatch("[0-9]{1,5}", written) or not 0 < int(written) <= 65535:  # noqa: PLR2004  # the largest port
        raise UsageError(f"--port {written} is not a port; use a number from 1 to 65535, or leave it out")
    return int(written)


def build_command(launch: Launch, path: str, port: int) -> list[str]:
    """Return the command that runs the program at *path* on the port *port*."""
    flags = launch.parsed_flags
    defaults = [] if "--host" in flags else ["--host", get_host(flags)]
    defaults += [] if "--port" in flags else ["--port", str(port)]
    defaults += [] if NAMES in flags else [NAMES, launch.name]
    # The user's flags last: vLLM takes the last value of a repeated flag.
    return [path, "serve", launch.name, *defaults, *choose_tool_flags(launch), *launch.flags]


def choose_tool_flags(launch: Launch) -> list[str]:
    """Return the flags for parsing tool calls that the user has not set.

    There is no flag for reasoning: vLLM's parsers remove it from the text, each in its own way, while gymsdk parses
    `<think>` of all models alike, and sends the reasoning back unchanged.
    """
    flags = launch.parsed_flags
    if "--config" in flags or "--no-enable-auto-tool-choice" in flags:
        return []
    auto = [] if AUTO in flags else [AUTO]
    if PARSER in flags:
        return auto
    family = find_family(launch.name)
    return [*auto, PARSER, family.parser] if family else []


def log_command(launch: Launch) -> str:
    """Return one line on how tool calls are parsed, and why; warn if no parser is known and tools are used."""
    flags = launch.parsed_flags
    if PARSER in flags or "--config" in flags or "--no-enable-auto-tool-choice" in flags:
        return f"starting vLLM with {launch.name}; your options decide how tool calls are parsed"
    if family := find_family(launch.name):
        wanted = f"; vLLM recommends --chat-template with its examples/{family.template}" if family.template else ""
        template = "" if "--chat-template" in flags else wanted
        return (
            f"starting vLLM with {launch.name}; tool calls are parsed with {family.parser!r}, because the model is of"
            f" the family {family.name} (choose another with -- {PARSER} NAME){template}"
        )
    if launch.tools:
        log.warning(
            "no tool call parser is known for %r: vLLM refuses requests that offer tools unless you choose one of its"
            " parsers with -- %s NAME",
            launch.name,
            PARSER,
        )
    return f"starting vLLM with {launch.name}, without a tool call parser"
