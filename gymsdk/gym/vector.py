"""Many seats at one environment as a `gymnasium.vector.VectorEnv`: every step plays a turn of all of them at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from gymsdk.environment import Environment
from gymsdk.errors import UsageError, format_suggestion
from gymsdk.gym import env, loop
from gymsdk.gym.batch import Batch, Objects, objects, values_of
from gymsdk.gym.config import Seeds, Table, Tasks, budget, merged, wishes
from gymsdk.gym.env import Claim
from gymsdk.gym.render import Screen
from gymsdk.gym.slot import NEW, Info, Seats, Stepped
from gymsdk.tokens.tokenizer import Tokenizer
from gymsdk.types import Episode, Rollout

WIDE = 2**63
"""From here on an integer does not fit NumPy's."""


def infos_merged(infos: Sequence[Info]) -> Info:
    """Give one dict for the seats' *infos*: under a key an array over the seats, under `_key` whose info has it.

    Dicts become a dict of arrays, numbers of one type an array of that type, everything else an array of objects; so
    do dicts beside something else, and dicts whose keys would be taken for masks. `info_of` gives each back.
    """
    keys = dict.fromkeys(key for info in infos for key in info)
    batch: Info = {}
    for key in keys:
        has = np.fromiter((key in info for info in infos), dtype=np.bool_, count=len(infos))
        batch[key], batch[f"_{key}"] = _column(infos, key, has), has
    return batch


def info_of(infos: Info, index: int) -> Info:
    """Give the info of the seat at *index* out of a batch's *infos*, just as the seat gave it."""
    return {
        key: _plain(value, index)
        for key, value in infos.items()
        if not key.startswith("_") and (f"_{key}" not in infos or infos[f"_{key}"][index])
    }


def _column(infos: Sequence[Info], key: str, has: NDArray[np.bool_]) -> Any:
    values = [info[key] for info in infos if key in info]
    if all(map(_nests, values)):
        return infos_merged([info.get(key, {}) for info in infos])
    kind = type(values[0])
    if kind in {bool, int, float} and all(type(value) is kind and _fits(value) for value in values):
        numbers = np.zeros(len(infos), dtype=kind)
        numbers[has] = values
        return numbers
    return objects(info.get(key) for info in infos)


def _nests(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) and not key.startswith("_") for key in value)


def _fits(number: float) -> bool:
    return isinstance(number, float) or -WIDE <= number < WIDE


def _plain(column: Any, index: int) -> Any:
    if isinstance(column, dict):
        return info_of(column, index)
    value = column[index]
    return value.item() if isinstance(value, np.generic) else value


MODES = {mode.name.lower(): mode for mode in AutoresetMode}
"""When a seat whose episode is over gets its next one, by the plain word for it."""

Batched: TypeAlias = tuple[Objects, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], Info]
"""Observations, rewards, terminations, truncations, infos."""


class VectorEnv(gymnasium.vector.VectorEnv[Objects, Any, Any]):
    """Episodes of *environment* at *num_envs* seats, each as an `Env` with the same arguments plays them.

    A seat whose episode is over gets the next one at the `next_step`, whose action is not used, in the `same_step`,
    the last observation and info then in `final_obs` and `final_info`, or, *autoreset_mode* being `disabled`, when
    `reset` says so. *max_episode_steps*, which `make_vec` passes on, bounds the turns as *turns* does.
    `gymsdk.gym.vector.info_of` gives a seat's own info. Raises `UsageError`; what goes wrong in an episode is in its
    seat's info instead.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi", "human"], "render_fps": 1}  # type: ignore[misc]  # Gymnasium does not say that it is the class's

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
        # Gymnasium 1.1 closes what it garbage-collects: there is nothing to close where this method raises.
        self.closed = True
        if render_mode not in {None, *self.metadata["render_modes"]}:
            raise UsageError(f"render_mode is 'ansi', 'human' or None, not {render_mode!r}")
        self.num_envs, self.render_mode = _count(num_envs), render_mode
        self._mode = _mode(autoreset_mode)
        self.metadata = self.metadata | {"autoreset_mode": self._mode}  # type: ignore[misc]  # the mode is this one's own
        table = Table(
            environment,
            settings=merged(settings, config),
            split=split,
            tasks=tasks,
            codec=codec,
            tokenizer=tokenizer,
            budget=budget(turns=_limited(turns, max_episode_steps), tools=tools, seconds=seconds),
        )
        self._seen: list[Any] = [None] * self.num_envs
        self._screens = [Screen(f"seat {index}: ") for index in range(self.num_envs)]
        self._claim = Claim()
        self._sit(table, [None] * self.num_envs)
        one = self._seats.seats[0].codec
        self.single_observation_space, self.single_action_space = one.observation_space, one.action_space
        self.observation_space = Batch(one.observation_space, self.num_envs)
        self.action_space = Batch(one.action_space, self.num_envs)
        self.closed = False

    def reset(self, *, seed: Seeds = None, options: Mapping[str, Any] | None = None) -> tuple[Objects, Info]:
        """Give the first observations of new episodes, and their infos.

        A *seed* is the first seat's, the next one's is one more; a list has each seat's. *options* are those of `Env`,
        for all seats, or a list of tasks, one for each; a boolean array `reset_mask` says which seats are reset,
        the others' observations being those they gave last. Raises `UsageError`.
        """
        with self._claim.held(self._sit_anew):
            asked = wishes(self.num_envs, seed, options)
            if new := [str(index) for index, seen in enumerate(self._seen) if seen is None and index not in asked]:
                raise UsageError(f"options['reset_mask'] leaves out seat {', '.join(new)}, which was never reset")
            dealt = {index: self._seats.deal(index, *wish) for index, wish in asked.items()}
            self.closed = False
            seen, *_, told = self._batch(loop.run(self._seats.played({}, dealt)))
            return seen, told

    def step(self, actions: Any) -> Batched:
        """Give what comes of a turn at each seat: observations, rewards, terminations, truncations, infos.

        *actions* is any sequence with one for each seat. Raises `ResetNeeded` where a seat has no episode, and
        `UsageError` where an action is none: nothing is played then.
        """
        with self._claim.held(self._sit_anew):
            given = values_of(actions, self.num_envs)
            # Heard first, dealt then: who gives a wrong action may step again, and gets the same tasks.
            over = dict.fromkeys(self._seats.over() if self._mode is AutoresetMode.NEXT_STEP else ())
            said = self._seats.heard({index: action for index, action in enumerate(given) if index not in over})
            stepped = loop.run(self._seats.played(said, {index: self._seats.deal(index) for index in over}))
            return self._batch(self._renewed(stepped) if self._mode is AutoresetMode.SAME_STEP else stepped)

    def render(self) -> tuple[str, ...] | None:
        """Give each seat's episode so far as text where `render_mode` is `ansi`; `human` has shown them already."""
        if self.render_mode != "ansi":
            return None
        return tuple(Screen().text(seat.episode, seat.rollout) for seat in self._seats.seats)

    def close_extras(self, **_: Any) -> None:
        """Close every episode in hand and leave the environment; `reset` enters it again."""
        with self._claim.held(self._sit_anew):
            loop.run(self._seats.clear())

    @property
    def episodes(self) -> tuple[Episode | None, ...]:
        """Each seat's episode in hand, or the one that ended last; `None` before a reset and after `close`."""
        return tuple(seat.episode for seat in self._seats.seats)

    @property
    def rollouts(self) -> tuple[Rollout | None, ...]:
        """Each seat's last finished rollout."""
        return tuple(self._seats.finished)

    @property  # type: ignore[misc]  # nobody sets many seats' one generator
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]  # as in `SyncVectorEnv`
        """Each seat's generator."""
        return tuple(self._seats.generator(index)[0] for index in range(self.num_envs))

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]  # as in `SyncVectorEnv`
        """What each seat's generator was seeded with."""
        return tuple(self._seats.generator(index)[1] for index in range(self.num_envs))

    def _sit(self, table: Table, generators: list[tuple[np.random.Generator, int] | None]) -> None:
        self._seats = Seats(table, generators)
        env.unclosed(self, Seats.clear, self._seats)

    def _sit_anew(self) -> None:
        self._sit(self._seats.table.anew(), self._seats.generators)

    def _renewed(self, stepped: dict[int, Stepped]) -> dict[int, Stepped]:
        """Give *stepped* with the next episode at the seats where one is over."""
        self._show()
        dealt = {index: self._seats.deal(index) for index in self._seats.over()}
        for index, (seen, *_, info) in loop.run(self._seats.played({}, dealt)).items():
            last, reward, terminated, truncated, final = stepped[index]
            stepped[index] = seen, reward, terminated, truncated, info | {"final_obs": last, "final_info": final}
        return stepped

    def _batch(self, stepped: Mapping[int, Stepped]) -> Batched:
        self._show()
        for index, (seen, *_) in stepped.items():
            self._seen[index] = seen
        left: Stepped = None, *NEW, {}
        _, *columns, told = zip(*(stepped.get(index, left) for index in range(self.num_envs)), strict=True)
        rewards, terminations, truncations = map(np.array, columns)
        return objects(self._seen), rewards, terminations, truncations, infos_merged(told)

    def _show(self) -> None:
        if self.render_mode == "human":
            for screen, seat in zip(self._screens, self._seats.seats, strict=True):
                screen.show(seat.episode, seat.rollout)


def _count(num_envs: object) -> int:
    if isinstance(num_envs, bool) or not isinstance(num_envs, (int, np.integer)) or num_envs < 1:
        raise UsageError(f"num_envs is a whole number from 1, not {num_envs!r}")
    return int(num_envs)


def _limited(turns: int, steps: object) -> int:
    """Return the budget of *turns* within so many *steps* of Gymnasium's, of which `None` and -1 mean no limit."""
    if steps is None or steps == -1:
        return turns
    if isinstance(steps, bool) or not isinstance(steps, (int, np.integer)) or steps < 1:
        raise UsageError(f"max_episode_steps must be a positive integer, or -1 for no limit, not {steps!r}")
    return min(turns, int(steps))


def _mode(mode: str | AutoresetMode) -> AutoresetMode:
    for word, known in MODES.items():
        if mode in {word, known, known.value}:
            return known
    near = format_suggestion(mode, MODES) if isinstance(mode, str) else ""
    raise UsageError(f"autoreset_mode is one of {', '.join(MODES)}, not {mode!r}{near}")
