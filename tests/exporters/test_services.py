"""Runs are sent to W&B, MLflow and OpenTelemetry by their official SDKs, offline or to a receiver on loopback."""

from __future__ import annotations

import gzip
import os
import struct
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gymsdk.jsonl import read_rows

pytestmark = pytest.mark.services

BLOCK_BYTES = 32768
"""The size of a block of W&B's file, in which records do not cross the end of a block."""


def run_gymsdk(*arguments: object, cwd: Path, code: int = 0, **environment: str) -> tuple[str, str]:
    """Run the command line; return its standard output and its standard error."""
    command = [sys.executable, "-m", "gymsdk", *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=os.environ | environment, check=False, timeout=100
    )
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of two environments with right and wrong rollouts."""
    home = tmp_path_factory.mktemp("runs")
    plays = ["tool_call", "multineedle", "--split", "train", "--limit", "8", "--repeats", "2"]
    run_gymsdk("rollout", *plays, "--model", "scripted/oracle:0.6", "--output", "run", cwd=home)
    return home / "run"


@pytest.fixture(scope="module")
def lines(run: Path) -> list[dict[str, Any]]:
    return [row for _, row in read_rows(run / "rollouts.jsonl")]


@dataclass
class Collector:
    """A receiver of OTLP over HTTP: keeps the spans and the events that it receives."""

    endpoint: str = ""
    spans: list[Any] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    is_broken: bool = False

    def receive(self, path: str, body: bytes) -> None:
        from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        if path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.resources.append(to_dict(resource.resource.attributes))
                self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        elif path == "/v1/logs":
            for resource in ExportLogsServiceRequest.FromString(body).resource_logs:
                self.events += [record for scope in resource.scope_logs for record in scope.log_records]


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            if not found.is_broken:
                found.receive(self.path, body)
            self.send_response(400 if found.is_broken else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found.endpoint = f"http://127.0.0.1:{server.server_port}"
        yield found
        server.shutdown()


def to_dict(attributes: Any) -> dict[str, Any]:
    return {attribute.key: getattr(attribute.value, attribute.value.WhichOneof("value")) for attribute in attributes}


def group_traces(collector: Collector) -> dict[bytes, list[Any]]:
    traces: defaultdict[bytes, list[Any]] = defaultdict(list)
    for span in collector.spans:
        traces[span.trace_id].append(span)
    return traces


def test_each_rollout_is_a_trace_with_its_turns_and_tool_calls(
    run: Path, lines: list[dict[str, Any]], collector: Collector, tmp_path: Path
) -> None:
    out, _ = run_gymsdk("export", run, "otel", cwd=tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint)
    assert out == f"run: {len(lines)} rollouts; {len(collector.spans)} spans to {collector.endpoint}\n"
    assert {resource["service.name"] for resource in collector.resources} == {"gymsdk"}
    traces = group_traces(collector)
    assert len(traces) == len(lines)
    expected = Counter(
        (
            line["gymsdk"]["environment"],
            line["_ng_task_index"],
            line["_ng_rollout_index"],
            line["reward"],
            line["gymsdk"]["turns"],
            sum(item["type"] == "function_call" for item in line["response"]["output"]),
        )
        for line in lines
    )
    found: Counter[Any] = Counter()
    for spans in traces.values():
        [root] = [span for span in spans if not span.parent_span_id]
        about = to_dict(root.attributes)
        assert root.name == f"invoke_agent {about['gen_ai.agent.name']}"
        assert about["gen_ai.conversation.id"] == f"run/{about['gymsdk.task']}:{about['gymsdk.repeat']}"
        assert about["gen_ai.usage.input_tokens"] > 0
        names: Counter[str] = Counter()
        for span in spans:
            assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
            assert span.end_time_unix_nano <= root.end_time_unix_nano
            if span is root:
                continue
            assert span.parent_span_id == root.span_id
            operation = to_dict(span.attributes)["gen_ai.operation.name"]
            names[operation] += 1
            assert (span.kind == span.SPAN_KIND_CLIENT) == (operation == "chat")
        keys = ("gen_ai.agent.name", "gymsdk.task", "gymsdk.repeat", "gymsdk.reward")
        found[(*(about[key] for key in keys), names["chat"], names["execute_tool"])] += 1
    assert found == expected
    starts = [span.start_time_unix_nano for span in collector.spans if not span.parent_span_id]
    assert min(starts) == pytest.approx(min(line["gymsdk"]["timing"]["started"] for line in lines) * 1e9, rel=1e-12)

    roots = {span.span_id: span.trace_id for span in collector.spans if not span.parent_span_id}
    assert {event.event_name for event in collector.events} == {"gen_ai.evaluation.result"}
    assert all(roots[event.span_id] == event.trace_id for event in collector.events)
    scores: defaultdict[str, list[float]] = defaultdict(list)
    for event in collector.events:
        about = to_dict(event.attributes)
        scores[about["gen_ai.evaluation.name"]].append(about["gen_ai.evaluation.score.value"])
    assert sorted(scores.pop("reward")) == sorted(line["reward"] for line in lines)
    components = Counter(name for line in lines for name in line.get("reward_components") or {})
    assert {name: len(values) for name, values in scores.items()} == components


def test_texts_are_sent_on_demand_only_and_identifiers_stay(run: Path, collector: Collector, tmp_path: Path) -> None:
    run_gymsdk("export", run, "otel", cwd=tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint)
    first = {(span.trace_id, span.span_id) for span in collector.spans}
    assert len(first) == len(collector.spans)
    texts = ("messages", "arguments", "result")
    assert not [field.key for span in collector.spans for field in span.attributes if field.key.endswith(texts)]
    collector.spans.clear()
    run_gymsdk("export", run, "otel", "--content", cwd=tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint)
    assert {(span.trace_id, span.span_id) for span in collector.spans} == first
    keys = Counter(field.key for span in collector.spans for field in span.attributes if field.key.endswith(texts))
    names = Counter(to_dict(span.attributes)["gen_ai.operation.name"] for span in collector.spans)
    assert keys["gen_ai.input.messages"] == names["invoke_agent"]
    assert keys["gen_ai.output.messages"] == names["chat"]
    assert keys["gen_ai.tool.call.arguments"] == keys["gen_ai.tool.call.result"] == names["execute_tool"] > 0


def test_a_failed_rollout_is_a_trace_with_an_error(collector: Collector, tmp_path: Path) -> None:
    model = ["--model", "vllm/none", "--base-url", "http://127.0.0.1:9/v1", "--attempts", "1"]
    run_gymsdk("rollout", "math", "--limit", "2", *model, "--output", "run", cwd=tmp_path, code=1)
    run_gymsdk("export", "run", "otel", cwd=tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint)
    assert len(collector.spans) == 2
    assert not collector.events
    for span in collector.spans:
        about = to_dict(span.attributes)
        assert span.status.code == span.status.STATUS_CODE_ERROR
        assert about["error.type"]
        assert span.status.message
        assert "gymsdk.reward" not in about


def test_a_collector_that_refuses_spans_fails_the_export(run: Path, collector: Collector, tmp_path: Path) -> None:
    collector.is_broken = True
    _, err = run_gymsdk("export", run, "otel", cwd=tmp_path, code=1, OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint)
    assert f"the collector at {collector.endpoint} did not accept the spans" in err


def test_a_run_is_sent_while_it_plays(collector: Collector, tmp_path: Path) -> None:
    play = ["rollout", "tool_call", "--split", "train", "--limit", "20", "--output", "run", "--json"]
    out, err = run_gymsdk(*play, "--export", "otel", cwd=tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint)
    assert out.startswith("{")
    assert "run: 20 rollouts; " in err
    assert len(group_traces(collector)) == 20


def test_a_run_does_not_fail_with_its_export(collector: Collector, tmp_path: Path) -> None:
    collector.is_broken = True
    play = ["rollout", "tool_call", "--split", "train", "--limit", "4", "--output", "run"]
    _, err = run_gymsdk(*play, "--export", "otel", cwd=tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint)
    assert "the export has failed, the run has not; repeat the export with: gymsdk export run otel" in err


def read_wandb(path: Path) -> Iterator[Any]:
    """Yield the records of W&B's file, which has the blocks of LevelDB's log."""
    from wandb.proto import wandb_internal_pb2

    data, position, part = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if (left := BLOCK_BYTES - position % BLOCK_BYTES) < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        part += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in {1, 4}:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            part = b""
            yield record


def test_wandb_gets_settings_curves_summary_table_and_files(
    run: Path, lines: list[dict[str, Any]], tmp_path: Path
) -> None:
    import orjson

    out, _ = run_gymsdk("export", run, "wandb", "--project", "tests", cwd=tmp_path, WANDB_MODE="offline")
    assert f"run: {len(lines)} rollouts; wandb sync " in out
    [folder] = (tmp_path / "wandb").glob("offline-run-*")
    [file] = folder.glob("run-*.wandb")
    records = list(read_wandb(file))
    [start] = [record.run for record in records if record.HasField("run")]
    config = {setting.key: orjson.loads(setting.value_json) for setting in start.config.update}
    assert (start.project, start.display_name) == ("tests", "run")
    assert set(start.tags) == {"multineedle", "tool_call"}
    assert config["model"] == "scripted/oracle:0.6"
    points = [
        {"/".join(item.nested_key) or item.key: orjson.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    curve = [point for point in points if "mean/reward" in point]
    assert [point["rollouts"] for point in curve] == list(range(1, len(lines) + 1))
    mean = sum(line["reward"] for line in lines) / len(lines)
    assert curve[-1]["mean/reward"] == pytest.approx(mean)
    assert {"tool_call/mean/reward", "multineedle/mean/reward"} <= set(curve[-1])
    [table] = folder.glob("files/media/table/*.json")
    rows = orjson.loads(table.read_bytes())
    assert len(rows["data"]) == len(lines)
    rewards = [row[rows["columns"].index("reward")] for row in rows["data"]]
    assert rewards == [line["reward"] for line in lines]
    conversations = [row[rows["columns"].index("conversation")] for row in rows["data"]]
    assert all(conversations)
    artifacts = {record.artifact.type: record.artifact for record in records if record.HasField("artifact")}
    names = {entry.path for entry in artifacts["run"].manifest.contents}
    assert names == {path.name for path in run.iterdir() if path.suffix in {".json", ".jsonl"}}


def test_wandb_gets_no_texts_without_content(run: Path, tmp_path: Path) -> None:
    run_gymsdk("export", run, "wandb", "--no-content", cwd=tmp_path, WANDB_MODE="offline")
    [folder] = (tmp_path / "wandb").glob("offline-run-*")
    [file] = folder.glob("run-*.wandb")
    assert {record.artifact.type for record in read_wandb(file) if record.HasField("artifact")} == {"run_table"}
    [table] = folder.glob("files/media/table/*.json")
    assert b"conversation" not in table.read_bytes()


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # of MLflow's client, which uses a deprecated SQLAlchemy option
def test_mlflow_gets_parameters_curves_and_files_once(run: Path, lines: list[dict[str, Any]], tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    for _ in range(2):
        out, _ = run_gymsdk("export", run, "mlflow", "--project", "tests", cwd=tmp_path, MLFLOW_TRACKING_URI=uri)
        assert out.startswith(f"run: {len(lines)} rollouts; {uri}, experiment 1, run ")
    client = MlflowClient(uri)
    try:
        [found] = client.search_runs(["1"])
        assert (found.info.run_name, found.info.status) == ("run", "FINISHED")
        assert found.data.params["model"] == "scripted/oracle:0.6"
        curve = client.get_metric_history(found.info.run_id, "progress/mean/reward")
        assert [point.step for point in curve] == list(range(1, len(lines) + 1))
        mean = sum(line["reward"] for line in lines) / len(lines)
        assert curve[-1].value == pytest.approx(mean)
        rewards = [line["reward"] for line in lines if line["gymsdk"]["environment"] == "tool_call"]
        assert found.data.metrics["tool_call/mean/reward"] == pytest.approx(sum(rewards) / len(rewards))
        names = {artifact.path for artifact in client.list_artifacts(found.info.run_id)}
        assert names == {path.name for path in run.iterdir() if path.suffix in {".json", ".jsonl"}}
    finally:
        client._tracking_client.store.engine.dispose()


def test_a_tracking_server_that_does_not_answer_is_named(run: Path, tmp_path: Path) -> None:
    _, err = run_gymsdk(
        "export",
        run,
        "mlflow",
        cwd=tmp_path,
        code=1,
        MLFLOW_TRACKING_URI="http://127.0.0.1:9",
        MLFLOW_HTTP_REQUEST_MAX_RETRIES="0",
    )
    assert "Error: MLflow: " in err
    assert "MLFLOW_TRACKING_URI names the tracking server" in err
