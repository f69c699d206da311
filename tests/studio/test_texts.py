"""The viewer shows every text of a transcript as it was written, and every output of a tool call."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gymsdk.jsonl import dump_row

from .conftest import Viewer, start_viewer
from .test_browser import Browser, open_export, open_viewer

__all__ = ["open_export", "open_viewer"]

REPLY = (
    "<think>\nline one\n\nline two\n</think>\n\n<answer>42</answer> a <guess>crane</guess> [red]no markup[/red]\n\n"
    "&lt;b&gt; &amp; <!-- comment --> <answer\n\n[name]: definition"
)
"""A reply with tags, entities and a definition, which HTML and Markdown would hide."""

NUMBERS = '{"large": 12345678901234567890123, "exact": 1.10}'

BIG = "x" * 2_000_000


def build_call(number: int, arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "name": "look", "call_id": f"c{number}", "arguments": arguments}


def build_output(number: int, text: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"c{number}", "output": text}


def build_message(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": text}


ITEMS: tuple[list[dict[str, Any]], ...] = (
    [build_message(REPLY), build_call(0, NUMBERS), build_output(0, NUMBERS)],
    [build_call(0), build_output(0, BIG + "end of the first"), build_message("done")],
    [
        build_call(0),
        build_call(1),
        build_output(0, BIG),
        build_output(1, BIG + "end of the second"),
        build_message("x"),
    ],
    [build_call(0), build_message("an answer without an output")],
    [build_call(0), *[build_call(n) for n in range(1, 12)], *[build_output(n, BIG) for n in range(12)]],
)
"""The items of each rollout; the last has more bytes of outputs than one answer."""


def build_line(task: int, items: list[dict[str, Any]]) -> dict[str, Any]:
    host = {"id": f"{task}:0", "environment": "looks", "outcome": "scored", "ended": "done", "turns": 1, "verdict": []}
    prompt = {"input": [{"role": "user", "content": "begin"}]}
    indices = {"_ng_task_index": task, "_ng_rollout_index": 0}
    line = {"responses_create_params": prompt, "response": {"output": items}, "reward": 1.0, "answer": "gold"}
    return line | indices | {"gymsdk": host}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts") / "texts"
    folder.mkdir()
    (folder / "rollouts.jsonl").write_bytes(b"".join(dump_row(build_line(*numbered)) for numbered in enumerate(ITEMS)))
    failed = build_line(9, [build_message("broken off")])
    del failed["reward"], failed["gymsdk"]["verdict"]
    failed["gymsdk"] |= {"outcome": "failed"}
    failed |= {f"_ng_failure_{name}": name for name in ("class", "stage", "message")}
    (folder / "failures.jsonl").write_bytes(dump_row(failed))
    return folder


@pytest.fixture(scope="module")
def viewer_of_texts(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    with start_viewer(texts, cache=tmp_path_factory.mktemp("cache") / "cache") as started:
        yield started


@pytest.mark.slow
def test_an_answer_has_the_outputs_of_its_calls(viewer_of_texts: Viewer) -> None:
    with viewer_of_texts.client() as client:
        for task, items in enumerate(ITEMS):
            answer = client.get(f"/api/runs/texts/rollouts/{task}:0").json()
            found = answer["items"][1:]
            assert answer["total_items"] == len(items) + 1
            assert found == items[: len(found)]
            assert len(found) == (19 if task == 4 else len(items) - (task in {1, 2})), task
            while len(found) < len(items):
                path = f"/api/runs/texts/rollouts/{task}:0/items"
                found += client.get(path, params={"from": len(found) + 1}).json()["items"]
            assert found == items
        assert client.get("/api/runs/texts/rollouts/9:0").json()["verdict"] == []


def check_page(browser: Browser, base: str) -> None:
    def open_rollout(task: int, text: str) -> Any:
        browser.page.goto(f"{base}#/run/texts/{task}:0")
        browser.page.get_by_text(text).first.wait_for()
        return browser.page

    page = open_rollout(0, "no markup")
    shown = page.locator("#item-1 .body").inner_text()
    assert [line for line in shown.splitlines() if line] == [line for line in REPLY.splitlines() if line]
    call = page.locator("#item-2")
    assert f"look({NUMBERS})" in call.inner_text()
    assert NUMBERS in call.locator("pre").text_content()
    for task, end in ((1, "end of the first"), (2, "end of the second")):
        page = open_rollout(task, "tool call")
        page.get_by_text("2,000,0").first.wait_for()
        assert page.locator(".result pre").last.text_content().endswith(end)
        assert page.get_by_text("no output").count() == 0
    page = open_rollout(3, "an answer without")
    assert page.get_by_text("no output").count() == 1
    page = open_rollout(9, "broken off")
    assert "gold" not in page.locator("dl.verdict").inner_html()


@pytest.mark.slow
def test_the_viewer_shows_texts_as_they_were_written(
    viewer_of_texts: Viewer, open_viewer: Callable[..., Browser]
) -> None:
    browser = open_viewer(viewer_of_texts)
    check_page(browser, f"{viewer_of_texts.base}/")
    page = browser.open("#/run/texts/4:0", "the output is not loaded yet")
    assert page.get_by_text("no output").count() == 0


@pytest.mark.slow
def test_an_exported_page_shows_texts_as_they_were_written(
    texts: Path, tmp_path: Path, open_export: Callable[[Path], Browser]
) -> None:
    command = [sys.executable, "-m", "gymsdk", "view", str(texts), "--export", str(tmp_path / "page")]
    subprocess.run(command, check=True, capture_output=True)
    page = tmp_path / "page" / "index.html"
    check_page(open_export(page), f"file://{page}")
