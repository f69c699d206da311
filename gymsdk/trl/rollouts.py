"""Play the episodes of a `GRPOTrainer`: in this process with the trainer's own policy, or through running servers."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from gymsdk import jsonl
from gymsdk.environment import Environment
from gymsdk.errors import UsageError
from gymsdk.gym import slot
from gymsdk.gym.codecs import Tokens
from gymsdk.gym.config import EnvConfig, EpisodeStart, build_budget
from gymsdk.gym.env import close_on_finalize
from gymsdk.gym.slot import Slots
from gymsdk.line import compute_seed, get_agent_name, get_environment_name
from gymsdk.plugins.registry import load
from gymsdk.rollouts.jobs import Job, build_input_row
from gymsdk.rollouts.remote import RemotePlayer, fetch_servers
from gymsdk.rollouts.token_limit import MAX_NORMAL_SHARE, TokenLimitCounter, is_prompt_too_long
from gymsdk.trl.samples import Sample, build_sample, report_failures
from gymsdk.types import Budget, Item, Row, extract_text

if TYPE_CHECKING:
    from datasets import Dataset
    from trl import GRPOTrainer

NUMBER_KEY = "task"
"""The key of the first message of a prompt, and of a row of the dataset, that holds the number of the task."""

REWARD_KEY = "gymsdk_reward"
"""The field in which the rewards travel from the rollouts to the reward function."""

ROW_SECONDS = 900.0
"""The time limit of a rollout on servers, in seconds, with its repetitions."""

Messages: TypeAlias = list[dict[str, Any]]

log = logging.getLogger("gymsdk")


class Player(Protocol):
    """Plays one episode for each number of a task; returns the samples in the same order."""

    def __call__(self, numbers: Sequence[int], trainer: GRPOTrainer) -> list[Sample]: ...


class RolloutFunc:
    """A `rollout_func` for `GRPOTrainer`, with the dataset and the reward function that belong to it.

    Build it with `gymsdk.trl.rollout_func`. TRL hands only prompts to a rollout function: the first message of each
    prompt of `dataset` has the number of its task.

    Args:
        rows: The rows of the tasks.
        player: Plays the episodes.

    Attributes:
        rows: The rows of the tasks.
    """

    __name__ = "rollout_func"

    def __init__(self, rows: Sequence[Row], player: Player) -> None:
        self.rows = rows
        self._player = player
        self._has_warned = False

    @property
    def dataset(self) -> Dataset:
        """A dataset with the prompt and the number of each task, for `train_dataset` and `eval_dataset`."""
        from datasets import Dataset

        return Dataset.from_list(
            [{"prompt": build_prompt(row, number), NUMBER_KEY: number} for number, row in enumerate(self.rows)]
        )

    def __call__(self, prompts: Sequence[Messages], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """Play one episode for each prompt.

        Args:
            prompts: The prompts of this process. TRL has repeated each of them already, once per generation.
            trainer: The trainer.

        Returns:
            `prompt_ids`, `completion_ids`, `logprobs`, `env_mask` and the rewards, each with one element per prompt. A
            failed episode is masked and has no reward.

        Raises:
            UsageError: A prompt is not one of `dataset`, or TRL did not repeat the prompts.
            GymsdkError: All episodes failed.
        """
        numbers = [self._get_number(prompt) for prompt in prompts]
        check_repeats(numbers, trainer)
        samples = self._player(numbers, trainer)
        report_failures([sample.failure for sample in samples])
        self._report_token_limit(samples, trainer.args.max_completion_length)
        samples = [mask_failed(sample, trainer) for sample in samples]
        has_logprobs = all(sample.logprobs is not None for sample in samples)
        return {
            "prompt_ids": [sample.prompt_ids for sample in samples],
            "completion_ids": [sample.completion_ids for sample in samples],
            "logprobs": [sample.logprobs for sample in samples] if has_logprobs else None,  # type: ignore[dict-item]  # as TRL's own generation
            "env_mask": [sample.env_mask for sample in samples],
            REWARD_KEY: [sample.reward for sample in samples],
            "gymsdk_components": [sample.components for sample in samples],
        }

    def reward(
        self,
        gymsdk_reward: Sequence[float | None],
        gymsdk_components: Sequence[Mapping[str, float]] = (),
        log_metric: Callable[[str, float], None] | None = None,
        **_: Any,
    ) -> list[float | None]:
        """Return the environment's rewards, `None` for failed episodes; pass this method as `reward_funcs`.

        Args:
            gymsdk_reward: The rewards, which `__call__` returned.
            gymsdk_components: The parts of each reward; their means are logged.
            log_metric: TRL's function that logs a number.
        """
        if log_metric is not None:
            for name in sorted({name for components in gymsdk_components for name in components}):
                values = [components[name] for components in gymsdk_components if name in components]
                log_metric(f"components/{name}", sum(values) / len(values))
            log_metric("failed_rollouts", sum(reward is None for reward in gymsdk_reward) / max(1, len(gymsdk_reward)))
        return list(gymsdk_reward)

    def _report_token_limit(self, samples: Sequence[Sample], limit: int | None) -> None:
        """Log that the token limit ends nearly all episodes of a batch, unless the batches before had this warning."""
        counter = TokenLimitCounter("max_completion_length of GRPOConfig")
        for sample in samples:
            if not sample.failure:
                counter.add(is_cut=sample.is_cut, replies=sample.turns, tokens=sum(sample.env_mask), limit=limit)
        if (sentence := counter.describe()) and not self._has_warned:
            self._has_warned = True
            log.warning(sentence)
        elif counter.share <= MAX_NORMAL_SHARE:
            self._has_warned = False

    def _get_number(self, prompt: Messages) -> int:
        number = prompt[0].get(NUMBER_KEY) if prompt and isinstance(prompt[0], Mapping) else None
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(self.rows):
            raise UsageError("a prompt names no task; train on the dataset of the rollout function: .dataset")
        return number


def rollout_func(  # noqa: PLR0913  # each is a setting of the rollouts
    environment: str | Environment | None = None,
    *,
    head: str | None = None,
    agent: str | None = None,
    split: str | None = None,
    tasks: str | Path | Iterable[Row] | None = None,
    limit: int | None = 10_000,
    settings: Mapping[str, Any] | None = None,
    update_weights: Callable[[GRPOTrainer], None] | None = None,
    turns: int = 32,
    tools: int = 128,
    tokens: int | None = None,
    seconds: float = 600.0,
    concurrency: int = 256,
    seed: int = 0,
) -> RolloutFunc:
    """Return a rollout function for `GRPOTrainer`.

    Without *head*, the episodes run in this process, and the trainer's own policy plays them: with vLLM if the trainer
    uses it. With *head*, the agents of running servers play them with the engine behind these servers.

    Args:
        environment: The environment: its name, or an `Environment`. Not needed with *head* and *tasks*.
        head: The URL of the head server, as in `http://127.0.0.1:11000`.
        agent: The agent that plays the rows on the servers; by default the one that the row names, or that of the
            environment.
        split: The split of the tasks, by default `train`.
        tasks: The tasks instead of a split: a JSONL file, or rows.
        limit: The largest number of tasks; `None` for all, which a generated split may not end.
        settings: Settings of the environment.
        update_weights: With *head*: copies the trainer's weights to the engine. It is called with the trainer before
            the first rollouts and after each step.
        turns: The largest number of turns of an episode. The trainer's `max_completion_length` limits each turn.
        tools: The largest number of tool calls of an episode.
        tokens: Without *head*: the largest number of tokens of an episode, by default the context of the model. An
            episode whose next turn might not fit ends, and is graded as it is.
        seconds: The time limit of an episode without the time of the policy; with *head*, with the time of the policy.
        concurrency: With *head*: how many episodes run at the same time.
        seed: The seed of the episodes; all episodes of a task open alike.

    Raises:
        UsageError: An argument is wrong, or the environment has no such split.
    """
    loaded = load(environment, **(settings or {})) if isinstance(environment, str) else environment
    rows = read_rows(loaded, split=split, tasks=tasks, limit=limit)
    budget = build_budget(turns=turns, tools=tools, seconds=seconds)
    if head is not None:
        name = loaded.name if loaded is not None else None
        player = ServerPlayer(rows, head, name, agent, budget, concurrency, update_weights, seed)
        return RolloutFunc(rows, player)
    if loaded is None:
        raise UsageError("name the environment, or the head server of running servers with head=URL")
    if tokens is not None and tokens < 1:
        raise UsageError(f"tokens must be at least 1, got {tokens}")
    if update_weights is not None or agent is not None:
        raise UsageError("update_weights and agent are for servers; leave them out, or name the servers with head=URL")
    return RolloutFunc(rows, LocalPlayer(loaded, rows, budget, tokens, seed))


def read_rows(
    environment: Environment | None, *, split: str | None, tasks: str | Path | Iterable[Row] | None, limit: int | None
) -> list[Row]:
    """Return the rows of a split, or the given rows.

    Raises:
        UsageError: Neither tasks nor an environment are given, or there is no row.
    """
    if tasks is not None:
        if split is not None:
            raise UsageError(f"give either a split or tasks, not both; remove split={split!r} or tasks=")
        source = (row for _, row in jsonl.read_rows(Path(tasks))) if isinstance(tasks, (str, Path)) else iter(tasks)
    elif environment is None:
        raise UsageError("name the environment, or give its rows with tasks=FILE")
    else:
        source = (task.row() for task in environment.tasks(split or "train"))
    rows = list(islice(source, limit))
    if not rows:
        raise UsageError("there is no task; give at least one row")
    return rows


def build_prompt(row: Row, number: int) -> Messages:
    """Return the messages of a row for TRL's dataset; the first message has the *number* of the task."""
    prompt: str | list[Item] = row["responses_create_params"]["input"]
    items = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    # Few chat templates know the role `developer`, the newer name of `system`.
    messages = [
        {"role": item["role"].replace("developer", "system"), "content": extract_text(item.get("content"))}
        for item in items
        if "role" in item
    ]
    messages = messages or [{"role": "user", "content": ""}]
    messages[0][NUMBER_KEY] = number
    return messages


def check_repeats(numbers: Sequence[int], trainer: GRPOTrainer) -> None:
    """Raise `UsageError` if each task occurs once although the trainer compares several generations of a task.

    TRL 1.16 repeats the prompts before it calls the rollout function, although its documentation says the opposite. A
    rollout function that plays one episode per prompt would train on groups of one if a later version changed this.
    """
    generations = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
    if generations > 1 and trainer.accelerator.num_processes == 1 and len(set(numbers)) == len(numbers) > 1:
        raise UsageError(
            f"TRL did not repeat the prompts: each of {len(numbers)} tasks occurs once, and num_generations is"
            f" {generations}; use a version of TRL that gymsdk[trl] allows"
        )


def mask_failed(sample: Sample, trainer: GRPOTrainer) -> Sample:
    """Return *sample* if the policy can learn from it, otherwise one end token that does not count."""
    if not sample.failure and sample.completion_ids:
        return sample
    tokenizer = trainer.processing_class
    prompt = sample.prompt_ids or [tokenizer.eos_token_id]
    return Sample(prompt, [tokenizer.eos_token_id], [0], [0.0], failure=sample.failure or "the policy wrote nothing")


class LocalPlayer:
    """Plays episodes in this process with the trainer's policy, all in the same rhythm: one batch of turns at a time.

    Args:
        rows: The rows of the tasks.
        tokens: The largest number of tokens of an episode; `None` for the context of the model.
    """

    def __init__(
        self, environment: Environment, rows: Sequence[Row], budget: Budget, tokens: int | None, seed: int
    ) -> None:
        self._environment, self._rows, self._budget, self._seed = environment, rows, budget, seed
        self._tokens = tokens
        self._slots: Slots | None = None

    def __call__(self, numbers: Sequence[int], trainer: GRPOTrainer) -> list[Sample]:
        """Play one episode of each task in *numbers*."""
        slots = self._get_slots(len(numbers), trainer)
        sampler = slots.config.sampler
        starts = {
            index: EpisodeStart(*sampler.find(number), compute_seed(self._seed, self._environment.name, number))
            for index, number in enumerate(numbers)
        }
        opened = slot.run(slots.open(starts))
        samples = [Sample(opened[index]) for index in range(len(numbers))]
        self._end_long_episodes(slots, samples, trainer)
        while _is_any_playing(slots, len(numbers), trainer):
            self._play_turn(slots, samples, trainer)
            self._end_long_episodes(slots, samples, trainer)
        for index, sample in enumerate(samples):
            sample.drop_environment_tail()
            rollout = slots.slots[index].rollout
            assert rollout is not None
            sample.score(rollout)
        return samples

    def _play_turn(self, slots: Slots, samples: Sequence[Sample], trainer: GRPOTrainer) -> None:
        """Let the policy play a turn of each open episode."""
        playing = [index for index in range(len(samples)) if slots.slots[index].is_playing]
        # Every process must take part in the generation of the others, even if its own episodes are over.
        prompts = [samples[index].ids for index in playing] or [samples[0].ids]
        generated, logprobs = trainer._generate_single_turn(prompts, None, {}, 1)  # noqa: SLF001  # TRL has no public function that generates with its engine
        actions = {}
        limit = trainer.args.max_completion_length
        for position, index in enumerate(playing):
            ids, codec = generated[position], slots.slots[index].codec
            samples[index].add_policy_tokens(ids, None if logprobs is None else logprobs[position])
            samples[index].is_cut = len(ids) >= limit and isinstance(codec, Tokens) and codec.end_tokens.isdisjoint(ids)
            actions[index] = ids
        for index, (observation, *_) in slot.run(slots.play(slots.parse_actions(actions), {})).items():
            samples[index].add_environment_tokens(observation)

    def _end_long_episodes(self, slots: Slots, samples: Sequence[Sample], trainer: GRPOTrainer) -> None:
        """End the episodes whose next turn might not fit into the context."""
        limit = self._tokens or get_context(trainer)
        longest = limit - trainer.args.max_completion_length
        for index, sample in enumerate(samples):
            if slots.slots[index].is_playing and sample.length > longest:
                slot.run(slots.slots[index].end())

    def _get_slots(self, count: int, trainer: GRPOTrainer) -> Slots:
        """Return at least *count* slots, which are reused by later batches."""
        if self._slots is None or len(self._slots.slots) < count:
            if self._slots is not None:
                # Their finalizer would close them only when this object is dropped.
                slot.run(self._slots.close())
            tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
            config = EnvConfig(
                self._environment, tasks=self._rows, codec="tokens", tokenizer=tokenizer, budget=self._budget
            )
            self._slots = Slots(config, [None] * count)
            close_on_finalize(self, Slots.close, self._slots)
        return self._slots


class ServerPlayer:
    """Plays episodes on running servers.

    Args:
        rows: The rows of the tasks.
        head: The URL of the head server.
        environment: The name of the environment, for rows that name no agent.
        agent: The agent that plays the rows.
        concurrency: How many episodes run at the same time.
        update_weights: Copies the trainer's weights to the engine.
    """

    def __init__(  # each is a setting of the rollouts
        self,
        rows: Sequence[Row],
        head: str,
        environment: str | None,
        agent: str | None,
        budget: Budget,
        concurrency: int,
        update_weights: Callable[[GRPOTrainer], None] | None,
        seed: int,
    ) -> None:
        if agent is None and environment is None and not all(map(get_agent_name, rows)):
            raise UsageError("a row names no agent; name it with agent=NAME, or name the environment")
        self._rows, self._head, self._environment, self._agent = rows, head, environment, agent
        self._budget, self._concurrency, self._seed = budget, concurrency, seed
        self._update_weights, self._updated_step = update_weights, -1

    def __call__(self, numbers: Sequence[int], trainer: GRPOTrainer) -> list[Sample]:
        """Play one episode of each task in *numbers*."""
        # Once per step, although a step may play several batches.
        if self._update_weights is not None and trainer.state.global_step != self._updated_step:
            self._update_weights(trainer)
            self._updated_step = trainer.state.global_step
        sampling = {
            "temperature": trainer.args.temperature,
            "top_p": trainer.args.top_p,
            "max_output_tokens": trainer.args.max_completion_length,
        }
        repeats: Counter[int] = Counter()
        jobs = []
        for number in numbers:
            jobs.append(self._build_job(number, repeats[number], sampling))
            repeats[number] += 1
        return slot.run(self._play_all(jobs))

    def _build_job(self, number: int, repeat: int, sampling: Mapping[str, Any]) -> Job:
        row = self._rows[number]
        name = get_environment_name(row) or self._environment or ""
        agent = self._agent or get_agent_name(row)
        input_row = build_input_row(row, environment=name, task=number, repeat=repeat, sampling=sampling, agent=agent)
        return Job(name, number, repeat, input_row)

    async def _play_all(self, jobs: Sequence[Job]) -> list[Sample]:
        servers = await fetch_servers(self._head)
        player = RemotePlayer(servers.build_agent_client(ROW_SECONDS), seed=self._seed, budget=self._budget)
        slots = asyncio.Semaphore(self._concurrency)

        async def play(job: Job) -> Sample:
            async with slots:
                rollout = (await player(job)).rollout
            if rollout.verdict is None:
                sample = Sample([])
            else:
                try:
                    sample = build_sample((rollout.response or {}).get("output", []))
                except ValueError as error:
                    return Sample([], failure=str(error))
            sample.score(rollout)
            sample.is_cut = rollout.ended == "tokens" and not is_prompt_too_long(rollout.response)
            return sample

        return await asyncio.gather(*map(play, jobs))


def get_context(trainer: GRPOTrainer) -> float:
    """Return the largest number of tokens that the trainer's policy can read."""
    limits = [
        getattr(trainer.args, "vllm_max_model_length", None) if trainer.use_vllm else None,
        getattr(trainer.model.config, "max_position_embeddings", None),
    ]
    return min((limit for limit in limits if limit), default=math.inf)


def _is_any_playing(slots: Slots, count: int, trainer: GRPOTrainer) -> bool:
    """Return whether an episode of any process is open: all processes generate together."""
    is_playing = any(slot.is_playing for slot in slots.slots[:count])
    if trainer.accelerator.num_processes == 1:
        return is_playing
    from accelerate.utils import gather_object

    return any(gather_object([is_playing]))
