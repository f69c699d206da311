"""What the tests of NeMo Gym's pages share: a model server that knows the answers, and a folder to type in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from seeds.place import KEY, Place


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that speaks as vLLM does, and as OpenAI does; it plays `tool_call`."""
    with Place(tmp_path_factory.mktemp("engine")).serving("gymsdk policy serve oracle --env tool_call --port 0") as it:
        yield it.url("policy")


@pytest.fixture(scope="session")
def needles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of another, which plays `multineedle`."""
    with Place(tmp_path_factory.mktemp("engine")).serving(
        "gymsdk policy serve oracle --env multineedle --port 0"
    ) as it:
        yield it.url("policy")


@pytest.fixture
def place(tmp_path: Path, engine: str) -> Place:
    """A folder to type in, with the settings of a policy that is there."""
    folder = tmp_path / "folder"
    folder.mkdir()
    place = Place(folder, engine)
    place.write("env.yaml", f"{KEY}policy_base_url: {engine}\npolicy_model_name: policy\n")
    return place
