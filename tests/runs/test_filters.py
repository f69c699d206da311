"""Conditions mean the same in Python, SQL, tables, metrics and an exported page, and errors point at their place."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gymsdk import UsageError
from gymsdk.jsonl import dump_row
from gymsdk.runs import Run, read
from gymsdk.runs.filters import FIELD_KINDS, NUMBER, OPERATORS, build_filter, check_condition, parse_condition
from gymsdk.studio.app import STATIC, StudioApi
from gymsdk.studio.export import export_runs
from gymsdk.studio.library import Library

Line = dict[str, Any]
Spec = dict[str, Any]
Condition = tuple[str, str, Any]

TEXTS = ("none", "null", "7", "0,5", "a_b", "100%", "Äpfel", "äPFEL", '"a"', " b", "\U0001f600", "\uffee", "True")
NUMBERS = (-1, -0.5, 0, 0.05, 0.15, 0.3, 0.5, 1, 1.0, 2, 7, 10**15)

specs = st.fixed_dictionaries(
    {
        "environment": st.sampled_from(["one", "two", "none"]),
        "reward": st.none() | st.sampled_from(NUMBERS),
        "ended": st.sampled_from(["done", "turns", "none"]),
        "tokens": st.none() | st.sampled_from([1, 7, 10**15]),
        "seconds": st.none() | st.sampled_from([0.0, 0.5, 7.0]),
        "answer": st.none() | st.sampled_from(("", *TEXTS)),
        "prompt": st.sampled_from(("", "a b", *(text for text in TEXTS if text == text.strip()))),
        "failure": st.sampled_from(["", "none", "model_timeout"]),
        "figures": st.dictionaries(st.sampled_from(["x", "part/y", "a b"]), st.sampled_from(NUMBERS)),
        "tools": st.dictionaries(st.sampled_from(["find", "none", "Find_all", "%"]), st.booleans()),
        "fields": st.dictionaries(
            st.sampled_from(["f", "g h"]), st.lists(st.sampled_from((*TEXTS, *NUMBERS)), max_size=3)
        ),
    }
)


def draw_conditions() -> st.SearchStrategy[Condition]:
    texts = st.none() | st.sampled_from((*TEXTS, "done", "find", "one", "model_timeout", "f", "ä", "_", "%", "x"))
    numbers = st.none() | st.sampled_from(NUMBERS)

    def choose(field: str) -> st.SearchStrategy[Condition]:
        kind = "values" if field.startswith("row:") else FIELD_KINDS.get(field, "number")
        values = numbers if kind == "number" else texts
        return st.sampled_from(OPERATORS[kind]).flatmap(
            lambda operator: st.tuples(
                st.just(field),
                st.just(operator),
                st.lists(values, max_size=3)
                if operator == "in"
                else values
                if operator in {"=", "!="}
                else values.filter(lambda value: value is not None),
            )
        )

    fields = [name for name in FIELD_KINDS if name not in {"lens", "flags", "model_seconds", "started", "stage"}]
    others = ["figure:x", "figure:part/y", "figure:a b", "figure:nowhere", "row:f", "row:g h", "row:nowhere"]
    return st.sampled_from([*fields, *others]).flatmap(choose)


def build_line(spec: Spec, number: int) -> Line:
    calls = [
        item
        for index, (name, fails) in enumerate(spec["tools"].items())
        for item in (
            {"type": "function_call", "call_id": str(index), "name": name, "arguments": "{}"},
            {"type": "function_call_output", "call_id": str(index), "output": '{"error": 1}' if fails else "1"},
        )
    ]
    figures = {name: value for name, value in spec["figures"].items() if not name.startswith("part/")}
    parts = {name.removeprefix("part/"): value for name, value in spec["figures"].items() if name.startswith("part/")}
    line: Line = {
        "_ng_task_index": number // 2,
        "_ng_rollout_index": number % 2,
        "responses_create_params": {"input": spec["prompt"]},
        "response": {"output": calls},
        "reward_components": parts,
        "extracted_answer": spec["answer"],
        **figures,
        **spec["fields"],
        "gymsdk": {
            "id": f"{number // 2}:{number % 2}",
            "environment": spec["environment"],
            "outcome": "scored",
            "ended": spec["ended"],
            "turns": 1,
            "seed": 1,
            "usage": {"policy": {"total_tokens": spec["tokens"]}} if spec["tokens"] else {},
            "timing": {"stages": {}} | ({} if spec["seconds"] is None else {"total": spec["seconds"] * 1e3}),
            "verdict": ["extracted_answer", *figures],
        },
    }
    if spec["reward"] is not None:
        return line | {"reward": spec["reward"]}
    failure = {"class": spec["failure"], "stage": "model", "message": spec["prompt"]}
    line["gymsdk"] |= {"outcome": "failed"}
    return line | {f"_ng_failure_{name}": value for name, value in failure.items()}


def list_expected(run_specs: Sequence[Spec]) -> list[Spec]:
    """Return the row of the index for each rollout, in its order: the scored rollouts, then the failed ones."""
    numbered = list(enumerate(run_specs))
    ordered = [one for one in numbered if one[1]["reward"] is not None] + [
        one for one in numbered if one[1]["reward"] is None
    ]
    return [
        {name: spec[name] for name in ("environment", "reward", "ended", "tokens", "seconds", "answer")}
        | {"id": place, "task": number // 2, "repeat": number % 2, "prompt": " ".join(spec["prompt"].split())}
        | {"outcome": "failed" if spec["reward"] is None else "scored", "turns": 1, "tool_calls": len(spec["tools"])}
        | {"failure": (spec["failure"] or "unknown") if spec["reward"] is None else ""}
        | {"message": spec["prompt"] if spec["reward"] is None else ""}
        # A rollout without a reward has no parts of it, even if its line has some.
        | {
            f"figure:{name}": value
            for name, value in spec["figures"].items()
            if spec["reward"] is not None or not name.startswith("part/")
        }
        | {f"row:{name}": values for name, values in spec["fields"].items()}
        | {"tool": list(spec["tools"]), "tool_error": [name for name, fails in spec["tools"].items() if fails]}
        for place, (number, spec) in enumerate(ordered, 1)
    ]


def holds(spec: Spec, condition: Condition) -> bool:
    """Return whether a rollout meets a condition, in plain Python."""
    field, operator, value = condition
    own = spec.get(field)
    if field.startswith("row:") and operator in {"=", "<", "<=", ">", ">=", "contains"} and value is not None:
        return any(holds_value(one, operator, value) for one in own or [])
    values = own if isinstance(own, list) else [] if own in {None, ""} else [own]
    if operator == "=":
        return value in values if value is not None else not values
    if operator == "!=":
        return not holds(spec, (field, "=", value))
    if operator == "in":
        return any(holds(spec, (field, "=", one)) for one in value)
    if operator == "contains":
        return any(value.lower() in one.lower() for one in values)
    tests = {"<": lambda one: one < value, "<=": lambda one: one <= value, ">": lambda one: one > value}
    return any(map(tests.get(operator, lambda one: one >= value), values))


def holds_value(own: str | float, operator: str, value: str) -> bool:
    """Return whether a value of a field of the row meets a condition: numbers are compared with numbers only."""
    text = own if isinstance(own, str) else json.dumps(own)
    if operator == "contains":
        return value.lower() in text.lower()
    is_number = re.fullmatch(NUMBER, value, re.ASCII) is not None
    if operator == "=":
        return text == value or (is_number and not isinstance(own, str) and own == float(value))
    if is_number == isinstance(own, str):
        return False
    first, second = (own, float(value)) if is_number else (text, value)
    return {"<": first < second, "<=": first <= second, ">": first > second, ">=": first >= second}[operator]


@contextmanager
def store(run_specs: Sequence[Spec]) -> Iterator[Run]:
    with tempfile.TemporaryDirectory() as folder:
        lines = [build_line(spec, number) for number, spec in enumerate(run_specs)]
        for name, chosen in (
            ("rollouts", [line for line in lines if "reward" in line]),
            ("failures", [line for line in lines if "reward" not in line]),
            ("inputs", lines),
        ):
            (Path(folder) / f"{name}.jsonl").write_bytes(b"".join(map(dump_row, chosen)))
        with read(folder) as run:
            yield run


def write_text(condition: Condition) -> str | None:
    """Return a condition as text; there is none for `in`."""
    field, operator, value = condition
    if operator == "in":
        return None
    quoted = json.dumps(value) if isinstance(value, str) else "none" if value is None else repr(value)
    return f"{field} {'~' if operator == 'contains' else operator} {quoted}"


quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.slow
@quick
@given(st.lists(specs, min_size=1, max_size=12), st.lists(draw_conditions(), min_size=1, max_size=8))
def test_conditions_choose_in_lists_counts_and_tables_what_plain_python_chooses(
    run_specs: list[Spec], conditions: list[Condition]
) -> None:
    expected = list_expected(run_specs)
    with store(run_specs) as run:
        for where in (*([condition] for condition in conditions), conditions):
            wanted = [spec["id"] for spec in expected if all(holds(spec, one) for one in where)]
            assert [row["id"] for row in run.list_rows(where)] == wanted, where
            texts = [write_text(condition) or condition for condition in where]
            assert [row["id"] for row in run.list_rows(texts)] == wanted, texts
            assert run.queries.count(build_filter(where)) == len(wanted)
            names = [(spec["task"], spec["repeat"]) for spec in expected if spec["id"] in wanted]
            table = run.arrow(where=where).to_pylist()
            assert [(row["task"], row["repeat"]) for row in table] == names


TEXT_CONDITIONS: dict[str, Condition] = {
    "reward<1": ("reward", "<", 1),
    " reward <= 0.5 ": ("reward", "<=", 0.5),
    "reward=none": ("reward", "=", None),
    "reward!=": ("reward", "!=", None),
    "tokens>1_000": ("tokens", ">", 1000),
    "tokens>1e3": ("tokens", ">", 1000.0),
    "tokens>=+.5": ("tokens", ">=", 0.5),
    "answer=007": ("answer", "=", "007"),
    "answer=0,5": ("answer", "=", "0,5"),
    "answer=none": ("answer", "=", None),
    'answer="none"': ("answer", "=", "none"),
    'answer=" a "': ("answer", "=", " a "),
    'answer="': ("answer", "=", '"'),
    "answer=<b>": ("answer", "=", "<b>"),
    "prompt~none": ("prompt", "contains", "none"),
    "prompt~a>b": ("prompt", "contains", "a>b"),
    "tool=none": ("tool", "=", None),
    "tool_error!=find": ("tool_error", "!=", "find"),
    "figure:part/a b<1": ("figure:part/a b", "<", 1),
    "lens=alike": ("lens", "=", "alike"),
    "row:a b=7": ("row:a b", "=", "7"),
    "row:x<-2": ("row:x", "<", "-2"),
    "row:x=none": ("row:x", "=", None),
    "tag~hard": ("tag", "contains", "hard"),
    "note!=": ("note", "!=", None),
}


@pytest.mark.parametrize("text", TEXT_CONDITIONS)
def test_text_is_read_by_the_type_of_its_field(text: str) -> None:
    found = parse_condition(text)
    assert found == TEXT_CONDITIONS[text]
    assert type(found[2]) is type(TEXT_CONDITIONS[text][2])
    assert check_condition(found) == found


TEXT_ERRORS: dict[str, tuple[int, str]] = {
    "reward<0,5": (8, "must be a number such as 0.5, or none, got '0,5'; write 0.5"),
    "reward < abc": (10, "must be a number"),
    "reward=nan": (8, "must be a number"),
    "reward<1e999": (8, "must be a finite number"),
    "reward<": (8, "expected a number"),
    "reward<none": (8, "expected a number"),
    "reward~1": (7, "has only the operators"),
    "reward==1": (7, "no operator '=='"),
    "answer<>x": (7, "no operator '<>'"),
    "answer=~x": (7, "no operator '=~'"),
    "reward ! 1": (8, "no operator '!'"),
    "tool<find": (5, "has only the operators"),
    "prompt~": (8, "expected a text"),
    "figure:x=some": (10, "must be a number"),
    "figure:=1": (1, "no field 'figure:'"),
    "row:=1": (1, "no field 'row:'"),
    "row:x<none": (7, "expected a text"),
    "tags=x": (1, "did you mean 'tag'?"),
    "rewrad<1": (1, "did you mean 'reward'?"),
    "  environmet=x": (3, "did you mean 'environment'?"),
    "tols=x": (1, "did you mean 'tool'?"),
    "reward": (7, "is not a condition"),
    "": (1, "is not a condition"),
    "id=99999999999999999999": (4, "at most 64 bits"),
    "lens>3": (5, "with one of: alike"),
    "lens=x": (6, "with one of: alike"),
    # Python converts no number of so many digits.
    f"task={'9' * 5000}": (6, "must be a finite number"),
}


@pytest.mark.parametrize("text", TEXT_ERRORS)
def test_an_error_in_text_has_its_position(text: str) -> None:
    position, reason = TEXT_ERRORS[text]
    with pytest.raises(UsageError) as caught:
        parse_condition(text)
    assert reason in str(caught.value)
    assert f"at position {position}" in str(caught.value)


@pytest.mark.parametrize(
    ("condition", "reason"),
    [
        (("reward", "<", "0,5"), "condition 2: the value of 'reward' must be a number"),
        (("reward", "<", None), "condition 2: expected a number"),
        (("reward", "in", [1, "x"]), "condition 2: the value of 'reward' must be a number"),
        (("reward", "contains", "1"), "condition 2: 'reward' has only the operators"),
        (("tool", "<", "x"), "condition 2: 'tool' has only the operators"),
        (("prompt", "contains", ""), "condition 2: expected a text"),
        (("reward", "<"), "condition 2: a condition is a list"),
        (("figure:\ud800", "=", 1), "condition 2: .* unpaired surrogate"),
        (5, "condition 2: a condition is a list"),
        (("reward", "=", float("nan")), "condition 2: the value of 'reward' must be a finite number"),
    ],
)
def test_an_error_in_parts_has_the_number_of_its_condition(condition: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=reason.replace("'", ".")):
        build_filter(["reward<1", condition])


@pytest.mark.parametrize(
    ("given_condition", "expected"),
    [
        (("answer", "=", 7), ("answer", "=", "7")),
        (("answer", "=", 7.0), ("answer", "=", "7")),
        (("answer", "=", "none"), ("answer", "=", "none")),
        (("failure", "=", ""), ("failure", "=", None)),
        (("reward", "<", "0.5"), ("reward", "<", 0.5)),
        (("reward", "=", True), ("reward", "=", 1)),
        (("ended", "in", "turns"), ("ended", "in", ["turns"])),
        (("tool", "in", [None, "find"]), ("tool", "in", [None, "find"])),
    ],
)
def test_addresses_of_earlier_versions_are_read(given_condition: Condition, expected: Condition) -> None:
    assert check_condition(given_condition) == expected


def test_as_many_conditions_are_possible_in_a_table_as_in_a_list() -> None:
    with store([{**dict.fromkeys(("reward", "tokens", "seconds"), 1), **EMPTY}]) as run:
        where = [("repeat", "=", 0)] * 100
        assert (len(run.list_rows(where)), run.arrow(where=where).num_rows) == (1, 1)
        with pytest.raises(UsageError, match="at most 100"):
            run.arrow(where=[*where, where[0]])


TEXT_FIELDS = {"environment": "one", "ended": "done", "answer": None, "prompt": "", "failure": ""}
EMPTY: Spec = {**TEXT_FIELDS, "figures": {}, "tools": {}, "fields": {}}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_an_exported_page_chooses_and_sorts_as_python_does(tmp_path: Path) -> None:
    pairs = [*sample(specs, 60), *({**spec, "reward": None} for spec in sample(specs, 20))]
    conditions = sample(draw_conditions(), 600)
    fields = ["reward", "answer", "prompt", "failure", "tokens", "figure:x"]
    with store(pairs) as run:
        expected = list_expected(pairs)
        python = [[row["id"] for row in run.list_rows([one], limit=1000)] for one in conditions]
        assert python == [[spec["id"] for spec in expected if holds(spec, one)] for one in conditions]
        order = [[row["id"] for row in run.list_rows(sort=field, limit=1000)] for field in fields]
        rewards = [(bar["low"], bar["high"], bar["count"]) for bar in run.queries.count_facets()["reward"]]
        export_runs([run.source.path], tmp_path / "pages")
        key = run.name
    script = f"""
        import "./exported.js";
        import {{ source }} from "./core.js";
        const find = async (where, sort) =>
          (await source.get("runs/{key}/rows", {{ where, sort }})).rows.map((row) => row.id);
        const found = [];
        for (const condition of {json.dumps(conditions)}) found.push(await find([condition]));
        const texts = [];
        for (const text of {json.dumps([write_text(one) for one in conditions])}) {{
          if (text === null) texts.push(null);
          else texts.push(await find([(await source.get("condition", {{ text }})).condition]));
        }}
        const order = [];
        for (const field of {json.dumps(fields)}) order.push(await find([], field));
        const parsed = [];
        for (const text of {json.dumps([*TEXT_CONDITIONS, *TEXT_ERRORS])})
          parsed.push(await source.get("condition", {{ text }}));
        const {{ reward }} = await source.get("runs/{key}/facets", {{}});
        console.log(JSON.stringify({{ found, texts, order, parsed, reward }}));
    """
    shown = run_exported(tmp_path, script)
    assert shown["found"] == python
    assert shown["texts"] == [
        None if write_text(one) is None else ids for one, ids in zip(conditions, python, strict=True)
    ]
    assert shown["order"] == order
    assert [(bar["low"], bar["high"], bar["count"]) for bar in shown["reward"]] == rewards
    for text, answer in zip([*TEXT_CONDITIONS, *TEXT_ERRORS], shown["parsed"], strict=True):
        if text in TEXT_CONDITIONS:
            assert tuple(answer.get("condition", ())) == TEXT_CONDITIONS[text], answer
        else:
            assert f"at position {TEXT_ERRORS[text][0]}" in answer["error"], answer


LIVE_ONLY = {"events", "runs/{run}/rollouts/{id}/items", "runs/{run}/rollouts/{id}/tokens"}
"""What exported pages do not ask for: they hold whole transcripts, have no tokenizer, and follow no run."""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_an_exported_page_answers_each_path_of_the_api(tmp_path: Path) -> None:
    with store(sample(specs, 3)) as run:
        export_runs([run.source.path], tmp_path / "pages")
        row, library = run.list_rows()[0], Library([run.source.path])
        paths = [path for method, path, _ in StudioApi(library).list_endpoints() if method == "GET"]
        asked = {path: path.format(run=run.name, id=f"{row['task']}:{row['repeat']}") for path in paths}
    script = f"""
        import "./exported.js";
        import {{ source }} from "./core.js";
        const errors = {{}};
        for (const [path, address] of Object.entries({json.dumps(asked)}))
          await source.get(address).catch((error) => (errors[path] = error.message));
        console.log(JSON.stringify(errors));
    """
    errors = run_exported(tmp_path, script)
    assert errors.pop("compare") == "this page holds no comparison of these runs"
    assert errors.keys() == LIVE_ONLY


def sample(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """Return *count* different values of a strategy, the same ones at each call."""
    found: list[Any] = []

    @settings(max_examples=count, database=None, derandomize=True, deadline=None)
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


def run_exported(folder: Path, script: str) -> Any:
    """Return the JSON that a script prints, which runs with the modules and data of the pages exported to *folder*."""
    place = folder / "modules"
    place.mkdir()
    (place / "package.json").write_text('{"type": "module"}')
    for name in ("exported.js", "filters.js"):
        shutil.copy(STATIC / name, place)
    (place / "core.js").write_text("export class ApiError extends Error {}\nexport const source = {};\n")
    (place / "transcript.js").write_text("export const getText = () => '';\n")
    page = (folder / "pages" / "index.html").read_text(encoding="utf-8")
    chunks = [
        part.partition("</script>")[0] for part in page.split("<script>") if part.startswith("(window.gymsdkData")
    ]
    chunks += [path.read_text() for path in (folder / "pages" / "data").glob("*.js")]
    data = "globalThis.window = globalThis;\n" + "\n".join(chunks)
    (place / "data.js").write_text(data)
    (place / "main.js").write_text(f'import "./data.js";\n{script}')
    done = subprocess.run(["node", "main.js"], cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
