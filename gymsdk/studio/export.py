"""Export the viewer with the data of runs: a folder or a single HTML file that opens from disk and needs no server.

The pages are those of the viewer. Their modules become `data:` URLs in an import map, because a browser loads no
modules from disk; the rows and the lines of rollouts are compressed parts of about a megabyte in classic scripts.
"""

from __future__ import annotations

import base64
import gzip
import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any

from gymsdk import jsonl, line
from gymsdk.errors import UsageError
from gymsdk.runs.compare import compare, to_json
from gymsdk.runs.filters import Filter, describe_grammar
from gymsdk.runs.groups import MAX_COUNTED_VALUES
from gymsdk.runs.lenses import LENSES
from gymsdk.runs.queries import MAX_LISTED_VALUES, RunQueries
from gymsdk.runs.records import list_verdict_names
from gymsdk.studio.app import STATIC, describe_lenses, describe_run
from gymsdk.studio.library import Library, OpenRun
from gymsdk.types import Row

CHUNK_BYTES = 1_000_000
"""The size of the lines in one part, before compression."""

MAX_FILE_BYTES = 50_000_000
"""The size of the lines up to which a single file is written; a browser would open a larger one slowly."""

CLASSIC_SCRIPTS = ("purify.min.js", "katex.min.js", "diff.min.js")
"""The libraries that set a global variable; the others are modules."""

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'self' data: file:; style-src 'unsafe-inline'; img-src data:;"
    " base-uri 'none'; form-action 'none'"
)
"""An exported page loads nothing from elsewhere. Its own scripts are inline, as a file from disk has no origin."""


@dataclass(frozen=True)
class ExportChoice:
    """Which rollouts are exported.

    Attributes:
        chosen: A filter.
        sample: The most rollouts of each run, spread evenly; `None` for all.
    """

    chosen: Filter = field(default_factory=Filter)
    sample: int | None = None


def export_runs(paths: Sequence[Path], target: Path, choice: ExportChoice | None = None) -> int:
    """Write the viewer with the data of runs, and return the number of rollouts.

    Args:
        paths: The runs.
        target: A file that ends in `.html`, or a new or empty folder.
        choice: Which rollouts; by default all.

    Raises:
        UsageError: The target cannot be written, or a single file would be too large.
    """
    is_file = target.suffix == ".html"
    if not is_file and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} exists; name a new folder, or a file that ends in .html")
    library = Library(paths)
    runs = library.list_runs()
    try:
        for run in runs:
            run.update()
        chunks = dict(_build_chunks(runs, choice or ExportChoice(), MAX_FILE_BYTES if is_file else None))
        _write(target, chunks, is_file=is_file)
        return sum(len(chunks[f"rows-{number}"]) for number in range(len(runs)))
    except OSError as error:
        raise UsageError(f"{target} cannot be written ({error.strerror or error})") from error
    finally:
        library.stop()


def _build_chunks(runs: Sequence[OpenRun], choice: ExportChoice, max_bytes: int | None) -> Iterator[tuple[str, Any]]:
    """Yield the name and the JSON value of each part."""
    described, total = [], 0
    for number, run in enumerate(runs):
        rows = list(_list_rows(run, choice))
        chunk: dict[str, Any] = {}
        names: list[str] = []
        size = 0
        for row in rows:
            with run.use() as queries:
                data = queries.read_bytes(row["id"])
            size += len(data)
            total += len(data)
            if max_bytes is not None and total > max_bytes:
                raise UsageError(
                    f"the rollouts have more than {max_bytes // 1_000_000} MB, too much for one file; export a folder,"
                    " or choose rollouts with --where or --sample"
                )
            stored = line.parse(data, number=row["task"], where=str(run.source.path), is_failure=bool(row["failure"]))
            row |= {
                "chunk": f"lines-{number}-{len(names)}",
                "verdict": list_verdict_names(stored),
            }
            chunk[str(row["id"])] = stored.line
            if size > CHUNK_BYTES:
                yield row["chunk"], chunk
                names.append(row["chunk"])
                chunk, size = {}, 0
        if chunk:
            name = f"lines-{number}-{len(names)}"
            yield name, chunk
            names.append(name)
        yield f"rows-{number}", rows
        described.append(_describe(run, len(rows)) | {"rows_chunk": f"rows-{number}", "chunks": names})
    yield "runs", described
    limits = {"max_counted_values": MAX_COUNTED_VALUES, "max_listed_values": MAX_LISTED_VALUES}
    yield "grammar", describe_grammar() | limits
    # In both orders: a page may compare either run with the other.
    comparisons = {
        jsonl.dump_json([first.key, second.key]).decode(): to_json(compare(first.index, second.index))
        for first, second in permutations(runs, 2)
    }
    yield "comparisons", comparisons


def _list_rows(run: OpenRun, choice: ExportChoice) -> Iterator[Row]:
    """Yield the chosen rollouts with their figures and tools."""
    if choice.chosen.search:
        run.index.update_texts()
    with run.use() as queries:
        ids_by_lens = {name: set(queries.list_ids(Filter((("lens", "=", name),)))) for name in LENSES}
        total = queries.count(choice.chosen)
        step = max(1.0, total / choice.sample) if choice.sample else 1.0
        next_number, count = 0.0, 0
        for number, row in enumerate(queries.iter_rows(choice.chosen)):
            if number < next_number or (choice.sample is not None and count >= choice.sample):
                continue
            next_number += step
            count += 1
            lenses = [name for name, ids in ids_by_lens.items() if row["id"] in ids]
            details = {"figures": queries.get_figures(row["id"]), "tools": queries.get_tools(row["id"])}
            details["fields"] = queries.get_fields(row["id"])
            yield row | details | {"lenses": lenses}


def _describe(run: OpenRun, count: int) -> Row:
    settings = run.source.read_about().get("settings")
    summary = run.compute("summary", RunQueries.summarize)
    with run.use() as queries:
        bad, figures, edges = queries.list_bad_lines(), queries.list_figures(), queries.get_reward_edges()
        lenses = describe_lenses(queries)
    is_part = count < summary["rollouts"]
    return describe_run(run) | {
        "path": run.source.name,
        "settings": settings,
        "summary": summary,
        "figures": figures,
        "reward_edges": edges,
        "bad_lines": bad + run.notes.list_bad_lines(),
        **lenses,
        "notes": [note.model_dump() for note in run.notes.read()],
        "part": f"{count} of {summary['rollouts']} rollouts are on this page" if is_part else "",
    }


def _write(target: Path, chunks: dict[str, Any], *, is_file: bool) -> None:
    scripts = {name: _build_script(name, value) for name, value in chunks.items()}
    first = ("runs", "grammar", "comparisons")
    if is_file:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{target.name}.part")
        temporary.write_text(_build_page(list(scripts.values())), encoding="utf-8")
        # Renamed when complete: a page that was interrupted must not look like an export.
        temporary.replace(target)
        return
    (target / "data").mkdir(parents=True)
    for name, script in scripts.items():
        if name not in first:
            (target / "data" / f"{name}.js").write_text(script, encoding="utf-8")
    (target / "index.html").write_text(_build_page([scripts[name] for name in first]), encoding="utf-8")


def _build_script(name: str, value: Any) -> str:
    """Return a classic script that adds a compressed part."""
    # `mtime=0`: the same rollouts give the same file.
    packed = base64.b64encode(gzip.compress(jsonl.dump_portable_json(value), 6, mtime=0)).decode()
    return f'(window.gymsdkData ||= {{ chunks: {{}} }}).chunks["{name}"] = "{packed}";\n'


def _build_page(data: Sequence[str]) -> str:
    modules = {f"gymsdk/{path.name}": _adapt_module(path.read_text("utf-8")) for path in STATIC.glob("*.js")}
    vendor = STATIC / "vendor"
    names = {"preact": "preact.mjs", "preact/hooks": "preact-hooks.mjs", "htm": "htm.mjs", "marked": "marked.mjs"}
    modules |= {name: (vendor / file).read_text("utf-8") for name, file in names.items()}
    modules |= {f"gymsdk/vendor/{name}": "" for name in CLASSIC_SCRIPTS}
    imports = {name: f"data:text/javascript;base64,{_encode(text)}" for name, text in modules.items()}
    import_map = jsonl.dump_json({"imports": imports}).decode()
    # These scripts set their globals before any module runs, so the modules that import them are empty.
    libraries = [(vendor / name).read_text("utf-8") for name in CLASSIC_SCRIPTS]
    style = (STATIC / "style.css").read_text("utf-8")
    icon = f"data:image/svg+xml;base64,{_encode((STATIC / 'icon.svg').read_text('utf-8'))}"
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(POLICY)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        f'<title>gymsdk view</title><link rel="icon" href="{icon}"><style>{style}</style>',
        *(f"<script>{_escape_script(text)}</script>" for text in (*libraries, *data)),
        f'<script type="importmap">{_escape_script(import_map)}</script>',
        '<script type="module">await import("gymsdk/exported.js"); await import("gymsdk/app.js");</script>',
        '</head><body><div id="app"></div></body></html>',
    ]
    return "\n".join(lines) + "\n"


def _adapt_module(text: str) -> str:
    """Return a module with names of the import map instead of relative imports."""
    return re.sub(r'((?:from|import|import\() ?)"\./', r'\1"gymsdk/', text)


def _encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _escape_script(text: str) -> str:
    """Return a script that cannot end its own element."""
    return re.sub(r"</(?=script)|<!--", lambda match: match[0].replace("<", "\\x3c"), text, flags=re.IGNORECASE)
