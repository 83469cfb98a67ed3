"""`asel demo`: a real run, and its display on terminals of all widths."""

from __future__ import annotations

import io
import re

import anyio
import pytest
from rich.console import Console
from support.command_line import asel as run
from support.command_line import report
from support.kernels import BEST, COSTS, Toy, call, scripted

import asel.cli.demo.story
from asel import ConfigCache, ConfigSelectorChain
from asel.cli.demo.service import Scene
from asel.cli.demo.story import Demo, Facts
from asel.cli.demo.summary import sentences
from asel.cli.demo.view import frame, live
from asel.stores.records import Record
from asel.web.entries import Entry


@pytest.mark.timeout(120)
def test_the_demo_serves_tunes_and_starts_again(tmp_path, monkeypatch):
    """On this machine's device, without a terminal: a line for each event, and a summary."""
    monkeypatch.setattr(asel.cli.demo.story, "_CALM_S", 0.2)
    folder = tmp_path / "demo"
    ran = run("demo", "--folder", folder)
    assert ran.code == 0, ran.err
    told = ran.out
    assert "400 callers asked for 2 cold keys at once, and shared one tune for each key." in told
    assert "Blocks(rows=96) fails in compile" in told
    assert told.count("candidates begins") == 3
    assert re.search(r"from autotune +400 ", told)
    assert re.search(r"warm requests, while it tunes: p50 .* p99", told)
    assert "in the background" in told
    assert "The second start answered 61 requests with no tune" in told
    assert "while a tune ran in the background" in told
    assert len(run("cache", "ls", "--store", folder / "cache", "--json").json) == 3
    shown = run("trace", folder / "trace.jsonl").out
    for name in ("demo: cold request 0", "asel.choose", "asel.autotune", "asel.candidate.compile", "asel.store.put"):
        assert name in shown
    assert "waits for the tune in" in shown
    assert f"asel trace {folder / 'trace.jsonl'}" in told
    assert f"{folder / 'report.html'}, for a browser" in told
    assert "demo.matmul@v1" in (folder / "report.html").read_text()
    again = run("demo", "--folder", folder)
    assert again.code == 2
    assert "not empty" in again.err


def test_the_demo_runs_on_asyncio_or_trio():
    """Any other name is wrong use."""
    assert "asyncio or trio" in run("demo", "--backend", "gevent").err


@pytest.mark.anyio
async def test_a_frame_shows_tiers_candidates_and_samples_while_a_tune_runs():
    """No line is wider than the window; at the end the winner is marked."""
    scene = Scene(title="cold")
    tuner, _ = scripted(COSTS, compile_s=0.2)
    frames = {}
    async with ConfigSelectorChain(ConfigCache(), tuner=tuner, sinks=[scene]) as selector:
        async with anyio.create_task_group() as callers:
            for _ in range(3):
                callers.start_soon(selector.choose, call(), Toy())
            await anyio.wait_all_tasks_blocked()
            seen = set()
            while scene.progress.running or not scene.progress.tunes:
                scene.progress.look(selector)
                seen |= {one.stage for tune in scene.progress.tunes.values() for one in tune.candidates.values()}
                samples = max(
                    (one.samples for tune in scene.progress.tunes.values() for one in tune.candidates.values()),
                    default=0,
                )
                frames[samples] = text_of(scene, 80)
                await anyio.sleep(0.05)
        assert await selector.choose(call(), Toy()) == BEST
    assert {"compiling", "racing"} <= seen
    assert len(frames) > 2
    assert "3 wait" in frames[min(frames)]
    for width in (40, 80, 160):
        lines = text_of(scene, width).splitlines()
        assert max(map(len, lines)) <= width
        assert sum("winner" in line for line in lines) == 1
        assert any("autotune" in line and "3" in line for line in lines)


def text_of(scene, width):
    to = Console(file=io.StringIO(), width=width, color_system=None)
    scene.latencies_s = {"calm": [0.001, 0.002], "tuning": [0.003]}
    to.print(frame(scene, to, list(scene.progress.tunes.values())))
    return to.file.getvalue().rstrip("\n")


@pytest.mark.anyio
async def test_the_live_display_keeps_titles_and_finished_tunes(tmp_path):
    """A finished tune is printed once, above the live part."""
    to = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    demo = Demo(tmp_path, ())
    tuner, _ = scripted(COSTS)
    with live(demo, to):
        async with ConfigSelectorChain(ConfigCache(), tuner=tuner, sinks=[demo.scene]) as demo.selector:
            demo.step("the first step")
            await demo.selector.choose(call(), Toy())
            demo.step("the second step")
    shown = to.file.getvalue()
    first, second = shown.index("the first step"), shown.index("the second step")
    assert first < shown.index("winner") < second
    assert "0 served" in shown


def entry(**changes):
    tuned = report(**changes)
    record = Record(key=tuned.key, cfg=tuned.winner, environment=tuned.environment, created=0.0)
    return Entry(record, tuned, "cache")


def test_the_summary_is_plain_sentences(tmp_path):
    """The chosen configs, the speed-ups, the latencies, and the second start."""
    demo = Demo(tmp_path, (), facts=Facts(400, 2, 2, "new(a=f32[8])", 0.2, 1.5, 61, 0.03, 0))
    demo.scene.latencies_s = {"calm": [0.001] * 99 + [0.01], "tuning": [0.002]}
    told = list(sentences(demo, [entry(), entry(fastest=32)]))
    assert any("2.00 times as fast as its default, rows=32 (noise 2%)" in one for one in told)
    assert any("keeps its default, rows=32" in one for one in told)
    assert any("took 1 ms at the median and 10 ms at p99 without a tune; 2 ms at the median" in one for one in told)
    assert told[-1].startswith("The second start answered 61 requests with no tune")
