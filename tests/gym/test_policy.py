"""Models as policies of Gymnasium's environments, held against `play` on the same tasks."""

from __future__ import annotations

import asyncio
import pickle
from copy import deepcopy
from itertools import count

import gymnasium
import pytest
from episodes.environments import Notebook, Paying

from gymsdk import Environment, Failed, Task, UsageError, load, model, play, responses
from gymsdk.episode import Budget
from gymsdk.errors import UnknownEnvironment
from gymsdk.gym.actions import Turn
from gymsdk.gym.env import Env
from gymsdk.gym.policy import Policy, rollout
from gymsdk.gym.vector import VectorEnv
from gymsdk.testing.endpoint import build_app, serve

CODEC_NAMES = ("math", "multineedle", "tool_call")
TASKS = [Task.ask(f"Note {number}.", number=number) for number in range(3)]
TOKENS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}
EXACT = [responses.build_reasoning("hm", id="rs_x"), responses.build_message("done", id="msg_x") | TOKENS]


class Keeps:
    """Answers with its turns one after another, the last one again and again, and keeps what it was asked."""

    def __init__(self, *turns, **response):
        self.turns = turns
        self.response = response
        self.asked = []

    async def respond(self, request, *, episode=None):
        self.asked.append(deepcopy(request))
        said = self.turns[min(len(self.asked), len(self.turns)) - 1]
        if isinstance(said, Exception):
            raise said
        return (
            responses.build_response(deepcopy(said), model="keeps", usage=responses.build_usage(3, 4), request=request)
            | self.response
        )


class Deaf:
    """Was written without knowing of episodes."""

    async def respond(self, request):
        return responses.build_response([], model="deaf")


class Parrot:
    """Says what it was told last, and knows how many were asked at once."""

    def __init__(self, breaks_at=None):
        self.at_once = self.most = self.calls = 0
        self.breaks_at = breaks_at

    async def respond(self, request, *, episode=None):
        self.calls += 1
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await asyncio.sleep(0.01)
        self.at_once -= 1
        said = request["input"][-1]["content"]
        if said == self.breaks_at:
            raise Failed("out of words", kind="model_gone")
        return responses.build_response([responses.build_message(said)], model="parrot")


def call(what, number=0):
    return [responses.build_function_call("note", {"what": what}, f"c{number}", id=f"fc_{number}")]


def noting(plugin=None, **options):
    return Env(Environment("noting", plugin or Notebook()), tasks=TASKS, **options)


def told(rollout):
    """Everything of a rollout but how long it took, how it is called, and what is made up anew for each response."""
    response = rollout.response and {key: rollout.response[key] for key in ("output", "usage", "model", "status")}
    left_out = {"timing", "id", "response"}
    return rollout.model_dump(exclude=left_out) | {"response": response}


async def played(environment, model, rollout, **given):
    return await play(environment, model, rollout.row, seed=rollout.seed, **given)


@pytest.mark.parametrize("name", CODEC_NAMES)
@pytest.mark.parametrize("player", ["scripted/oracle:0.5", "scripted/random", "scripted/null"])
async def test_a_rollout_through_gymnasium_is_the_one_that_play_gives(name, player):
    found = [rollout(name, player, seed=seed) for seed in range(4)]
    async with load(name) as environment:
        assert [told(each) for each in found] == [
            told(await played(environment, model(player), each)) for each in found
        ]


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_a_seed_gives_the_same_rollout_again(name):
    assert told(rollout(name, "scripted/oracle", seed=5)) == told(rollout(f"nemo/{name}", "scripted/oracle", seed=5))


def test_a_task_is_chosen_by_the_options_of_reset():
    found = rollout("multineedle", "scripted/oracle", seed=1, options={"task": 2, "split": "example"})
    assert found.row == [task.row() for task in load("multineedle").tasks("example")][2]
    assert found.reward == 1


@pytest.mark.parametrize("name", CODEC_NAMES)
async def test_an_episode_out_of_turns_is_judged_as_play_judges_it(name):
    with gymnasium.make(f"nemo/{name}", turns=1) as env:
        found = rollout(env, "scripted/random", seed=3)
    async with load(name) as environment:
        again = await played(environment, model("scripted/random"), found, budget=Budget(turns=1))
    assert told(found) == told(again)


async def test_an_episode_out_of_tokens_is_judged_as_play_judges_it():
    cut = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    found = rollout(noting(), Keeps(call("a"), **cut), seed=1)
    assert (found.ended, found.reward, found.outcome) == ("tokens", 0, "scored")
    assert told(found) == told(await played(Environment("noting", Notebook()), Keeps(call("a"), **cut), found))


async def test_an_episode_out_of_tool_calls_is_judged_as_play_judges_it():
    player = Keeps([*call("a", 1), *call("b", 2)])
    found = rollout(noting(tools=1), player, seed=1)
    assert (found.ended, found.reward) == ("tools", 1)
    budget = Budget(tools=1)
    assert told(found) == told(await played(Environment("noting", Notebook()), player, found, budget=budget))


async def test_a_model_that_breaks_fails_the_rollout_as_in_play():
    def player():
        return Keeps(call("a"), Failed("gone", kind="model_unreachable", retryable=True))

    found = rollout(noting(), player(), seed=1)
    assert (found.outcome, found.failure.stage, found.failure.kind) == ("failed", "model", "model_unreachable")
    assert told(found) == told(await played(Environment("noting", Notebook()), player(), found))


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
async def test_an_environment_that_breaks_fails_the_rollout_as_in_play(environment, hook, asks, raised):
    verify = "" if hook == "verify" else "\n@hookimpl\ndef verify():\n    return Verdict(reward=1)\n"
    broken = environment(BROKEN.format(hook=hook, asks=asks, raised=raised) + verify)
    player = Keeps([responses.build_message("x", id="msg_1")])
    found = rollout(Env(broken), player, seed=1)
    assert found.failure.stage == hook
    assert len(player.asked) == (hook != "reset")
    assert told(found) == told(await played(broken, player, found))


async def test_rewards_paid_on_the_way_count_as_in_play():
    def player():
        return Keeps(call("a", 1), call("b", 2), [responses.build_message("stop", id="msg_1")])

    found = rollout(noting(Paying()), player(), seed=1)
    assert found.reward == 4.5
    assert told(found) == told(await played(Environment("noting", Paying()), player(), found))


async def test_a_model_is_asked_what_play_asks_it():
    row = {"responses_create_params": {"input": "Hi", "temperature": 0.5, "tool_choice": "auto", "max_tool_calls": 9}}
    turns = call("a", 1), call("b", 2), [responses.build_message("stop", id="msg_1")]
    mine, plays = Keeps(*turns), Keeps(*turns)
    sampling = {"temperature": 0.25}
    env = noting(Paying())
    found = rollout(env, mine, options={"task": row}, sampling=sampling)
    again = await played(Environment("noting", Paying()), plays, found, sampling=sampling)
    assert [said(request) for request in mine.asked] == [said(request) for request in plays.asked]
    assert mine.asked[0]["max_tool_calls"] == 9
    assert mine.asked[0]["temperature"] == 0.25
    assert found.sampling == again.sampling == sampling


def said(request):
    """The request without `type`s that say what is plain: a chat message comes back without."""
    plain = [
        {key: value for key, value in item.items() if (key, value) != ("type", "message") or "id" in item}
        for item in request["input"]
    ]
    return request | {"input": plain}


def test_an_action_is_the_models_own_items():
    env = noting()
    policy = Policy(Keeps(EXACT))
    action = policy(*env.reset(seed=1))
    assert action == EXACT
    assert env.action_space.contains(action)
    env.step(action)
    assert env.rollout.response["output"] == EXACT


def test_a_conversation_begins_anew_with_a_reset():
    player = Keeps(call("a", 1), [responses.build_message("done")])
    env = noting()
    policy = Policy(player, env)
    for number in (0, 2):
        seen, info = env.reset(options={"task": number})
        seen, *_, info = env.step(policy(seen, info))
    assert [item.get("content") for item in player.asked[-1]["input"]] == ["Note 2."]


def test_a_wrapper_of_observations_is_heard():
    def reminded(observation):
        return [*observation, {"role": "user", "content": "Be brief."}]

    env = gymnasium.wrappers.TransformObservation(noting(), reminded, None)
    player = Keeps([responses.build_message("done")])
    assert rollout(env, player).outcome == "scored"
    assert [item["content"] for item in player.asked[0]["input"]][1:] == ["Be brief."]


def test_examples_in_a_prompt_are_the_environments_words_and_have_no_id():
    row = {
        "responses_create_params": {"input": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}
    }
    player = Keeps([responses.build_message("done")])
    rollout(noting(), player, options={"task": row})
    assert [("id" in item, item["role"]) for item in player.asked[0]["input"]] == [
        (False, "user"),
        (False, "assistant"),
    ]


def test_a_model_that_fails_is_told_and_may_be_asked_again():
    player = Keeps(call("a", 1), Failed("busy", kind="model_unreachable"), [responses.build_message("done")])
    env = noting()
    policy = Policy(player)
    seen, *_, info = env.step(policy(*env.reset(seed=1)))
    with pytest.raises(Failed, match="busy") as caught:
        policy(seen, info)
    assert caught.value.stage == "model"
    assert policy(seen, info) == player.turns[-1]
    assert player.asked[-1] == player.asked[-2]


def test_a_model_that_does_not_answer_is_given_up():
    class Hangs:
        async def respond(self, request, *, episode=None):
            await asyncio.Event().wait()

    with pytest.raises(Failed, match=r"did not answer within 0\.02 s") as caught:
        Policy(Hangs(), timeout=0.02)(*noting().reset())
    assert (caught.value.kind, caught.value.retryable) == ("model_timeout", True)


@pytest.mark.parametrize("player", [Keeps(None, output=None), Keeps([], error="x")])
def test_an_answer_that_is_none_is_no_action(player):
    with pytest.raises(Failed, match="the model"):
        Policy(player)(*noting().reset())


def test_an_oracle_needs_the_environment():
    with pytest.raises(Failed, match="needs an episode that is played in this process"):
        Policy("scripted/oracle")(*gymnasium.make("nemo/multineedle").reset(seed=1))


async def test_a_served_model_plays_over_http():
    async with serve(build_app(model("scripted/echo"))) as address:
        found = await asyncio.to_thread(rollout, "math", f"endpoint/any@{address}", seed=2)
    assert (found.outcome, found.ended, found.turns) == ("scored", "done", 1)
    assert found.usage["policy"].output_tokens > 0


async def test_a_served_model_that_breaks_fails_the_rollout():
    async with serve(build_app(Keeps(Failed("down", kind="model_down")))) as address:
        policy = Policy("endpoint/any", base_url=address, retries=0)
        with pytest.raises(Failed, match="down"):
            await asyncio.to_thread(policy, *noting().reset())


def steps(env, policy, *, seed, limit):
    """Play until *limit* episodes have ended, and give their rewards as they came."""
    observations, infos = env.reset(seed=seed)
    rewards = []
    for _ in range(200):
        observations, paid, terminated, truncated, infos = env.step(policy.batch(observations, infos))
        rewards += list(paid[terminated | truncated])
        if len(rewards) >= limit:
            return rewards
        if env.metadata["autoreset_mode"] is gymnasium.vector.AutoresetMode.DISABLED and (terminated | truncated).any():
            observations, again = env.reset(options={"reset_mask": terminated | truncated})
            infos = again
    raise AssertionError("the episodes do not end")


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
@pytest.mark.parametrize("name", CODEC_NAMES)
async def test_a_batch_plays_the_episodes_as_one_policy_each_would(name, mode):
    env = gymnasium.make_vec(f"nemo/{name}", num_envs=3, autoreset_mode=mode)
    rewards = steps(env, Policy("scripted/oracle:0.5", env), seed=4, limit=6)
    found = [each for each in env.unwrapped.rollouts if each]
    env.close()
    async with load(name) as environment:
        again = [await played(environment, model("scripted/oracle:0.5"), each) for each in found]
    assert [each.reward for each in found] == [each.reward for each in again]
    assert set(rewards) <= {0.0, 1.0}


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
def test_no_model_is_asked_for_an_action_that_is_ignored(mode):
    player = Parrot()
    env = VectorEnv(Environment("noting", Notebook()), num_envs=3, tasks=TASKS, autoreset_mode=mode)
    rewards = steps(env, Policy(player, env), seed=1, limit=9)
    assert player.calls == len(rewards) == 9


def test_all_models_are_asked_at_once():
    player = Parrot()
    env = VectorEnv(Environment("noting", Notebook()), num_envs=16, tasks=TASKS)
    Policy(player, env).batch(*env.reset(seed=1))
    assert player.most == 16


def test_a_model_that_breaks_harms_its_own_seat_only():
    env = VectorEnv(Environment("noting", Notebook()), num_envs=3, tasks=TASKS)
    policy = Policy(Parrot(breaks_at="Note 1."), env)
    observations, infos = env.reset(options={"task": [0, 1, 2]})
    _, rewards, _, truncated, infos = env.step(policy.batch(observations, infos))
    assert [str(reward) for reward in rewards] == ["0.0", "nan", "0.0"]
    assert truncated.tolist() == [False, True, False]
    assert env.rollouts[1].failure.kind == "model_gone"


@pytest.mark.parametrize("mode", gymnasium.vector.AutoresetMode)
def test_gymnasiums_own_vector_of_environments_is_played_too(mode):
    env = gymnasium.vector.SyncVectorEnv([noting] * 2, autoreset_mode=mode, copy=False)
    player = Parrot()
    rewards = steps(env, Policy(player, env), seed=1, limit=4)
    assert player.calls == len(rewards) == 4


async def test_a_policy_plays_inside_a_running_loop():
    env = noting()
    assert env.step(Policy("scripted/echo", env)(*env.reset(seed=1)))[2]


def test_the_rewards_of_an_evaluation_are_those_of_play():
    env = gymnasium.make("nemo/multineedle")
    policy = Policy("scripted/oracle:0.7", env)
    rewards = []
    for seed in range(12):
        (observation, info), over = env.reset(seed=seed), False
        while not over:
            observation, reward, terminated, truncated, info = env.step(policy(observation, info))
            over = terminated or truncated
        rewards.append(reward)
    again = [rollout("multineedle", "scripted/oracle:0.7", seed=seed).reward for seed in range(12)]
    assert rewards == again
    assert 0 < sum(rewards) < 12


def test_a_turn_is_the_same_after_a_pickle_and_a_copy():
    failed = Turn(failure=Failed("no", kind="model_gone"))
    for again in (pickle.loads(pickle.dumps(failed)), deepcopy(failed), failed.deep_copy()):
        assert isinstance(again, Turn)
        assert again.failure.kind == "model_gone"
    whole = Turn(responses.build_response(EXACT, model="x", status="incomplete"))
    for again in (pickle.loads(pickle.dumps(whole)), deepcopy(whole), whole.deep_copy()):
        assert (list(again), again.response["status"]) == (EXACT, "incomplete")


class Cuts(gymnasium.Wrapper):
    """A wrapper that truncates an episode, and that gymsdk knows nothing of."""

    def step(self, action):
        observation, reward, terminated, _, info = self.env.step(action)
        return observation, reward, terminated, True, info


WRONG = [
    (lambda: Policy(Keeps(), noting(codec="text")), "create it with codec='chat'"),
    (lambda: Policy(Keeps([]))("Note it.", {"tools": []}), "this observation is text; create the environment with"),
    (lambda: Policy(Keeps([]))([1, 2], {"tools": []}), "this observation is of type list"),
    (lambda: Policy(Keeps([]))([{"content": "x"}], {"tools": []}), "cannot be read; a chat message needs a `role`"),
    (
        lambda: Policy(Keeps([]))([{"role": "user", "content": 3}], {"tools": []}),
        "parts, got {'role': 'user', 'cont",
    ),
    (lambda: Policy(Keeps([]))([], {"tools": 3}), "in the form of Chat Completions, got 3; pass the info of reset"),
    (lambda: Policy(3, noting()), "model int has no method `respond`; write `async def respond"),
    (lambda: Policy(None), "model NoneType has no method `respond`"),
    (lambda: Policy(lambda request: request), "model function has no method `respond`"),
    (
        lambda: Policy(Deaf()),
        "method `respond` of model Deaf cannot be called: got an unexpected keyword argument 'episode'",
    ),
    (lambda: Policy(Keeps), "method `respond` of model type cannot be called: missing a required argument"),
    (lambda: rollout("math", 3), "model int has no method `respond`"),
    (lambda: rollout("math", Keeps(), base_url="http://127.0.0.1:1/v1"), "base_url: options apply to a model's name"),
    (lambda: Policy(Keeps([]))([{"role": "user", "content": "x"}], {}), "must come with the info of reset"),
    (lambda: Policy(Keeps(), base_url="http://127.0.0.1:1/v1"), "this model exists already"),
    (lambda: Policy(Keeps(), gymnasium.make("CartPole-v1")), "plays environments of gymsdk"),
    (lambda: rollout(gymnasium.make("CartPole-v1"), Keeps()), "got CartPoleEnv"),
    (lambda: rollout(Cuts(noting()), Keeps(call("a"))), "turns= instead"),
]


@pytest.mark.parametrize(("wrong", "words"), WRONG, ids=[str(number) for number, _ in zip(count(), WRONG)])
def test_what_is_wrong_is_said_in_a_sentence(wrong, words):
    with pytest.raises(UsageError, match=words.replace("[", r"\[")):
        wrong()


def test_a_rollout_takes_the_options_of_a_models_name(unused_tcp_port):
    base_url = f"http://127.0.0.1:{unused_tcp_port}/v1"
    found = rollout("math", "vllm/none", base_url=base_url, api_key="k", retries=0, seed=1)
    assert (found.failure.stage, found.failure.kind) == ("model", "model_unreachable")
    assert str(unused_tcp_port) in found.failure.message


def test_an_oracle_without_its_environment_says_how_to_get_it():
    with noting() as env, pytest.raises(Failed, match=r"write Policy\(model, env\)"):
        Policy("scripted/oracle")(*env.reset(seed=1))


@pytest.mark.parametrize("player", [3, None, Deaf()])
async def test_play_refuses_what_is_no_model(player):
    with pytest.raises(UsageError, match="write `async def respond"):
        await play(Environment("noting", Notebook()), player, TASKS[0])


def test_an_unknown_environment_is_said_with_the_nearest():
    with pytest.raises(UnknownEnvironment, match="did you mean 'math'"):
        rollout("maths", "scripted/oracle")


def test_a_turn_is_public() -> None:
    import gymsdk.gym

    assert gymsdk.gym.Turn is Turn
    assert set(gymsdk.gym.__all__) == {"Env", "Policy", "Turn", "VectorEnv", "register", "rollout"}
