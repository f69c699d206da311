"""The pages in a real browser: contents, reactions, hostile transcripts, accessibility."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import pytest

from gymsdk.jsonl import dump_row, read_rows

from .conftest import Viewer, start_viewer

axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install 'gymsdk[browser]'")
playwright = pytest.importorskip("playwright.sync_api", reason="pip install 'gymsdk[browser]'")

pytestmark = pytest.mark.browser

SCREENSHOTS = os.environ.get("GYMSDK_SCREENSHOTS")
"""The folder for the pictures of the documentation, `docs/images/view`; without it, none are written."""


class Browser:
    """A page of the viewer, which records what must not happen."""

    def __init__(self, page: Any, viewer: Viewer) -> None:
        self.page = page
        self.viewer = viewer
        self.problems: list[str] = []
        page.on("console", lambda message: message.type in {"error", "warning"} and self.problems.append(message.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("dialog", lambda dialog: (self.problems.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.on("request", self._check_request)
        page.goto(f"{viewer.base}/#token={viewer.token}" if viewer.token else viewer.base)

    def _check_request(self, request: Any) -> None:
        own = self.viewer.base.rpartition("/")[0] if self.viewer.base.startswith("file:") else self.viewer.base
        if not request.url.startswith((own, "data:", "blob:")):
            self.problems.append(f"request to {request.url}")

    def open(self, address: str, text: str = "") -> Any:
        self.page.goto(f"{self.viewer.base}/{address}")
        if text:
            self.page.get_by_text(text).first.wait_for()
        return self.page


@pytest.fixture
def open_viewer(chromium: Any) -> Iterator[Callable[..., Browser]]:
    contexts, opened = [], []

    def build(viewer: Viewer, **options: Any) -> Browser:
        context = chromium.new_context(viewport={"width": 1400, "height": 850}, **options)
        contexts.append(context)
        opened.append(Browser(context.new_page(), viewer))
        return opened[-1]

    yield build
    for context in contexts:
        context.close()
    assert [problem for page in opened for problem in page.problems] == []


@pytest.fixture
def browser(viewer: Viewer, open_viewer: Callable[..., Browser]) -> Browser:
    return open_viewer(viewer)


def filter_address(*conditions: list[Any]) -> str:
    return "#/run/run?where=" + quote(json.dumps(list(conditions)))


def count_shown(page: Any) -> int:
    text = page.locator(".list [role=status]").inner_text()
    return int(text.split()[0].replace(",", ""))


def read_ids(page: Any) -> list[str]:
    found: list[str] = page.locator(".grid-row .cell:first-child").all_inner_texts()
    return found


def find_line(run: Path, environment: str, *, solved: bool = True, tools: bool = False) -> dict[str, Any]:
    lines = (line for _, line in read_rows(run / "rollouts.jsonl"))
    return next(
        line
        for line in lines
        if line["gymsdk"]["environment"] == environment
        and (line["reward"] == 1) == solved
        and tools == any(item["type"] == "function_call" for item in line["response"]["output"])
    )


PAGES = {
    "runs": ("#/", "compare two runs"),
    "run": ("#/run/run", "81 rollouts"),
    "rollout": ("#/run/run/TOOLS", "tool call"),
    "maths": ("#/run/run/MATHS", "extracted_answer"),
    "groups": ("#/run/run/groups", "41 tasks"),
    "tools": ("#/run/run/tools", "get_weather"),
    "failures": ("#/run/run/failures", "model_timeout"),
    "compare": ("#/compare/run/strong", "95 % interval"),
    "diff": ("#/diff/run:WRONG/strong:WRONG", "transcripts"),
}

QUICK_PAGES = ("run", "rollout", "compare")
"""The pages that the short set tests."""


@pytest.mark.parametrize(
    ("name", "theme"),
    [
        *((name, "light") for name in QUICK_PAGES),
        ("rollout", "dark"),
        *(pytest.param(name, "light", marks=pytest.mark.slow) for name in PAGES if name not in QUICK_PAGES),
        *(pytest.param(name, "dark", marks=pytest.mark.slow) for name in PAGES if name != "rollout"),
    ],
)
def test_each_page_is_accessible_and_has_its_picture(
    viewer: Viewer, open_viewer: Callable[..., Browser], run: Path, name: str, theme: str
) -> None:
    address, text = PAGES[name]
    for mark, line in (
        ("TOOLS", find_line(run, "tool_call", tools=True)),
        ("MATHS", find_line(run, "math")),
        ("WRONG", find_line(run, "tool_call", solved=False)),
    ):
        address = address.replace(mark, line["gymsdk"]["id"])
    page = open_viewer(viewer, color_scheme=theme).open(address, text)
    page.wait_for_timeout(300)
    results = axe.Axe().run(page)
    assert [(found["id"], found["nodes"][0]["html"]) for found in results.response["violations"]] == []
    if SCREENSHOTS:
        page.screenshot(path=f"{SCREENSHOTS}/{name}-{theme}.png")


def test_a_rollout_is_chosen_filtered_and_linked(browser: Browser, run: Path) -> None:
    page = browser.open("#/run/run", "81 rollouts")
    page.locator(".facet", has_text="get_weather").click()
    page.wait_for_function("() => document.querySelector('.list [role=status]').innerText !== '81 rollouts'")
    lines = [line for _, line in read_rows(run / "rollouts.jsonl")]
    expected = [
        line["gymsdk"]["id"]
        for line in lines
        if any(item.get("name") == "get_weather" for item in line["response"]["output"])
    ]
    assert count_shown(page) == len(expected)
    assert read_ids(page) == expected[: len(read_ids(page))]
    page.locator(".grid-row").first.click()
    page.locator(".pane .item").first.wait_for()
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    page.locator(".pane .item").first.wait_for()
    assert page.locator(".pane h2").first.inner_text() == f"tool_call {expected[0]}"


def test_the_search_finds_texts_of_the_conversation(browser: Browser) -> None:
    page = browser.open("#/run/run", "81 rollouts")
    page.keyboard.press("/")
    page.keyboard.type("I do not know")
    page.wait_for_function(
        "() => !['81 rollouts', '…'].includes(document.querySelector('.list [role=status]').innerText)"
    )
    assert 0 < count_shown(page) < 81
    assert "q=I+do+not+know" in page.url


def test_a_condition_is_added_and_removed(browser: Browser) -> None:
    page = browser.open("#/run/run", "81 rollouts")
    page.locator("#condition").fill("outcome=failed")
    page.get_by_role("button", name="add", exact=True).click()
    page.get_by_text("1 rollout", exact=True).wait_for()
    assert read_ids(page) == ["0:7"]
    page.get_by_role("button", name="remove outcome = failed").click()
    page.get_by_text("81 rollouts").wait_for()
    page.locator("#condition").fill("nonsense")
    page.get_by_role("button", name="add", exact=True).click()
    page.get_by_text("write FIELD=VALUE").wait_for()


def test_columns_sort_in_both_directions(browser: Browser) -> None:
    page = browser.open("#/run/run", "81 rollouts")
    header = page.get_by_role("columnheader", name="reward")
    header.get_by_role("button").click()
    page.wait_for_function("() => document.querySelector('[aria-sort=ascending]')")
    playwright.expect(page.locator(".grid-row .cell:nth-child(2)").first).to_have_text("0", timeout=30_000)
    header.get_by_role("button").click()
    page.wait_for_function("() => document.querySelector('[aria-sort=descending]')")
    playwright.expect(page.locator(".grid-row .cell:nth-child(2)").first).to_have_text("1", timeout=30_000)


def test_columns_are_chosen(browser: Browser, run: Path) -> None:
    page = browser.open("#/run/run", "81 rollouts")
    page.get_by_text("columns", exact=True).click()
    page.get_by_label("turns").uncheck()
    page.get_by_label("calls_needed").check()
    page.get_by_role("columnheader", name="calls_needed").get_by_role("button").click()
    page.get_by_role("columnheader", name="calls_needed").get_by_text("↓").or_(
        page.get_by_role("columnheader", name="calls_needed").get_by_text("↑")
    ).wait_for()
    assert page.get_by_role("columnheader", name="turns").count() == 0
    results = axe.Axe().run(page)
    assert [(found["id"], found["nodes"][0]["html"]) for found in results.response["violations"]] == []
    page.reload()
    page.get_by_role("columnheader", name="calls_needed").wait_for()
    page.locator(".grid-row").first.wait_for()
    needed = sorted(line["calls_needed"] for _, line in read_rows(run / "rollouts.jsonl") if "calls_needed" in line)
    names = page.get_by_role("columnheader").all_inner_texts()
    column = [name.split()[0] for name in names].index("calls_needed")
    shown = page.locator(".grid-row").evaluate_all(f"rows => rows.map(row => row.children[{column}].innerText)")
    assert [float(text) for text in shown[:5]] == needed[:5]


def test_the_rollout_is_resized_with_the_keyboard(browser: Browser) -> None:
    page = browser.open("#/run/run?id=0:0&at=0", "raw")
    divider = page.get_by_role("separator", name="width of the rollout")
    before = page.locator(".pane").bounding_box()["width"]
    divider.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert divider.get_attribute("aria-valuenow") == "60"
    assert page.locator(".pane").bounding_box()["width"] > before + 50


def test_a_saved_filter_finds_groups_without_variance(browser: Browser, run: Path) -> None:
    page = browser.open("#/run/run", "81 rollouts")
    value = page.locator("#lens option", has_text="no variance").get_attribute("value")
    page.locator("#lens").select_option(value)
    page.locator(".chip", has_text="lens = alike").wait_for()
    rewards: dict[tuple[str, int], list[float]] = {}
    for _, line in read_rows(run / "rollouts.jsonl"):
        rewards.setdefault((line["gymsdk"]["environment"], line["_ng_task_index"]), []).append(line["reward"])
    alike = [task for task in rewards.values() if len(task) > 1 and len(set(task)) == 1]
    failed = 1 if any(key == ("tool_call", 0) and len(set(task)) == 1 for key, task in rewards.items()) else 0
    page.wait_for_timeout(300)
    assert count_shown(page) == sum(map(len, alike)) + failed


@pytest.mark.slow
def test_more_rows_than_a_browser_can_lay_out_are_on_further_pages(browser: Browser) -> None:
    def answer(route: Any) -> None:
        offset = int(parse_qs(urlsplit(route.request.url).query).get("offset", ["0"])[0])
        row = {"turns": 1, "tool_calls": 0, "tokens": None, "seconds": None, "answer": None, "prompt": "", "ended": ""}
        rows = [row | {"id": n, "task": n, "repeat": 0, "reward": 1.0} for n in range(offset, offset + 200)]
        route.fulfill(json={"total": 700_000, "offset": offset, "rows": rows, "is_cut": False})

    browser.page.route("**/api/runs/run/rows*", answer)
    page = browser.open("#/run/run", "700,000 rollouts")
    assert read_ids(page)[0] == "0:0"
    page.get_by_role("navigation", name="parts of the table").get_by_role("button", name="later").click()
    page.get_by_text("500000:0").wait_for()
    page.evaluate("document.querySelector('.grid').scrollTop = 1e9")
    page.get_by_text("699999:0").wait_for()
    assert page.get_by_role("row").last.get_attribute("aria-rowindex") == "700001"


def test_the_keyboard_moves_through_rollouts_and_items(browser: Browser) -> None:
    page = browser.open("#/run/run", "81 rollouts")
    ids = read_ids(page)
    for key in "jjj":
        page.keyboard.press(key)
    page.locator(f".pane h2:has-text('{ids[2]}')").wait_for()
    page.keyboard.press("k")
    page.locator(f".pane h2:has-text('{ids[1]}')").wait_for()
    page.keyboard.press("n")
    page.keyboard.press("n")
    assert page.locator(".item.current").get_attribute("id") == "item-1"
    page.keyboard.press("r")
    page.locator(".pane pre.json").first.wait_for()
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(rf"#/run/run/{ids[1]}$"))
    page.keyboard.press("?")
    page.get_by_role("dialog", name="keys").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")


def test_tool_calls_have_their_results_beneath_them(browser: Browser, run: Path) -> None:
    line = find_line(run, "tool_call", tools=True)
    page = browser.open(f"#/run/run/{line['gymsdk']['id']}", "tool call")
    output = line["response"]["output"]
    call = next(item for item in output if item["type"] == "function_call")
    result = next(item for item in output if item.get("call_id") == call["call_id"] and "output" in item)
    shown = page.locator(".item", has_text=f"{call['name']}(").first
    assert json.loads(shown.locator("pre").first.inner_text()) == json.loads(result["output"])
    assert page.locator(".item").count() == len(line["responses_create_params"]["input"]) + sum(
        item["type"] != "function_call_output" for item in output
    )


def test_maths_is_rendered(browser: Browser, run: Path) -> None:
    line = find_line(run, "math")
    page = browser.open(f"#/run/run/{line['gymsdk']['id']}", "extracted_answer")
    page.locator(".item.assistant math").first.wait_for()


def test_a_note_is_written_and_shown(browser: Browser, run: Path) -> None:
    page = browser.open("#/run/run/0:0", "tool_call 0:0")
    page.keyboard.press("t")
    page.get_by_label("tags, separated by commas").fill("interesting, later")
    page.get_by_label("text", exact=True).fill("look again")
    page.get_by_role("button", name="save").click()
    page.locator(".tag", has_text="interesting").first.wait_for()
    note = json.loads((run / "notes.jsonl").read_text())
    assert (note["id"], note["tags"], note["text"]) == ("0:0", ["interesting", "later"], "look again")


def test_new_rollouts_wait_behind_a_button(browser: Browser, run: Path) -> None:
    page = browser.open("#/run/run", "81 rollouts")
    _, line = next(iter(read_rows(run / "rollouts.jsonl")))
    with (run / "rollouts.jsonl").open("ab") as file:
        for task in range(3):
            file.write(dump_row(line | {"_ng_task_index": 1000 + task}))
    page.get_by_text("3 new rollouts").wait_for()
    assert count_shown(page) == 81
    page.get_by_role("button", name="show them").click()
    page.get_by_text("84 rollouts").wait_for()


def test_two_runs_are_chosen_and_compared(browser: Browser) -> None:
    page = browser.open("#/", "compare two runs")
    page.get_by_label("choose run").check()
    page.get_by_label("choose strong").check()
    page.get_by_role("button", name="compare two runs").click()
    page.get_by_text("95 % interval").wait_for()
    page.get_by_role("button", name="B won").click()
    page.locator("table a").first.wait_for()
    page.locator("table.plain").last.locator("a").first.click()
    page.get_by_text("transcripts differ from item").wait_for()


def test_an_unknown_page_run_and_rollout_are_explained(viewer: Viewer, open_viewer: Callable[..., Browser]) -> None:
    browser = open_viewer(viewer)
    browser.open("#/nothing", "There is no such page")
    for address, text in (("#/run/nothing", "there is no run"), ("#/run/run/99:9", "no rollout")):
        browser.open(address, text)
    # The browser reports an answer with status 404 as another error.
    assert all("404" in problem for problem in browser.problems)
    browser.problems.clear()


HOSTILE = [
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked=1'>",
    "<img src='http://evil.example/x.png'>![x](http://evil.example/y.png)",
    "<svg onload='window.hacked=1'><a xlink:href='javascript:window.hacked=1'>x</a></svg>",
    "[link](javascript:window.hacked=1) [link2](data:text/html,<script>window.hacked=1</script>)",
    "[x](vbscript:x) <a href='&#106;avascript:window.hacked=1'>y</a>",
    "<iframe srcdoc='<script>parent.hacked=1</script>'></iframe><object data='x'></object><embed src='x'>",
    "<form action='http://evil.example'><input name=a><button>send</button></form>",
    "<style>* { display: none }</style><link rel=stylesheet href='http://evil.example/x.css'>",
    "<base href='http://evil.example/'><meta http-equiv=refresh content='0;url=http://evil.example'>",
    "<math><mtext></form><form><mglyph><style></math><img src onerror=window.hacked=1>",
    '<noscript><p title="</noscript><img src=x onerror=window.hacked=1>">',
    r"$\href{javascript:window.hacked=1}{x}$ $\url{javascript:window.hacked=1}$ $\htmlId{app}{x}$",
    r"$$\includegraphics{http://evil.example/z.png}$$ $\def\a{\a\a}\a$ $\rule{100000em}{100000em}$",
    "<span data-math='0'>x</span> <p id=app class=dialog style='position:fixed;inset:0'>y</p>",
    "```html\n<script>window.hacked=1</script>\n```",
    "\u202e\u0000\ud800 \x1b[31m",
    '"><script>window.hacked=1</script>',
    "__proto__ constructor {{7*7}} ${window.hacked=1}",
    "<details open ontoggle=window.hacked=1><summary>x</summary></details>",
    "<video><source onerror=window.hacked=1></video>",
]


def build_hostile_run(folder: Path, line: dict[str, Any]) -> Path:
    """Write a run in which every text is hostile."""
    folder.mkdir()
    rows = []
    for number, text in enumerate(HOSTILE):
        output = [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]},
            {"type": "function_call", "call_id": text, "name": text, "arguments": text},
            {"type": "function_call_output", "call_id": text, "output": text},
            {"type": "function_call", "call_id": "2", "name": "f", "arguments": json.dumps({text: text})},
            {
                "type": text,
                "role": text,
                "content": [{"type": "input_image", "image_url": text}, {"type": text, "text": text}],
            },
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]},
        ]
        rows.append(
            line
            | {
                "_ng_task_index": number,
                "_ng_rollout_index": 0,
                "responses_create_params": {"input": [{"role": "user", "content": text}]},
                "response": {"output": output, "model": text},
                "reward_components": {text: 1.0},
                "kind": text,
                text: 1.0,
                "given_answer": text,
                "gymsdk": line["gymsdk"]
                | {"environment": text, "ended": text, "verdict": ["kind", text, "given_answer"]},
            }
        )
    (folder / "rollouts.jsonl").write_bytes(b"".join(map(dump_row, rows)))
    failure = rows[0] | {f"_ng_failure_{name}": HOSTILE[0] for name in ("class", "stage", "message")}
    (folder / "failures.jsonl").write_bytes(dump_row(failure | {"_ng_rollout_index": 1}))
    about = {"settings": {"model": HOSTILE[1], "environments": {HOSTILE[0]: {}}}, "started": HOSTILE[2]}
    (folder / "run.json").write_text(json.dumps(about))
    (folder / "notes.jsonl").write_bytes(
        dump_row({"id": "0:0", "tags": HOSTILE[:3], "text": HOSTILE[1], "author": HOSTILE[0]})
    )
    return folder


def test_hostile_transcripts_do_nothing(weak: Path, tmp_path: Path, open_viewer: Callable[..., Browser]) -> None:
    line = find_line(weak, "tool_call", tools=True)
    run = build_hostile_run(tmp_path / "hostile", line)
    other = build_hostile_run(tmp_path / "<b>other", line)
    with start_viewer(run, other, cache=tmp_path / "cache") as viewer:
        browser = open_viewer(viewer)
        page = browser.page
        addresses = ["#/", "#/run/hostile", "#/run/hostile?at=0&id=0:0", "#/compare/hostile/-b-other"]
        addresses += [f"#/run/hostile/{name}" for name in ("groups", "tools", "failures", "0:1")]
        addresses += [f"#/run/hostile/{number}:0" for number in range(len(HOSTILE))]
        addresses += ["#/diff/hostile:0:0/-b-other:3:0", "#/run/<script>window.hacked=1</script>/x"]
        for address in addresses:
            browser.open(address)
            page.wait_for_timeout(150)
            for details in page.locator("details").all():
                details.evaluate("element => { element.open = true }")
            assert page.evaluate("window.hacked") is None, address
            assert (
                page.locator(
                    "script:not([src]):not([type=importmap]), iframe, object, embed, base, form[action]"
                ).count()
                == 0
            )
            assert (
                page.locator("main [onerror], main [onload], main [ontoggle], main [href^='javascript']").count() == 0
            )
            assert page.locator("#app").count() == 1
        browser.problems[:] = [problem for problem in browser.problems if "404" not in problem]


def export(target: Path, *runs: Path, options: tuple[str, ...] = ()) -> Path:
    command = [sys.executable, "-m", "gymsdk", "view", *map(str, runs), "--export", str(target), *options]
    subprocess.run(command, check=True, capture_output=True)
    return target if target.is_file() else target / "index.html"


@pytest.fixture
def open_export(chromium: Any) -> Iterator[Callable[[Path], Browser]]:
    """Open an exported page from disk."""
    contexts, opened = [], []

    def build(page: Path) -> Browser:
        context = chromium.new_context(viewport={"width": 1400, "height": 850}, offline=True)
        contexts.append(context)
        opened.append(Browser(context.new_page(), Viewer(f"file://{page}", "", None)))  # type: ignore[arg-type]
        return opened[-1]

    yield build
    for context in contexts:
        context.close()
    assert [problem for page in opened for problem in page.problems] == []


@pytest.mark.parametrize("name", ["page.html", pytest.param("folder", marks=pytest.mark.slow)])
def test_an_exported_page_shows_the_same_from_disk(
    run: Path, strong: Path, tmp_path: Path, open_export: Callable[[Path], Browser], browser: Browser, name: str
) -> None:
    page = export(tmp_path / "to" / name, run, strong)
    exported = open_export(page)

    def read(opened: Browser, base: str, address: str, text: str) -> str:
        opened.page.goto(f"{base}{address}")
        opened.page.get_by_text(text).first.wait_for()
        opened.page.wait_for_timeout(300)
        shown: str = opened.page.locator("main").inner_text()
        # What only a viewer with a server has: the button for notes, and the keys beside it.
        return re.sub(r"\s+", " ", re.sub(r"\bnote( t)?\b", "", shown))

    tools, wrong = (find_line(run, "tool_call", tools=True), find_line(run, "tool_call", solved=False))
    for address, text in (
        ("#/run/run", "81 rollouts"),
        (filter_address(["tool", "=", "get_weather"], ["reward", "<", 2]), "rollouts"),
        (filter_address(["figure:calls_needed", ">", 1]) + "&sort=tokens&desc=1", "rollouts"),
        ("#/run/run?q=I+do+not+know", "rollouts"),
        (f"#/run/run/{tools['gymsdk']['id']}", "tool call"),
        ("#/run/run/groups", "41 tasks"),
        ("#/run/run/tools", "get_weather"),
        ("#/run/run/failures", "model_timeout"),
        ("#/compare/run/strong", "95 % interval"),
        (f"#/diff/run:{wrong['gymsdk']['id']}/strong:{wrong['gymsdk']['id']}", "transcripts"),
    ):
        live = read(browser, f"{browser.viewer.base}/", address, text)
        assert read(exported, f"file://{page}", address, text) == live, address


def test_a_part_of_a_run_is_exported(run: Path, tmp_path: Path, open_export: Callable[[Path], Browser]) -> None:
    page = export(tmp_path / "page.html", run, options=("--where", "environment=multineedle", "--sample", "7"))
    exported = open_export(page)
    exported.page.goto(f"file://{page}#/run/run")
    exported.page.get_by_text("7 of 81 rollouts are on this page").wait_for()
    assert count_shown(exported.page) == 7


@pytest.mark.slow
def test_hostile_transcripts_do_nothing_in_an_exported_page(
    weak: Path, tmp_path: Path, open_export: Callable[[Path], Browser]
) -> None:
    run = build_hostile_run(tmp_path / "hostile", find_line(weak, "tool_call", tools=True))
    page = export(tmp_path / "page.html", run)
    browser = open_export(page)
    for address in (
        "#/",
        "#/run/hostile",
        "#/run/hostile/tools",
        *(f"#/run/hostile/{n}:0" for n in range(len(HOSTILE))),
    ):
        browser.page.goto(f"file://{page}{address}")
        browser.page.wait_for_timeout(100)
        assert browser.page.evaluate("window.hacked") is None, address
        assert browser.page.locator("#app").count() == 1


def test_a_rollout_is_played_again_and_continued_differently(
    shared_playing_viewer: Viewer, weak: Path, open_viewer: Callable[..., Browser]
) -> None:
    line = find_line(weak, "tool_call", tools=True)
    browser = open_viewer(shared_playing_viewer)
    page = browser.open(f"#/run/weak/{line['gymsdk']['id']}", "tool call")
    page.get_by_role("button", name="play again").click()
    page.get_by_text("equal: items and reward 1").wait_for()
    last = page.locator(".item.assistant").last
    last.get_by_role("button", name="branch").click()
    dialog = page.get_by_role("dialog")
    assert dialog.locator("textarea").input_value()
    turns = line["gymsdk"]["turns"]
    assert f"The first {turns - 1} of {turns} turns are said as stored" in dialog.inner_text()
    results = axe.Axe().run(page)
    assert [found["id"] for found in results.response["violations"]] == []
    dialog.locator("textarea").fill("I do not know.")
    if SCREENSHOTS:
        page.screenshot(path=f"{SCREENSHOTS}/branch-light.png")
    dialog.get_by_role("button", name="play").click()
    dialog.get_by_role("link", name="compare").click()
    page.get_by_text("The transcripts differ from item").wait_for()
    assert "I do not know." in page.locator(".diff").inner_text()


def test_nothing_is_played_without_the_option(browser: Browser, run: Path) -> None:
    page = browser.open("#/run/run/0:0", "raw")
    assert page.get_by_role("button", name="play again").count() == 0
    assert page.get_by_role("button", name="branch").count() == 0


@pytest.mark.slow
def test_tokens_are_shown_with_their_texts(shared_playing_viewer: Viewer, open_viewer: Callable[..., Browser]) -> None:
    browser = open_viewer(shared_playing_viewer)
    page = browser.open("#/run/sampled/0:0", "raw")
    page.get_by_role("button", name="tokens").click()
    tokens = page.locator(".tokens")
    tokens.get_by_text("H", exact=True).wait_for()
    assert tokens.locator("span").all_inner_texts()[-5:] == list("[end]")
    assert tokens.locator("span").first.get_attribute("title") == "id 72, log-probability 0.0000"
    assert tokens.locator(".t3").count() == 0
    results = axe.Axe().run(page)
    assert [found["id"] for found in results.response["violations"]] == []


def test_judges_and_the_rewards_of_steps_are_shown(
    weak: Path, tmp_path: Path, open_viewer: Callable[..., Browser], open_export: Callable[[Path], Browser]
) -> None:
    lines = [line for _, line in read_rows(weak / "rollouts.jsonl")][:2]
    said = {"type": "message", "content": [{"type": "output_text", "text": "It is <b>right</b>."}]}
    call = {"role": "judge", "stage": "verify", "seconds": 0.25}
    call |= {"request": {"input": [{"role": "user", "content": "Is it right?"}]}, "answer": {"output": [said]}}
    failed = {"role": "user", "stage": "step", "step": 1, "seconds": 2.0, "error": {"message": "no answer"}}
    lines[0]["gymsdk"] |= {"step_rewards": [0.0, 0.5], "environment_calls": [failed, call]}
    lines[0]["gymsdk"]["environment_calls_left_out"] = 3
    lines[1]["gymsdk"] |= {
        "step_rewards": "odd",
        "environment_calls": [None, 3, {"request": [], "answer": {"output": 4}}],
    }
    folder = tmp_path / "judged"
    folder.mkdir()
    (folder / "rollouts.jsonl").write_bytes(b"".join(map(dump_row, lines)))
    command = [sys.executable, "-m", "gymsdk", "view", str(folder), "--export", str(tmp_path / "page.html")]
    subprocess.run(command, check=True, capture_output=True)
    first, second = (f"#/run/judged/{line['gymsdk']['id']}" for line in lines)
    with start_viewer(folder, cache=tmp_path / "cache") as viewer:
        exported = tmp_path / "page.html"
        for browser, base in (
            (open_viewer(viewer), f"{viewer.base}/"),
            (open_export(exported), f"file://{exported}"),
        ):
            page = browser.page
            page.goto(base + first)
            page.get_by_text("(steps: 0, 0.5)").wait_for()
            page.get_by_role("button", name="judges").click()
            page.get_by_text("Is it right?").wait_for()
            shown = page.locator("main").inner_text()
            calls = ("judge at verify, 0.25 s", "It is <b>right</b>.", "user at step 1, 2 s", "no answer")
            assert [text for text in (*calls, "3 earlier calls left out") if text not in shown] == []
            page.goto(base + second)
            page.get_by_role("button", name="judges").click()


def test_the_dark_theme_is_kept(browser: Browser) -> None:
    page = browser.open("#/", "compare two runs")
    page.get_by_role("button", name="dark").click()
    page.reload()
    page.get_by_role("button", name="light").wait_for()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_the_token_leaves_the_address_and_stays_in_the_tab(viewer: Viewer, open_viewer: Callable[..., Browser]) -> None:
    browser = open_viewer(viewer)
    page = browser.page
    page.get_by_text("strong").first.wait_for()
    assert page.url == f"{viewer.base}/#/"
    assert page.evaluate("document.cookie") == ""
    assert page.context.cookies() == []
    page.goto(f"{viewer.base}/#/run/run")
    page.get_by_text("81 rollouts").first.wait_for()
    page.reload()
    page.get_by_text("81 rollouts").first.wait_for()
    tab = page.context.new_page()
    tab.goto(page.url)
    tab.get_by_text("This tab has no token").wait_for()
    # The printed address, entered in this tab, changes only the part after `#`: the page stays where it was.
    tab.goto(f"{viewer.base}/#token={viewer.token}")
    tab.get_by_text("81 rollouts").first.wait_for()
    assert tab.url == page.url


def test_a_wrong_token_is_explained(viewer: Viewer, open_viewer: Callable[..., Browser]) -> None:
    browser = open_viewer(replace(viewer, token="wrong"))
    browser.page.get_by_text("needs the token in the address that `gymsdk view` printed").wait_for()
    # The browser reports an answer with status 401 as another error.
    assert all("401" in problem for problem in browser.problems)
    browser.problems.clear()


@pytest.mark.slow
def test_a_page_follows_the_run_again_after_the_viewer_was_started_again(
    run: Path, tmp_path: Path, open_viewer: Callable[..., Browser]
) -> None:
    with start_viewer(run, cache=tmp_path / "cache") as first:
        browser = open_viewer(first)
        browser.open("#/run/run", "81 rollouts")
    port = first.base.rpartition(":")[2]
    with start_viewer(run, cache=tmp_path / "cache", options=["--port", port]) as second:
        browser.page.goto(f"{second.base}/#token={second.token}")
        browser.page.get_by_text("81 rollouts").first.wait_for()
        _, line = next(iter(read_rows(run / "rollouts.jsonl")))
        with (run / "rollouts.jsonl").open("ab") as file:
            file.write(dump_row(line | {"_ng_task_index": 1000}))
        browser.page.get_by_text("1 new rollout").wait_for()
    # The browser reports lost connections as further errors.
    assert all("ERR_" in problem for problem in browser.problems), browser.problems
    browser.problems.clear()
