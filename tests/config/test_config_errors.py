from __future__ import annotations

from pathlib import Path

import pytest
from config.conftest import ReadErrors, Write

from gymsdk.config.read import check_environments, load_config
from gymsdk.errors import BadConfig

MATH = "math:\n  resources_servers:\n    math:\n      port: 11001\n"
MODEL = "m:\n  responses_api_models:\n    vllm_model:\n      base_url: http://h:1\n      model: x\n"
AGENT = "a:\n  responses_api_agents:\n    simple_agent:\n"
OWN_MODEL = "m:\n  responses_api_models:\n    gymsdk_model:\n      model: "
IN_MODEL = "a.yaml:4: m.responses_api_models.gymsdk_model.model: "
PAIR = f"{MATH}{AGENT}      "
IN_AGENT = "a.yaml:8: a.responses_api_agents.simple_agent."

JUDGED_FILE = "resources_servers/math_with_judge/configs/math_stack_overflow.yaml"

INVALID = [
    ("lo_level: 2\n", "a.yaml:1: there is no setting 'lo_level'; did you mean 'log_level'?"),
    ("log_level: loud\n", "a.yaml:1: log_level: input should be 'debug', 'info', 'warning' or 'error'"),
    ("\ninsecure: perhaps\n", "a.yaml:2: insecure: input should be a valid boolean, unable to interpret input"),
    ("head_server:\n  hots: x\n", "a.yaml:2: head_server has no setting 'hots'; did you mean 'host'?"),
    ("head_server:\n  port: 70000\n", "a.yaml:2: head_server.port: input should be less than or equal to 65535"),
    ("head_server:\n  host: me:hush@h\n", "a.yaml:2: head_server.host: a host must be a name or an address only"),
    ("head_server: here\n", "a.yaml:1: head_server must hold host and port"),
    ("tls_key: k\n", "a.yaml:1: tls_key is given without tls_certificate"),
    ("port_range_low: 9\nport_range_high: 8\n", "a.yaml:1: port_range_low 9 is above port_range_high 8"),
    ("head_server:\n  port: true\n", "a.yaml:2: head_server.port: a port must be a number"),
    ("head_server:\n  port: 80a\n", "a.yaml:2: head_server.port: input should be a valid integer"),
    ("tls_key: [1]\ntls_certificate: c\n", "a.yaml:1: tls_key: input should be a valid string"),
    ("policy_base_url: {a: 1}\n", "a.yaml:1: policy_base_url: input should be a list"),
    ("disallowed_ports: 3\n", "a.yaml:1: disallowed_ports: input should be a list"),
    ("model_endpoint_readiness_timeout_seconds: .inf\n", "a.yaml:1: model_endpoint_readiness_timeout_seconds: input"),
    ("token_file: [1]\n", "a.yaml:1: token_file: input should be a path"),
    ("disallowed_ports: [1, x]\n", "a.yaml:1: disallowed_ports.1: input should be a valid integer"),
    ("a:\n\tb: 1\n", "a.yaml:2: this is not valid YAML"),
    ("- a\n", "a.yaml:1: a configuration must hold `key: value` lines"),
    ("insecure: true\nlog_level: info\ninsecure: false\n", "a.yaml:3: 'insecure' is here and in line 1"),
    ("x: &x\n  y: *x\n", "a.yaml:1: this repeats itself without end"),
    ("x: 1\n\ny: \0\n", "a.yaml:3: this is not valid YAML"),
    ("config_paths: [.]\n", "a.yaml:1: . is a folder; name a file in it"),
    ("config_paths: {a: 1}\n", "a.yaml:1: config_paths must be a list of files"),
    ("config_paths: [b.yaml]\n", "a.yaml:1: there is no file b.yaml; did you mean 'a.yaml'?"),
    (
        "config_paths:\n- responses_api_models/vlm_model/configs/vlm_model.yaml\n",
        "a.yaml:2: responses_api_models/vlm_model/configs/vlm_model.yaml: there is no model server 'vlm_model'",
    ),
    (
        "config_paths: [responses_api_models/vllm_model/configs/vllm_modle.yaml]\n",
        "a.yaml:1: responses_api_models/vllm_model/configs/vllm_modle.yaml: vllm_model has no file vllm_modle.yaml",
    ),
    (
        f"config_paths: [{JUDGED_FILE}]\n",
        f"a.yaml:1: {JUDGED_FILE}: math_with_judge has no built-in file math_stack_overflow.yaml, because",
    ),
    (
        "j:\n  resources_servers:\n    math_with_judge:\n      should_use_judge: perhaps\n",
        "a.yaml:4: j.resources_servers.math_with_judge.should_use_judge: input should be true or false",
    ),
    ("m:\n  vllm_model: {}\n", "a.yaml:1: m has no kind of server; write responses_api_models: above vllm_model:"),
    ("m:\n  responses_api_model: {}\n", "a.yaml:1: m has no kind of server; did you mean 'responses_api_models'?"),
    (
        MATH + "  resource_server: {}\n",
        "a.yaml:5: math.resource_server is not a kind of server; did you mean 'resources",
    ),
    (
        MATH + "    maths: {}\n",
        "a.yaml:2: math.resources_servers needs one implementation, and has math (a.yaml:3) and",
    ),
    (
        "a:\n  responses_api_agents:\n    simpel_agent: {}\n",
        "a.yaml:3: a: responses_api_agents has no implementation 'simpel_agent' here; did you mean 'simple_agent'?",
    ),
    (
        "m:\n  responses_api_models:\n    local_vllm_model: {}\n",
        "a.yaml:3: m: local_vllm_model has no equivalent in gymsdk; start vLLM with `gymsdk serve --launch-vllm`",
    ),
    (MODEL + "      modle: y\n", "a.yaml:6: m.responses_api_models.vllm_model has no setting 'modle'; did you mean"),
    (MODEL.replace("http://h:1", "h"), "a.yaml:4: m.responses_api_models.vllm_model: option 'base_url' of vllm/x: "),
    (
        "m:\n  responses_api_models:\n    vllm_model:\n      model: x\n",
        "a.yaml:3: m.responses_api_models.vllm_model needs the base URL: give base_url there, or policy_base_url",
    ),
    (
        OWN_MODEL + "vllm/x\n",
        "a.yaml:3: m.responses_api_models.gymsdk_model needs the base URL: give base_url there, or policy_base_url",
    ),
    (OWN_MODEL + "scriptd/oracle\n", IN_MODEL + "there is no provider 'scriptd'; did you mean 'scripted'?"),
    (OWN_MODEL + "Qwen/Qwen3-4B\n", IN_MODEL + "there is no provider 'Qwen'; a model is one of"),
    (MODEL + "      timeout: soon\n", "a.yaml:6: m.responses_api_models.vllm_model: option 'timeout' of vllm/x: "),
    (MODEL + "      default_headers: x\n", "a.yaml:6: m.responses_api_models.vllm_model: option 'headers' of vllm/x: "),
    (MATH + "      host: [1]\n", "a.yaml:5: math.resources_servers.math.host: input should be a valid string"),
    (MATH.replace("11001", "11000"), "a.yaml:4: math and head_server both have port 11000 of 127.0.0.1"),
    (MATH + "disallowed_ports: [11001]\n", "a.yaml:4: math has port 11001, which disallowed_ports forbids"),
    (AGENT + "      max_steps: many\n", "a.yaml:4: a.responses_api_agents.simple_agent.max_steps: input should be a"),
    (
        PAIR + "resources_server: {type: resources_servers, name: mth}\n",
        "a.yaml:8: a.resources_server refers to 'mth', which is none of the resources_servers; did you mean 'math'?",
    ),
    (
        PAIR + "model_server: {type: responses_api_models, name: math}\n",
        "a.yaml:8: a.model_server refers to 'math', which is none of the responses_api_models; add a server math",
    ),
    (
        PAIR + "resources_server: {type: resource_server, name: math}\n",
        (
            IN_AGENT + "resources_server.type: there is no kind of server "
            "'resource_server'; did you mean 'resources_servers'?"
        ),
    ),
    (
        PAIR + "resources_server:\n        name: math\n        type: responses_api_models\n",
        "a.yaml:10: a.responses_api_agents.simple_agent.resources_server.type must be resources_servers, got resp",
    ),
    (PAIR + "resources_server: math\n", IN_AGENT + "resources_server is not a reference to a server; write it"),
    (
        PAIR + "resorces_server: {type: resources_servers, name: math}\n",
        "a.yaml:8: a.responses_api_agents.simple_agent has no setting 'resorces_server'; did you mean 'res",
    ),
    (
        MATH + "      judge_model_server: {type: responses_api_model, name: m}\n",
        "a.yaml:5: math.resources_servers.math.judge_model_server.type: there is no kind of server 'resp",
    ),
    (
        PAIR + "model_server: {type: responses_api_models, name: policy_model}\n",
        "a.yaml:8: a.model_server refers to 'policy_model', which is none of the responses_api_models; add a file that",
    ),
    (
        MATH + "      datasets:\n      - name: x\n",
        "a.yaml:6: math.resources_servers.math.datasets.0.jsonl_fpath: field required",
    ),
    (
        "log_dir: ${oc.env:NOT_SET_HERE}\n",
        "a.yaml:1: log_dir has a reference that does not resolve: set the environment variable",
    ),
    (
        "log_dir: ${log_dri}\n",
        "a.yaml:1: log_dir has a reference that does not resolve: there is no 'log_dri'; did you",
    ),
    (
        MATH + "log_dir: ${math.prt}\n",
        "a.yaml:5: log_dir has a reference that does not resolve: there is no 'math.prt'",
    ),
    (
        "log_dir: ${foo:1}\n",
        "a.yaml:1: log_dir has a reference that does not resolve: unknown resolver foo:; write ${key.of",
    ),
    ("log_dir: ${log_dir}\n", "a.yaml:1: log_dir refers to itself"),
    ("\nlog_dir: ${a\n", "a.yaml:2: log_dir has a ${ without a matching }; write ${key.of.another}"),
    ("\nlog_dir: ???\n", "a.yaml:2: required values are ???: log_dir (a.yaml:2); write log_dir=VALUE"),
    ("log_dir: ???\ntoken_file: ???\n", "a.yaml:1: required values are ???: log_dir (a.yaml:1), token_file (a.yaml:2)"),
]


@pytest.mark.parametrize(("text", "line"), INVALID, ids=lambda text: text[:30])
def test_each_error_is_one_sentence_with_its_line(read_errors: ReadErrors, text: str, line: str) -> None:
    [error] = read_errors(text)
    assert error.startswith(line)


def test_all_errors_are_reported_at_once(read_errors: ReadErrors) -> None:
    lines = read_errors(f"lo_level: 2\n{MATH}{AGENT}      max_steps: many\n      port: 11001\n")
    assert [line.split(": ")[0] for line in lines] == ["a.yaml:1", "a.yaml:9", "a.yaml:10"]


def test_a_name_of_two_kinds_names_both_files(write: Write, read_errors: ReadErrors) -> None:
    write("b.yaml", "config_paths: []\n" + MATH.replace("resources_servers", "responses_api_models"))
    [line] = read_errors("config_paths: [b.yaml]\n" + MATH)
    assert "math is both resources_servers at a.yaml:3 and responses_api_models at b.yaml:3" in line


def test_two_servers_share_a_port_only_on_different_hosts(write: Write, read_errors: ReadErrors) -> None:
    other = MATH.replace("math:\n  r", "more:\n  r")
    [line] = read_errors(MATH + other + "      host: 0.0.0.0\n")
    assert line.startswith("a.yaml:8: more and math both have port 11001")
    write("b.yaml", MATH + other + "      host: 192.168.1.7\n")
    assert len(load_config(["b.yaml"]).servers) == 2


def test_no_error_or_warning_contains_a_key(write: Write, read_errors: ReadErrors) -> None:
    lines = read_errors(f"{MODEL}      api_key: sk-12345678\n      timeout: sk-12345678\nlog_leve: sk-12345678\n")
    assert len(lines) == 2
    assert "sk-12345678" not in "".join(lines)
    write("a.yaml", f"{MODEL}      api_key: sk-12345678\nsk-12345678: 1\n")
    assert load_config(["a.yaml"]).notes == ("a.yaml:7: *** is not known to gymsdk and is ignored",)


def test_an_environment_that_is_not_installed_gets_a_suggestion(write: Write) -> None:
    write("a.yaml", MATH.replace("    math:", "    mth:"))
    deployment = load_config(["a.yaml"])
    with pytest.raises(
        BadConfig, match=r"^a.yaml:3: math: no environment named 'mth' is installed; did you mean 'math'"
    ):
        check_environments(deployment, {"math", "multineedle"})
    write("b.yaml", MATH.replace("    math:", "    library_judge_math:"))
    check_environments(load_config(["b.yaml"]), {"math"})


ALIASES = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: " + "[" * 5000, "a.yaml"),
        ("a: " + "{a: " * 5000, "a.yaml"),
        ("a0: &a0 [1]\n" + ALIASES, "this repeats itself without end"),
    ],
    ids=["lists", "mappings", "aliases"],
)
def test_a_deeply_nested_file_is_reported(read_errors: ReadErrors, text: str, reason: str) -> None:
    [line] = read_errors(text)
    assert reason in line


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("+a.b=c", "command line: there is no setting 'a'; a server is written"),
        ("++a=b", "command line: there is no setting 'a'; leave it out"),
        ("~a", "command line: there is no a to delete"),
        ("+", "command line: '+' is not a setting; write it as key=value"),
        ("maths.math.port=1", "command line: there is no setting 'maths'; did you mean 'math'?"),
        ("head_server.prt=1", "command line: head_server has no setting 'prt'; did you mean 'port'?"),
        ("math.math.port=80a", "command line: math.resources_servers.math.port: input should be a valid integer"),
    ],
)
def test_an_invalid_override_is_one_sentence(read_errors: ReadErrors, override: str, line: str) -> None:
    [error] = read_errors(MATH, override)
    assert error.startswith(line)


def test_a_key_on_the_command_line_causes_a_warning(write: Write) -> None:
    write("a.yaml", MODEL)
    [note] = load_config(["a.yaml"], ["m.vllm_model.api_key=sk-12345678"]).notes
    assert note.startswith("m.vllm_model.api_key is on the command line, which all users of this machine can read")
    assert "sk-12345678" not in note
    assert load_config(["a.yaml"], ["m.vllm_model.api_key=${oc.env:HOME}"]).notes == ()


@pytest.mark.parametrize(
    "model", ["", "policy_model:\n  responses_api_models:\n    vllm_model:\n      base_url: ???\n"]
)
def test_the_caller_may_provide_the_policy(write: Write, model: str) -> None:
    write("a.yaml", f"{MATH}{AGENT}      model_server: {{type: responses_api_models, name: policy_model}}\n{model}")
    with pytest.raises(BadConfig):
        load_config(["a.yaml"])
    assert [server.name for server in load_config(["a.yaml"], played=True).servers] == ["math", "a", "policy_model"]


def test_a_policy_that_other_settings_refer_to_is_kept_when_another_policy_plays(write: Write) -> None:
    model = MODEL.replace("m:", "policy_model:", 1)
    write("a.yaml", f"{model}log_dir: ${{policy_model.responses_api_models.vllm_model.model}}\n")
    deployment = load_config(["a.yaml"], played=True)
    assert (deployment.logs.directory, deployment.servers[0].implementation) == (Path.cwd() / "x", "gymsdk_model")


def test_a_missing_policy_server_error_says_how_to_add_it(read_errors: ReadErrors) -> None:
    [line] = read_errors(f"{MATH}{AGENT}      model_server: {{type: responses_api_models, name: policy_model}}\n")
    assert line.endswith(
        "add a file that has policy_model (--config FILE), or name the policy: --model scripted/oracle"
    )
