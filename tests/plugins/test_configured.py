"""Settings: the config that an environment declares, filled from names and values, and the models in it."""

from __future__ import annotations

import re

import pytest
from pydantic import Field, field_validator, model_validator

from gymsdk import Config, Environment, Model, Verdict, hookimpl, play, responses
from gymsdk.environment import build_config
from gymsdk.errors import BadConfig, UnknownModel
from gymsdk.models.registry import MeteredModel
from gymsdk.models.scripted import build
from gymsdk.responses import build_usage


class Settings(Config):
    level: int = 1
    families: list[str] = Field(default_factory=list)
    odd: int = 1

    @field_validator("odd")
    @classmethod
    def is_odd(cls, value):
        if value % 2 == 0:
            raise ValueError("choose an odd number")
        return value


class Judged(Config):
    judge: Model | None = None
    user: Model


def test_settings_have_defaults_are_validated_and_do_not_change():
    settings = build_config("math", Settings, {"level": "3"})
    assert settings == Settings(level=3)
    with pytest.raises(ValueError, match="frozen"):
        settings.level = 3


class Needs(Config):
    level: int


class Ranged(Config):
    least: int = 0
    most: int = 9

    @model_validator(mode="after")
    def check_order(self):
        if self.least > self.most:
            raise ValueError("`least` may not be more than `most`")
        return self


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (Settings, {"levle": 1}, "has no setting 'levle'; did you mean 'level'? Its settings: level, families, odd"),
        (Config, {"level": 1}, "has no setting 'level'; its settings: none"),
        (Settings, {"level": "x"}, "setting 'level' is wrong: Input should be a valid integer, unable to parse string"),
        (Settings, {"families": ["a", 5]}, "setting 'families.1' is wrong: Input should be a valid string"),
        (Settings, {"odd": 4}, "setting 'odd' is wrong: choose an odd number (got 4)"),
        (Ranged, {"least": 10}, "its settings are wrong: `least` may not be more than `most`"),
        (Judged, {}, "setting 'user' is required; give it with --set user=PROVIDER/NAME"),
        (Judged, {"user": 5}, "setting 'user' is wrong: Input should be an instance of Model (got 5)"),
        (Judged, {"user": "nonsense"}, "setting 'user' is wrong: no model named 'nonsense'"),
        (
            Judged,
            {"user": "scripted/ehco"},
            "setting 'user' is wrong: no scripted policy named 'ehco'; did you mean 'echo'",
        ),
        (Needs, {}, "setting 'level' is required; give it with --set level=VALUE"),
    ],
)
def test_the_message_about_a_wrong_setting_names_it_and_the_correction(kind, given, message):
    with pytest.raises((BadConfig, UnknownModel), match=re.escape(message)):
        build_config("math", kind, given)


def test_a_model_is_resolved_by_its_name_and_metered():
    config = build_config("math", Judged, {"user": "scripted/echo", "judge": build("null")})
    assert isinstance(config.user, MeteredModel)
    assert repr(config.user) == "user=scripted/echo"
    assert repr(config.judge) == "judge=scripted/null"


def test_a_default_model_is_resolved_too():
    class Defaulted(Config):
        judge: Model = "scripted/echo"
        other: Model = Field(default_factory=lambda: build("null"))

    config = build_config("math", Defaulted, {})
    assert (repr(config.judge), repr(config.other)) == ("judge=scripted/echo", "other=scripted/null")
    assert build_config("math", Judged, {"user": "scripted/echo"}).judge is None


class CallsJudge:
    """An environment that queries its judge in a given hook."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    @hookimpl
    async def step(self, config: Judged):
        if self.hook == "step":
            await config.user.respond({"input": "Is it right?"})

    @hookimpl
    async def verify(self, config: Judged):
        if self.hook == "verify":
            await config.user.respond({"input": "Is it right?"})
        return Verdict(reward=1.0)


class Judge:
    def __init__(self, answer) -> None:
        self.answer = answer

    async def respond(self, request, *, episode=None):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def play_with_judge(answer, hook, policy, task):
    environment = Environment("asks", CallsJudge(hook), {"user": Judge(answer)})
    return await play(environment, policy("done"), task)


@pytest.mark.parametrize("hook", ["step", "verify"])
async def test_the_tokens_of_a_model_are_counted_by_its_role(policy, task, hook):
    rollout = await play_with_judge(
        responses.build_response([], model="m", usage=build_usage(7, 2)), hook, policy, task
    )
    assert rollout.usage["user"].total_tokens == 9
    assert rollout.usage["policy"].calls == 1
    assert rollout.response["usage"]["total_tokens"] == rollout.usage["policy"].total_tokens


@pytest.mark.parametrize(
    "answer", [ConnectionError("down"), "text", {"output": [], "status": "failed"}, TimeoutError()]
)
async def test_a_judge_that_fails_is_unscorable_in_verify_and_failed_elsewhere(policy, task, answer):
    judged = await play_with_judge(answer, "verify", policy, task)
    assert (judged.outcome, judged.failure.stage, judged.failure.kind) == ("unscorable", "verify", "judge_failed")
    assert judged.failure.message.startswith("the judge failed: the user model")
    assert judged.failure.retryable
    stepped = await play_with_judge(answer, "step", policy, task)
    assert (stepped.outcome, stepped.failure.stage) == ("failed", "step")
    assert stepped.failure.kind.startswith("model_")
    assert stepped.failure.message.startswith("the user model")
