"""Draw the pictures of `asel demo`, its trace and its report from a real run: `python observability/pictures.py`.

The demo's has the moment at which most candidates of a tune were racing, and the summary; the trace's has the tune with
a candidate that fails; the report's has the key that gained most. Run it with nothing else running. It needs Chromium.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import anyio
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, Group
from rich.text import Text

from asel.cli.cache.record_lookup import read_entries
from asel.cli.demo.command import spans_in, summarize
from asel.cli.demo.story import Demo, tell
from asel.cli.demo.view import frame
from asel.cli.trace.spans import read_spans
from asel.cli.trace.waterfall import print_trace, traces_of
from asel.web.report import report_page

WIDTH = 100
PICTURE, TRACE, REPORT = (Path(__file__).with_name(name) for name in ("demo.svg", "trace.svg", "report.png"))
# Without the fonts that rich would have a reader's browser fetch.
SVG_FORMAT = re.sub(r"@font-face \{\{.*?\}}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def main() -> None:
    out = _console()
    with (
        tempfile.TemporaryDirectory(prefix="asel-demo-") as name,
        spans_in(Path(name, "trace.jsonl")) as (tracer, sinks),
    ):
        demo = Demo(Path(name, "cache"), sinks, tracer)
        title, moment = anyio.run(_most_lively, demo, out)
        out.print(Text("$ asel demo", "bold"), Text(title, "bold cyan"), moment, sep="\n")
        summarize(out, demo, Path(name, "report.html"), Path(name, "trace.jsonl"), None)
        _photograph(Path(name, "cache"), Path(name, "report.html"))
        _draw_trace(Path(name, "trace.jsonl"))
    _save(out, "asel demo", PICTURE)


def _save(out: Console, title: str, picture: Path) -> None:
    picture.write_text(out.export_svg(title=title, code_format=SVG_FORMAT), encoding="utf-8")
    print(f"{picture}: {picture.stat().st_size / 1000:.0f} kB")


def _console() -> Console:
    return Console(file=io.StringIO(), width=WIDTH, record=True, force_terminal=True, highlight=False, markup=False)


def _draw_trace(spans: Path) -> None:
    """Draw the shortest trace that has a failed candidate in it."""
    found = [
        one
        for one in traces_of(read_spans(spans)[0])
        if any(span.name.startswith("asel.candidate") and "error.type" in span.attributes for span in one.spans)
    ]
    out = _console()
    print_trace(out, min(found, key=lambda one: len(one.spans)))
    _save(out, "asel trace trace.jsonl", TRACE)


def _photograph(cache: Path, page: Path) -> None:
    """Write the report of a cache, and take a picture of it with the key that gained most opened."""
    entries, unreadable = read_entries(str(cache))
    page.write_text(report_page(entries, unreadable, title="asel demo", created=time.time()), encoding="utf-8")
    best = max(entries, key=lambda entry: entry.speedup or 0.0)
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("the report's picture needs Chromium: apt-get install chromium")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1100,1250"]
    options += [f"--user-data-dir={page.parent / 'profile'}", f"--screenshot={REPORT}"]
    address = f"{page.as_uri()}#{best.record.key.call_key}"
    subprocess.run([chromium, *options, address], check=True, capture_output=True, timeout=60)
    print(f"{REPORT}: {REPORT.stat().st_size / 1000:.0f} kB")


async def _most_lively(demo: Demo, to: Console) -> tuple[str, Group]:
    """Run the demo; return the frame in which most happened, with the title of its step."""
    best: tuple[int, str, Group] = (-1, "", Group())

    async with anyio.create_task_group() as tasks:

        async def run() -> None:
            await tell(demo)
            tasks.cancel_scope.cancel()

        tasks.start_soon(run)
        while True:
            await anyio.sleep(0.01)
            if demo.selector is None:
                continue
            demo.scene.progress.look(demo.selector)
            running = demo.scene.progress.running
            candidates = [one for tune in running for one in tune.candidates.values()]
            lively = sum((one.stage in ("racing", "out")) + 3 * (one.stage == "out") for one in candidates)
            if lively > best[0] and demo.scene.waiting:
                best = (lively, demo.scene.title, frame(demo.scene, to, running))
    return best[1:]


if __name__ == "__main__":
    main()
