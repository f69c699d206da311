"""The servers run in a Ray actor, as NeMo RL runs them, and results and errors leave the actor."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from nemo_compat.conftest import AGENT, build_config, build_rows, get_address, parse
from nemo_gym.cli import RunHelper
from nemo_gym.rollout_collection import RolloutCollectionHelper, RunError
from nemo_gym.server_utils import ServerClient

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240), pytest.mark.skipif(not find_spec("ray"), reason="no Ray")]


class Actor:
    """Uses the package as NeMo RL's actor does."""

    def spin_up(self, config: dict[str, Any]) -> str:
        import ray

        config["ray_head_node_address"] = ray.get_runtime_context().gcs_address
        self.head = get_address(config)
        self.servers = RunHelper()
        self.servers.start(global_config_dict_parser_config=parse(config))
        return str(ServerClient.load_from_global_config(self.head).global_config_dict.ray_head_node_address)

    async def run_rollouts(self, rows: list[dict[str, Any]]) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        for waiting in RolloutCollectionHelper().run_examples(examples=rows, head_server_config=self.head):
            row, result = await waiting
            yield row["_rowidx"], result

    def health_check(self) -> bool:
        self.servers.poll()
        return True

    def shut_down(self) -> None:
        self.servers.shutdown()


@pytest.fixture
def ray() -> Iterator[Any]:
    import ray

    os.environ["RAY_AUTH_MODE"] = "disabled"
    variables = {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": variables})
    try:
        yield ray
    finally:
        ray.shutdown()


def test_rollouts_stream_out_of_an_actor(ray: Any, engines: list[str]) -> None:
    actor = ray.remote(Actor).remote()
    address = ray.get(actor.spin_up.remote(build_config(engines)))
    assert address == ray.get_runtime_context().gcs_address
    results = [ray.get(result) for result in actor.run_rollouts.options(num_returns="streaming").remote(build_rows(6))]
    assert sorted(number for number, _ in results) == [*range(6)]
    assert max(result["reward"] for _, result in results) == 1.0
    assert ray.get(actor.health_check.remote())
    stream = actor.run_rollouts.options(num_returns="streaming").remote([{"agent_ref": {"name": AGENT}}])
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        [ray.get(result) for result in stream]
    assert isinstance(caught.value.cause, RunError)
    assert caught.value.cause.status == 422
    ray.get(actor.shut_down.remote())
