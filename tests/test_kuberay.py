"""The manifest for KubeRay fits together, and its command has only options that exist."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

MANIFEST = Path(__file__).resolve().parent.parent / "deploy" / "kuberay.yaml"
CLUSTER, DEPLOYMENT, SERVICE = yaml.safe_load_all(MANIFEST.read_text())
[SERVER] = DEPLOYMENT["spec"]["template"]["spec"]["containers"]


def get_ray_containers() -> list[dict[str, Any]]:
    groups = [CLUSTER["spec"]["headGroupSpec"], *CLUSTER["spec"]["workerGroupSpecs"]]
    return [container for group in groups for container in group["template"]["spec"]["containers"]]


def get_option(name: str) -> str:
    [value] = [argument.removeprefix(f"--{name}=") for argument in SERVER["args"] if argument.startswith(f"--{name}=")]
    return value


def test_the_servers_join_the_cluster_with_its_token() -> None:
    assert {container["image"] for container in [SERVER, *get_ray_containers()]} == {"gymsdk-ray:1"}
    port = next(port["containerPort"] for port in get_ray_containers()[0]["ports"] if port["name"] == "gcs-server")
    assert get_option("ray-address") == f"{CLUSTER['metadata']['name']}-head-svc:{port}"
    variables = {variable["name"]: variable for variable in SERVER["env"]}
    assert variables["RAY_AUTH_MODE"]["value"] == CLUSTER["spec"]["authOptions"]["mode"]
    reference = variables["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert reference == {"name": CLUSTER["spec"]["authOptions"]["secretName"], "key": "auth_token"}


def test_the_replicas_and_their_gradings_fit_on_the_workers() -> None:
    placement = pytest.importorskip("gymsdk.ray.placement", reason="needs Ray")
    [workers] = CLUSTER["spec"]["workerGroupSpecs"]
    [container] = workers["template"]["spec"]["containers"]
    nodes = [placement.NodeRoom(float(container["resources"]["requests"]["cpu"]), 0.0)] * workers["replicas"]
    demand = placement.Demand(int(get_option("replicas")), float(get_option("cpus-per-replica")), 0.0, True)
    assert demand.fits(nodes), demand.describe(sum(node.cpus for node in nodes))


@pytest.mark.slow
def test_the_pod_becomes_ready_for_the_probes_of_the_kubelet_which_send_no_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-of-the-cluster\n")
    token.chmod(0o400)
    replaced = {"port": "0", "advertise-host": "127.0.0.1", "token-file": token, "model": "scripted/oracle"}
    # Ray and the engine are not here; the head, which the probes ask, does not depend on them.
    kept = [argument.removeprefix("--").partition("=") for argument in SERVER["args"]]
    options = [f"--{name}={replaced.get(name, value)}" for name, _, value in kept if name in {*replaced, "host"}]
    command = [sys.executable, "-m", *SERVER["command"], *options, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path) as process:
        try:
            assert process.stdout is not None
            head = json.loads(process.stdout.readline())["head"]
            for probe in ("readinessProbe", "livenessProbe"):
                # The kubelet names the address of the pod, and sends these headers alone.
                headers = {"host": "10.1.2.3:11000", "user-agent": "kube-probe/1.34", "accept": "*/*"}
                answer = httpx.get(head + SERVER[probe]["httpGet"]["path"], headers=headers)
                assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
                assert SERVER[probe]["httpGet"]["port"] == "head"
        finally:
            process.terminate()


def test_the_service_reaches_every_port() -> None:
    named = {port["name"]: port["containerPort"] for port in SERVER["ports"]}
    assert {port["targetPort"]: port["port"] for port in SERVICE["spec"]["ports"]} == named
    flags = [flag.rpartition("=")[2] for flag in SERVER["args"] if flag.startswith(("--port=", "--server-port="))]
    assert sorted(map(int, flags)) == sorted(named.values())
    assert SERVICE["spec"]["selector"] == DEPLOYMENT["spec"]["template"]["metadata"]["labels"]


def test_the_command_has_only_options_that_exist() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "gymsdk", "serve", "--help"], capture_output=True, text=True, check=True
    ).stdout
    for argument in SERVER["args"]:
        assert f"{argument.partition('=')[0]} " in shown
    mount = SERVER["volumeMounts"][0]["mountPath"]
    assert get_option("token-file") == f"{mount}/token"
