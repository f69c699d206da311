"""Send mutated requests to all servers, and check that none of them fails because of a request.

usage: fuzz.py [--requests N] [--seed S] [--case N] [--step N] [--only TEXT]

Starts `gymsdk serve` with several models and with two workers, two policy endpoints and a viewer with `--play`. Each
case is a short sequence of valid requests, of which the last one and some others are mutated. The seed and the number
of a case determine the case. Before the cases, every query parameter of the viewer gets every hostile value.

The script prints the statuses by server and route, and each kind of failure with its smallest request. A failure is a
status of 500 or more, a hanging request, a connection that is closed without an answer, a traceback in a log, or a
process whose memory grows. These statuses are no failures: 501 of an engine that cannot count tokens, and 503 of an
agent whose tools do not answer, or whose session is lost. The exit status is 1 if there is a failure.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import orjson
from fuzzing.client import Answer, Client
from fuzzing.mutations import QUERY_VALUES, HttpRequest, list_smaller, mutate
from fuzzing.targets import Target, serve_all

REQUESTS, SEED = 20_000, 1
MAX_GROWTH_MB = 64
"""How much the memory of a process may grow in the last three quarters of the requests."""

MAX_SHRINKS = 150
"""The most requests of one search for a smaller request."""

LEGITIMATE = frozenset({("model_cannot_count", 501), ("server_unreachable", 503), ("session_lost", 503)})
"""Kinds of failures that a request does not cause, with their statuses."""


@dataclass
class Report:
    """The outcomes of all requests."""

    statuses: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    hook_failures: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    failures: dict[tuple[str, str, int, bytes], tuple[int, HttpRequest, Answer]] = field(default_factory=dict)


def is_failure(answer: Answer) -> bool:
    """Return whether an answer shows a defect of the server."""
    if 0 < answer.status < 500:
        return False
    try:
        body = orjson.loads(answer.body)
    except ValueError:
        return True
    error = body.get("error") if isinstance(body, dict) else None
    kinds = [body.get("kind")] if isinstance(body, dict) else []
    kinds += [error.get("code"), error.get("type")] if isinstance(error, dict) else []
    message = error.get("message", "") if isinstance(error, dict) else ""
    return not any((kind, answer.status) in LEGITIMATE for kind in kinds) and "cannot count tokens" not in message


def read_hook_failure(answer: Answer) -> str:
    """Return the message of an answer whose request made code of an environment raise, else an empty text."""
    if b'"hook_raised"' not in answer.body and b'"tool_raised"' not in answer.body:
        return ""
    body = orjson.loads(answer.body)
    return str(body.get("detail", body))[:160] if isinstance(body, dict) else ""


def get_signature(answer: Answer) -> bytes:
    """Return what answers to the same defect have in common."""
    return answer.body[:60]


class Fuzzer:
    """Plays cases against servers.

    Args:
        targets: The servers.
        seed: The seed of all cases.
    """

    def __init__(self, targets: list[Target], seed: int) -> None:
        self._targets = targets
        self._seed = seed
        self._clients = {target.name: Client(target.url, target.headers) for target in targets}
        self.report = Report()
        self.sent = 0

    def play(self, number: int) -> None:
        """Play one case."""
        rng = random.Random(f"{self._seed}:{number}")
        [target] = rng.choices(self._targets, [candidate.weight for candidate in self._targets])
        sequence = rng.choice(target.cases)
        requests = [
            mutate(request, rng) if index == len(sequence) - 1 or rng.random() < 0.15 else request
            for index, request in enumerate(sequence)
        ]
        if rng.random() < 0.1:
            requests.append(requests[-1])
        if rng.random() < 0.05:
            self._clients[target.name].leave(requests[-1])
        self.play_requests(target, requests, number, at_once=rng.random() < 0.05)

    def list_query_requests(self) -> list[tuple[Target, HttpRequest]]:
        """Return a request for each query parameter of the viewer and each hostile value."""
        return [
            (target, replace(case[-1], query=(*case[-1].query, (name, value))))
            for target in self._targets
            for case in target.cases
            if target.name == "viewer"
            for name in case[-1].parameters
            for value in QUERY_VALUES
        ]

    def play_requests(self, target: Target, requests: list[HttpRequest], number: int, *, at_once: bool = False) -> None:
        """Send the requests of a case, with the cookies of the answers; the last one twice at once if asked for."""
        cookies: tuple[str, ...] = ()
        for index, request in enumerate(requests):
            answers: tuple[Answer, ...]
            if at_once and request is requests[-1]:
                answers = self._clients[target.name].send_twice(request, cookies)
            else:
                answers = (self._clients[target.name].send(request, cookies),)
            for answer in answers:
                self._record(target, requests[:index], request, answer, number)
            cookies = answers[0].cookies or cookies
        if target.after is not None:
            self._clients[target.name].send(target.after)

    def _record(
        self, target: Target, before: list[HttpRequest], request: HttpRequest, answer: Answer, number: int
    ) -> None:
        self.sent += 1
        self.report.statuses[target.name, request.route, answer.status] += 1
        if kind := read_hook_failure(answer):
            self.report.hook_failures[target.name, request.route, kind] += 1
        if is_failure(answer):
            key = (target.name, request.route, answer.status, get_signature(answer))
            if key not in self.report.failures:
                self.report.failures[key] = number, *self._shrink(target, before, request, answer)

    def _shrink(
        self, target: Target, before: list[HttpRequest], request: HttpRequest, answer: Answer
    ) -> tuple[HttpRequest, Answer]:
        """Return the smallest request found that fails in the same way."""
        if answer.status < 0:
            return request, answer
        tries = 0
        is_smaller = True
        while is_smaller:
            is_smaller = False
            for smaller in list_smaller(request):
                tries += 1
                if tries > MAX_SHRINKS:
                    return request, answer
                other = self._replay(target, before, smaller)
                if is_failure(other) and other.status == answer.status:
                    request, answer, is_smaller = smaller, other, True
                    break
        return request, answer

    def _replay(self, target: Target, before: list[HttpRequest], request: HttpRequest) -> Answer:
        cookies: tuple[str, ...] = ()
        for earlier in before:
            cookies = self._clients[target.name].send(earlier, cookies).cookies or cookies
        return self._clients[target.name].send(request, cookies)


def read_memory(pid: int) -> int:
    """Return the resident memory of a process and its children, in MB."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    own = next(
        int(line.split()[1])
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmRSS")
    )
    return own // 1024 + sum(read_memory(int(child)) for child in children)


def print_statuses(report: Report) -> None:
    """Print how often each route of each server gave each status."""
    rows: dict[tuple[str, str], Counter[int]] = {}
    for (server, route, status), count in sorted(report.statuses.items()):
        rows.setdefault((server, route), Counter())[status] = count
    for (server, route), counts in rows.items():
        statuses = " ".join(f"{status}:{count}" for status, count in sorted(counts.items()))
        print(f"{server:36} {route:52} {sum(counts.values()):6}  {statuses}")


def print_hook_failures(report: Report) -> None:
    """Print which requests made the code of an environment raise: the environment should refuse such rows."""
    for (server, route, message), count in report.hook_failures.most_common(20):
        print(f"raised {count} times at {server}, {route}: {message}")


def print_failures(report: Report) -> None:
    """Print each kind of failure with its smallest request."""
    for (server, _, status, _), (number, request, answer) in sorted(
        report.failures.items(), key=lambda item: item[1][0]
    ):
        content = request.content
        print(
            f"\nFAILED {status} at {server}, case {number}: {request.method} {request.target[:300]} {request.headers}"
        )
        print(f"  body: {content[:600]!r}{' …' if len(content) > 600 else ''}")
        print(f"  answer: {answer.body[:600]!r}")


def check_logs(folder: Path) -> dict[str, str]:
    """Return the first traceback of each log that has one, by the name of the log."""
    found = {}
    for path in sorted(folder.glob("*.log")):
        text = path.read_text(errors="replace")
        if (position := text.find("Traceback")) >= 0:
            found[path.stem] = text[max(0, position - 300) : position + 6000]
    return found


@dataclass(frozen=True)
class Outcome:
    """What happened to the servers.

    Attributes:
        report: The answers.
        summary: What was sent.
        memory: The memory of each process after the requests, and its growth, in MB.
        dead: The servers that do not answer any more.
        tracebacks: The first traceback of each log.
    """

    report: Report
    summary: str
    memory: dict[str, tuple[int, int]]
    dead: list[str]
    tracebacks: dict[str, str]

    @property
    def grown(self) -> list[str]:
        """The processes whose memory has grown too much."""
        return [name for name, (_, growth) in self.memory.items() if growth > MAX_GROWTH_MB]

    @property
    def failures(self) -> int:
        """The number of failures."""
        return len(self.report.failures) + len(self.tracebacks) + len(self.dead) + len(self.grown)


def play_all(arguments: argparse.Namespace, folder: Path) -> Outcome:
    """Start the servers and send the requests."""
    with serve_all(folder) as (targets, processes):
        chosen = [candidate for candidate in targets if arguments.only in candidate.name]
        fuzzer = Fuzzer(chosen, arguments.seed)
        started, number = time.perf_counter(), 0
        before: dict[str, int] = {}
        if arguments.case is not None:
            fuzzer.play(arguments.case)
        else:
            for target, request in fuzzer.list_query_requests()[:: arguments.step]:
                fuzzer.play_requests(target, [request], -1)
            while fuzzer.sent < arguments.requests:
                fuzzer.play(number)
                number += 1
                if not before and fuzzer.sent >= arguments.requests / 4:
                    before = {name: read_memory(pid) for name, pid in processes.items()}
        seconds = time.perf_counter() - started
        after = {name: read_memory(pid) for name, pid in processes.items()}
        root = HttpRequest("GET", "/")
        dead = [server.name for server in chosen if Client(server.url, server.headers).send(root).status != 200]
    memory = {name: (size, size - before.get(name, size)) for name, size in after.items()}
    summary = f"{fuzzer.sent:,} requests in {number:,} cases to {len(chosen)} servers in {seconds:.0f} s"
    return Outcome(fuzzer.report, f"seed {arguments.seed}: {summary}", memory, dead, check_logs(folder))


def print_outcome(outcome: Outcome) -> None:
    """Print the figures and the failures."""
    report = outcome.report
    print(f"{outcome.summary}\n")
    print_statuses(report)
    print_hook_failures(report)
    print_failures(report)
    print()
    for name, (size, growth) in outcome.memory.items():
        print(f"memory of {name:20} {size:6} MB, grown by {growth:4} MB  (limit {MAX_GROWTH_MB})")
    for name, traceback in outcome.tracebacks.items():
        print(f"\nlog of {name}: {traceback}")
    statuses = Counter[int]()
    for (_, _, status), count in report.statuses.items():
        statuses[status if status < 0 or status >= 500 else status // 100 * 100] += count
    print("\n" + ", ".join(f"{count:,} with {_describe(status)}" for status, count in sorted(statuses.items())))
    print(
        f"{outcome.failures} failures: {len(report.failures)} kinds of answers, {len(outcome.tracebacks)} logs with"
        f" tracebacks, {len(outcome.dead)} servers that do not answer any more {outcome.dead},"
        f" {len(outcome.grown)} processes that grow {outcome.grown}"
    )


def _describe(status: int) -> str:
    names = {-1: "a closed connection", -2: "no answer in time"}
    return names.get(status, str(status) if status >= 500 else f"{status // 100}xx")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--case", type=int, help="play only this case")
    parser.add_argument("--step", type=int, default=1, help="of the viewer's query parameters, try every Nth value")
    parser.add_argument("--only", default="", help="play only servers whose name contains this text")
    with tempfile.TemporaryDirectory() as folder:
        outcome = play_all(parser.parse_args(), Path(folder))
    print_outcome(outcome)
    sys.exit(bool(outcome.failures))


if __name__ == "__main__":
    main()
