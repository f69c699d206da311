"""Measure the viewer and its index with a run of 100,000 rollouts.

usage: view.py [--rollouts N] [--folder FOLDER]

Writes a run by repeating real rollouts of three environments (about 20 kB each) with other rewards and numbers, and
measures both passes of the index, the answers of the viewer's API, its memory, and its CPU time while it follows a run
that grows by 1,000 rollouts per second. With Chromium and `gymsdk[browser]`, also the time until a page shows rows, and
the page's heap. The exit status is 1 if a measurement exceeds its limit.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import httpx
import orjson

from gymsdk.runs.index import RunIndex
from gymsdk.runs.source import find_run

REPEATS = 8
SAMPLES = 40
"""The number of requests of each kind."""

ROLLOUTS_PER_SECOND, FOLLOWED_SECONDS = 1000, 10


class Figure(NamedTuple):
    """A measurement with its limit."""

    name: str
    value: float
    unit: str
    limit: float


def write_run(folder: Path, count: int) -> None:
    """Write a run of *count* rollouts."""
    seeds = folder / "seeds"
    names = ["tool_call", "math", "multineedle"]
    options = ["--split", "train", "--limit", "100", "--model", "scripted/oracle:0.6", "--output", str(seeds)]
    command = [sys.executable, "-m", "gymsdk", "rollout", *names, *options]
    subprocess.run(command, check=True, capture_output=True)
    lines = [orjson.loads(line) for line in (seeds / "rollouts.jsonl").read_bytes().splitlines()]
    rng = random.Random(0)
    (folder / "run").mkdir()
    with (folder / "run" / "rollouts.jsonl").open("wb") as file:
        for number in range(count):
            file.write(build_line(lines, number, rng))
    for name in ("run.json", "inputs.jsonl"):
        shutil.copy(seeds / name, folder / "run" / name)


def build_line(lines: list[dict[str, Any]], number: int, rng: random.Random) -> bytes:
    """Return the line of a rollout: one of *lines* with another number and reward."""
    line = dict(lines[number // REPEATS % len(lines)])
    line |= {"_ng_task_index": number // REPEATS, "_ng_rollout_index": number % REPEATS}
    line["reward"] = round(rng.random(), 3) if rng.random() < 0.3 else float(rng.random() < 0.5)
    line["gymsdk"] = line["gymsdk"] | {"id": f"{number // REPEATS}:{number % REPEATS}"}
    return orjson.dumps(line) + b"\n"


def measure(action: Callable[[], object]) -> tuple[float, float]:
    """Return the wall time and the CPU time of *action*, in seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - wall, time.process_time() - cpu


class Viewer:
    """A running `gymsdk view`.

    Args:
        run: The run.
    """

    def __init__(self, run: Path) -> None:
        command = [sys.executable, "-m", "gymsdk", "view", str(run), "--no-browser"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        self.base = self.address.partition("/?")[0]
        token = parse_qs(urlsplit(self.address).query)["token"][0]
        self.client = httpx.Client(base_url=self.base, headers={"Authorization": f"Bearer {token}"}, timeout=120)

    def get(self, path: str, **parameters: Any) -> Any:
        """Return the answer of the API."""
        given = {
            name: orjson.dumps(value).decode() if isinstance(value, list) else value
            for name, value in parameters.items()
        }
        answer = self.client.get(f"/api/runs/run{path}", params=given)
        answer.raise_for_status()
        return answer.json()

    def read_status(self, name: str) -> float:
        """Return a size from the process's status, in MB."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(next(line.split()[1] for line in text.splitlines() if line.startswith(name))) / 1024

    def read_cpu(self) -> float:
        """Return the CPU time of the process, in seconds."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def running_viewer(run: Path) -> Iterator[Viewer]:
    """Run the viewer while the context is open."""
    viewer = Viewer(run)
    try:
        yield viewer
    finally:
        viewer.process.terminate()
        viewer.process.wait()
        viewer.client.close()


def time_requests(send: Callable[[int], object]) -> list[float]:
    """Return the milliseconds of each of `SAMPLES` requests."""
    times = []
    for number in range(SAMPLES):
        began = time.perf_counter()
        send(number)
        times.append((time.perf_counter() - began) * 1e3)
    return times


def get_p95(times: list[float]) -> float:
    """Return the 95th percentile."""
    return statistics.quantiles(times, n=20)[-1]


def measure_api(viewer: Viewer, count: int) -> Iterator[Figure]:
    """Yield the times of the API's answers."""
    rng = random.Random(1)
    fields = ("reward", "tokens", "seconds", "turns", "task", "figure:calls_needed")
    tools = [tool["tool"] for tool in viewer.get("/tools")]

    def build_where(number: int) -> list[Any]:
        return [["reward", "<", round(0.1 + number / SAMPLES, 3)], ["tool", "=", tools[number % len(tools)]]]

    kinds: dict[str, Callable[[int], object]] = {
        "sort": lambda number: viewer.get("/rows", sort=fields[number % len(fields)], desc=str(number % 2), limit=200),
        "filter": lambda number: viewer.get("/rows", where=build_where(number), limit=200),
        "scroll": lambda _: viewer.get("/rows", sort="reward", offset=rng.randrange(count), limit=200),
        "next rollout": lambda number: viewer.get(f"/rollouts/{rng.randrange(count // REPEATS)}:{number % REPEATS}"),
    }
    for name, send in kinds.items():
        yield Figure(f"{name}, p95", get_p95(time_requests(send)), "ms", 100)
    words = [
        "Oslo",
        "degrees",
        "synonym",
        "boxed",
        "tomorrow",
        "Paris",
        "weather in",
        "Remind me on",
        "How many",
        "contacts",
    ]
    times = time_requests(
        lambda number: viewer.get("/rows", q=f"{words[number % len(words)]}{' ' * (number // len(words))}")
    )
    yield Figure("text search, p95", get_p95(times), "ms", 300)
    times = time_requests(lambda number: viewer.get("/facets", where=[["reward", "<=", 0.2 + number / 50]]))
    yield Figure("facets that are not cached, median", statistics.median(times), "ms", 150)


def measure_following(viewer: Viewer, run: Path, count: int) -> Figure:
    """Return the share of a core that the viewer needs while the run grows by 1,000 rollouts per second."""
    with (run / "rollouts.jsonl").open("rb") as file:
        lines = [orjson.loads(file.readline()) for _ in range(200)]
    rng = random.Random(2)
    cpu, began = viewer.read_cpu(), time.perf_counter()
    with viewer.client.stream("GET", "/api/events", params={"run": "run"}), (run / "rollouts.jsonl").open("ab") as file:
        for second in range(FOLLOWED_SECONDS):
            first = count + second * ROLLOUTS_PER_SECOND
            file.write(b"".join(build_line(lines, first + number, rng) for number in range(ROLLOUTS_PER_SECOND)))
            file.flush()
            time.sleep(max(0.0, began + second + 1 - time.perf_counter()))
    seconds = time.perf_counter() - began
    return Figure("following 1,000 rollouts per second", 100 * (viewer.read_cpu() - cpu) / seconds, "% of a core", 25)


def measure_page(viewer: Viewer) -> Iterator[Figure]:
    """Yield the time until a page shows rows, and its heap."""
    chromium = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        chromium = None
    if chromium is None:
        print("skipped: the page in a browser (Chromium or playwright is not installed)")
        return
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--enable-precise-memory-info"]
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        page = browser.new_page(viewport={"width": 1400, "height": 850})
        page.goto(viewer.address)
        page.get_by_text("compare two runs").wait_for()
        began = time.perf_counter()
        page.goto(f"{viewer.base}/#/run/run")
        page.locator(".grid-row .cell:first-child:not(:empty)").first.wait_for()
        yield Figure("rows of an indexed run on the screen", time.perf_counter() - began, "s", 1)
        for offset in range(0, 400_000, 8000):
            page.evaluate(f"document.querySelector('.grid').scrollTop = {offset}")
        page.wait_for_timeout(500)
        heap = page.evaluate("performance.memory.usedJSHeapSize") / 1e6
        yield Figure("heap of the page", heap, "MB", 50)
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="where to write the run; by default a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        write_run(folder, options.rollouts)
        run = folder / "run"
        size = (run / "rollouts.jsonl").stat().st_size
        print(f"{options.rollouts:,} rollouts, {size / 1e9:.2f} GB")
        index = RunIndex(find_run(run))
        figures = []
        for label, action, limit in (("pass 1: values", index.update, 10), ("pass 2: texts", index.update_texts, 90)):
            wall, cpu = measure(action)
            figures += [Figure(f"{label}, CPU", cpu, "s", limit), Figure(f"{label}, elapsed", wall, "s", 2 * limit)]
        figures.append(Figure("size of the index", index.path.stat().st_size / size * 100, "% of the run", 15))
        with running_viewer(run) as viewer:
            figures += measure_page(viewer)
            figures += measure_api(viewer, options.rollouts)
            figures.append(Figure("memory of the viewer", viewer.read_status("VmRSS"), "MB", 200))
            figures.append(measure_following(viewer, run, options.rollouts))
    for figure in figures:
        mark = "  EXCEEDED" if figure.value > figure.limit else ""
        print(f"{figure.name:40}{figure.value:10.2f} {figure.unit:14} (limit {figure.limit:g}){mark}")
    if any(figure.value > figure.limit for figure in figures):
        sys.exit(1)


if __name__ == "__main__":
    main()
