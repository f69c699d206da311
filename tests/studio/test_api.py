"""The viewer's API gives what the run's files hold, and only to those who have the token."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gymsdk.errors import UsageError
from gymsdk.jsonl import dump_row, read_rows
from gymsdk.runs import read
from gymsdk.studio.app import STATIC

from .conftest import TOKENS, Viewer, start_viewer


@pytest.fixture
def client(shared_viewer: Viewer) -> Iterator[httpx.Client]:
    """Return a client of the viewer of all tests that change nothing."""
    with shared_viewer.client() as opened:
        yield opened


def get(client: httpx.Client, path: str, **parameters: Any) -> Any:
    given = {name: json.dumps(value) if isinstance(value, list) else value for name, value in parameters.items()}
    answer = client.get(f"/api/{path}", params=given)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_runs_are_listed(client: httpx.Client, run: Path, strong: Path) -> None:
    listed = {info["run"]: info for info in get(client, "runs")}
    assert set(listed) == {"run", "strong", "changing"}
    assert listed["strong"]["model"] == "scripted/oracle:0.9"
    assert listed["strong"]["environments"] == ["tool_call", "multineedle"]
    assert (listed["strong"]["asked"], listed["strong"]["scored"]) == (80, 80)
    assert get(client, "runs/strong")["summary"]["mean"] == pytest.approx(listed["strong"]["mean"])


def test_rows_are_paged_filtered_and_sorted(client: httpx.Client, run: Path) -> None:
    lines = [line for _, line in read_rows(run / "rollouts.jsonl")]
    answer = get(client, "runs/run/rows", limit=10, offset=5)
    assert answer["total"] == 81
    assert [row["id"] for row in answer["rows"]] == list(range(6, 16))
    wrong = get(
        client,
        "runs/run/rows",
        where=[["reward", "<", 1], ["environment", "=", "multineedle"]],
        sort="seconds",
        desc="1",
    )
    assert wrong["total"] == sum(
        line["reward"] < 1 and line["gymsdk"]["environment"] == "multineedle" for line in lines
    )
    seconds = [row["seconds"] for row in wrong["rows"]]
    assert seconds == sorted(seconds, reverse=True)
    found = get(client, "runs/run/rows", q="I do not know.")
    assert 0 < found["total"] < 81


CONDITIONS = (
    "reward<0.5",
    "reward=none",
    "reward!=1",
    "failure=none",
    "failure!=none",
    "failure!=model_timeout",
    "tool=none",
    "tool!=get_weather",
    "tool~GET",
    "tool_error=none",
    "figure:calls_needed=none",
    "figure:calls_needed!=2",
    "answer=none",
    "answer=2",
    "stage=model",
    "prompt~weather",
)


def test_conditions_choose_what_they_choose_in_python(
    client: httpx.Client, shared_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with read(shared_run) as run:
        for text in CONDITIONS:
            expected = [row["id"] for row in run.list_rows([text], limit=1000)]
            checked = get(client, "condition", text=text)["condition"]
            for where in ([text], [checked]):
                answer = get(client, "runs/run/rows", where=where, limit=1000)
                assert ([row["id"] for row in answer["rows"]], answer["total"]) == (expected, len(expected)), where
    assert get(client, "condition", text="reward<0,5")["error"].endswith("(at position 8 of 'reward<0,5')")


def test_a_run_has_the_metrics_over_its_repeats(client: httpx.Client, changing: Path) -> None:
    entries = json.loads((changing / "metrics.json").read_text())
    entries[0]["agent_metrics"] |= {f"{name}@{k}/accuracy": k for name in ("majority", "vote") for k in (1, 2, 16)}
    (changing / "metrics.json").write_text(json.dumps(entries))
    shown = [
        (entry["environment"], entry["name"], entry["value"]) for entry in get(client, "runs/changing")["accuracy"]
    ]
    passes = [(entry["environment"], "pass@2", entry["agent_metrics"]["pass@2/accuracy"]) for entry in entries]
    name = entries[0]["environment"]
    assert shown == [passes[0], (name, "majority@16", 16), (name, "vote@16", 16), *passes[1:]]


def test_a_rollout_is_the_stored_line(client: httpx.Client, run: Path) -> None:
    _, line = next(iter(read_rows(run / "rollouts.jsonl")))
    answer = get(client, f"runs/run/rollouts/{line['gymsdk']['id']}")
    assert answer["items"] == [*line["responses_create_params"]["input"], *line["response"]["output"]]
    assert answer["line"]["gymsdk"] == line["gymsdk"]
    assert answer["opening"] == len(line["responses_create_params"]["input"])


def test_events_follow_a_growing_run_and_a_long_transcript_comes_in_parts(client: httpx.Client, changing: Path) -> None:
    path = changing / "rollouts.jsonl"
    _, line = next(iter(read_rows(path)))
    items = [{"type": "message", "role": "assistant", "content": f"{number} " + "x" * 100_000} for number in range(40)]
    line["response"]["output"] = items
    counts = []
    with client.stream("GET", "/api/events", params={"run": "changing"}) as stream:
        for text in stream.iter_lines():
            if text.startswith("data: "):
                state = json.loads(text.removeprefix("data: "))
                counts.append(state["rollouts"])
                if state["rollouts"] == 81 and counts.count(81) == 1:
                    with path.open("ab") as file:
                        file.write(dump_row(line | {"_ng_task_index": 900, "_ng_rollout_index": 0}))
                if state["rollouts"] == 82 and state["indexed"] == 1.0:
                    break
    assert (counts[0], counts[-1]) == (81, 82)
    answer = get(client, "runs/changing/rollouts/900:0")
    loaded = answer["items"]
    assert len(loaded) < answer["total_items"] == 40 + answer["opening"]
    while len(loaded) < answer["total_items"]:
        part = get(client, "runs/changing/rollouts/900:0/items", **{"from": len(loaded)})
        assert part["items"]
        loaded += part["items"]
    assert loaded[answer["opening"] :] == items


def test_groups_tools_failures_and_facets(client: httpx.Client, run: Path) -> None:
    tasks = get(client, "runs/run/tasks", limit=5)
    assert (tasks["total"], len(tasks["tasks"])) == (41, 5)
    assert {tool["tool"] for tool in get(client, "runs/run/tools")} >= {"get_weather", "find_contact"}
    [failure] = get(client, "runs/run/failures")
    assert (failure["kind"], failure["stage"], failure["count"]) == ("model_timeout", "model", 1)
    facets = get(client, "runs/run/facets")
    assert {facet["value"]: facet["count"] for facet in facets["outcome"]} == {"scored": 80, "failed": 1}


def test_two_runs_are_compared(client: httpx.Client) -> None:
    comparison = get(client, "compare", a="run", b="strong")
    assert comparison["overall"]["tasks"] == 40
    assert comparison["overall"]["difference"] > 0


def test_a_note_is_stored_beside_the_run(client: httpx.Client, changing: Path) -> None:
    note = {"id": "0:0", "item": 2, "tags": ["wrong tool"], "text": "should ask first"}
    assert client.post("/api/runs/changing/notes", json=note).status_code == 200
    assert client.post("/api/runs/changing/notes", json=note | {"text": "later"}).status_code == 200
    [stored] = get(client, "runs/changing/notes")
    assert (stored["text"], stored["tags"], stored["item"]) == ("later", ["wrong tool"], 2)
    assert len((changing / "notes.jsonl").read_text().splitlines()) == 2
    assert client.post("/api/runs/changing/notes", json={"id": "0:0", "tags": [], "item": 2}).status_code == 200
    assert get(client, "runs/changing/notes") == []


ORDINARY = ("setpriv", "--bounding-set=-dac_override") if os.geteuid() == 0 else ()
"""Runs a command without the right of root to write everywhere."""


@pytest.mark.skipif(bool(ORDINARY) and not shutil.which(ORDINARY[0]), reason="root may write everywhere")
def test_notes_on_a_read_only_run_are_kept_elsewhere(strong: Path, tmp_path: Path) -> None:
    strong.chmod(0o555)
    try:
        with start_viewer(strong, cache=tmp_path / "cache", prefix=ORDINARY) as viewer, viewer.client() as client:
            assert get(client, "runs/strong")["notes_beside_run"] is False
            assert client.post("/api/runs/strong/notes", json={"id": "0:0", "tags": ["a"]}).status_code == 200
            assert len(get(client, "runs/strong/notes")) == 1
    finally:
        strong.chmod(0o755)


def test_a_page_that_connects_again_gets_new_states_only(client: httpx.Client) -> None:
    events = "/api/events?run=run"
    identifier = ""
    with client.stream("GET", events) as stream:
        for text in stream.iter_lines():
            if text.startswith("id: "):
                identifier = text.removeprefix("id: ")
            if text.startswith("data: ") and json.loads(text.removeprefix("data: "))["indexed"] == 1.0:
                break
    with client.stream("GET", events, headers={"Last-Event-ID": identifier}) as stream:
        assert next(stream.iter_lines()) == ": still here"


def test_rows_have_the_figures_that_a_page_asks_for(client: httpx.Client, run: Path) -> None:
    names = ["calls_needed", "part/state"]
    parameters: dict[str, str] = {"figures": json.dumps(names), "where": '[["environment","=","tool_call"]]'}
    rows = client.get("/api/runs/run/rows", params=parameters).json()["rows"]
    lines = {line["gymsdk"]["id"]: line for _, line in read_rows(run / "rollouts.jsonl") if "calls_needed" in line}
    scored = [row for row in rows if row["reward"] is not None]
    assert len(scored) == len(lines)
    for row in scored:
        line = lines[f"{row['task']}:{row['repeat']}"]
        assert row["figures"] == {
            "calls_needed": line["calls_needed"],
            "part/state": line["reward_components"]["state"],
        }


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("runs/run/rows?figures=x", 400, "not JSON"),
        ('runs/run/rows?figures={"a":1}', 400, "a list of names"),
        ('runs/run/rows?where=[["lens","=","x"]]', 400, "with one of: alike"),
        ("runs/nothing", 404, "there is no run"),
        ("runs/run/rollouts/99:0", 404, "no rollout"),
        ("runs/run/rollouts/nonsense", 404, "no rollout"),
        ("runs/run/rows?where=nonsense", 400, "not JSON"),
        ("runs/run/rows?where=[1]", 400, "a list of conditions"),
        ('runs/run/rows?where=[["x","=",1]]', 400, "no field"),
        ('runs/run/rows?where=[["reward","=",{}]]', 400, "text or a number"),
        ('runs/run/rows?where=[["reward","OR 1=1",1]]', 400, "no operator"),
        ('runs/run/rows?where=[["task","=",1],["reward","<","0,5"]]', 400, "condition 2: the value of 'reward'"),
        ('runs/run/rows?where=["reward<0,5"]', 400, "at position 8 of 'reward<0,5'"),
        ("runs/run/rows?sort=reward;drop", 400, "no field"),
        ("runs/run/rows?limit=x", 400, "whole number"),
        ("compare?a=run", 404, "there is no run"),
        ("nothing", 404, "Not Found"),
    ],
)
def test_wrong_requests_are_explained(client: httpx.Client, path: str, status: int, message: str) -> None:
    answer = client.get(f"/api/{path}")
    assert answer.status_code == status, answer.text
    assert message in answer.json()["detail"]


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        *((body, "application/json", 400) for body in (b"", b"[]", b"nonsense", b'{"id": "x"}')),
        (b'{"id": "0:0", "more": 1}', "application/json", 400),
        (b'{"id": "0:0", "text": "%s"}' % (b"x" * 30_000), "application/json", 400),
        (b"x" * 200_000, "application/json", 413),
        *((b'{"id": "0:0", "tags": ["x"]}', kind, 415) for kind in ("", "text/plain", "application/json-patch")),
    ],
)
def test_a_note_that_is_not_valid_json_is_refused(
    client: httpx.Client, shared_run: Path, body: bytes, kind: str, status: int
) -> None:
    answer = client.post("/api/runs/run/notes", content=body, headers={"Content-Type": kind} if kind else {})
    assert answer.status_code == status
    assert status != 415 or "application/json" in answer.json()["detail"]
    assert not (shared_run / "notes.jsonl").exists()


@pytest.mark.parametrize("given", ["nothing", "a wrong token", "in the query", "in a cookie", "in another header"])
def test_no_data_is_shown_without_the_token(shared_viewer: Viewer, given: str) -> None:
    token, port = shared_viewer.token, shared_viewer.base.rpartition(":")[2]
    headers = {
        "a wrong token": {"Authorization": f"Bearer {token}x"},
        "in a cookie": {"Cookie": f"gymsdk-view-{port}={token}; gymsdk-token={token}; token={token}"},
        "in another header": {"x-api-key": token, "Referer": f"{shared_viewer.base}/#token={token}"},
    }.get(given, {})
    for path in ("runs", "runs/run", "events?run=run", "compare?a=run&b=strong", "no", ""):
        asked = f"{path}{'&' if '?' in path else '?'}token={token}" if given == "in the query" else path
        answer = httpx.get(f"{shared_viewer.base}/api/{asked}", headers=headers)
        assert answer.status_code == 401, path
        assert "token" in answer.json()["detail"]


def test_the_pages_need_no_token_and_every_answer_has_the_security_headers(
    shared_viewer: Viewer, client: httpx.Client
) -> None:
    files = ("", "/static/app.js", "/static/vendor/preact.mjs", "/favicon.ico", "/static/style.css")
    pages = [httpx.get(shared_viewer.base + path) for path in (*files, f"/?token={shared_viewer.token}")]
    for page in pages:
        assert page.status_code == 200
        assert shared_viewer.token.encode() not in page.content
    for answer in (*pages, *map(client.get, ("/", "/api/runs", "/static/app.js", "/api/x"))):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"
        assert "set-cookie" not in answer.headers


def test_other_hosts_and_other_files_than_those_of_the_pages_are_refused(client: httpx.Client) -> None:
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 421
    for path in ("../app.py", "%2e%2e/app.py", "/etc/passwd", "..%2f..%2fcli/view.py"):
        assert client.get(f"/static/{path}").status_code in {400, 404}


def test_the_viewer_listens_on_loopback_only(shared_viewer: Viewer) -> None:
    port = int(shared_viewer.base.rpartition(":")[2])
    addresses = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), port, socket.AF_INET)}
    for address in addresses - {"127.0.0.1"}:
        with socket.socket() as attempt:
            attempt.settimeout(2)
            assert attempt.connect_ex((address, port)) != 0 or address.startswith("127.")


@pytest.mark.slow
def test_ctrl_c_ends_the_viewer_although_a_page_follows_a_run(viewer: Viewer) -> None:
    with viewer.client() as client, client.stream("GET", "/api/events", params={"run": "run"}) as stream:
        next(stream.iter_lines())
        viewer.process.send_signal(signal.SIGINT)
        assert viewer.process.wait(20) in {0, 1, 130, -signal.SIGINT}


def test_all_runs_below_the_folder_are_listed_and_new_ones_are_found(
    shared_playing_viewer: Viewer, strong: Path
) -> None:
    with shared_playing_viewer.client() as client:
        assert {info["run"] for info in get(client, "runs")} >= {"weak", "sampled"}
        new = shared_playing_viewer.folder / "rollouts" / "new"
        new.mkdir()
        (new / "rollouts.jsonl").write_bytes((strong / "rollouts.jsonl").read_bytes())
        assert "new" in {info["run"] for info in get(client, "runs")}
        assert get(client, "runs/new/rows")["total"] == 80


def test_the_libraries_are_those_that_were_checked_in() -> None:
    folder = STATIC / "vendor"
    listed = dict(reversed(line.split()) for line in (folder / "SHA256SUMS").read_text().splitlines())
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*js")}
    assert found == listed
    licences = (folder / "LICENSES.txt").read_text()
    assert [name for name in listed if name not in licences] == []


def test_the_pages_load_nothing_from_elsewhere() -> None:
    for path in STATIC.glob("*.*"):
        assert "//cdn" not in path.read_text()
        assert "http://" not in path.read_text().replace("http://www.w3.org/2000/svg", "")


def find_tool_line(run: Path) -> dict[str, Any]:
    lines = [line for _, line in read_rows(run / "rollouts.jsonl")]
    # Rollouts are written in the order in which they end.
    lines.sort(key=lambda line: (line["_ng_task_index"], line["_ng_rollout_index"]))
    return next(line for line in lines if line["reward"] == 1 and line["gymsdk"]["turns"] > 1)


@pytest.mark.parametrize("action", ["replay", "branch"])
def test_nothing_is_played_without_the_option(client: httpx.Client, action: str) -> None:
    answer = client.post(f"/api/runs/run/rollouts/0:0/{action}", json={"turn": 0, "say": "x"})
    assert (answer.status_code, "gymsdk view --play" in answer.json()["detail"]) == (403, True)
    assert client.get("/api/runs/run/rollouts/0:0").json()["can_play"] is False


def test_a_rollout_is_played_again(shared_playing_viewer: Viewer, weak: Path) -> None:
    line = find_tool_line(weak)
    with shared_playing_viewer.client() as client:
        path = f"/api/runs/weak/rollouts/{line['gymsdk']['id']}"
        assert client.get(path).json()["can_play"] is True
        answer = client.post(f"{path}/replay", json={})
    assert answer.json() == {
        "is_equal": True,
        "reward": 1.0,
        "stored_reward": 1.0,
        "turns": line["gymsdk"]["turns"],
        "diverged": None,
        "failure": None,
    }


@pytest.mark.slow
def test_a_rollout_is_continued_differently(shared_playing_viewer: Viewer, weak: Path) -> None:
    line = find_tool_line(weak)
    with shared_playing_viewer.client() as client:
        path = f"/api/runs/weak/rollouts/{line['gymsdk']['id']}"
        answer = client.post(f"{path}/branch", json={"turn": 1, "say": "I give up.", "repeats": 2}).json()
        first, second = (rollout["reward"] for rollout in answer["rollouts"])
        # The calls of the first turn may earn a part of the reward.
        assert first == second < 1.0
        run = answer["run"]
        assert run in {info["run"] for info in client.get("/api/runs").json()}
        rows = client.get(f"/api/runs/{run}/rows").json()["rows"]
        branched = client.get(f"/api/runs/{run}/rollouts/{rows[0]['task']}:0").json()
    assert len(rows) == 2
    assert branched["items"][-1]["content"][0]["text"] == "I give up."
    assert branched["line"]["gymsdk"]["branch"] == {
        "run": "weak",
        "id": line["gymsdk"]["id"],
        "turn": 1,
        "edited": True,
    }
    assert (shared_playing_viewer.folder / answer["folder"] / "rollouts.jsonl").exists()


@pytest.mark.slow
def test_another_model_plays_on(shared_playing_viewer: Viewer, weak: Path) -> None:
    lines = (line for _, line in read_rows(weak / "rollouts.jsonl"))
    line = next(line for line in lines if line["reward"] == 0)
    with shared_playing_viewer.client() as client:
        path = f"/api/runs/weak/rollouts/{line['gymsdk']['id']}/branch"
        answer = client.post(path, json={"turn": 0, "say": "", "model": "scripted/oracle"}).json()
    assert [rollout["reward"] for rollout in answer["rollouts"]] == [1.0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"turn": 99, "say": "x"}, "has fewer turns than 99"),
        ({"turn": -1, "say": "x"}, "`turn` must be a number of turns"),
        ({"turn": 0}, "write the next turn, or name a model"),
        ({"turn": 0, "say": "x", "repeats": 17}, "`repeats` must be a number from 1 to 16"),
        ({"turn": 0, "say": ["x"]}, "`say` and `model` must be texts"),
        ({"turn": 0, "say": '{"type": "function_call_output"}'}, "come from the environment"),
        ({"turn": 0, "model": "nothing/at-all"}, "nothing"),
    ],
)
def test_a_wrong_branch_is_explained(shared_playing_viewer: Viewer, body: dict[str, Any], message: str) -> None:
    with shared_playing_viewer.client() as client:
        answer = client.post("/api/runs/weak/rollouts/0:0/branch", json=body)
    assert (answer.status_code // 100, message in answer.json()["detail"]) == (4, True), answer.text


def test_the_texts_of_tokens_are_shown_on_demand(shared_playing_viewer: Viewer) -> None:
    with shared_playing_viewer.client() as client:
        rollout = client.get("/api/runs/sampled/rollouts/0:0").json()
        item = rollout["total_items"] - 1
        path = "/api/runs/sampled/rollouts/0:0/tokens"
        texts = [bytes([token]).decode("utf-8", "replace") for token in TOKENS.encode()]
        assert client.get(path, params={"item": item}).json() == texts
        assert client.get(path, params={"item": item, "from": 3, "n": 2}).json() == [" ", "["]
        assert client.get(path, params={"item": 0}).status_code == 404
    assert rollout["has_tokenizer"] is True


@pytest.mark.slow
def test_a_tokenizer_file_gives_the_texts_of_tokens(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="pip install 'gymsdk[tokenizers]'")
    from gymsdk.tokens.tokenizer import load_token_decoder

    # A byte-level vocabulary, in which the two bytes of "é" are two tokens.
    vocabulary = {"Hello": 0, "Ġworld": 1, "Ã": 2, "©": 3}
    model = tokenizers.models.BPE(vocabulary, [])
    made = tokenizers.Tokenizer(model)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    decode = load_token_decoder(str(tmp_path / "tokenizer.json"))
    assert [decode(token) for token in range(4)] == ["Hello", " world", "Ã", "©"]
    with pytest.raises(UsageError, match="cannot load a tokenizer"):
        load_token_decoder(str(tmp_path / "none.json"))
