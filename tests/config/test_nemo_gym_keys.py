"""Keys of NeMo Gym are translated, ignored with a warning, or rejected."""

from __future__ import annotations

from typing import Any

import pytest
from config.conftest import ReadErrors, Write

from gymsdk.config.model import ModelServerConfig, ServerConfig
from gymsdk.config.read import load_config

VLLM = "m:\n  responses_api_models:\n    vllm_model:\n      base_url: http://h:1/v1\n      model: x\n"
OPENAI = "m:\n  responses_api_models:\n    openai_model:\n      openai_base_url: http://h:1/v1\n      openai_model: x\n"
AGENT = "a:\n  responses_api_agents:\n    simple_agent:\n      entrypoint: app.py\n"
JUDGE = VLLM.replace("m:\n", "judge:\n", 1)
MATH = "math:\n  resources_servers:\n    math_with_judge:\n      entrypoint: app.py\n"
SERVER = "      judge_model_server: {type: responses_api_models, name: judge}\n"


def read_server(write: Write, text: str) -> tuple[ModelServerConfig, str]:
    """Return the only model server in *text*, and the warnings."""
    write("a.yaml", text)
    deployment = load_config(["a.yaml"])
    [block] = deployment.servers
    assert isinstance(block.kind_settings, ModelServerConfig)
    return block.kind_settings, "".join([*deployment.notes, *deployment.ignored])


def options(write: Write, text: str) -> dict[str, Any]:
    """Return the options of the only model server in *text*, except its address."""
    given = read_server(write, text)[0].options
    return {key: value for key, value in given.items() if key not in {"base_url", "apart", "api"}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (VLLM + "      uses_reasoning_parser: true\n      uses_interleaved_reasoning: true\n", {}),
        (VLLM + "      uses_reasoning_parser: true\n      uses_interleaved_reasoning: false\n", {"thoughts": "drop"}),
        (VLLM + "      uses_reasoning_parser: false\n", {"thoughts": "tags"}),
        (VLLM + "      preserve_reasoning_in_assistant_content: true\n", {"thoughts": "tags"}),
        (OPENAI + "      drop_input_reasoning_items: ${oc.env:NOT_SET_HERE,false}\n", {}),
        (OPENAI + "      drop_input_reasoning_items: ${oc.env:NOT_SET_HERE,true}\n", {"thoughts": "drop"}),
        (OPENAI + "      max_http_attempts: 7\n", {"retries": 6}),
        (OPENAI + "      openai_default_headers: {}\n", {}),
    ],
)
def test_a_key_with_an_equivalent_has_its_effect(write: Write, text: str, expected: dict[str, Any]) -> None:
    assert options(write, text) == expected


def test_default_headers_are_sent_and_never_shown(write: Write) -> None:
    model_options = options(write, OPENAI + "      openai_default_headers: {X-Tenant: tell-nobody}\n")
    assert model_options["headers"]["X-Tenant"].get_secret_value() == "tell-nobody"
    assert "tell-nobody" not in repr(load_config(["a.yaml"]))


def test_an_unsupported_key_causes_a_warning_with_its_place(write: Write) -> None:
    write("a.yaml", f"{VLLM}      forward_session_id_as_conversation_id: true\nsandbox: {{image: x}}\n")
    assert load_config(["a.yaml"]).notes == (
        "a.yaml:7: sandbox is not known to gymsdk and is ignored",
        (
            "a.yaml:6: m.responses_api_models.vllm_model.forward_session_id_as_conversation_id is not known to gymsdk "
            "and is ignored"
        ),
    )


def test_keys_without_an_effect_are_named_once_with_their_places(write: Write) -> None:
    write("a.yaml", f"{VLLM}      num_workers: 4\n      endpoint_check_interval_s: 10.0\n      audio_root: null\n")
    assert load_config(["a.yaml"]).ignored_keys_note == (
        "gymsdk ignores these keys of NeMo Gym: endpoint_check_interval_s (a.yaml:7), num_workers (a.yaml:6)"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{VLLM}      endpoint_file: /shared/url\n", "a.yaml:6: m.responses_api_models.vllm_model.endpoint_file: "),
        (
            f"{VLLM}      use_completions_api: true\n",
            "a.yaml:6: m.responses_api_models.vllm_model.use_completions_api: ",
        ),
        (
            f"{AGENT}      skip_verification: true\n",
            "a.yaml:5: a.responses_api_agents.simple_agent.skip_verification: ",
        ),
        (f"{AGENT}      execute_tools: 'false'\n", "a.yaml:5: a.responses_api_agents.simple_agent.execute_tools: "),
        ("skip_verification: true\n", "a.yaml:1: skip_verification: true is not supported; every rollout is verified"),
        (f"{VLLM}      return_token_id_informatoin: true\n", "a.yaml:6: m.responses_api_models.vllm_model has no"),
        (
            f"{AGENT}      max_stesp: 3\n",
            "a.yaml:5: a.responses_api_agents.simple_agent has no setting 'max_stesp'; did",
        ),
        ("defualt_host: 0.0.0.0\n", "a.yaml:1: there is no setting 'defualt_host'; did you mean 'default_host'?"),
        ("m: {responses_api_models: {gymsdk_model: {modell_server: x}}}\n", "a.yaml:1: m.responses_api_models.gymsdk"),
    ],
)
def test_an_unsupported_setting_that_affects_rewards_is_an_error_with_a_solution(
    read_errors: ReadErrors, text: str, expected: str
) -> None:
    [line] = read_errors(text)
    assert line.startswith(expected)
    assert "; " in line


@pytest.mark.parametrize(
    "text",
    [
        f"{VLLM}      endpoint_file: null\n      use_completions_api: false\n",
        f"{AGENT}      skip_verification: false\n      execute_tools: true\n",
        "skip_verification: false\n",
    ],
)
def test_an_unsupported_setting_without_an_effect_is_accepted(write: Write, text: str) -> None:
    write("a.yaml", text)
    assert (load_config(["a.yaml"]).notes, load_config(["a.yaml"]).ignored_keys_note) == ((), None)


def read_math_server(write: Write, text: str) -> ServerConfig:
    write("a.yaml", MATH + text + JUDGE)
    return next(server for server in load_config(["a.yaml"]).servers if server.kind == "resources_servers")


@pytest.mark.parametrize(
    ("text", "models", "settings"),
    [
        (f"{SERVER}      should_use_judge: true\n", {"judge": "judge"}, {}),
        (SERVER, {"judge": "judge"}, {}),
        (f"{SERVER}      should_use_judge: false\n", {}, {}),
        ("      judge: {type: responses_api_models, name: judge}\n", {"judge": "judge"}, {}),
        (
            f"{SERVER}      judge_responses_create_params: {{input: [], temperature: 0}}\n      shortcut: false\n",
            {"judge": "judge"},
            {"judge_options": {"temperature": 0}, "shortcut": False},
        ),
        (
            f"{SERVER}      should_use_judge: false\n      judge_responses_create_params: {{input: [], top_p: 1}}\n",
            {},
            {},
        ),
    ],
)
def test_the_judge_of_nemo_gym_becomes_the_judge_of_the_environment(
    write: Write, text: str, models: dict[str, str], settings: dict[str, Any]
) -> None:
    server = read_math_server(write, text)
    assert (server.models, server.settings) == (models, {"grader": "math-verify", **settings})


def test_a_server_of_nemo_gym_keeps_its_grader_unless_the_file_names_another(write: Write) -> None:
    assert read_math_server(write, "      grader: gymsdk\n").settings == {"grader": "gymsdk"}
    write("b.yaml", MATH.replace("math_with_judge", "math"))
    [own] = [server for server in load_config(["b.yaml"]).servers if server.kind == "resources_servers"]
    assert own.settings == {}


def test_a_judges_model_server_is_not_used_as_the_policy(write: Write) -> None:
    write("a.yaml", MATH + SERVER + JUDGE + AGENT)
    [agent] = load_config(["a.yaml"]).get_servers("responses_api_agents")
    assert agent.refers == {"resources_server": "math"}


def test_the_file_of_an_environment_server_is_built_in() -> None:
    path = "environment_servers/single_agent_turn/configs/single_agent_turn.yaml"
    [block] = load_config([], [f"config_paths=[{path}]"]).servers
    assert (block.name, block.kind) == ("single_agent_turn", "environment_servers")


OPTIONS = (
    *("api: chat", "chat_template_kwargs: {a: 1}", "extra_body: {a: 1}", "headers: {X-A: b}", "max_answer: 4096"),
    *("pinned: {temperature: 1}", "propagate_context_overflow_errors: true", "retries: 7", "thoughts: drop"),
    *("timeout: 7", "token_interface: chat", "tokenizer: gpt2", "tokens: true", "default_headers: {X-A: b}"),
    *("openai_default_headers: {X-A: b}", "sampling_overrides: {temperature: 1}"),
    *("return_token_id_information: true", "max_http_attempts: 7", "drop_input_reasoning_items: true"),
    *("uses_reasoning_parser: false", "uses_interleaved_reasoning: false"),
    *("preserve_reasoning_in_assistant_content: true", "forward_session_id_as_conversation_id: true"),
)


@pytest.mark.parametrize("block", [VLLM, OPENAI], ids=["vllm", "openai"])
@pytest.mark.parametrize("line", OPTIONS)
def test_a_model_server_says_that_it_ignores_a_key_exactly_if_the_key_has_no_effect(
    write: Write, block: str, line: str
) -> None:
    before = block + "      tokens: true\n" * line.startswith("token_interface")
    server, notes = read_server(write, f"{before}      {line}\n")
    has_effect = server != read_server(write, before)[0]
    assert has_effect == (line.partition(":")[0] not in notes)
