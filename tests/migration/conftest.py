"""Shared fixtures for the page for users of NeMo Gym: a model server that knows the answers, and a workspace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from migration.workspace import KEY, Workspace


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the base URL of a server with the APIs of vLLM and OpenAI that plays `tool_call`."""
    with Workspace(tmp_path_factory.mktemp("engine")).serve(
        "gymsdk policy serve oracle --env tool_call --port 0"
    ) as server:
        yield server.url("policy")


@pytest.fixture(scope="session")
def needles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the base URL of a second such server, which plays `multineedle`."""
    with Workspace(tmp_path_factory.mktemp("engine")).serve(
        "gymsdk policy serve oracle --env multineedle --port 0"
    ) as server:
        yield server.url("policy")


@pytest.fixture
def workspace(tmp_path: Path, engine: str) -> Workspace:
    """Return a workspace with the settings of a policy that is running."""
    folder = tmp_path / "folder"
    folder.mkdir()
    workspace = Workspace(folder, engine)
    workspace.write("env.yaml", f"{KEY}policy_base_url: {engine}\npolicy_model_name: policy\n")
    return workspace
