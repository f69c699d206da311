"""Policies: a model as `policy(observation, info) -> action`, and `rollout`, which plays an episode with a model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import gymnasium

from gymsdk import responses
from gymsdk.episode import build_request
from gymsdk.errors import EpisodeError, Failed, UsageError
from gymsdk.gym import registration, slot
from gymsdk.gym.env import Env
from gymsdk.gym.spaces import Conversation, Messages, Turn
from gymsdk.gym.vector import VectorEnv, get_info
from gymsdk.models import registry as models
from gymsdk.types import Episode, Item, Model, Rollout

SingleEnv: TypeAlias = gymnasium.Env[Any, Any]

ManyEnvs: TypeAlias = gymnasium.vector.VectorEnv[Any, Any, Any]

Info: TypeAlias = dict[str, Any]


class Policy:
    """A model as a policy.

    The policy keeps the conversation from the observations, and its actions are the model's output items.

    Args:
        model: A model, or the name of one.
        env: The environment to play, with or without wrappers. A model that needs the episode itself, such
            as `scripted/oracle`, gets it from here, and so does each request its row's own parameters.
        sampling: Sampling parameters, which override those of the row.
        timeout: The seconds that one answer of the model may take.
        **options: The options of `gymsdk.model`, if the model is given by name.

    Raises:
        UsageError: An option is invalid, or a policy cannot play the environment.
    """

    def __init__(
        self,
        model: Model | str,
        env: SingleEnv | ManyEnvs | None = None,
        *,
        sampling: Mapping[str, Any] | None = None,
        timeout: float = 600.0,
        **options: Any,
    ) -> None:
        if options and not isinstance(model, str):
            raise UsageError(f"{', '.join(options)}: options apply to a model's name; this model exists already")
        self._model = models.model(model, timeout=timeout, **options) if isinstance(model, str) else model
        responses.check_model(self._model)
        self._env = None if env is None else _check_env(env)
        self._sampling = dict(sampling or {})
        self._timeout = timeout
        self._conversations: list[Conversation] = []

    def __call__(self, observation: Any, info: Info) -> Turn:
        """Return the model's next turn.

        An unfinished turn is an action too: it ends the episode, because the model ran out of tokens.

        Raises:
            Failed: The model gave no answer. The same call may be repeated.
        """
        (turn,) = self._play_turns([observation], [info])
        if turn.failure:
            raise turn.failure
        return turn

    def batch(self, observations: Sequence[Any], infos: Info | Sequence[Info]) -> list[Turn]:
        """Return the next turn of each sub-environment, from concurrent calls of the model.

        The model is not asked where the action is ignored. If a request fails, the turn has a `failure`, which ends its
        episode as failed; the other episodes continue.
        """
        if isinstance(infos, dict):
            infos = [get_info(infos, number) for number in range(len(observations))]
        return self._play_turns(observations, infos)

    def _play_turns(self, observations: Sequence[Any], infos: Sequence[Info]) -> list[Turn]:
        new = len(infos) - len(self._conversations)
        self._conversations += [Conversation() for _ in range(new)]
        observed = enumerate(zip(observations, infos, strict=True))
        has_turns = [self._conversations[number].observe(observation, info) for number, (observation, info) in observed]
        numbers = [number for number, has_turn in enumerate(has_turns) if has_turn]
        turns = slot.run(self._ask_models(numbers)) if numbers else {}
        return [turns[number] if number in turns else Turn() for number in range(len(has_turns))]

    async def _ask_models(self, numbers: Sequence[int]) -> dict[int, Turn]:
        conversations = self._conversations
        episodes = [None] * len(conversations) if self._env is None else _get_episodes(self._env)
        async with asyncio.TaskGroup() as group:
            tasks = {
                number: group.create_task(self._ask_model(conversations[number], episodes[number]))
                for number in numbers
            }
        return {number: task.result() for number, task in tasks.items()}

    async def _ask_model(self, conversation: Conversation, episode: Episode | None) -> Turn:
        try:
            response = await self._query(self._build_parameters(episode) | conversation.build_request(), episode)
        except EpisodeError as error:
            error.stage = "model"
            return Turn(failure=error)
        conversation.add_output(response["output"])
        return Turn(response)

    def _build_parameters(self, episode: Episode | None) -> Item:
        parameters = build_request(episode, self._sampling) if episode else self._sampling
        return {key: value for key, value in parameters.items() if key not in {"input", "tools"}}

    async def _query(self, request: Item, episode: Episode | None) -> Item:
        try:
            async with asyncio.timeout(self._timeout):
                return await responses.query_model(self._model, request, episode=episode)
        except TimeoutError:
            message = f"the model did not answer within {self._timeout:g} s"
            raise Failed(message, kind="model_timeout", retryable=True) from None


def rollout(
    env: SingleEnv | str,
    model: Model | str,
    *,
    seed: int | None = None,
    options: dict[str, Any] | None = None,
    sampling: Mapping[str, Any] | None = None,
    timeout: float = 600.0,
    **model_options: Any,
) -> Rollout:
    """Play one episode with `reset` and `step`, wrappers included.

    Args:
        env: An environment's name, as in `math` or `nemo/math`, or the result of `gymnasium.make`.
        model: A model, or the name of one.
        seed: The seed of `reset`.
        options: The options of `reset`.
        sampling: Sampling parameters, which override those of the row.
        timeout: The seconds that one answer of the model may take.
        **model_options: The options of `gymsdk.model`, as in `base_url`.

    Returns:
        The rollout. A failure in the episode does not raise: it is the rollout's `failure`.
    """
    env_to_play = make_env(env) if isinstance(env, str) else env
    try:
        base = _get_base_env(env_to_play)
        policy = Policy(model, env_to_play, sampling=sampling, timeout=timeout, **model_options)
        _play(env_to_play, policy, *env_to_play.reset(seed=seed, options=options))
    finally:
        if env_to_play is not env:
            env_to_play.close()
    if base.rollout is None:
        raise UsageError(
            "a wrapper ended the episode before it was scored; limit it with the environment's turns= instead"
        )
    return base.rollout.model_copy(update={"sampling": dict(sampling or {})})


def _get_base_env(env: SingleEnv) -> Env:
    base = env.unwrapped
    if not isinstance(base, Env):
        raise UsageError(f"rollout() plays a single environment of gymsdk, got {type(base).__name__}")
    return base


def _play(env: SingleEnv, policy: Policy, observation: Any, info: Info) -> None:
    is_over = False
    while not is_over:
        observation, _, terminated, truncated, info = env.step(_ask_policy(policy, observation, info))
        is_over = terminated or truncated


def _ask_policy(policy: Policy, observation: Any, info: Info) -> Turn:
    try:
        return policy(observation, info)
    except EpisodeError as error:
        return Turn(failure=error)


def make_env(name: str, **arguments: Any) -> SingleEnv:
    """Create the environment *name*, as in `math` or `nemo/math`, with `gymnasium.make` and *arguments*."""
    registration.register()
    plain = name.removeprefix(f"{registration.NAMESPACE}/")
    if "/" in plain or ":" in plain:
        return gymnasium.make(name, **arguments)
    known = f"{registration.NAMESPACE}/{plain}"
    # For an environment that is not registered, `Env` raises with the reason.
    return gymnasium.make(known, **arguments) if known in gymnasium.registry else Env(plain, **arguments)


def _check_env(env: SingleEnv | ManyEnvs) -> SingleEnv | ManyEnvs:
    """Return *env* if a policy can play it; raises `UsageError` otherwise."""
    base = env.unwrapped
    _get_episodes(env)
    space = base.single_observation_space if isinstance(base, gymnasium.vector.VectorEnv) else base.observation_space
    if not isinstance(space, Messages):
        raise UsageError(f"a policy reads chat messages, this environment shows {space}; create it with codec='chat'")
    return env


def _get_episodes(env: SingleEnv | ManyEnvs) -> Sequence[Episode | None]:
    base = env.unwrapped
    if isinstance(base, Env):
        return [base.episode]
    if isinstance(base, VectorEnv):
        return base.episodes
    if isinstance(base, gymnasium.vector.SyncVectorEnv):
        return [_get_episodes(env)[0] for env in base.envs]
    raise UsageError(
        f"a policy plays environments of gymsdk in this process, got {type(base).__name__}; leave out env="
    )
