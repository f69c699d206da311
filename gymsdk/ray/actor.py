"""An actor that plays rollouts on the Ray cluster of a trainer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import ray

from gymsdk.config.model import Deployment, ModelServerConfig
from gymsdk.deploy.process import RunningServers, serve, use_offload
from gymsdk.errors import GymsdkError, UsageError
from gymsdk.http import client
from gymsdk.line import ROLLOUT_INDEX, TASK_INDEX, build_line, get_environment_name
from gymsdk.ray.placement import check_room
from gymsdk.ray.replicas import make_reachable, run_replicas
from gymsdk.rollouts.jobs import Job
from gymsdk.rollouts.players import collect
from gymsdk.rollouts.remote import RemotePlayer, fetch_servers
from gymsdk.rollouts.token_limit import TokenLimitCounter
from gymsdk.tokens.history import mask_untrainable
from gymsdk.types import AGENT_SUFFIX, Budget, Row, build_agent_reference

log = logging.getLogger("gymsdk")


class Gym:
    """A head, agents, environments and a model server in one actor, or with replicas of all but the models.

    Use it as `GymActor`, on a cluster to which this process is connected:

        gym = GymActor.remote(["math"], model="vllm/policy", model_options={"base_url": "http://HOST:8000/v1"})
        for reference in gym.run_rollouts.remote(rows):
            index, line = ray.get(reference)

    Errors of gymsdk reach the caller with their own classes. A rollout that fails raises no error: its
    line has the fields of `failures.jsonl` instead of a reward.

    Args:
        environments: The names of the environments, or their settings by name.
        model: The name of the policy's model, `provider/name`; by default the oracle, which knows the solutions.
        model_options: The options of the model, such as `base_url` and `tokens`; see `gymsdk.model`.
        replicas: The number of replicas that Ray places on the nodes of the cluster; 0 to play in this actor.
        deployment: Further fields of `gymsdk.config.model.Deployment`, such as `host`, `token_file` and
            `gpus_per_replica`.

    Raises:
        UsageError: An argument is not valid.
    """

    def __init__(
        self,
        environments: Sequence[str] | Mapping[str, Mapping[str, Any]],
        *,
        model: str = "scripted/oracle",
        model_options: Mapping[str, Any] | None = None,
        replicas: int = 0,
        deployment: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(environments, str) or not environments:
            raise UsageError("name the environments of the actor in a list, as in ['math']")
        settings = environments if isinstance(environments, Mapping) else {name: {} for name in environments}
        self._deployment = Deployment(
            environments=settings,
            model=ModelServerConfig(name=model, options=dict(model_options or {})),
            replicas=replicas,
            **{"offload": "ray", **(deployment or {})},
        )
        self._lock = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._running: RunningServers | None = None

    async def start(self) -> str:
        """Start the servers, unless they run, and return the URL of the head.

        Raises:
            GymsdkError: A server does not start.
        """
        return (await self._start()).head_url

    async def run_rollouts(
        self,
        rows: Iterable[Row],
        *,
        concurrency: int = 256,
        attempts: int = 3,
        seed: int = 0,
        budget: Mapping[str, Any] | None = None,
        seconds: float = 900.0,
    ) -> AsyncIterator[tuple[int, Row]]:
        """Play *rows*, and yield the index and the line of each rollout as soon as it ends.

        Args:
            rows: The rows of tasks, as `gymsdk tasks` writes them. A row without an agent goes to the only environment.
            concurrency: How many rollouts are played at the same time.
            attempts: How often a rollout is played until it has a reward; only failures that may pass count.
            seed: The seed of the rollouts.
            budget: The limits of an episode, the fields of `gymsdk.Budget`.
            seconds: Seconds that one attempt may take.

        Raises:
            UsageError: A row names no agent, and there are several environments.
            GymsdkError: A server does not start.
        """
        running = await self._start()
        servers = await fetch_servers(running.head_url)
        player = RemotePlayer(servers.build_agent_client(seconds), seed, Budget(**(budget or {})), attempts)
        jobs = [self._build_job(index, row) for index, row in enumerate(rows)]
        limit, has_warned = TokenLimitCounter("max_output_tokens in the responses_create_params of the rows"), False
        async for played in collect(jobs, player, concurrency=concurrency):
            limit.add_rollout(played.rollout)
            if not has_warned and (sentence := limit.describe()):
                has_warned = True
                log.warning(sentence)
            line = build_line(played.rollout, played.job.key, attempts=played.attempts)
            yield played.job.task, mask_untrainable(line)

    async def health(self) -> dict[str, Any]:
        """Return the head's report: its nodes, and the instances of all servers with their health and load.

        Raises:
            GymsdkError: A server does not start, or the head does not answer.
        """
        running = await self._start()
        answer = await client.get(f"{running.head_url}/nodes", timeout=30.0, retry=client.DEFAULT_RETRY)
        report: dict[str, Any] = answer.json()
        return report

    async def shutdown(self) -> None:
        """Stop the servers and the replicas. A later call starts them again."""
        async with self._lock:
            self._running = None
            # A new stack first: a failure to stop must not keep the actor from starting again.
            stack, self._stack = self._stack, AsyncExitStack()
            await stack.aclose()
            await client.aclose()

    async def _start(self) -> RunningServers:
        async with self._lock:
            if self._running is None:
                use_offload(self._deployment.offload)
                deployment = self._deployment
                if deployment.replicas:
                    check_room(deployment)
                    deployment = self._stack.enter_context(make_reachable(deployment))
                running = await self._stack.enter_async_context(serve(deployment=deployment))
                if deployment.replicas:
                    await self._stack.enter_async_context(run_replicas(deployment, running.head_url))
                self._running = running
            elif self._running.task.done():
                raise GymsdkError("the servers of this actor have ended; its log says why. Start another actor")
            return self._running

    def _build_job(self, index: int, row: Row) -> Job:
        environment = get_environment_name(row)
        if environment is None:
            if len(self._deployment.environments) > 1:
                raise UsageError(f"row {index} names no agent, and the actor has several environments; add agent_ref")
            [environment] = self._deployment.environments
            row = {**row, "agent_ref": build_agent_reference(environment + AGENT_SUFFIX)}
        # The indices of an earlier run would end up in the line of this rollout.
        bare = {key: value for key, value in row.items() if key not in {TASK_INDEX, ROLLOUT_INDEX}}
        return Job(environment, index, 0, bare)


GymActor = ray.remote(Gym)
"""`Gym` as an actor: `GymActor.remote(...)`, or `GymActor.options(num_cpus=1).remote(...)`."""
