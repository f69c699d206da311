"""Send a run to an OpenTelemetry collector: a trace for each rollout, and its reward as an event.

A trace has the span `invoke_agent ENVIRONMENT` with a span `chat MODEL` for each turn and `execute_tool NAME` for each
tool call of the turn. The names and attributes are those of the semantic conventions for generative AI, version 1.41.
The identifiers are derived from the run and the rollout, so that a second export sends the same spans.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from opentelemetry import trace
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk._logs.export import LogRecordExportResult
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from gymsdk import __version__, jsonl, responses
from gymsdk.errors import GymsdkError
from gymsdk.exporters.base import ExportOptions, compute_run_id
from gymsdk.line import StoredRollout
from gymsdk.runs import Run
from gymsdk.runs.records import get_reasoning, get_text, is_tool_error
from gymsdk.types import Item, Row, pair_outputs

BATCH_SPANS = 500
"""The number of spans of a request."""

SCOPE = InstrumentationScope("gymsdk", __version__, schema_url="https://opentelemetry.io/schemas/1.41.0")

TOOL_ERROR = "tool_error"
"""The `error.type` of a tool call that returned an error."""

Attributes = dict[str, Any]


class _Interval(NamedTuple):
    """The start and the end of a span, in nanoseconds since the epoch."""

    start: int
    end: int


@dataclass(frozen=True)
class _Span:
    """A span without identifiers.

    Attributes:
        key: What identifies the span within its rollout.
        name: The name.
        interval: The start and the end.
        attributes: The attributes.
        kind: The kind.
        error: The type of the error; `None` without one.
        message: The message of the error.
    """

    key: str
    name: str
    interval: _Interval
    attributes: Attributes
    kind: SpanKind = SpanKind.INTERNAL
    error: str | None = None
    message: str = ""


def create(run: Run, options: ExportOptions) -> OtelExporter:
    """Return the exporter of *run*, which sends to the collector that `OTEL_EXPORTER_OTLP_ENDPOINT` names."""
    return OtelExporter(run, options)


class OtelExporter:
    """Sends the rollouts of a run as traces.

    Args:
        options: How the run is exported.
    """

    def __init__(self, run: Run, options: ExportOptions) -> None:
        self._run = run
        self._run_id = compute_run_id(run)
        self._options = options
        self._resource = Resource.create({"service.name": options.project, "gymsdk.run": run.name})
        self._model = run.settings.get("model")
        self._started = _parse_date(run.source.read_about().get("started"))
        self._span_exporter, self._log_exporter = OTLPSpanExporter(), OTLPLogExporter()
        self._spans: list[ReadableSpan] = []
        self._events: list[ReadableLogRecord] = []
        self._sent = 0

    def add(self, rollout: Row) -> None:
        """Send the trace of a rollout; traces are sent together."""
        stored = self._run.queries.read(rollout["id"])
        figures = self._run.queries.get_figures(rollout["id"])
        self._add_trace(stored, rollout, figures)
        if len(self._spans) >= BATCH_SPANS:
            self._send()

    def log(self, metrics: Mapping[str, float], step: int) -> None:  # noqa: ARG002  # the traces have the values
        """Send the traces that wait; a collector computes metrics from traces."""
        self._send()

    def finish(self) -> str:
        """Send the traces that wait; return the number of spans and the collector's address."""
        self._send()
        self._span_exporter.shutdown()  # type: ignore[no-untyped-call]  # of the SDK
        self._log_exporter.shutdown()  # type: ignore[no-untyped-call]
        return f"{self._sent} spans to {_get_address()}"

    def _send(self) -> None:
        spans, events = self._spans, self._events
        self._spans, self._events = [], []
        if spans and self._span_exporter.export(spans) is not SpanExportResult.SUCCESS:
            raise _build_error("spans")
        if events and self._log_exporter.export(events) is not LogRecordExportResult.SUCCESS:
            raise _build_error("events")
        self._sent += len(spans)

    def _add_trace(self, stored: StoredRollout, row: Row, figures: Mapping[str, float]) -> None:
        rollout = f"{row['task']}:{row['repeat']}"
        ids = (self._run_id, row["environment"], rollout)
        model = _describe_model(self._model or stored.response.get("model"))
        attributes = self._describe_rollout(stored, row, rollout) | model
        interval = self._find_interval(stored, row)
        name = f"invoke_agent {row['environment']}"
        error = row["failure"] or None
        root = self._build_span(
            ids, _Span("invoke_agent", name, interval, attributes, error=error, message=row["message"] or "")
        )
        self._spans.append(root)
        for number, (turn, outputs) in enumerate(_iter_turns(stored.output)):
            chat, step = _find_turn_intervals(stored, number, interval)
            self._spans += [
                self._build_span(ids, span, root.get_span_context())
                for span in (
                    self._describe_chat(number, turn, chat, model),
                    *self._describe_tool_calls(number, turn, outputs, step),
                )
            ]
        self._events += self._build_events(root, row, figures)

    def _describe_chat(self, number: int, turn: Sequence[Item], interval: _Interval, model: Attributes) -> _Span:
        attributes = {"gen_ai.operation.name": "chat"} | model
        if self._options.content:
            attributes["gen_ai.output.messages"] = _dump([{"role": "assistant", "parts": _build_parts(turn)}])
        name = " ".join(["chat", *(value for key, value in model.items() if key == "gen_ai.request.model")])
        return _Span(f"chat {number}", name, interval, attributes, SpanKind.CLIENT)

    def _describe_tool_calls(
        self, number: int, turn: Sequence[Item], outputs: Mapping[int, str], interval: _Interval
    ) -> Iterator[_Span]:
        """Yield the spans of a turn's tool calls; their durations are not recorded one by one."""
        calls = ((index, item) for index, item in enumerate(turn) if item.get("type") == "function_call")
        for position, (index, call) in enumerate(calls):
            output = outputs.get(index)
            attributes = {
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": str(call.get("name")),
                "gen_ai.tool.call.id": str(call.get("call_id")),
                "gen_ai.tool.type": "function",
            }
            if self._options.content:
                attributes["gen_ai.tool.call.arguments"] = str(call.get("arguments"))
                attributes |= {} if output is None else {"gen_ai.tool.call.result": output}
            error = TOOL_ERROR if output is not None and is_tool_error(output) else None
            name = f"execute_tool {call.get('name')}"
            yield _Span(f"execute_tool {number} {position}", name, interval, attributes, error=error)

    def _build_span(self, ids: tuple[str, ...], span: _Span, parent: SpanContext | None = None) -> ReadableSpan:
        return ReadableSpan(
            name=span.name,
            context=SpanContext(
                # The same rollout has the same ids in each export, so that a collector can tell repetitions.
                _derive(16, *ids),
                _derive(8, *ids, span.key),
                is_remote=False,
                trace_flags=TraceFlags(TraceFlags.SAMPLED),
            ),
            parent=parent,
            resource=self._resource,
            attributes=span.attributes | ({} if span.error is None else {"error.type": span.error}),
            kind=span.kind,
            instrumentation_scope=SCOPE,
            status=Status(StatusCode.UNSET) if span.error is None else Status(StatusCode.ERROR, span.message),
            start_time=span.interval.start,
            end_time=span.interval.end,
        )

    def _describe_rollout(self, stored: StoredRollout, row: Row, rollout: str) -> Attributes:
        usage = stored.policy_usage
        attributes: Attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": row["environment"],
            "gen_ai.conversation.id": f"{self._run.name}/{rollout}",
            "gen_ai.usage.input_tokens": usage.get("input_tokens"),
            "gen_ai.usage.output_tokens": usage.get("output_tokens"),
            "gymsdk.reward": row["reward"],
            "gymsdk.task": row["task"],
            "gymsdk.repeat": row["repeat"],
            "gymsdk.seed": stored.seed,
            "gymsdk.outcome": row["outcome"],
            "gymsdk.ended": row["ended"],
        }
        if self._options.content:
            messages = [{"role": _get_role(item), "parts": _build_parts([item])} for item in stored.opening]
            attributes["gen_ai.input.messages"] = _dump(messages)
        return {name: value for name, value in attributes.items() if value is not None}

    def _build_events(self, root: ReadableSpan, row: Row, figures: Mapping[str, float]) -> Iterator[ReadableLogRecord]:
        """Yield the evaluations of a rollout: its reward, and the components of the reward."""
        if row["reward"] is None:
            return
        scores = {"reward": row["reward"]}
        scores |= {name: value for name, value in figures.items() if name.startswith("part/")}
        context = root.get_span_context()
        assert context is not None, "the span has been built with a context"
        for name, value in scores.items():
            record = LogRecord(
                timestamp=root.end_time,
                observed_timestamp=root.end_time,
                # By its context, the event belongs to the span of the rollout.
                context=trace.set_span_in_context(trace.NonRecordingSpan(context)),
                severity_number=SeverityNumber.INFO,
                event_name="gen_ai.evaluation.result",
                attributes={
                    "gen_ai.evaluation.name": name.removeprefix("part/"),
                    "gen_ai.evaluation.score.value": value,
                    "gen_ai.conversation.id": f"{self._run.name}/{row['task']}:{row['repeat']}",
                },
            )
            yield ReadableLogRecord(record, self._resource, SCOPE)

    def _find_interval(self, stored: StoredRollout, row: Row) -> _Interval:
        """Return when the rollout was played; without a recorded start, it is placed at the start of the run.

        The duration is the sum of its stages, which can end some microseconds before the last turn: the time between
        two stages belongs to none. The interval contains every turn.
        """
        timing = stored.timing
        start = _to_nanoseconds(timing.get("started") or self._started or 0.0)
        ends = [sum(round(milliseconds * 1e6) for milliseconds in turn) for turn in timing.get("turns") or []]
        return _Interval(start, start + max([_to_nanoseconds(row["seconds"] or 0.0), *ends]))


def _get_address() -> str:
    """Return the address of the collector, for messages; the SDK reads the same variable."""
    return os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")


def _build_error(what: str) -> GymsdkError:
    return GymsdkError(
        f"the collector at {_get_address()} did not accept the {what};"
        " OTEL_EXPORTER_OTLP_ENDPOINT names the address of a collector for OTLP over HTTP"
    )


def _iter_turns(output: Sequence[Item]) -> Iterator[tuple[list[Item], dict[int, str]]]:
    """Yield the items of each turn of the policy, with the outputs of its calls by their index in the turn."""
    pairs = pair_outputs(output)
    for span in responses.iter_turn_spans(output):
        calls = (index for index in range(span.start, span.stop) if index in pairs)
        texts = {index - span.start: get_text(output[pairs[index]].get("output")) for index in calls}
        yield list(output[span]), texts


def _find_turn_intervals(
    stored: StoredRollout, number: int, rollout_interval: _Interval
) -> tuple[_Interval, _Interval]:
    """Return when the model was called in a turn and when the environment answered.

    A rollout without recorded turns gives intervals of no length at the end of the rollout.
    """
    turns = stored.timing.get("turns") or []
    if number >= len(turns):
        at_end = _Interval(rollout_interval.end, rollout_interval.end)
        return at_end, at_end
    start, model, step = (round(milliseconds * 1e6) for milliseconds in turns[number])
    begin, middle = rollout_interval.start + start, rollout_interval.start + start + model
    return _Interval(begin, middle), _Interval(middle, middle + step)


def _describe_model(name: object) -> Attributes:
    """Return the attributes of a model, given by its name `PROVIDER/MODEL`."""
    if not isinstance(name, str):
        return {}
    provider, separator, model = name.partition("/")
    return (
        {"gen_ai.provider.name": provider, "gen_ai.request.model": model}
        if separator
        else {"gen_ai.request.model": name}
    )


def _build_parts(items: Sequence[Item]) -> list[Item]:
    """Return items as the parts of a message of the semantic conventions."""
    parts: list[Item] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call":
            call = {"id": item.get("call_id"), "name": item.get("name"), "arguments": item.get("arguments")}
            parts.append({"type": "tool_call"} | call)
        elif kind == "function_call_output":
            result = {"id": item.get("call_id"), "response": get_text(item.get("output"))}
            parts.append({"type": "tool_call_response"} | result)
        elif kind == "reasoning":
            parts.append({"type": "reasoning", "content": get_reasoning(item)})
        else:
            parts.append({"type": "text", "content": get_text(item.get("content"))})
    return parts


def _get_role(item: Item) -> str:
    kind = item.get("type", "message")
    if kind == "function_call_output":
        return "tool"
    return str(item.get("role") or "assistant")


def _derive(size: int, *parts: str) -> int:
    """Return an identifier of *size* bytes for *parts*; it is never 0, which is no identifier."""
    return int.from_bytes(hashlib.blake2b("\0".join(parts).encode(), digest_size=size).digest()) or 1


def _dump(value: object) -> str:
    return jsonl.dump_portable_json(value).decode()


def _to_nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _parse_date(text: object) -> float | None:
    if not isinstance(text, str):
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
