"""Environments as a `gymnasium.vector.VectorEnv`: each step applies one turn in all slots concurrently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from gymsdk.environment import Environment
from gymsdk.errors import UsageError, format_suggestion
from gymsdk.gym import env, slot
from gymsdk.gym.config import EnvConfig, Seeds, Tasks, build_budget, merge_settings, parse_slot_resets
from gymsdk.gym.env import ExclusiveLock, TranscriptPrinter
from gymsdk.gym.slot import RESET_REWARD_AND_FLAGS, Info, Slots, StepResult
from gymsdk.gym.spaces import Batch, ObjectArray, build_object_array, list_values
from gymsdk.tokens.tokenizer import Tokenizer
from gymsdk.types import Episode, Rollout

INT64_BOUND = 2**63
"""The first positive integer that does not fit into a 64-bit integer of NumPy."""


def merge_infos(infos: Sequence[Info]) -> Info:
    """Merge the infos of all slots into one dict of arrays; `_key` is a mask of the slots whose info has `key`.

    Dicts are merged into a dict of arrays, numbers of one type into an array of this type, other values into an array
    of objects. Dicts mixed with other values stay objects, and so do dicts whose keys look like masks. `get_info` is
    the inverse.
    """
    keys = dict.fromkeys(key for info in infos for key in info)
    batch: Info = {}
    for key in keys:
        mask = np.fromiter((key in info for info in infos), dtype=np.bool_, count=len(infos))
        batch[key], batch[f"_{key}"] = _merge_values(infos, key, mask), mask
    return batch


def get_info(infos: Info, index: int) -> Info:
    """Return the info of the slot at *index* from the merged *infos*."""
    return {
        key: _get_value(value, index)
        for key, value in infos.items()
        if not key.startswith("_") and (f"_{key}" not in infos or infos[f"_{key}"][index])
    }


def _merge_values(infos: Sequence[Info], key: str, mask: NDArray[np.bool_]) -> Any:
    values = [info[key] for info in infos if key in info]
    if all(map(_is_nested, values)):
        return merge_infos([info.get(key, {}) for info in infos])
    kind = type(values[0])
    if kind in {bool, int, float} and all(type(value) is kind and _fits_int64(value) for value in values):
        numbers = np.zeros(len(infos), dtype=kind)
        numbers[mask] = values
        return numbers
    return build_object_array(info.get(key) for info in infos)


def _is_nested(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) and not key.startswith("_") for key in value)


def _fits_int64(number: float) -> bool:
    return isinstance(number, float) or -INT64_BOUND <= number < INT64_BOUND


def _get_value(column: Any, index: int) -> Any:
    if isinstance(column, dict):
        return get_info(column, index)
    value = column[index]
    return value.item() if isinstance(value, np.generic) else value


AUTORESET_MODES = {mode.name.lower(): mode for mode in AutoresetMode}
"""The autoreset modes by their lower-case names."""

BatchedStepResult: TypeAlias = tuple[ObjectArray, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], Info]
"""Observations, rewards, terminations, truncations and infos."""


class VectorEnv(gymnasium.vector.VectorEnv[ObjectArray, Any, Any]):
    """Plays episodes of one environment in several slots.

    Arguments that are not listed here are those of `Env`. `gymsdk.gym.vector.get_info` returns the info of one slot.

    Args:
        environment: The name of an installed environment, or an `Environment`.
        num_envs: The number of slots.
        autoreset_mode: When a slot opens its next episode: at the `next_step`, which ignores the slot's action; in the
            `same_step`, which returns the last observation and info as `final_obs` and `final_info`; or only on `reset`
            (`disabled`).
        max_episode_steps: A limit of turns, beside `turns`. `gymnasium.make_vec` passes this argument.

    Raises:
        UsageError: An argument is invalid. A failure inside an episode does not raise: the slot's info holds it.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi", "human"], "render_fps": 1}  # type: ignore[misc]  # Gymnasium annotates it as an instance attribute

    def __init__(  # noqa: PLR0913  # each is an argument of `gymnasium.make_vec`
        self,
        environment: str | Environment,
        *,
        num_envs: int = 1,
        autoreset_mode: str | AutoresetMode = "next_step",
        split: str | None = None,
        tasks: Tasks | None = None,
        codec: str = "chat",
        tokenizer: Tokenizer | str | None = None,
        turns: int = 32,
        tools: int = 128,
        seconds: float = 600.0,
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
        settings: Mapping[str, Any] | None = None,
        **config: Any,
    ) -> None:
        # Gymnasium 1.1 closes an object on garbage collection: if this method fails, there is nothing to close.
        self.closed = True
        if render_mode not in {None, *self.metadata["render_modes"]}:
            raise UsageError(f"render_mode must be 'ansi', 'human' or None, got {render_mode!r}")
        self.num_envs, self.render_mode = _parse_num_envs(num_envs), render_mode
        self._mode = _parse_autoreset_mode(autoreset_mode)
        self.metadata = self.metadata | {"autoreset_mode": self._mode}  # type: ignore[misc]  # the mode differs by instance
        env_config = EnvConfig(
            environment,
            settings=merge_settings(settings, config),
            split=split,
            tasks=tasks,
            codec=codec,
            tokenizer=tokenizer,
            budget=build_budget(turns=_limit_turns(turns, max_episode_steps), tools=tools, seconds=seconds),
        )
        self._observations: list[Any] = [None] * self.num_envs
        self._printers = [TranscriptPrinter(f"slot {index}: ") for index in range(self.num_envs)]
        self._lock = ExclusiveLock()
        self._set_up(env_config, [None] * self.num_envs)
        codec_spaces = self._slots.slots[0].codec
        self.single_observation_space = codec_spaces.observation_space
        self.single_action_space = codec_spaces.action_space
        self.observation_space = Batch(self.single_observation_space, self.num_envs)
        self.action_space = Batch(self.single_action_space, self.num_envs)
        self.closed = False

    def reset(self, *, seed: Seeds = None, options: Mapping[str, Any] | None = None) -> tuple[ObjectArray, Info]:
        """Open an episode in each slot.

        Args:
            seed: An integer, to which each slot adds its index, or a list with one seed per slot.
            options: The options of `Env`, for all slots. `task` may be a list with one task per slot; the boolean array
                `reset_mask` selects the slots to reset, and the others return their last observation again.

        Returns:
            The observations and the infos.

        Raises:
            UsageError: The seed or an option is invalid.
        """
        with self._lock.hold(self._rebuild_after_fork):
            resets = parse_slot_resets(self.num_envs, seed, options)
            if never_reset := [
                str(index)
                for index, observation in enumerate(self._observations)
                if observation is None and index not in resets
            ]:
                raise UsageError(
                    f"options['reset_mask'] leaves out slot {', '.join(never_reset)}, which was never reset"
                )
            episodes = {
                index: self._slots.choose_episode(index, *reset_options) for index, reset_options in resets.items()
            }
            self.closed = False
            observation, *_, infos = self._batch(slot.run(self._slots.play({}, episodes)))
            return observation, infos

    def step(self, actions: Any) -> BatchedStepResult:
        """Apply one turn in each slot.

        Args:
            actions: A sequence with one action per slot.

        Returns:
            Observations, rewards, terminations, truncations and infos.

        Raises:
            ResetNeeded: A slot has no open episode. No slot has played.
            UsageError: An action is invalid. No slot has played.
        """
        with self._lock.hold(self._rebuild_after_fork):
            action_list = list_values(actions, self.num_envs)
            # Parsed before the next tasks are drawn: after an invalid action, the repeated step draws the same tasks.
            finished = dict.fromkeys(self._slots.find_finished() if self._mode is AutoresetMode.NEXT_STEP else ())
            actions = self._slots.parse_actions(
                {index: action for index, action in enumerate(action_list) if index not in finished}
            )
            episodes = {index: self._slots.choose_episode(index) for index in finished}
            results = slot.run(self._slots.play(actions, episodes))
            return self._batch(self._reset_finished(results) if self._mode is AutoresetMode.SAME_STEP else results)

    def render(self) -> tuple[str, ...] | None:
        """Return the episode of each slot as text if `render_mode` is `ansi`; `human` prints them during the steps."""
        if self.render_mode != "ansi":
            return None
        return tuple(TranscriptPrinter().format(slot.episode, slot.rollout) for slot in self._slots.slots)

    def close_extras(self, **_: Any) -> None:
        """Close every open episode and leave the environment; the next `reset` enters the environment again."""
        with self._lock.hold(self._rebuild_after_fork):
            slot.run(self._slots.close())

    @property
    def episodes(self) -> tuple[Episode | None, ...]:
        """The open episode of each slot, or else its last episode; `None` before a reset and after `close`."""
        return tuple(slot.episode for slot in self._slots.slots)

    @property
    def rollouts(self) -> tuple[Rollout | None, ...]:
        """The last finished rollout of each slot."""
        return tuple(self._slots.finished)

    @property  # type: ignore[misc]  # each slot has a generator, so that this property has no setter
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]  # as in `SyncVectorEnv`
        """The random generator of each slot."""
        return tuple(self._slots.get_generator(index)[0] for index in range(self.num_envs))

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]  # as in `SyncVectorEnv`
        """The seed of each slot's generator."""
        return tuple(self._slots.get_generator(index)[1] for index in range(self.num_envs))

    def _set_up(self, config: EnvConfig, generators: list[tuple[np.random.Generator, int] | None]) -> None:
        self._slots = Slots(config, generators)
        env.close_on_finalize(self, Slots.close, self._slots)

    def _rebuild_after_fork(self) -> None:
        self._set_up(self._slots.config.rebuild(), self._slots.generators)

    def _reset_finished(self, results: dict[int, StepResult]) -> dict[int, StepResult]:
        """Open the next episode of each finished slot; return *results* with the new observations and infos."""
        # Before the next episodes open: the last turns of the finished ones are still to be printed.
        self._print_new_turns()
        episodes = {index: self._slots.choose_episode(index) for index in self._slots.find_finished()}
        for index, (observation, *_, info) in slot.run(self._slots.play({}, episodes)).items():
            final_observation, reward, terminated, truncated, final_info = results[index]
            final = {"final_obs": final_observation, "final_info": final_info}
            results[index] = observation, reward, terminated, truncated, info | final
        return results

    def _batch(self, results: Mapping[int, StepResult]) -> BatchedStepResult:
        """Return the results of all slots as arrays; a slot without a result keeps its observation."""
        self._print_new_turns()
        for index, (observation, *_) in results.items():
            self._observations[index] = observation
        skipped: StepResult = None, *RESET_REWARD_AND_FLAGS, {}
        _, *columns, infos = zip(*(results.get(index, skipped) for index in range(self.num_envs)), strict=True)
        rewards, terminations, truncations = map(np.array, columns)
        return build_object_array(self._observations), rewards, terminations, truncations, merge_infos(infos)

    def _print_new_turns(self) -> None:
        if self.render_mode == "human":
            for printer, slot in zip(self._printers, self._slots.slots, strict=True):
                printer.print_new(slot.episode, slot.rollout)


def _parse_num_envs(num_envs: object) -> int:
    if isinstance(num_envs, bool) or not isinstance(num_envs, (int, np.integer)) or num_envs < 1:
        raise UsageError(f"num_envs must be a positive integer, got {num_envs!r}")
    return int(num_envs)


def _limit_turns(turns: int, steps: object) -> int:
    """Return the turn budget: *turns*, or fewer if Gymnasium's step limit is lower (`None` and -1 mean no limit)."""
    if steps is None or steps == -1:
        return turns
    if isinstance(steps, bool) or not isinstance(steps, (int, np.integer)) or steps < 1:
        raise UsageError(f"max_episode_steps must be a positive integer, or -1 for no limit, got {steps!r}")
    return min(turns, int(steps))


def _parse_autoreset_mode(mode: str | AutoresetMode) -> AutoresetMode:
    for word, autoreset_mode in AUTORESET_MODES.items():
        if mode in {word, autoreset_mode, autoreset_mode.value}:
            return autoreset_mode
    suggestion = format_suggestion(mode, AUTORESET_MODES) if isinstance(mode, str) else ""
    raise UsageError(f"autoreset_mode must be one of {', '.join(AUTORESET_MODES)}, got {mode!r}{suggestion}")
