"""Policies: any model as `policy(observation, info) -> action`; one call plays an episode through Gymnasium."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import gymnasium

from gymsdk import responses
from gymsdk.episode import build_request
from gymsdk.errors import EpisodeError, Failed, UsageError
from gymsdk.gym import loop, registration
from gymsdk.gym.actions import Conversation, Turn
from gymsdk.gym.env import Env
from gymsdk.gym.spaces import Messages
from gymsdk.gym.vector import VectorEnv, info_of
from gymsdk.models import registry as models
from gymsdk.types import Episode, Item, Model, Rollout

Single: TypeAlias = gymnasium.Env[Any, Any]

Several: TypeAlias = gymnasium.vector.VectorEnv[Any, Any, Any]

Info: TypeAlias = dict[str, Any]


class Policy:
    """A model as a policy: *model* is one, or the name of one with the *options* of `gymsdk.model`.

    It keeps the conversation from what it is shown, and answers with the model's own output items. *env* is who is
    played, with its wrappers or without: a model that needs the episode itself, as `scripted/oracle` does, gets it from
    there, and so does every request the row's own parameters; *sampling* goes over them. A model has *timeout* seconds.
    """

    def __init__(
        self,
        model: Model | str,
        env: Single | Several | None = None,
        *,
        sampling: Mapping[str, Any] | None = None,
        timeout: float = 600.0,
        **options: Any,
    ) -> None:
        if options and not isinstance(model, str):
            raise UsageError(f"{', '.join(options)}: options are for a model's name; this model is made already")
        self._model = models.model(model, timeout=timeout, **options) if isinstance(model, str) else model
        responses.check_model(self._model)
        self._env = None if env is None else _spoken_with(env)
        self._sampling = dict(sampling or {})
        self._timeout = timeout
        self._conversations: list[Conversation] = []

    def __call__(self, observation: Any, info: Info) -> Turn:
        """Give the model's next turn; raises `Failed` where it gives none, and may be asked again then.

        A turn that the model did not finish is an action too: it ends the episode, as running out of tokens does.
        """
        (turn,) = self._turns([observation], [info])
        if turn.failure:
            raise turn.failure
        return turn

    def batch(self, observations: Sequence[Any], infos: Info | Sequence[Info]) -> list[Turn]:
        """Give the next turn of each sub-environment, all asked at once; none is asked where its action is ignored.

        Where the model fails, the turn has a `failure`: it ends its own episode as failed, and the others go on.
        """
        return self._turns(observations, _each(infos, len(observations)))

    def _turns(self, observations: Sequence[Any], infos: Sequence[Info]) -> list[Turn]:
        new = len(infos) - len(self._conversations)
        self._conversations += [Conversation() for _ in range(new)]
        shown = enumerate(zip(observations, infos, strict=True))
        heard = [self._conversations[number].hear(*each) for number, each in shown]
        asked = [number for number, has_turn in enumerate(heard) if has_turn]
        said = loop.run(self._asked(asked)) if asked else {}
        return [said[number] if number in said else Turn() for number in range(len(heard))]

    async def _asked(self, numbers: Sequence[int]) -> dict[int, Turn]:
        talks = self._conversations
        episodes = [None] * len(talks) if self._env is None else _episodes(self._env)
        async with asyncio.TaskGroup() as group:
            asked = {number: group.create_task(self._turn(talks[number], episodes[number])) for number in numbers}
        return {number: task.result() for number, task in asked.items()}

    async def _turn(self, conversation: Conversation, episode: Episode | None) -> Turn:
        try:
            response = await self._response(self._parameters(episode) | conversation.request(), episode)
        except EpisodeError as error:
            error.stage = "model"
            return Turn(failure=error)
        conversation.said(response["output"])
        return Turn(response)

    def _parameters(self, episode: Episode | None) -> Item:
        whole = build_request(episode, self._sampling) if episode else self._sampling
        return {key: value for key, value in whole.items() if key not in {"input", "tools"}}

    async def _response(self, request: Item, episode: Episode | None) -> Item:
        try:
            async with asyncio.timeout(self._timeout):
                return await responses.query_model(self._model, request, episode=episode)
        except TimeoutError:
            message = f"the model did not answer within {self._timeout:g} s"
            raise Failed(message, kind="model_timeout", retryable=True) from None


def rollout(
    env: Single | str,
    model: Model | str,
    *,
    seed: int | None = None,
    options: dict[str, Any] | None = None,
    sampling: Mapping[str, Any] | None = None,
    timeout: float = 600.0,
    **model_options: Any,
) -> Rollout:
    """Play one episode of *env* with *model* and give its rollout, through `reset` and `step`, wrappers included.

    *env* is a name, as in `math` or `nemo/math`, or what `gymnasium.make` gave; *seed* and *options* are those of its
    `reset`, *model_options*, as `base_url`, of `gymsdk.model`, as with `Policy`. As with `gymsdk.play`, what goes wrong
    in the episode is in the rollout's `failure`, and not raised.
    """
    played = made(env) if isinstance(env, str) else env
    try:
        base = _base(played)
        policy = Policy(model, played, sampling=sampling, timeout=timeout, **model_options)
        _play(played, policy, *played.reset(seed=seed, options=options))
    finally:
        if played is not env:
            played.close()
    if base.rollout is None:
        raise UsageError("a wrapper ended the episode unjudged; bound it by the environment's own turns= instead")
    return base.rollout.model_copy(update={"sampling": dict(sampling or {})})


def _base(env: Single) -> Env:
    base = env.unwrapped
    if not isinstance(base, Env):
        raise UsageError(f"a rollout is of one environment of gymsdk, not of {type(base).__name__}")
    return base


def _play(env: Single, policy: Policy, observation: Any, info: Info) -> None:
    over = False
    while not over:
        observation, _, terminated, truncated, info = env.step(_turn(policy, observation, info))
        over = terminated or truncated


def _turn(policy: Policy, observation: Any, info: Info) -> Turn:
    try:
        return policy(observation, info)
    except EpisodeError as error:
        return Turn(failure=error)


def made(name: str, **arguments: Any) -> Single:
    """Give what `gymnasium.make` makes of an environment's *name*, as in `math` or `nemo/math`, with *arguments*."""
    registration.register()
    plain = name.removeprefix(f"{registration.NAMESPACE}/")
    if "/" in plain or ":" in plain:
        return gymnasium.make(name, **arguments)
    known = f"{registration.NAMESPACE}/{plain}"
    # Whoever has no entry says why when it is made.
    return gymnasium.make(known, **arguments) if known in gymnasium.registry else Env(plain, **arguments)


def _spoken_with(env: Single | Several) -> Single | Several:
    """Give *env* where a policy can play it; raises `UsageError`."""
    base = env.unwrapped
    _episodes(env)
    space = base.single_observation_space if isinstance(base, gymnasium.vector.VectorEnv) else base.observation_space
    if not isinstance(space, Messages):
        raise UsageError(f"a policy reads chat messages, and this environment shows {space}; make it with codec='chat'")
    return env


def _episodes(env: Single | Several) -> Sequence[Episode | None]:
    base = env.unwrapped
    if isinstance(base, Env):
        return [base.episode]
    if isinstance(base, VectorEnv):
        return base.episodes
    if isinstance(base, gymnasium.vector.SyncVectorEnv):
        return [_episodes(each)[0] for each in base.envs]
    raise UsageError(
        f"a policy plays environments of gymsdk in this process, not {type(base).__name__}; leave out env="
    )


def _each(infos: Info | Sequence[Info], count: int) -> Sequence[Info]:
    return [info_of(infos, number) for number in range(count)] if isinstance(infos, dict) else infos
