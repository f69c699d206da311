"""The released token capture of NeMo Gym 0.7 reads and checks the files that gymsdk writes."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokens.conversations import Turn, draw_turn
from tokens.test_capture import TURNS, Harness, build_url, read_entries, serve

from gymsdk.responses import TokenInterface
from gymsdk.tokens.capture import TokenCaptureFolder
from released.wheels import checkout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return the package `nemo_gym.token_id_capture` of the released wheel."""
    sys.path.insert(0, str(checkout("0.7.0", tmp_path_factory.mktemp("released"))))
    # Another test of this process may have imported the package of the same name from gymsdk-nemo-compat.
    own = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == "nemo_gym"}
    try:
        for name in ("conformance", "consumer", "lineage", "store"):
            importlib.import_module(f"nemo_gym.token_id_capture.{name}")
        yield sys.modules["nemo_gym.token_id_capture"]
    finally:
        sys.path.pop(0)
        for name in [name for name in sys.modules if name.partition(".")[0] == "nemo_gym"]:
            del sys.modules[name]
        sys.modules.update(own)


class Sink:
    """Our folder with the methods of NeMo Gym's `TokenSink`."""

    def __init__(self, folder: Path) -> None:
        self._folder = TokenCaptureFolder(folder)

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        self._folder.begin_call(rollout_id, model_call_id)

    async def put(self, entry: Any) -> None:
        self._folder.put(entry.model_dump(mode="json"))

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        self._folder.mark_incomplete(rollout_id, model_call_id)

    async def close(self) -> None:
        pass


async def test_the_folder_passes_the_conformance_test(capture: Any, tmp_path: Path) -> None:
    passed = await capture.conformance.run_conformance(
        lambda: Sink(tmp_path),
        lambda: capture.store.TokenCaptureStore(tmp_path),
        lambda: capture.lineage.FileLineageStore(tmp_path),
    )
    assert "begin_call_custody" in passed
    assert len(passed) == 10


async def build(capture: Any, folder: Path, rollout: str, response: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what the collector of NeMo Gym builds from the captured rollout."""
    source = capture.store.TokenCaptureStore(folder)
    built: dict[str, Any] = await capture.consumer.trajectories_from_source(rollout, source, verified_response=response)
    return built


async def play(
    folder: Path,
    rollout: str,
    turns: list[Turn],
    template: str = "qwen",
    interface: TokenInterface = "vllm-completions",
) -> Harness:
    async with serve(folder, turns, template, interface) as url:
        harness = Harness(build_url(url, rollout))
        await harness.play(turns)
    return harness


TEMPLATES = ["qwen", "gemma", "strip", "mistral", "drop-empty"]
ROLLOUTS = 40


def draw_turns(seed: int) -> list[Turn]:
    rng = random.Random(seed)
    return [draw_turn(rng) for _ in range(4)]


@pytest.mark.parametrize("template", TEMPLATES)
async def test_no_rollout_of_an_agent_without_token_ids_is_masked(capture: Any, tmp_path: Path, template: str) -> None:
    for seed in range(ROLLOUTS):
        harness = await play(tmp_path, f"{seed}-0", draw_turns(seed), template)
        built = await build(capture, tmp_path, f"{seed}-0")
        assert (built["mask_sample"], built.get("error")) == (False, None), built
        assert (built["metrics"]["chains"], built["metrics"]["delivered_fraction"]) == (1, 1.0)
        delivered = [item for item in built["rebuilt_response"]["output"] if item.get("generation_token_ids")]
        assert [item["generation_token_ids"] for item in delivered] == [
            carrier["generation_token_ids"] for carrier in harness.carriers
        ]


async def test_the_scored_response_names_its_call(capture: Any, tmp_path: Path) -> None:
    await play(tmp_path, "r", TURNS)
    last = read_entries(tmp_path, "r")[-1]
    response = {"id": last["response_id"], "output": last["output_items"]}
    built = await build(capture, tmp_path, "r", response)
    assert built["metrics"]["terminal_attribution"]["call_id"] == last["model_call_id"]
    assert built["mask_sample"] is False


async def test_a_lost_call_masks_the_rollout(capture: Any, tmp_path: Path) -> None:
    await play(tmp_path, "r", TURNS)
    TokenCaptureFolder(tmp_path).begin_call("r", "lost")
    built = await build(capture, tmp_path, "r")
    assert (built["mask_sample"], built["metrics"]["capture_incomplete"]) == (True, True)


async def test_a_rewritten_conversation_masks_the_rollout(capture: Any, tmp_path: Path) -> None:
    async with serve(tmp_path, TURNS) as url:
        harness = Harness(build_url(url, "r"))
        await harness.play(TURNS[:2])
        harness.messages[0] = {"role": "user", "content": "a summary of the conversation"}
        await harness.play(TURNS[2:])
    assert (await build(capture, tmp_path, "r"))["mask_sample"] is True
