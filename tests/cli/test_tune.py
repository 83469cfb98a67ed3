"""`asel tune`: its targets, its results, its exit codes, Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys

import anyio
import pytest
from rich.console import Console
from support.command_line import asel
from support.kernels import Toy, call
from support.kernels import scripted as kernels_scripted
from support.tunable import COSTS

import asel.cli.tune.run as tune_run
from asel import ConfigCache, ConfigSelectorChain, Invocation, PersistentCache, Tuner
from asel.cli.tune.targets import target_calls
from asel.cli.tune.view import _frame
from asel.serving.import_paths import imported_kernel
from asel.testing import ScriptedMeasure


@pytest.fixture
def scripted(script):
    return script()


def test_a_kernel_in_a_file_is_tuned_and_stored(kernels):
    """On the real device; the config is in the operation's cache, and the next command finds it."""
    command = ["tune", f"{kernels}:square", "--shapes", "x=f32[64]", "--shapes", "x=f32[64], scale=2.0", "--check"]
    ran = asel(*command)
    assert ran.code == 0, ran.err
    assert ran.out.count("tuned") == 4  # as each ends, and in the table
    assert "square(x=f32[64], scale=2.0)" in ran.out
    assert str(kernels.parent / "caches" / "square") in ran.out
    again = asel(*command, "--json")
    assert [row["outcome"] for row in again.json] == ["known", "known"]
    assert again.json[0]["config"] in COSTS
    assert "[2/2] known" in again.err
    assert {one["key"] for one in asel("cache", "ls", "--json").json} == {row["key"] for row in again.json}


def test_the_summary_has_speedup_noise_and_failures(kernels, scripted, monkeypatch):
    """A call without a config has the reason, and the exit code is 1."""
    store = kernels.parent / "configs.json"
    good = asel("tune", f"{kernels}:square", "--shapes", "x=f32[8]", "--store", store, "--json")
    assert good.code == 0
    (row,) = good.json
    assert (row["outcome"], row["config"], row["error"]) == ("tuned", 3, None)
    assert row["speedup"] > 1
    assert row["noise"] > 0
    assert "x ±" in asel("tune", f"{kernels}:square", "--shapes", "x=f32[8]", "--store", store, "--again").out
    job = kernels.parent / "jobs.toml"
    job.write_text(
        f'store = "{store}"\n[[tune]]\nkernel = "tune_example.py:square"\nshapes = ["x=f32[8]"]\n'
        '[[tune]]\nkernel = "tune_example.py:broken"\nshapes = ["x=f32[8]"]\nbackward = true\n'
    )
    monkeypatch.setattr(tune_run, "Tuner", Tuner)
    ran = asel("tune", job)
    assert ran.code == 1
    assert "known" in ran.out
    assert "broken(x=f32[8]) has no config: TuningError" in ran.out
    assert "there is no such shape" in ran.out


def test_the_summary_names_candidates_that_failed(kernels):
    """A tuned call keeps its config; the candidates that --check refused are listed, also in the JSON."""
    (kernels.parent / "picky_example.py").write_text(
        "from asel import kernel\n"
        "@kernel(op_id='picky', configs=[1, 2, 3], heuristic=1)\n"
        "def picky(x, *, cfg):\n    return x * (2 if cfg == 3 else 1)\n"
    )
    command = ["tune", f"{kernels.parent / 'picky_example.py'}:picky", "--shapes", "x=f32[8]", "--check"]
    ran = asel(*command)
    assert ran.code == 0
    assert "picky(x=f32[8]): 1 of 3 candidates failed; 1 of them: OutputMismatch in the check stage" in ran.out
    (row,) = asel(*command, "--json").json
    assert [(one["config"], one["error"]) for one in row["failures"]] == [("3", "OutputMismatch")]
    sys.modules.pop("picky_example")


@pytest.mark.timeout(90)
def test_commands_with_one_store_share_the_work(tmp_path):
    """Of two processes, one tunes each call, and both have all configs in the end."""
    (tmp_path / "slow_example.py").write_text(
        "import time\n"
        "from asel import kernel\n"
        "@kernel(op_id='slow', configs=[1, 2], heuristic=1)\n"
        "def slow(x, *, cfg):\n    time.sleep(0.5)\n    return x * cfg\n"  # compiling takes long enough to meet
    )
    shapes = [f"--shapes=x=f32[{size}]" for size in (8, 16, 32)]
    command = [sys.executable, "-m", "asel", "tune", "slow_example.py:slow", *shapes, "--store", "./cache", "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    running = [subprocess.Popen(command, cwd=tmp_path, text=True, **pipes) for _ in range(2)]
    tables = [json.loads(one.communicate(timeout=60)[0]) for one in running]
    assert [one.returncode for one in running] == [0, 0]
    outcomes = [sorted(row["outcome"] for row in rows) for rows in zip(*tables, strict=True)]
    assert outcomes == [["known", "tuned"]] * 3
    assert [row["config"] for row in tables[0]] == [row["config"] for row in tables[1]]


def test_options_reach_the_tuner(kernels, scripted):
    """Options of the command line override those of a job file."""
    job = kernels.parent / "jobs.toml"
    job.write_text(
        'strategy = "race"\nisolation = "process"\ncheck = true\n'
        '[[tune]]\nkernel = "tune_example.py:square"\nshapes = ["x=f32[8]"]'
    )
    assert asel("tune", job, "--isolation", "thread").code == 0
    assert scripted == [{"isolation": "thread", "check": True, "strategy": "race"}]


def test_recorded_calls_are_a_target(kernels, scripted, monkeypatch):
    """Unreadable lines are named, and the other lines are used."""
    monkeypatch.syspath_prepend(kernels.parent)
    calls = kernels.parent / "calls.jsonl"
    lines = [{"kernel": "tune_example:square", "call": f"x=f32[{size}]", "seen": size} for size in (8, 16)]
    calls.write_text("\n".join([*map(json.dumps, lines), "nonsense"]))
    ran = asel("tune", calls, "--json")
    assert [row["call"] for row in ran.json] == ["x=f32[8]", "x=f32[16]"]
    assert "line 3" in ran.err


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_keeps_measurements_and_prints_the_command_to_continue(kernels, scripted, monkeypatch, times):
    """The first ends the tune with the best so far, which the next run measures again; the second drops it."""
    sampled = []

    class Interrupting(ScriptedMeasure):
        async def compile(self, trial):
            sample = await super().compile(trial)

            async def interrupting():
                sampled.append(trial.cfg)
                if len(sampled) == 3:  # two were sampled and can be compared
                    for _ in range(times):
                        os.kill(os.getpid(), signal.SIGINT)
                        await anyio.wait_all_tasks_blocked()
                return await sample()

            return interrupting

    plain = tune_run.Tuner
    monkeypatch.setattr(
        tune_run,
        "Tuner",
        lambda **options: Tuner(warmup=0, iters=1, strategy="exhaustive", measure=Interrupting(COSTS)),
    )
    command = ["tune", f"{kernels}:square", "--shapes", "x=f32[8]", "--shapes", "x=f32[16]"]
    monkeypatch.setattr(sys, "argv", ["asel", *command])
    ran = asel(*command)
    assert ran.code == 130
    assert ran.out.count(" left ") == times  # in the table
    assert f"stopped: {2 - times} of 2 calls have their config" in ran.err
    assert f"asel tune {kernels}:square --shapes 'x=f32[8]'" in ran.err
    assert "frozen" not in ran.out + ran.err
    if times == 1:
        assert "budget of 60 s" not in asel("cache", "why", "x=f32").out  # it was Ctrl-C that spent it
    monkeypatch.setattr(tune_run, "Tuner", plain)
    rows = asel(*command, "--json").json
    assert [(row["outcome"], row["config"]) for row in rows] == [("tuned", 3), ("tuned", 3)]


def test_a_store_that_fails_is_named(kernels, scripted):
    """It is refused before anything is tuned."""
    command = ["tune", f"{kernels}:square", "--shapes", "x=f32[8]", "--store"]
    away = asel(*command, "redis://u:hunter2@127.0.0.1:1?timeout_s=0.1")
    assert (away.code, away.out) == (2, "")
    assert "cannot be reached" in away.err
    assert "hunter2" not in away.err
    closed = asel(*command, "/dev/null/cache")
    assert (closed.code, closed.out) == (2, "")
    assert "/dev/null/cache" in closed.err


@pytest.mark.anyio
async def test_a_terminal_shows_the_race_and_the_time_left():
    """The best so far, the remaining budget, and the number of finished calls; no line is too wide."""
    job = tune_run.Job((None, None), tune_run.Options())
    tuner, _ = kernels_scripted()
    frames = []
    selector = ConfigSelectorChain(ConfigCache(), tuner=tuner, sinks=[job.watch])
    async with selector as job.selector, anyio.create_task_group() as tasks:
        tasks.start_soon(selector.choose, call(), Toy())
        await anyio.wait_all_tasks_blocked()
        while job.watch.running:
            to = Console(file=io.StringIO(), width=60, color_system=None)
            to.print(_frame(job, to))
            frames.append(to.file.getvalue())
            await anyio.sleep(0.1)
    assert "0 of 2 calls done" in frames[0]
    assert "best so far Blocks(m=2, n=1), 200 ms; at most" in frames[-1]
    assert max(len(line) for frame in frames for line in frame.splitlines()) <= 60


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        (["FILE:square"], "--shapes 'x=f32[8,128]'"),
        (["FILE", "--shapes", "x=f32[8]"], "it has square, broken"),
        (["FILE:cube", "--shapes", "x=f32[8]"], "the kernels there are square, broken"),
        (["FILE:square", "--shapes", "y=f32[8]"], "its parameters are x, scale"),
        (["FILE:square", "--shapes", "x=f33[8]"], "is not a dtype"),
        (["absent.py:square"], "check the path"),
        (["no_such_module:square", "--shapes", "x=f32[8]"], "or name its file"),
        (["json:square", "--shapes", "x=f32[8]"], "no attribute 'square'"),
        (["some/thing"], "write package.module:kernel"),
        (["FILE:square", "--shapes", "x=f32[8]", "--budget", "0"], "above zero"),
        (["FILE:square", "--shapes", "x=f32[8]", "--isolation", "rope"], "thread or process"),
        (["FILE:square", "--shapes", "x=f32[8]", "--strategy", "luck"], "--strategy luck: use auto, race"),
        (["FILE:square", "--shapes", "x=f32[8]", "--store", "/proc/asel"], "/proc cannot be written: "),
        (["FILE:square", "--shapes", "x=f32[8]", "--store", "http://host"], "redis://"),
        (["FILE:square", "--shapes", "x=f32[8]", "--store", "FILE"], "neither a directory nor a *.json document"),
        (["absent.jsonl"], "there is no file absent.jsonl"),
    ],
)
def test_wrong_targets_shapes_and_options_are_one_sentence(kernels, arguments, fix):
    """With the fix and without a traceback; nothing is tuned."""
    ran = asel("tune", *(argument.replace("FILE", str(kernels)) for argument in arguments))
    assert (ran.code, ran.out) == (2, "")
    assert fix in " ".join(ran.err.split())
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("[[tune]", "is not TOML"),
        ("budget = 3", "has no [[tune]]"),
        ('budjet = 3\n[[tune]]\nkernel="k:k"\nshapes=["x"]', "'budjet' is not one of store, budget"),
        ('budget = "3"\n[[tune]]\nkernel="k:k"\nshapes=["x"]', "should be a number"),
        ('[[tune]]\nkernel="tune_example.py:square"', 'needs kernel = "package.module:name" and shapes'),
        ('[[tune]]\nkernel="tune_example.py:square"\nshapes=["x=3 4"]', "[[tune]] 1: cannot parse"),
    ],
)
def test_the_error_of_a_wrong_job_file_names_the_place(kernels, text, fix):
    """The number of the table, and the valid form."""
    job = kernels.parent / "jobs.toml"
    job.write_text(text)
    ran = asel("tune", job)
    assert ran.code == 2
    assert fix in ran.err


def test_a_module_that_fails_on_import_is_named(kernels):
    """For any exception; a missing dependency is distinguished from a missing module."""
    for text, told in (("1 / 0", "ZeroDivisionError"), ("import no_such_dependency", "it needs no_such_dependency")):
        (kernels.parent / "failing_example.py").write_text(text)
        ran = asel("tune", f"{kernels.parent / 'failing_example.py'}:x", "--shapes", "x=f32[8]")
        assert told in ran.err


def test_tuning_that_is_switched_off_is_refused(kernels, monkeypatch):
    """ASEL_AUTOTUNE=off applies to this command, too."""
    monkeypatch.setenv("ASEL_AUTOTUNE", "off")
    assert "unset it" in asel("tune", f"{kernels}:square", "--shapes", "x=f32[8]").err


def test_a_kernel_by_import_path_is_the_modules_object(kernels, monkeypatch):
    """A file is imported under its name, as in worker processes."""
    monkeypatch.syspath_prepend(kernels.parent)
    (call,) = target_calls("tune_example:square", ["x=f32[8]"]).calls
    assert call.kernel is imported_kernel("tune_example:square")
    assert isinstance(call.inv, Invocation)


def test_a_store_is_the_path_of_a_persistent_cache(kernels, scripted, monkeypatch):
    """`--store results` is the directory of PersistentCache("square", "results"), for writing and for reading."""
    monkeypatch.chdir(kernels.parent)
    command = ["tune", f"{kernels}:square", "--shapes", "x=f32[8]", "--store"]
    assert asel(*command, "results").code == 0
    cache = PersistentCache("square", "results")

    async def configs():
        return [record.cfg async for record in cache.records()]

    assert anyio.run(configs) == [3]
    assert [one["cache"] for one in asel("cache", "ls", "--store", "results", "--json").json] == [cache.path]


def test_an_ambiguous_name_of_a_cache_is_refused(kernels, scripted, monkeypatch):
    """It may be an operation in the cache directory, or a new directory here."""
    monkeypatch.chdir(kernels.parent)
    command = ["tune", f"{kernels}:square", "--shapes", "x=f32[8]"]
    assert asel(*command).code == 0
    ran = asel(*command, "--store", "square")
    assert ran.code == 2
    assert "write ./square for a new directory here" in ran.err
    assert asel(*command, "--store", "./square").code == 0
    assert asel(*command, "--store", "square").code == 0  # there is only one meaning now: the path


def test_a_kernel_and_its_class_in_one_file_are_one_kernel(kernels, script):
    """As in the quick start; the name may be left out."""
    script({1: 2e-4, 2: 1e-4})
    path = kernels.parent / "class_example.py"
    path.write_text(
        "from asel import Kernel\n"
        "class Scale(Kernel):\n    op_id = 'scale'\n    def run(self, x, *, cfg):\n        return x\n"
        "    def heuristic_cfg(self, inv):\n        return 1\n"
        "    def candidate_cfgs(self, inv):\n        return [1, 2]\n"
        "scale = Scale()\n"
    )
    assert asel("tune", path, "--shapes", "x=f32[8]", "--json").json[0]["config"] == 2
    sys.modules.pop("class_example")


def test_a_candidate_that_hangs_takes_no_longer_than_the_budget(kernels, scripted):
    """`--budget 5` ends after about five seconds."""
    store = kernels.parent / "configs.json"
    for budget, limit_s in (("5", 5.0), ("90", 30.0)):
        command = ["tune", f"{kernels}:square", "--shapes", "x=f32[8]", "--store", store, "--budget", budget, "--again"]
        assert asel(*command).code == 0
        (record,) = json.loads(store.read_text())["records"]
        assert record["report"]["candidate_timeout_s"] == limit_s
