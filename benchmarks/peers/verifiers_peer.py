"""Play weather rollouts with verifiers against the stub model server: two model calls and one tool call each.

usage: verifiers_peer.py STUB_URL ROLLOUTS IN_FLIGHT      run with a Python that has verifiers 0.4 and uv installed

The environment has the lightest settings that verifiers 0.4 offers: the harness without tools of its own, in a
subprocess per rollout, and one tool server for all rollouts. This file is also the module that verifiers imports as the
package of the environment. The script prints the CPU time per rollout in milliseconds, with all child processes, the
number of scored rollouts and the version of verifiers as a line of JSON, after a warm-up.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import verifiers.v1 as vf
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

HERE = Path(__file__).resolve().parent
NAME = "verifiers_peer"
WARM_UP = 4
__all__ = ["WeatherTaskset"]


class WeatherToolset(vf.Toolset[vf.SharedToolsetConfig]):
    """The tool server of the environment, a process of its own."""

    TOOL_PREFIX = None

    @vf.tool
    async def get_weather(self, city: str) -> str:
        """Get the weather."""
        return json.dumps({"city": city, "weather_description": f"The weather in {city} is cold."})


class WeatherTask(vf.Task):
    """A question about the weather, which is answered right if the reply says that it is cold."""

    @vf.reward
    async def is_cold(self, trace: vf.Trace) -> float:
        """Return 1.0 if the tool was called and the reply is right."""
        return float(len(trace.tool_messages) == 1 and "cold" in trace.last_reply)


class WeatherTaskset(vf.Taskset[WeatherTask]):
    """Tasks with different questions."""

    INFINITE = True

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:  # noqa: ARG003  # the signature of the hook
        """Return the tool servers that all rollouts share."""
        return [WeatherToolset(vf.SharedToolsetConfig())]

    def load(self) -> Iterator[WeatherTask]:
        """Yield the tasks."""
        for number in itertools.count():
            prompt = f"what's it like in sf? (request {number})"
            yield WeatherTask(vf.TaskData(prompt=prompt), self.config.task)


async def main(stub: str, rollouts: int, in_flight: int) -> None:
    """Print the measurement."""
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    env = load_environment(resolve_env_config({"taskset": {"id": NAME}, "agent": agent}))
    client = EvalClientConfig(base_url=f"{stub}/v1", api_key_var="STUB_API_KEY")
    context = ModelContext(client=client, model="stub", sampling=vf.SamplingConfig())
    tree = ProcessTree(os.getpid())

    async def play(number: int) -> int:
        limit = asyncio.Semaphore(in_flight)
        slots = [slot for task in env.taskset.take(number) for slot in env.slots(task)]
        episodes = await asyncio.gather(*(env.run_slot(slot, context, limit) for slot in slots))
        return sum(episode.ok and episode.traces[0].reward == 1.0 for episode in episodes)

    async with env.serving():
        if await play(WARM_UP) < WARM_UP:
            raise RuntimeError("the rollouts of the warm-up were not scored")
        before = tree.read_cpu()
        scored = await play(rollouts)
        cpu = tree.read_cpu() - before
    print(json.dumps({"cpu": 1e3 * cpu / rollouts, "scored": scored, "version": version("verifiers")}))


if __name__ == "__main__" and "VF_CONFIG" in os.environ:  # verifiers starts the tool server by the name of the module
    WeatherToolset.run()
elif __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    from yardstick.processes import ProcessTree

    logging.disable(logging.WARNING)
    # verifiers looks for uv on the path, and the tool server for this module.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ["PYTHONPATH"] = str(HERE)
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
