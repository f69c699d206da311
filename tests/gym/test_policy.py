"""Models as policies of Gymnasium's environments, compared with `play` on the same tasks."""

from __future__ import annotations

import asyncio
import pickle
from copy import deepcopy

import gymnasium
import pytest
from episodes.environments import Notebook, Paying

from gymsdk import Environment, Failed, Task, UsageError, load, model, play, responses
from gymsdk.gym.env import Env
from gymsdk.gym.policy import Policy, rollout
from gymsdk.gym.spaces import Turn
from gymsdk.gym.vector import VectorEnv
from gymsdk.responses import build_usage
from gymsdk.testing.endpoint import build_app, serve
from gymsdk.types import Budget

CODEC_NAMES = ("math", "multineedle", "tool_call")
TASKS = [Task.ask(f"Note {number}.", number=number) for number in range(3)]
TOKENS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}
EXACT = [responses.build_reasoning("hm", id="rs_x"), responses.build_message("done", id="msg_x") | TOKENS]


class RecordingModel:
    """A model that gives its turns in order, repeats the last one, and records the requests."""

    def __init__(self, *turns, **response):
        self.turns = turns
        self.response = response
        self.requests = []

    async def respond(self, request, *, episode=None):
        self.requests.append(deepcopy(request))
        turn = self.turns[min(len(self.requests), len(self.turns)) - 1]
        if isinstance(turn, Exception):
            raise turn
        usage = build_usage(3, 4)
        return responses.build_response(deepcopy(turn), model="keeps", usage=usage, request=request) | self.response


class ModelWithoutEpisode:
    """A model with a `respond` method that does not accept `episode`."""

    async def respond(self, request):
        return responses.build_response([], model="deaf")


class EchoModel:
    """A model that repeats the last message and counts its concurrent calls."""

    def __init__(self, breaks_at=None):
        self.at_once = self.max_at_once = self.calls = 0
        self.breaks_at = breaks_at

    async def respond(self, request, *, episode=None):
        self.calls += 1
        self.at_once += 1
        self.max_at_once = max(self.max_at_once, self.at_once)
        await asyncio.sleep(0.01)
        self.at_once -= 1
        text = request["input"][-1]["content"]
        if text == self.breaks_at:
            raise Failed("out of words", kind="model_gone")
        return responses.build_response([responses.build_message(text)], model="parrot")


def call(text, number=0):
    return [responses.build_function_call("note", {"what": text}, f"c{number}", id=f"fc_{number}")]


def build_note_env(plugin=None, **options):
    return Env(Environment("noting", plugin or Notebook()), tasks=TASKS, **options)


def comparable(rollout):
    """Return the rollout without its duration, its id, and the parts that are new in each response."""
    response = rollout.response and {key: rollout.response[key] for key in ("output", "usage", "model", "status")}
    left_out = {"timing", "id", "response"}
    return rollout.model_dump(exclude=left_out) | {"response": response}


async def replay(environment, model, rollout, **given):
    return await play(environment, model, rollout.row, seed=rollout.seed, **given)


@pytest.mark.parametrize("name", CODEC_NAMES)
@pytest.mark.parametrize("player", ["scripted/oracle:0.5", "scripted/random", "scripted/null"])
async def test_a_rollout_through_gymnasium_equals_the_one_of_play(name, player):
    result = [rollout(name, player, seed=seed) for seed in range(4)]
    async with load(name) as environment:
        for entry in result:
            assert comparable(entry) == comparable(await replay(environment, model(player), entry))


def test_reset_options_choose_the_task():
    result = rollout("multineedle", "scripted/oracle", seed=1, options={"task": 2, "split": "example"})
    assert result.row == [task.row() for task in load("multineedle").tasks("example")][2]
    assert result.reward == 1


@pytest.mark.parametrize("name", CODEC_NAMES)
async def test_an_episode_out_of_turns_is_judged_as_in_play(name):
    with gymnasium.make(f"nemo/{name}", turns=1) as env:
        result = rollout(env, "scripted/random", seed=3)
    async with load(name) as environment:
        expected = await replay(environment, model("scripted/random"), result, budget=Budget(turns=1))
    assert comparable(result) == comparable(expected)


BROKEN = """
@hookimpl
def tasks(split: Literal["train"]):
    yield Task.ask("Go.")

@hookimpl
def {hook}({asks}):
    raise {raised}
"""


@pytest.mark.parametrize(
    ("hook", "asks", "raised"),
    [
        ("reset", "task", "ValueError('no')"),
        ("step", "action", "ValueError('no')"),
        ("verify", "transcript", "ValueError('no')"),
        ("verify", "transcript", "Unscorable('no gold')"),
    ],
)
async def test_a_failing_environment_fails_the_rollout_as_in_play(environment, hook, asks, raised):
    verify = "" if hook == "verify" else "\n@hookimpl\ndef verify():\n    return Verdict(reward=1)\n"
    broken = environment(BROKEN.format(hook=hook, asks=asks, raised=raised) + verify)
    player = RecordingModel([responses.build_message("x", id="msg_1")])
    result = rollout(Env(broken), player, seed=1)
    assert result.failure.stage == hook
    assert len(player.requests) == (hook != "reset")
    assert comparable(result) == comparable(await replay(broken, player, result))


TRUNCATION = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
STOP = [responses.build_message("stop", id="msg_1")]
GONE = Failed("gone", kind="model_unreachable", retryable=True)
PLAYED = {
    "out of tokens": (Notebook, [call("a")], TRUNCATION, {}, ("tokens", 0, "scored")),
    "out of tool calls": (Notebook, [[*call("a", 1), *call("b", 2)]], {}, {"tools": 1}, ("tools", 1, "scored")),
    "a failing model": (Notebook, [call("a"), GONE], {}, {}, (None, None, "failed")),
    "step rewards": (Paying, [call("a", 1), call("b", 2), STOP], {}, {}, ("done", 4.5, "scored")),
}


@pytest.mark.parametrize("case", PLAYED)
async def test_an_episode_ends_as_in_play(case):
    plugin, turns, response, budget, expected = PLAYED[case]
    result = rollout(build_note_env(plugin(), **budget), RecordingModel(*turns, **response), seed=1)
    assert (result.ended, result.reward, result.outcome) == expected
    if case == "a failing model":
        assert (result.failure.stage, result.failure.kind) == ("model", "model_unreachable")
    played = await replay(
        Environment("noting", plugin()), RecordingModel(*turns, **response), result, budget=Budget(**budget)
    )
    assert comparable(result) == comparable(played)


async def test_a_model_receives_the_same_requests_as_in_play():
    row = {"responses_create_params": {"input": "Hi", "temperature": 0.5, "tool_choice": "auto", "max_tool_calls": 9}}
    turns = call("a", 1), call("b", 2), STOP
    mine, plays = RecordingModel(*turns), RecordingModel(*turns)
    sampling = {"temperature": 0.25}
    env = build_note_env(Paying())
    result = rollout(env, mine, options={"task": row}, sampling=sampling)
    expected = await replay(Environment("noting", Paying()), plays, result, sampling=sampling)
    assert [without_message_types(request) for request in mine.requests] == [
        without_message_types(request) for request in plays.requests
    ]
    assert mine.requests[0]["max_tool_calls"] == 9
    assert mine.requests[0]["temperature"] == 0.25
    assert result.sampling == expected.sampling == sampling


def without_message_types(request):
    """Return the request without the redundant `type` of its messages, which a chat message does not carry."""
    plain = [
        {key: value for key, value in item.items() if (key, value) != ("type", "message") or "id" in item}
        for item in request["input"]
    ]
    return request | {"input": plain}


def test_an_action_holds_the_items_of_the_model():
    env = build_note_env()
    policy = Policy(RecordingModel(EXACT))
    action = policy(*env.reset(seed=1))
    assert action == EXACT
    assert env.action_space.contains(action)
    env.step(action)
    assert env.rollout.response["output"] == EXACT


def test_a_reset_starts_a_new_conversation():
    player = RecordingModel(call("a", 1), [responses.build_message("done")])
    env = build_note_env()
    policy = Policy(player, env)
    for number in (0, 2):
        observation, info = env.reset(options={"task": number})
        observation, *_, info = env.step(policy(observation, info))
    assert [item.get("content") for item in player.requests[-1]["input"]] == ["Note 2."]


def test_the_policy_sees_an_observation_changed_by_a_wrapper():
    def add_reminder(observation):
        return [*observation, {"role": "user", "content": "Be brief."}]

    env = gymnasium.wrappers.TransformObservation(build_note_env(), add_reminder, None)
    player = RecordingModel([responses.build_message("done")])
    assert rollout(env, player).outcome == "scored"
    assert [item["content"] for item in player.requests[0]["input"]][1:] == ["Be brief."]


def test_assistant_examples_in_a_prompt_have_no_id():
    examples = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    player = RecordingModel([responses.build_message("done")])
    rollout(build_note_env(), player, options={"task": {"responses_create_params": {"input": examples}}})
    roles = [("id" in item, item["role"]) for item in player.requests[0]["input"]]
    assert roles == [(False, "user"), (False, "assistant")]


def test_a_failing_model_raises_and_can_be_called_again():
    player = RecordingModel(call("a", 1), Failed("busy", kind="model_unreachable"), [responses.build_message("done")])
    env = build_note_env()
    policy = Policy(player)
    observation, *_, info = env.step(policy(*env.reset(seed=1)))
    with pytest.raises(Failed, match="busy") as caught:
        policy(observation, info)
    assert caught.value.stage == "model"
    assert policy(observation, info) == player.turns[-1]
    assert player.requests[-1] == player.requests[-2]


def test_a_model_that_does_not_answer_is_abandoned():
    class HangingModel:
        async def respond(self, request, *, episode=None):
            await asyncio.Event().wait()

    with pytest.raises(Failed, match=r"did not answer within 0\.02 s") as caught:
        Policy(HangingModel(), timeout=0.02)(*build_note_env().reset())
    assert (caught.value.kind, caught.value.retryable) == ("model_timeout", True)


@pytest.mark.parametrize("player", [RecordingModel(None, output=None), RecordingModel([], error="x")])
def test_an_invalid_response_is_not_an_action(player):
    with pytest.raises(Failed, match="the model"):
        Policy(player)(*build_note_env().reset())


async def test_a_served_model_plays_over_http():
    async with serve(build_app(model("scripted/echo"))) as address:
        result = await asyncio.to_thread(rollout, "math", f"endpoint/any@{address}", seed=2)
    assert (result.outcome, result.ended, result.turns) == ("scored", "done", 1)
    assert result.usage["policy"].output_tokens > 0


def play_vector(env, policy, *, seed, limit):
    """Play until *limit* episodes have ended and return their rewards in order of completion."""
    observations, infos = env.reset(seed=seed)
    rewards = []
    for _ in range(200):
        observations, paid, terminated, truncated, infos = env.step(policy.batch(observations, infos))
        rewards += list(paid[terminated | truncated])
        if len(rewards) >= limit:
            return rewards
        if env.metadata["autoreset_mode"] is gymnasium.vector.AutoresetMode.DISABLED and (terminated | truncated).any():
            observations, infos = env.reset(options={"reset_mask": terminated | truncated})
    raise AssertionError("the episodes do not end")


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
@pytest.mark.parametrize("name", CODEC_NAMES)
async def test_a_batch_plays_the_same_episodes_as_one_policy_each(name, mode):
    env = gymnasium.make_vec(f"nemo/{name}", num_envs=3, autoreset_mode=mode)
    rewards = play_vector(env, Policy("scripted/oracle:0.5", env), seed=4, limit=6)
    result = [entry for entry in env.unwrapped.rollouts if entry]
    env.close()
    async with load(name) as environment:
        expected = [await replay(environment, model("scripted/oracle:0.5"), entry) for entry in result]
    assert [entry.reward for entry in result] == [entry.reward for entry in expected]
    assert set(rewards) <= {0.0, 1.0}


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
def test_no_model_is_called_for_an_action_that_is_ignored(mode):
    player = EchoModel()
    env = VectorEnv(Environment("noting", Notebook()), num_envs=3, tasks=TASKS, autoreset_mode=mode)
    rewards = play_vector(env, Policy(player, env), seed=1, limit=9)
    assert player.calls == len(rewards) == 9


def test_all_models_are_called_concurrently():
    player = EchoModel()
    env = VectorEnv(Environment("noting", Notebook()), num_envs=16, tasks=TASKS)
    Policy(player, env).batch(*env.reset(seed=1))
    assert player.max_at_once == 16


def test_a_failing_model_affects_its_own_slot_only():
    env = VectorEnv(Environment("noting", Notebook()), num_envs=3, tasks=TASKS)
    policy = Policy(EchoModel(breaks_at="Note 1."), env)
    observations, infos = env.reset(options={"task": [0, 1, 2]})
    _, rewards, _, truncated, infos = env.step(policy.batch(observations, infos))
    assert [str(reward) for reward in rewards] == ["0.0", "nan", "0.0"]
    assert truncated.tolist() == [False, True, False]
    assert env.rollouts[1].failure.kind == "model_gone"


@pytest.mark.parametrize("mode", gymnasium.vector.AutoresetMode)
def test_gymnasiums_sync_vector_is_supported(mode):
    env = gymnasium.vector.SyncVectorEnv([build_note_env] * 2, autoreset_mode=mode, copy=False)
    player = EchoModel()
    rewards = play_vector(env, Policy(player, env), seed=1, limit=4)
    assert player.calls == len(rewards) == 4


def test_a_turn_survives_pickling_and_copying():
    failed = Turn(failure=Failed("no", kind="model_gone"))
    for expected in (pickle.loads(pickle.dumps(failed)), deepcopy(failed), failed.deep_copy()):
        assert isinstance(expected, Turn)
        assert expected.failure.kind == "model_gone"
    whole = Turn(responses.build_response(EXACT, model="x", status="incomplete"))
    for expected in (pickle.loads(pickle.dumps(whole)), deepcopy(whole), whole.deep_copy()):
        assert (list(expected), expected.response["status"]) == (EXACT, "incomplete")


class TruncatingWrapper(gymnasium.Wrapper):
    """A wrapper unknown to gymsdk that truncates an episode."""

    def step(self, action):
        observation, reward, terminated, _, info = self.env.step(action)
        return observation, reward, terminated, True, info


def observe(observation, info):
    """Return a function that gives a policy this observation and info."""
    return lambda: Policy(RecordingModel([]))(observation, info)


NO_TOOLS = {"tools": []}
WRONG_USES = [
    (lambda: Policy(RecordingModel(), build_note_env(codec="text")), "create it with codec='chat'"),
    (observe("Note it.", NO_TOOLS), "this observation is text; create the environment with"),
    (observe([1, 2], NO_TOOLS), "this observation is of type list"),
    (observe([{"content": "x"}], NO_TOOLS), "cannot be read; a chat message needs a `role`"),
    (observe([{"role": "user", "content": 3}], NO_TOOLS), "parts, got {'role': 'user', 'cont"),
    (observe([], {"tools": 3}), "in the form of Chat Completions, got 3; pass the info of reset"),
    (observe([{"role": "user", "content": "x"}], {}), "must come with the info of reset"),
    (lambda: Policy(3, build_note_env()), "model int has no method `respond`; write `async def respond"),
    (
        lambda: Policy(ModelWithoutEpisode()),
        "method `respond` of model ModelWithoutEpisode cannot be called: got an unexpected keyword argument 'episode'",
    ),
    (lambda: Policy(RecordingModel), "method `respond` of model type cannot be called: missing a required argument"),
    (lambda: rollout("maths", "scripted/oracle"), "did you mean 'math'"),
    (lambda: rollout("math", RecordingModel(), base_url="http://x/v1"), "base_url: options apply to a model's name"),
    (lambda: Policy(RecordingModel(), base_url="http://127.0.0.1:1/v1"), "this model exists already"),
    (lambda: Policy(RecordingModel(), gymnasium.make("CartPole-v1")), "plays environments of gymsdk"),
    (lambda: rollout(gymnasium.make("CartPole-v1"), RecordingModel()), "got CartPoleEnv"),
    (lambda: rollout(TruncatingWrapper(build_note_env()), RecordingModel(call("a"))), "turns= instead"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG_USES, ids=range(len(WRONG_USES)))
def test_wrong_usage_is_rejected_with_an_explanation(wrong, message):
    with pytest.raises(UsageError, match=message.replace("[", r"\[")):
        wrong()


def test_a_rollout_accepts_the_options_of_a_models_name(unused_tcp_port):
    base_url = f"http://127.0.0.1:{unused_tcp_port}/v1"
    result = rollout("math", "vllm/none", base_url=base_url, api_key="k", retries=0, seed=1)
    assert (result.failure.stage, result.failure.kind) == ("model", "model_unreachable")
    assert str(unused_tcp_port) in result.failure.message


def test_an_oracle_without_its_environment_says_how_to_pass_it():
    with build_note_env() as env, pytest.raises(Failed, match=r"write Policy\(model, env\)"):
        Policy("scripted/oracle")(*env.reset(seed=1))


async def test_play_rejects_an_object_that_is_not_a_model():
    for player in (3, ModelWithoutEpisode()):
        with pytest.raises(UsageError, match="write `async def respond"):
            await play(Environment("noting", Notebook()), player, TASKS[0])


def test_turn_is_public() -> None:
    import gymsdk.gym

    assert gymsdk.gym.Turn is Turn
    assert set(gymsdk.gym.__all__) == {"Env", "Policy", "Turn", "VectorEnv", "register", "rollout"}
