"""No call continues with other text than that of the chat templates of published models.

The templates are those in the source archive of llama-cpp-python, which is downloaded from PyPI by its hash and is not
built. `GYMSDK_TEMPLATES` names a folder to keep them in, and `GYMSDK_TEMPLATE_TABLE` a file for the table. `.ci/long`
runs this test.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from gymsdk.responses import TokenInterface
from gymsdk.tokens.bridge import TemplateBridge, TokenizerSteps

from .jinja_templates import KINDS, Outcome, play_kind

VERSION = "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
COUNT = 70
OUTCOMES: tuple[Outcome, ...] = ("template", "counted", "marked", "rejected", "different")
INTERFACES: tuple[TokenInterface, ...] = ("vllm-generate", "sglang")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the sources of the templates by name."""
    kept = os.environ.get("GYMSDK_TEMPLATES")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("templates")
    if not [*folder.glob("*.jinja")]:
        download(folder)
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}


def download(folder: Path) -> None:
    """Write the templates of the archive to *folder*."""
    folder.mkdir(parents=True, exist_ok=True)
    requirements = folder / "requirements.txt"
    requirements.write_text(f"llama-cpp-python=={VERSION} --hash=sha256:{SHA256}\n")
    options = ["--no-binary", ":all:", "--no-deps", "--require-hashes", "-r", str(requirements), "-d", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *options], check=True, timeout=1800)
    archive = next(folder.glob("*.tar.gz"))
    with tarfile.open(archive) as file:
        for member in file:
            if re.fullmatch(r"[^/]+/vendor/llama\.cpp/models/templates/[^/]+\.jinja", member.name):
                content = file.extractfile(member)
                assert content is not None
                (folder / Path(member.name).name).write_bytes(content.read())
    archive.unlink()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows with each continuation that is found by counting turns."""
    calls: list[str] = []
    count = TemplateBridge.count_suffix

    def record(self: TemplateBridge, *arguments: object, **options: object) -> TokenizerSteps[list[int]]:
        ids = yield from count(self, *arguments, **options)  # type: ignore[arg-type]  # the same arguments
        calls.append("counted")
        return ids

    monkeypatch.setattr(TemplateBridge, "count_suffix", record)
    return calls


@pytest.mark.parametrize("interface", INTERFACES)
def test_no_template_continues_with_other_text(
    templates: dict[str, str], interface: TokenInterface, counted: list[str]
) -> None:
    logging.getLogger("gymsdk").setLevel(logging.ERROR)
    assert len(templates) == COUNT
    rows: dict[str, Counter[Outcome]] = {}
    reasons: Counter[str] = Counter()
    different: list[tuple[str, str, str]] = []
    for name, source in templates.items():
        rows[name] = Counter()
        for kind_name, kind in KINDS.items():
            for outcome, detail in asyncio.run(play_kind(source, kind, interface, counted)):
                rows[name][outcome] += 1
                reasons[detail[:80]] += outcome == "marked"
                different += [(name, kind_name, detail)] if outcome == "different" else []
    if path := os.environ.get("GYMSDK_TEMPLATE_TABLE"):
        with Path(path).open("a") as file:
            file.writelines(f"{line}\n" for line in format_table(interface, rows, reasons))
    assert different == []


def format_table(interface: str, rows: dict[str, Counter[Outcome]], reasons: Counter[str]) -> Iterator[str]:
    """Yield the lines of the table, in Markdown."""
    yield f"\n## {interface}: llama-cpp-python {VERSION}, {len(rows)} templates, {len(KINDS)} conversations\n"
    yield f"| template | {' | '.join(OUTCOMES)} |"
    yield "|---" * (len(OUTCOMES) + 1) + "|"
    total = sum(rows.values(), Counter())
    for name, row in [*rows.items(), ("**all**", total)]:
        yield f"| {name} | {' | '.join(str(row[outcome]) for outcome in OUTCOMES)} |"
    yield ""
    for reason, count in (+reasons).most_common():
        yield f"marked {count}: {reason}"
