from __future__ import annotations

import functools
import re
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal

import pytest

from gymsdk import BrokenEnvironment, Config, Environment, Reset, Step, Task, Verdict, hookimpl

if TYPE_CHECKING:
    from decimal import Decimal


class Judge:
    """The minimal environment; the other environments extend it or contain a mistake."""

    @hookimpl
    def verify(self):
        return Verdict(reward=1.0)


class Row(Task):
    answer: int


class Narrower(Row):
    note: str


class Settings(Config):
    level: int = 1


class OtherSettings(Config):
    level: int = 1


class Misspelt(Judge):
    @hookimpl
    def verifi(self): ...


class WrongParameter(Judge):
    @hookimpl
    def reset(self, tasks): ...


class FarParameter(Judge):
    @hookimpl
    def close(self, zzz): ...


class Defaulted(Judge):
    @hookimpl
    def reset(self, seed=0): ...


class Starred(Judge):
    @hookimpl
    def reset(self, **given): ...


class Wrapper(Judge):
    @hookimpl(wrapper=True)
    def reset(self):
        return (yield)


class OldWrapper(Judge):
    @hookimpl(hookwrapper=True)
    def reset(self):
        yield


class AsyncTools(Judge):
    @hookimpl
    async def tools(self):
        return []


class AsyncTasks(Judge):
    @hookimpl
    async def tasks(self, split: Literal["train"]):
        yield Task.ask("?")


class BareLifespan(Judge):
    @hookimpl
    async def lifespan(self):
        yield 1


class Unmarked(Judge):
    def reset(self):
        return Reset()


class UnmarkedVerify:
    def verify(self): ...


class NoVerdict:
    @hookimpl
    def reset(self):
        return Reset()


class Partial(Judge):
    solve = staticmethod(hookimpl(functools.partial(print)))


class NoSplits(Judge):
    @hookimpl
    def tasks(self, split: str):
        return []


class UnaskedSplit(Judge):
    @hookimpl
    def tasks(self):
        return []


class Unresolvable(Judge):
    @hookimpl
    def reset(self, task: Decimal): ...


class UnresolvableAttribute(Judge):
    @hookimpl
    def reset(self, task: functools.missing): ...


class NoTask(Judge):
    @hookimpl
    def reset(self, task: dict): ...


class Disagreeing(Judge):
    @hookimpl
    def reset(self, config: Settings): ...

    @hookimpl
    def step(self, config: OtherSettings): ...


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (Misspelt(), "hook 'verifi' does not exist; did you mean 'verify'? The hooks are reset, step, verify, close"),
        (
            WrongParameter(),
            "hook 'reset' has an unknown parameter 'tasks'; did you mean 'task'? Its parameters: task, seed, ",
        ),
        (
            FarParameter(),
            "hook 'close' has an unknown parameter 'zzz'; its parameters: task, state, episode_id, shared",
        ),
        (Defaulted(), "hook 'reset' has a default for 'seed'; remove it, the host fills the value"),
        (
            Starred(),
            "hook 'reset' has an unknown parameter 'given'; its parameters: task, seed, episode_id, config, shared",
        ),
        (Wrapper(), "hook 'reset' is a hook wrapper, which is not supported; write a plain hook"),
        (OldWrapper(), "hook 'reset' is a hook wrapper, which is not supported; write a plain hook"),
        (AsyncTools(), "hook 'tools' is called outside the event loop; write it as a plain `def`"),
        (AsyncTasks(), "hook 'tasks' is called outside the event loop; write it as a plain `def`"),
        (BareLifespan(), "hook 'lifespan' is a bare generator; put @asynccontextmanager below its @hookimpl"),
        (Unmarked(), "hook 'reset' is not decorated with @hookimpl; decorate it"),
        (UnmarkedVerify(), "hook 'verify' is not decorated with @hookimpl; decorate it"),
        (Partial(), "hook 'solve' is a partial; write it as a function"),
        (NoSplits(), "annotate `split` in `tasks` with the names of its splits, as in Literal['train', 'test']"),
        (UnaskedSplit(), "annotate `split` in `tasks` with the names of its splits, as in Literal['train', 'test']"),
        (
            Unresolvable(),
            "the annotation of 'task' in hook 'reset' cannot be resolved at run time (name 'Decimal' is not defined)",
        ),
        (
            UnresolvableAttribute(),
            "the annotation of 'task' in hook 'reset' cannot be resolved at run time ('functools.missing': ",
        ),
        (NoTask(), "'task' of hook 'reset' must be annotated with a subclass of gymsdk.Task, not <class 'dict'>"),
        (
            Disagreeing(),
            "hook 'reset' annotates 'config' with Settings, hook 'step' with OtherSettings; annotate both",
        ),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_a_mistake_is_an_error_at_load_that_names_it(plugin, message):
    with pytest.raises(BrokenEnvironment, match=re.escape(f"environment 'wrong': {message}")):
        Environment("wrong", plugin)


@pytest.mark.parametrize("plugin", [NoVerdict(), object(), None, 5])
def test_an_environment_without_rewards_is_an_error_at_load(plugin):
    message = "environment 'wrong' has neither `verify` nor a `step` with rewards; add one of them"
    with pytest.raises(BrokenEnvironment, match=re.escape(message)):
        Environment("wrong", plugin)


def test_an_unused_annotation_is_not_resolved():
    class Quiet:
        @hookimpl
        def verify(self, transcript: Decimal) -> Decimal: ...

    assert Environment("quiet", Quiet()).task_type is Task


def test_the_most_specific_annotation_of_task_is_the_row_schema():
    class Rows:
        @hookimpl
        def reset(self, task: Row): ...

        @hookimpl
        def verify(self, task: Narrower): ...

        @hookimpl
        def close(self, task: Task): ...

    assert Environment("rows", Rows()).task_type is Narrower


def test_the_annotation_on_config_is_the_settings():
    class Set(Judge):
        @hookimpl
        def reset(self, config: Settings): ...

        @hookimpl
        def step(self, config): ...

    assert Environment("set", Set(), {"level": 3}).config == Settings(level=3)


def test_the_annotation_on_split_names_the_splits():
    class Splits(Judge):
        @hookimpl
        def tasks(self, split: Literal["train", "hard"]):
            return []

    assert Environment("splits", Splits()).splits == ("train", "hard")


def test_an_imported_function_with_a_hooks_name_is_ignored(made):
    made("def reset(task): ...", "elsewhere")
    plugin = made("from elsewhere import reset\n@hookimpl\ndef verify(): ...", "here")
    assert Environment("here", plugin).name == "here"


def test_a_hook_may_have_another_name_with_specname():
    class Renamed:
        @hookimpl(specname="verify")
        def judge(self): ...

    assert Environment("renamed", Renamed()).name == "renamed"


async def test_the_authors_hooks_run_before_the_default_ones_for_any_requested_order():
    class Last(Judge):
        @hookimpl(trylast=True)
        def reset(self):
            return Reset(messages=["mine"])

    episode = await Environment("last", Last()).reset(Task.ask("?"))
    assert episode.transcript.opening[-1] == {"type": "message", "role": "user", "content": "mine"}


async def test_a_lifespan_is_a_plain_function_that_returns_a_context_manager():
    class Shared:
        @hookimpl
        @asynccontextmanager
        async def lifespan(self) -> AsyncIterator[str]:
            yield "index"

        @hookimpl
        def step(self, shared: str):
            return Step(messages=[shared], done=True)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Environment("shared", Shared()).name == "shared"
