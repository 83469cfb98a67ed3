"""Ctrl-C outside of the event loop: while modules are imported, and at a prompt."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.command_line import fill

INTERRUPTING = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"


def run(*arguments, path="", **more):
    environment = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, "-m", "asel", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, **more)


def test_ctrl_c_while_the_command_is_imported_ends_it_without_a_traceback(tmp_path):
    """A user who notices a typing error presses it within a tenth of a second."""
    (tmp_path / "typer.py").write_text(INTERRUPTING)
    ran = run("cache", "ls", path=tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "asel: stopped\n")


@pytest.mark.parametrize("swallowed", [False, True])
def test_ctrl_c_before_the_first_tune_prints_the_command_to_continue(tmp_path, swallowed):
    """It ends the command even if extension modules would replace KeyboardInterrupt by other errors."""
    body = "exec(INTERRUPTING)"
    if swallowed:
        body = "try:\n    exec(INTERRUPTING)\nexcept BaseException:\n    raise ImportError from None\n"
    (tmp_path / "interrupting.py").write_text(f"INTERRUPTING = {INTERRUPTING!r}\n{body}")
    ran = run("tune", "interrupting.py:kernel", "--shapes", "x=f32[8]", "--again", cwd=tmp_path)
    assert ran.returncode == 130
    assert ran.stderr == "asel: stopped. To go on: asel tune interrupting.py:kernel --shapes 'x=f32[8]'\n"


def test_the_command_to_continue_does_not_show_a_password(tmp_path):
    """The line may be in the log of a CI job."""
    (tmp_path / "interrupting.py").write_text(INTERRUPTING)
    store = "redis://user:hunter2@cache.example"
    ran = run("tune", "interrupting.py:kernel", "--shapes", "x=f32[8]", "--store", store, cwd=tmp_path)
    assert "cache.example" in ran.stderr
    assert "hunter2" not in ran.stderr


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_ctrl_c_in_an_event_loop_cancels_its_tasks(backend):
    """So that they can clean up."""
    script = (
        "import os, signal, anyio\n"
        "from asel.cli.interrupts import end_at_once, run_loop\n"
        "async def wait():\n"
        "    try:\n        os.kill(os.getpid(), signal.SIGINT)\n        await anyio.sleep_forever()\n"
        "    finally:\n        print('cleaned up', flush=True)\n"
        "async def main():\n"
        "    async with anyio.create_task_group() as tasks:\n        tasks.start_soon(wait)\n"
        "end_at_once()\n"
        f"try:\n    run_loop(main, backend={backend!r})\n"
        "except KeyboardInterrupt:\n    os.kill(os.getpid(), signal.SIGINT)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "cleaned up\n", "asel: stopped\n" * 2)


def test_a_command_started_with_ctrl_c_ignored_continues(tmp_path):
    """Shells start background commands of a script this way."""
    (tmp_path / "interrupting.py").write_text(INTERRUPTING)
    command = f"trap '' INT; exec {sys.executable} -m asel tune interrupting.py:kernel --shapes 'x=f32[8]'"
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ran.returncode == 2
    assert "has no attribute 'kernel'" in ran.stderr


def test_a_command_in_a_thread_does_not_handle_ctrl_c():
    """Python lets only the main thread set a handler."""
    script = (
        "import signal, sys, threading\nfrom asel.cli import main\nsys.argv = ['asel', '--help']\n"
        "thread = threading.Thread(target=main)\nthread.start()\nthread.join()\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "Commands" in ran.stdout


def test_ctrl_c_at_a_prompt_deletes_nothing(tmp_path):
    """No answer does not count as a yes."""
    store = fill(tmp_path / "cache")
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, os, signal\n"
        "class Typist:\n    def readline(self, *a):\n        os.kill(os.getpid(), signal.SIGINT)\n"
        "    def __getattr__(self, name):\n        return getattr(sys.__stdin__, name)\n"
        "sys.stdin = Typist()\n"
    )
    ran = run("cache", "prune", "--op", "matmul", "--store", store, path=tmp_path)
    assert ran.returncode == 130, ran.stderr
    assert len([*(tmp_path / "cache").glob("schema-*/*/*.json")]) == 2
