from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from config.conftest import Write, list_settings
from pydantic import ValidationError

from gymsdk.config import show
from gymsdk.config.model import ResourcesServerConfig
from gymsdk.config.read import load_config
from gymsdk.errors import BadConfig

MATH = "math:\n  resources_servers:\n    math:\n      entrypoint: app.py\n"


def test_without_files_all_settings_have_defaults(write: Write) -> None:
    deployment = load_config()
    assert (deployment.head_address, deployment.head_host) == (("127.0.0.1", 11000), None)
    assert (deployment.servers, deployment.insecure, deployment.token_file) == ((), False, None)
    assert deployment.readiness == 600
    assert {place for _, place in list_settings(deployment).values()} == {"default"}
    with pytest.raises(ValidationError, match="frozen"):
        deployment.host = "0.0.0.0"  # type: ignore[misc]  # the test needs a forbidden assignment
    write("a.yaml", "insecure: false\n")
    assert deployment.logs.level == load_config(["a.yaml"]).logs.level == "warning"


def test_the_settings_of_a_deployment_are_read(write: Write, folder: Path) -> None:
    text = """\
advertise_host: node-1
token_file: token.txt
insecure: true
tls_certificate: cert.pem
tls_key: key.pem
port_range_low: 5000
port_range_high: 5999
disallowed_ports: [5001]
log_level: DEBUG
log_format: json
nemo_gym_log_dir: logs
profiling_enabled: true
profiling_results_dirpath: profiles/today
model_endpoint_readiness_timeout_seconds: 0
"""
    write("a.yaml", text)
    deployment = load_config(["a.yaml"], folder=folder)
    assert (deployment.advertise_host, deployment.insecure) == ("node-1", True)
    assert deployment.token_file == folder / "token.txt"
    assert deployment.tls is not None
    assert (deployment.tls.certificate, deployment.tls.key) == (folder / "cert.pem", folder / "key.pem")
    ports, logs = deployment.port_range, deployment.logs
    assert (ports.low, ports.high, ports.disallowed) == (5000, 5999, (5001,))
    assert (logs.level, logs.format, logs.directory) == ("debug", "json", folder / "logs")
    assert (deployment.profile, deployment.readiness, tuple(deployment.ignored)) == (folder / "profiles/today", 0, ())


def test_token_file_and_insecure_can_come_from_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYMSDK_TOKEN_FILE", "token.txt")
    monkeypatch.setenv("GYMSDK_INSECURE", "1")
    deployment = load_config([], ["insecure=false"])
    assert (deployment.token_file, deployment.insecure) == (Path.cwd() / "token.txt", False)
    assert list_settings(deployment)["token_file"] == ("token.txt", "GYMSDK_TOKEN_FILE")


def test_references_and_numbers_are_read_as_by_omegaconf(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT_OF_MATH", "7001")
    settings = "      port: ${oc.env:PORT_OF_MATH}\n      rate: 1e-3\n      day: 2024-01-02\n      again: ${mine}\n"
    write("a.yaml", f"mine: {{x: [1, 2]}}\n{MATH}{settings}      <<: {{low: 1, rate: 2}}\n")
    [block] = load_config(["a.yaml"]).servers
    assert block.port == 7001
    assert block.settings == {"rate": 0.001, "day": "2024-01-02", "again": {"x": [1, 2]}, "low": 1}


def test_the_settings_of_an_environment_do_not_include_those_of_its_server(write: Write) -> None:
    judge = "      judge_model_server: {type: responses_api_models, name: policy_model}\n"
    policy = "policy_model: {responses_api_models: {gymsdk_model: {model: scripted/oracle}}}\n"
    rest = "      num_workers: 2\n      expose_tools_over_mcp: true\n      min_difficulty: 2\n"
    write("a.yaml", MATH + judge + rest + policy)
    deployment = load_config(["a.yaml"])
    assert deployment.servers[0].settings == {"min_difficulty": 2}
    assert deployment.servers[0].refers == {"judge_model_server": "policy_model"}
    assert deployment.servers[0].kind_settings == ResourcesServerConfig(environment="math", mcp=True)
    assert tuple(deployment.ignored) == ("num_workers",)


def test_an_agent_refers_to_the_only_servers_of_each_kind(write: Write) -> None:
    policy = "one: {responses_api_models: {gymsdk_model: {}}}\n"
    write("a.yaml", f"{MATH}{policy}a: {{responses_api_agents: {{simple_agent: {{}}}}}}\n")
    assert load_config(["a.yaml"]).servers[2].refers == {"resources_server": "math", "model_server": "one"}


def test_an_environment_server_uses_the_resources_server_of_its_agent(write: Write) -> None:
    block = """\
{name}:
  resources_servers: {{{name}: {{entrypoint: app.py}}}}
{name}_agent:
  responses_api_agents:
    simple_agent:
      resources_server: {{type: resources_servers, name: {name}}}
{name}_environment:
  environment_servers:
    legacy_agent:
      agent_server: {{type: responses_api_agents, name: {name}_agent}}
"""
    for name in ("first", "second"):
        write(f"{name}.yaml", block.format(name=name))
    for files in (["first.yaml"], ["first.yaml", "second.yaml"]):
        used = {server.name: server.refers.get("resources_server") for server in load_config(files).servers}
        for name in (Path(file).stem for file in files):
            assert used[f"{name}_environment"] == used[f"{name}_agent"] == name


def test_datasets_are_found_by_name(write: Write, folder: Path) -> None:
    datasets = "[{name: train, type: train, jsonl_fpath: data/t.jsonl, num_repeats: 4, license: MIT}]"
    write("a.yaml", f"{MATH}      datasets: {datasets}\n")
    deployment = load_config(["a.yaml"], folder=folder).find_dataset("train")
    assert deployment is not None
    block, dataset = deployment
    assert (block.name, dataset.path, dataset.type, dataset.repeats) == ("math", folder / "data/t.jsonl", "train", 4)
    assert load_config(["a.yaml"]).find_dataset("test") is None


def test_env_yaml_may_contain_keys_of_other_programs(write: Write) -> None:
    others = "judge_api_key: x\nopenai_api_key: y\njudge_base_url: z\nnv_embed:\n  url: http://x\n"
    write(
        "env.yaml",
        f"{others}company_proxy: ${{oc.env:NOT_SET_HERE}}\nhf_token: x\nwandb_project: y\nlog_level: error\n",
    )
    deployment = load_config()
    assert deployment.servers == ()
    assert (deployment.logs.level, tuple(deployment.ignored)) == ("error", ("hf_token", "wandb_project"))


@pytest.mark.parametrize("text", ["log_levl: info\n", "defualt_host: 0.0.0.0\n", "lamp:\n  resource_servers: {}\n"])
def test_a_misspelled_key_in_env_yaml_is_reported(write: Write, text: str) -> None:
    write("env.yaml", text)
    with pytest.raises(BadConfig, match="did you mean"):
        load_config()


def test_a_key_that_another_setting_refers_to_is_not_unknown(write: Write) -> None:
    write("a.yaml", "my_port: 7001\n" + MATH + "      port: ${my_port}\n")
    assert load_config(["a.yaml"]).servers[0].port == 7001


@pytest.mark.slow
def test_reading_without_files_imports_no_heavy_package() -> None:
    code = "import sys, gymsdk.config; print({'omegaconf', 'yaml', 'fastapi'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"


def test_a_starter_file_and_its_commented_settings_are_valid(write: Write) -> None:
    write("a.yaml", show.build_starter_file("math", {"shortcut": True, "judge": None}))
    deployment = load_config(["a.yaml"])
    assert [block.name for block in deployment.servers] == ["math", "math_simple_agent", "policy_model"]
    assert deployment.servers[0].settings == {}
    assert tuple(deployment.ignored) == ()
    text = show.build_starter_file("math", {"shortcut": True})
    write("a.yaml", text.replace("# shortcut", "shortcut").replace("# port: 11001", "port: 11001"))
    block = load_config(["a.yaml"]).servers[0]
    assert (block.settings, block.port) == ({"shortcut": True}, 11001)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("port_range_low: 12000", (12000, 65535)),
        ("port_range_high: 12000", (1024, 12000)),
        ("disallowed_ports: [12000]", (1024, 65535)),
        ("insecure: false", (None, None)),
    ],
)
def test_a_port_range_with_one_end_gets_a_default_for_the_other(
    write: Write, text: str, expected: tuple[object, object]
) -> None:
    write("a.yaml", text + "\n")
    deployment = load_config(["a.yaml"]).port_range
    assert (deployment.low, deployment.high) == expected
