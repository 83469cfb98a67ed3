"""The command as a whole: help, errors, exit codes, start-up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from support.command_line import asel, fill
from support.tunable import KERNELS

from asel.cli.app import app
from asel.kernels import devices


def commands(group, path=("asel",)):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_in_its_help(name):
    """Examples can be pasted."""
    assert f"[cyan]{name}" in COMMANDS[name].epilog
    shown = asel(*name.split()[1:], "--help")
    assert shown.code == 0
    assert f"{name} " in shown.out.partition("Examples")[2].replace("\n", " ")


def test_the_top_level_help_names_every_command():
    """With `--help`, with `-h`, and without arguments."""
    for arguments in (["--help"], ["-h"], []):
        shown = asel(*arguments).out
        assert all(name.split()[1] in shown for name in COMMANDS)


def test_version_names_asel_jax_and_the_device():
    """A bug report needs these first."""
    lines = asel("--version").out.splitlines()
    assert [line.split()[0] for line in lines] == ["asel", "jax", "device"]


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        (["cache", "ls", "--store", "/no/such/place"], "check the path"),
        (["cache", "ls", "--store", "nobody"], "asel cache stats"),
        (["cache", "ls", "--store", "http://example"], "redis://"),
        (["cache", "ls", "--store", "jax://"], "name a directory"),
        (["cache", "import", __file__, "--store", "jax://"], "name a directory"),
        (["cache", "ls", "--colour"], "No such option: --colour. `asel cache ls --help` shows the usage"),
        (["cache", "import", "/no/such/file.json"], "does not exist"),
        (["cache", "prune"], "give a condition"),
        (["cache", "shwo"], "No such command 'shwo'. Did you mean 'show'? `asel cache --help` shows the usage"),
        (["cache", "show"], "Missing argument 'KEY'. `asel cache show --help` shows"),
        (["demo", "--otlp", "nonsense"], "http://"),
        (["cache", "ls", "--store", f"{'x' * 300}/y"], "xxx/y: File name too long"),
        (["demo", "--folder", "/dev/null/demo"], "/dev/null/demo: Not a directory; check the path"),
    ],
)
def test_wrong_use_is_one_sentence_with_the_fix(arguments, fix, tmp_path, monkeypatch):
    """The exit code is 2, without a traceback."""
    monkeypatch.setenv("ASEL_CACHE_DIR", str(tmp_path))
    ran = asel(*arguments)
    assert ran.code == 2
    assert fix in ran.err
    assert len(ran.err.splitlines()) == 1
    assert ran.out == ""


def test_without_a_device_commands_fail_with_the_fix(tmp_path, monkeypatch):
    """If JAX does not start, commands that measure fail with one sentence, and leave no files."""

    def fails(device=None):
        raise AssertionError

    monkeypatch.setattr(devices, "device_fingerprint", fails)
    kernel = tmp_path / "tune_example.py"
    kernel.write_text(KERNELS)
    folder = tmp_path / "demo"
    for command in (
        ["demo", "--folder", folder],
        ["tune", f"{kernel}:square", "--shapes", "x=f32[8]", "--store", tmp_path / "new"],
        ["cache", "verify", "--store", fill(tmp_path / "cache")],
    ):
        ran = asel(*command)
        assert (ran.code, len(ran.err.splitlines())) == (2, 1)
        assert "no device to tune on: AssertionError. Install" in ran.err
        assert "JAX_PLATFORMS=cpu" in ran.err
    assert not folder.exists()
    sys.modules.pop("tune_example")


def test_debug_shows_the_traceback():
    """`--debug` may stand anywhere."""
    with pytest.raises(ValueError, match="check the path"):
        asel("cache", "ls", "--store", "/no/such/place", "--debug")


def test_debug_keeps_the_exit_code():
    """A script can distinguish wrong use from a problem with `--debug`, too."""
    command = [sys.executable, "-m", "asel", "cache", "ls", "--store", "/no/such/place", "--debug"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "Traceback" in ran.stderr
    assert "check the path" in ran.stderr


def test_an_error_never_shows_a_password():
    """A URL is named without its secret."""
    ran = asel("cache", "ls", "--store", "redis://user:hunter2@127.0.0.1:1?timeout_s=0.1")
    assert ran.code == 2
    assert "cannot be reached" in ran.err
    assert "hunter2" not in ran.err


def test_bash_completes_commands_and_options(monkeypatch):
    """The script that `--show-completion` prints, in a real bash: `asel cache sh<TAB>` becomes `show`."""
    monkeypatch.setenv("_ASEL_COMPLETE", "source_bash")
    script = asel().out
    assert "complete" in script
    monkeypatch.delenv("_ASEL_COMPLETE")
    program = script + '\nCOMP_WORDS=(asel cache sh); COMP_CWORD=2; _asel_completion asel; echo "${COMPREPLY[@]}"'
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ran = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert ran.stdout.split() == ["show"], ran.stderr


def test_completion_knows_options(monkeypatch):
    """`asel tune --st<TAB>` offers both options. All shells use the same mechanism."""
    monkeypatch.setenv("_ASEL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "asel tune --st")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert asel().out.split() == ["--store", "--strategy"]


def test_the_reader_of_a_pipe_may_stop_reading(tmp_path):
    """`asel cache ls | head -1` ends quietly."""
    store = fill(tmp_path / "cache")
    command = f"{sys.executable} -m asel cache ls --store {store} | true"
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert ran.stderr == ""


def test_a_candidate_that_still_runs_does_not_abort_the_command():
    """JAX aborts an interpreter that exits while a program runs; the exit code must be the command's."""
    script = (
        "import sys, anyio, jax, jax.numpy as jnp\n"
        "from asel.cli import main\nfrom asel.runtime.threads import leave_to_thread\n"
        "x = jnp.ones((512, 512))\n"
        "run = jax.jit(lambda x: jax.lax.fori_loop(0, 100_000, lambda i, a: a @ x, x)).lower(x).compile()\n"
        "async def tune():\n    leave_to_thread('a candidate', lambda: run(x).block_until_ready())\n"
        "anyio.run(tune)\n"
        "sys.argv = ['asel', 'cache', 'prune']\nmain()"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("asel: give a condition")
    assert len(ran.stderr.splitlines()) == 1


def test_help_imports_neither_jax_nor_the_sdk():
    """The help starts fast."""
    script = (
        "import sys\nfrom asel.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'jax', 'jaxlib', 'opentelemetry.sdk', 'matplotlib'} & set(sys.modules)\nassert not heavy, heavy"
    )
    environment = {**os.environ, "COLUMNS": "80"}
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment)
    assert ran.returncode == 0, ran.stderr
