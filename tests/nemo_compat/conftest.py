"""A trainer's view of gymsdk: servers that `RunHelper` starts from a configuration dictionary, with two engines."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from omegaconf import DictConfig

import gymsdk
from gymsdk_nemo_compat.running import CHILD_COMMAND
from nemo_gym.cli import GlobalConfigDictParserConfig, RunHelper
from nemo_gym.server_utils import HEAD_SERVER_KEY_NAME, BaseServerConfig

CONFIG_PATHS = [
    "resources_servers/tool_call/configs/tool_call.yaml",
    "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml",
]
AGENT = "tool_call_simple_agent"


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def serve_policy(*options: str) -> Iterator[str]:
    """Yield the base URL of an engine with token IDs that knows the answers of `tool_call`."""
    command = [sys.executable, "-m", "gymsdk", "policy", "serve", "oracle", "--env", "tool_call", "--port", "0"]
    engine = subprocess.Popen([*command, "--json", *options], stdout=subprocess.PIPE, text=True)
    try:
        assert engine.stdout is not None
        yield str(json.loads(engine.stdout.readline())["url"])
    finally:
        engine.terminate()
        engine.communicate(timeout=30)


@pytest.fixture(scope="session")
def engines() -> Iterator[list[str]]:
    """Yield the base URLs of two engines, as a trainer has one for each data-parallel rank."""
    with ExitStack() as stack:
        yield [stack.enter_context(serve_policy("--pairs")) for _ in range(2)]


def build_config(base_urls: list[str], **changes: Any) -> dict[str, Any]:
    """Return the dictionary that NeMo RL's actor passes, with a free port for the head server."""
    return {
        "config_paths": CONFIG_PATHS,
        "policy_model_name": "policy",
        "policy_api_key": "dummy_key",
        "policy_base_url": base_urls,
        "default_host": "127.0.0.1",
        "global_aiohttp_connector_limit": 65_536,
        "global_aiohttp_connector_limit_per_host": 16_384,
        "uv_cache_dir": "/nonexistent/uv",
        HEAD_SERVER_KEY_NAME: {"host": "0.0.0.0", "port": find_free_port()},
        **changes,
    }


def parse(config: Mapping[str, Any]) -> GlobalConfigDictParserConfig:
    """Return the argument of `RunHelper.start`, as NeMo RL builds it."""
    return GlobalConfigDictParserConfig(
        dotenv_path=Path("/nonexistent/nemo_gym_env.yaml"),
        initial_global_config_dict=DictConfig(config),
        skip_load_from_cli=True,
    )


def get_address(config: Mapping[str, Any]) -> BaseServerConfig:
    """Return the address of the head server, as clients on this machine reach it."""
    return BaseServerConfig(host="127.0.0.1", port=config[HEAD_SERVER_KEY_NAME]["port"])


@contextmanager
def running(config: Mapping[str, Any]) -> Iterator[RunHelper]:
    helper = RunHelper()
    helper.start(global_config_dict_parser_config=parse(config))
    try:
        yield helper
    finally:
        helper.shutdown()


Start: TypeAlias = Callable[..., tuple[RunHelper, BaseServerConfig]]


@pytest.fixture
def start(engines: list[str]) -> Iterator[Start]:
    """Return a function that starts servers with changes of the configuration, and returns the address of the head."""
    with ExitStack() as stack:

        def start(**changes: Any) -> tuple[RunHelper, BaseServerConfig]:
            config = build_config(engines, **changes)
            return stack.enter_context(running(config)), get_address(config)

        yield start


@pytest.fixture(scope="module")
def head(engines: list[str]) -> Iterator[BaseServerConfig]:
    """Yield the address of the head server of a run that the tests of a module share."""
    config = build_config(engines)
    with running(config):
        yield get_address(config)


def build_rows(count: int) -> list[dict[str, Any]]:
    """Return rows of `tool_call` as NeMo RL sends them, with its own keys and sampling parameters."""
    rows = [task.row() for task in islice(gymsdk.load("tool_call").tasks("train"), count)]
    for number, row in enumerate(rows):
        row |= {"_rowidx": number, "agent_ref": {"name": AGENT}, "trainer_key": {"kept": [number]}}
        row["responses_create_params"] |= {"temperature": 1.0, "top_p": 1.0, "max_output_tokens": 512}
    return rows


def list_server_processes() -> set[int]:
    """Return the process IDs of the servers that this process has started."""
    found: set[int] = set()
    parents = [os.getpid()]
    while parents:
        parent = parents.pop()
        for thread in Path(f"/proc/{parent}/task").glob("*/children"):
            children = [int(pid) for pid in thread.read_text().split()]
            parents += children
            found |= {pid for pid in children if CHILD_COMMAND[-1].encode() in read_command(pid)}
    return found


def read_command(pid: int) -> bytes:
    """Return the command line of a process, nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
