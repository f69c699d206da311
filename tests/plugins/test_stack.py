from __future__ import annotations

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


VERIFY = "\n\n@hookimpl\ndef verify(): ...\n"
SPLITS = "annotate `split` in `tasks` with the names of its splits, as in Literal['train', 'test']"
WRAPPER = "hook 'reset' is a hook wrapper, which is not supported; write a plain hook"
SETTINGS = "class Settings(Config): ...\n\nclass OtherSettings(Config): ...\n\n"

MISTAKES = {
    "@hookimpl\ndef verifi(): ...": (
        "hook 'verifi' does not exist; did you mean 'verify'? The hooks are reset, step, verify, close"
    ),
    "@hookimpl\ndef reset(tasks): ...": (
        "hook 'reset' has an unknown parameter 'tasks'; did you mean 'task'? Its parameters: task, seed, "
    ),
    "@hookimpl\ndef close(zzz): ...": (
        "hook 'close' has an unknown parameter 'zzz'; its parameters: task, state, episode_id, shared"
    ),
    "@hookimpl\ndef reset(seed=0): ...": "hook 'reset' has a default for 'seed'; remove it, the host fills the value",
    "@hookimpl\ndef reset(**given): ...": (
        "hook 'reset' has an unknown parameter 'given'; its parameters: task, seed, episode_id, config, shared"
    ),
    "@hookimpl(wrapper=True)\ndef reset():\n    return (yield)": WRAPPER,
    "@hookimpl(hookwrapper=True)\ndef reset():\n    yield": WRAPPER,
    "@hookimpl\nasync def tools(): ...": "hook 'tools' is called outside the event loop; write it as a plain `def`",
    "@hookimpl\nasync def tasks(split: Literal['train']):\n    yield Task.ask('?')": (
        "hook 'tasks' is called outside the event loop; write it as a plain `def`"
    ),
    "@hookimpl\nasync def lifespan():\n    yield 1": (
        "hook 'lifespan' is a bare generator; put @asynccontextmanager below its @hookimpl"
    ),
    "def reset(): ...": "hook 'reset' is not decorated with @hookimpl; decorate it",
    "import functools\nsolve = hookimpl(functools.partial(print))": (
        "hook 'solve' is a partial; write it as a function"
    ),
    "@hookimpl\ndef tasks(split: str): ...": SPLITS,
    "@hookimpl\ndef tasks(): ...": SPLITS,
    "@hookimpl\ndef reset(task: Decimal): ...": (
        "the annotation of 'task' in hook 'reset' cannot be resolved at run time (name 'Decimal' is not defined)"
    ),
    "@hookimpl\ndef reset(task: asyncio.missing): ...": (
        "the annotation of 'task' in hook 'reset' cannot be resolved at run time ('asyncio.missing': "
    ),
    "@hookimpl\ndef reset(task: dict): ...": (
        "'task' of hook 'reset' must be annotated with a subclass of gymsdk.Task, not <class 'dict'>"
    ),
    f"{SETTINGS}@hookimpl\ndef reset(config: Settings): ...\n\n@hookimpl\ndef step(config: OtherSettings): ...": (
        "hook 'reset' annotates 'config' with Settings, hook 'step' with OtherSettings; annotate both"
    ),
}


@pytest.mark.parametrize("source", MISTAKES)
def test_a_mistake_is_an_error_at_load_that_names_it(environment, source):
    with pytest.raises(BrokenEnvironment, match=re.escape(f"environment 'made': {MISTAKES[source]}")):
        environment(source + VERIFY)


def test_an_undecorated_verify_is_an_error_at_load(environment):
    with pytest.raises(BrokenEnvironment, match="hook 'verify' is not decorated with @hookimpl; decorate it"):
        environment("def verify(): ...")


class NoVerdict:
    @hookimpl
    def reset(self): ...


@pytest.mark.parametrize("plugin", [NoVerdict(), object(), None, 5])
def test_an_environment_without_rewards_is_an_error_at_load(plugin):
    message = "environment 'wrong' has neither `verify` nor a `step` with rewards; add one of them"
    with pytest.raises(BrokenEnvironment, match=re.escape(message)):
        Environment("wrong", plugin)


def test_the_most_specific_annotation_of_task_is_the_row_schema():
    class Rows:
        @hookimpl
        def reset(self, task: Row): ...

        # An annotation that is not used is not resolved, and a hook may have another name.
        @hookimpl(specname="verify")
        def judge(self, task: Narrower, transcript: Decimal) -> Decimal: ...

        @hookimpl
        def close(self, task: Task): ...

    assert Environment("rows", Rows()).task_type is Narrower


def test_the_annotations_on_config_and_split_are_the_settings_and_the_splits():
    class Set(Judge):
        @hookimpl
        def reset(self, config: Settings): ...

        @hookimpl
        def step(self, config): ...

        @hookimpl
        def tasks(self, split: Literal["train", "hard"]): ...

    environment = Environment("set", Set(), {"level": 3})
    assert (environment.config, environment.splits) == (Settings(level=3), ("train", "hard"))


def test_an_imported_function_with_a_hooks_name_is_ignored(made):
    made("def reset(task): ...", "elsewhere")
    plugin = made("from elsewhere import reset\n@hookimpl\ndef verify(): ...", "here")
    assert Environment("here", plugin).name == "here"


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
