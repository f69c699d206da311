"""Rollouts are filtered, sorted, counted, grouped and searched as a scan of the files would do it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from gymsdk import UsageError
from gymsdk.jsonl import dump_row, read_rows
from gymsdk.line import StoredRollout
from gymsdk.metrics import parse_scored_rollout, stderr
from gymsdk.runs import Run, read
from gymsdk.runs.filters import Filter, parse_condition
from gymsdk.runs.queries import RunQueries
from gymsdk.runs.records import iter_texts

Line = dict[str, Any]


@pytest.fixture
def lines(folder: Path) -> list[Line]:
    return [line for _, line in read_rows(folder / "rollouts.jsonl")]


def count_calls(line: Line, tool: str = "") -> int:
    calls = [item for item in line["response"]["output"] if item["type"] == "function_call"]
    return sum(not tool or call["name"] == tool for call in calls)


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("reward<1", lambda line: line["reward"] < 1),
        ("reward>=1", lambda line: line["reward"] >= 1),
        ("environment=multineedle", lambda line: line["gymsdk"]["environment"] == "multineedle"),
        ("environment!=multineedle", lambda line: line["gymsdk"]["environment"] != "multineedle"),
        ("tool=find_contact", lambda line: count_calls(line, "find_contact")),
        ("tool!=find_contact", lambda line: not count_calls(line, "find_contact")),
        ("tool_calls>1", lambda line: count_calls(line) > 1),
        ("figure:calls_needed=2", lambda line: line.get("calls_needed") == 2),
        ("figure:part/answer>0.4", lambda line: line.get("reward_components", {}).get("answer", 0) > 0.4),
        ("prompt~WEATHER", lambda line: "weather" in str(line["responses_create_params"]["input"][-1])[:150]),
        ("repeat=2", lambda line: line["_ng_rollout_index"] == 2),
        ("outcome=failed", lambda line: False),
    ],
)
def test_conditions_choose_the_rollouts_that_a_scan_chooses(
    run: Run, lines: list[Line], condition: str, holds: Callable[[Line], bool]
) -> None:
    expected = [line["gymsdk"] for line in lines if holds(line)]
    found = [f"{row['task']}:{row['repeat']}" for row in run.list_rows([condition], limit=1000)]
    assert found == [host["id"] for host in expected]
    assert run.queries.count(Filter((parse_condition(condition),))) == len(expected)
    # Several conditions are combined.
    combined = run.list_rows([condition, ("environment", "in", ["tool_call"])], limit=1000)
    wanted = [host["id"] for host in expected if host["environment"] == "tool_call"]
    assert [f"{row['task']}:{row['repeat']}" for row in combined] == wanted


def test_values_are_never_sql(run: Run) -> None:
    assert run.list_rows(["environment='; DROP TABLE rollout; --"]) == []
    assert run.list_rows([("figure:x' OR '1'='1", "=", 1)]) == []
    assert run.list_rows(["prompt~%"]) == []
    with pytest.raises(UsageError, match="no field"):
        run.list_rows(["; drop table rollout=1"])
    with pytest.raises(UsageError, match="no field"):
        run.list_rows(sort="reward; DROP TABLE rollout")
    assert len(run) == 80


@pytest.mark.parametrize("field", ["reward", "tokens", "seconds", "turns", "figure:calls_needed"])
@pytest.mark.parametrize("descending", [False, True])
def test_rows_are_sorted_with_missing_values_last(run: Run, field: str, *, descending: bool) -> None:
    def read_value(row: Line) -> Any:
        name = field.removeprefix("figure:")
        return run.queries.get_figures(row["id"]).get(name) if name != field else row[field]

    values = [read_value(row) for row in run.list_rows(sort=field, descending=descending, limit=1000)]
    known = [value for value in values if value is not None]
    assert values == sorted(known, reverse=descending) + [None] * (len(values) - len(known))


def test_the_summary_is_that_of_the_metrics(run: Run, lines: list[Line]) -> None:
    summary = run.queries.summarize()
    assert summary["mean"] == pytest.approx(fmean(line["reward"] for line in lines))
    assert summary["stderr"] == pytest.approx(stderr(parse_scored_rollout(StoredRollout(line)) for line in lines))
    assert (summary["rollouts"], summary["scored"]) == (80, 80)
    best: dict[tuple[str, int], float] = {}
    for line in lines:
        key = line["gymsdk"]["environment"], line["_ng_task_index"]
        best[key] = max(line["reward"], best.get(key, 0.0))
    assert (summary["tasks"], summary["solved_tasks"]) == (len(best), sum(reward >= 1 for reward in best.values()))


def test_facets_count_the_chosen_rollouts(run: Run, lines: list[Line]) -> None:
    facets = run.queries.count_facets(Filter((("reward", "<", 1),)))
    chosen = [line for line in lines if line["reward"] < 1]
    assert {facet["value"]: facet["count"] for facet in facets["environment"]} == Counter(
        line["gymsdk"]["environment"] for line in chosen
    )
    assert sum(bar["count"] for bar in facets["reward"]) == len(chosen)
    assert {facet["value"]: facet["count"] for facet in facets["tool"]} == Counter(
        name
        for line in chosen
        for name in {item["name"] for item in line["response"]["output"] if item["type"] == "function_call"}
    )
    assert "calls_needed" in facets["figures"]


@pytest.mark.parametrize(
    ("low", "high", "step"),
    [(0, 1, 0.05), (-1, 1, 0.1), (-1, 1, 0.05), (0, 3, 0.05), (-0.3, 0.7, 0.05), (0, 100, 5), (-0.7, 0, 0.1)],
)
def test_a_multiple_of_the_step_is_in_the_bin_that_fractions_give(
    tmp_path: Path, low: float, high: float, step: float
) -> None:
    first, last = Fraction(str(low)), Fraction(str(high))
    rewards = [first + number * Fraction(str(step)) for number in range(int((last - first) / Fraction(str(step))) + 1)]
    path = tmp_path / "made.jsonl"
    path.write_bytes(b"".join(dump_row({"reward": float(reward), "response": {}}) for reward in rewards))
    start, end = min(first, Fraction(0)), max(last, Fraction(1))
    expected = Counter(min(int((reward - start) / (end - start) * 20), 19) for reward in rewards)
    with read(path) as run:
        bars = run.queries.count_facets()["reward"]
        assert [bar["count"] for bar in bars] == [expected[number] for number in range(20)]
        assert [bar["low"] for bar in bars] == [float(start + (end - start) * number / 20) for number in range(20)]
        # A click on a bar chooses its rollouts.
        for number, bar in enumerate(bars):
            upper = "<=" if number == 19 else "<"
            chosen = Filter((("reward", ">=", bar["low"]), ("reward", upper, bar["high"])))
            assert run.queries.count(chosen) == bar["count"]


def test_rollouts_without_a_reward_are_in_no_bin(tmp_path: Path) -> None:
    (tmp_path / "made.jsonl").write_bytes(dump_row({"response": {}}) + dump_row({"reward": 0.15, "response": {}}))
    with read(tmp_path / "made.jsonl") as run:
        assert [bar["count"] for bar in run.queries.count_facets()["reward"]] == [0] * 3 + [1] + [0] * 16
        assert run.queries.count_facets(Filter((("reward", "=", None),)))["reward"] == []


def test_groups_have_the_mean_and_the_spread_of_their_task(run: Run, lines: list[Line]) -> None:
    rewards: dict[int, list[float]] = defaultdict(list)
    for line in lines:
        rewards[line["_ng_task_index"]].append(line["reward"])
    groups = run.queries.list_groups()
    assert {group["task"]: group["mean"] for group in groups} == {
        task: pytest.approx(fmean(values)) for task, values in rewards.items()
    }
    assert {group["task"] for group in groups if not group["spread"]} == {
        task for task, values in rewards.items() if len(set(values)) == 1
    }
    assert [group["mean"] for group in groups] == sorted(group["mean"] for group in groups)


def test_tools_have_their_calls_and_the_rewards_with_and_without(run: Run, lines: list[Line]) -> None:
    for tool in run.queries.list_tools():
        having = [line["reward"] for line in lines if count_calls(line, tool["tool"])]
        lacking = [line["reward"] for line in lines if not count_calls(line, tool["tool"])]
        assert tool["calls"] == sum(count_calls(line, tool["tool"]) for line in lines)
        assert tool["rollouts"] == len(having)
        assert tool["mean_with"] == pytest.approx(fmean(having))
        assert tool["mean_without"] == pytest.approx(fmean(lacking))


def test_a_tool_whose_output_is_an_error_is_counted(run: Run, folder: Path) -> None:
    line = run["0:0"] | {"_ng_task_index": 700}
    line["response"]["output"] = [
        {"type": "function_call", "call_id": "a", "name": "find_contact", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": '{"error": "no such contact"}'},
        {"type": "function_call", "call_id": "b", "name": "find_contact", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "b", "output": '{"contacts": []}'},
    ]
    with (folder / "rollouts.jsonl").open("ab") as file:
        file.write(dump_row(line))
    run.update()
    [tool] = run.queries.list_tools(Filter((("task", "=", 700),)))
    assert (tool["calls"], tool["errors"]) == (2, 1)
    assert [row["task"] for row in run.list_rows(["tool_error=find_contact"])] == [700]


def search_by_scan(lines: list[Line], text: str) -> list[int]:
    folded = " ".join(text.split()).casefold()
    return [
        number
        for number, line in enumerate(lines, 1)
        if any(folded in " ".join(part.split()).casefold() for part in iter_texts(StoredRollout(line)))
    ]


TEXTS = [
    "degrees",
    "use the tools",
    "What will",
    "the temp",
    "DEGREES celsius",
    "2025-",
    "find_contact",
    "no such words here",
    '"city"',
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_search_finds_what_a_scan_finds(run: Run, lines: list[Line], text: str) -> None:
    expected = search_by_scan(lines, text)
    assert run.queries.search(text) == expected, "before the texts are indexed"
    run.index.update_texts()
    assert run.queries.get_searchable_share() == 1.0
    found = run.queries.search(text)
    if text.isalpha():
        # A single word is found as the beginning of a word.
        assert set(found) <= set(expected)
    else:
        assert found == expected
    assert run.queries.count(Filter(search=text)) == len(found)


def test_a_search_follows_a_growing_run(run: Run, folder: Path) -> None:
    run.index.update_texts()
    assert run.list_rows(search="xylophone") == []
    line = run["0:0"] | {"_ng_task_index": 800}
    line["responses_create_params"]["input"] = "a most unusual xylophone"
    with (folder / "rollouts.jsonl").open("ab") as file:
        file.write(dump_row(line))
    run.update()
    assert run.queries.get_searchable_share() == 1
    assert [row["task"] for row in run.list_rows(search="unusual xylo")] == [800]
    assert [row["task"] for row in run.list_rows(search="xylophone")] == [800]


def test_a_search_without_full_text_search_reads_the_files(
    folder: Path, lines: list[Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gymsdk.runs.index.TEXT_SCHEMA", "CREATE VIRTUAL TABLE text USING nothing (content)")
    with read(folder) as run:
        assert run.index.update_texts()
        queries = RunQueries(run.index)
        assert queries.search("use the tools") == search_by_scan(lines, "use the tools") != []
        assert queries.get_searchable_share() == 0.0
        queries.close()
