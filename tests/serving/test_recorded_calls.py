"""Recorded calls in a file."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import runpy
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels import Toy

from asel import (
    Invocation,
    Kernel,
    UntunedWarning,
    clear_invocations,
    device_fingerprint,
    get_invocations,
    kernel,
    load_invocations,
    record_invocation,
    save_invocations,
)
from asel.kernels.key_memo import KeyMemo


class Act(enum.Enum):
    RELU = 1


class State(NamedTuple):
    left: object
    right: object


@dataclasses.dataclass(frozen=True)
class Options:
    window: int
    scale: float = 1.0


@kernel(op_id="anything", configs=[1, 2], heuristic=1)
def anything(x, *more, cfg, **named): ...


class Sized(Kernel):
    op_id = "sized"

    def __init__(self, size):
        super().__init__()
        self.size = size

    def run(self, x, causal=True, *, cfg): ...
    def heuristic_cfg(self, inv): ...


sized = Sized(3)
X = jax.ShapeDtypeStruct((8, 128), jnp.bfloat16)


def record(kernel, *args, times=1, **kwargs):
    key = KeyMemo().resolve(Invocation(kernel.op_id, args, kwargs), kernel).key
    for _ in range(times):
        record_invocation(*key, kernel, args, kwargs)
    return key


def recorded():
    return get_invocations(device_fingerprint())


def test_a_saved_call_comes_back_with_its_key(tmp_path):
    """A loaded call has the kernel, the shapes and all static values of the recorded one."""
    values = (Act.RELU, jax.nn.relu, float("inf"), b"ab", {1: (2, None)}, jnp.bfloat16, np.dtype("int8"), 1j, "x" * 300)
    keys = {
        record(anything, X, times=2, causal=True),
        record(anything, jax.ShapeDtypeStruct((), jnp.float32, weak_type=True)),
        record(anything, X, *values, state=State(X, [None]), options=Options(3)),
        record(anything, X, functools.partial(jax.nn.gelu, approximate=True)),
        record(anything, {"p": [np.ones(3), jax.random.key(0)]}),
        record(Toy(), X),
        record(sized, X, causal=False),
    }
    before = recorded()
    save_invocations(path := tmp_path / "calls.jsonl")
    clear_invocations()
    read = load_invocations(path)
    assert {call.key for call in read.calls} == keys
    assert {call.seen for call in read.calls} == {2, 1}
    assert read.skipped == ()
    loaded = recorded()
    [(kernel, _, kwargs)] = loaded["sized@v0"].values()
    assert (kernel, kwargs or True) == (sized, True)
    for op in before:
        assert {key: call[0] for key, call in before[op].items() if op != "toy@v1"}.items() <= {
            key: call[0] for key, call in loaded[op].items()
        }.items()


def test_people_can_read_and_edit_the_file(tmp_path):
    """A line has the call as asel's logs show it; only values without such a text are encoded."""
    record(anything, X, times=2, causal=True)
    record(anything, X, Act.RELU)
    save_invocations(path := tmp_path / "calls.jsonl")
    plain, spelt_out = map(json.loads, path.read_text().splitlines())
    here = f"{__name__}:anything"
    assert plain == {"kernel": here, "call": "x=bf16[8,128], causal=True", "seen": 2}
    assert spelt_out["args"] == [{"array": "bf16[8,128]"}, {"import": f"{__name__}:Act.RELU"}]

    clear_invocations()
    path.write_text(json.dumps({"kernel": here, "call": "f32[4], window=3"}))
    load_invocations(path)
    [(_, args, kwargs)] = recorded()["anything@v0"].values()
    assert (args[0].shape, kwargs) == ((4,), {"window": 3})


def test_a_call_that_cannot_be_written_is_named(tmp_path):
    """With the reason; the other calls are in the file."""
    record(anything, X)
    record(anything, lambda x: x)
    record(anything, "redis://user:hunter2@host/0")
    record(Sized(4), X)
    with jax.default_matmul_precision("highest"):
        record(anything, X, 1)
    with pytest.warns(UntunedWarning, match="4 recorded calls were not written to ") as warned:
        written = save_invocations(tmp_path / "calls.jsonl")
    assert len(written.calls) == 1
    message = str(warned[0].message)
    for reason in (
        "args[0] is a function, which has neither a value nor an import path",
        "args[0] is text that contains a secret",
        "its kernel, a Sized, has no import path; assign it to a variable of a module",
        "seen under other JAX settings",
    ):
        assert reason in message
    assert "hunter2" not in message


def test_any_text_in_a_call_stays_in_its_line(tmp_path):
    """JSON does not escape line separators, and UTF-8 cannot encode the lone surrogates of some file names."""
    for name in ("a\u2028b", "a\x85b", "\ud800", "plain"):
        record(anything, {name: 1})
    saved = save_invocations(tmp_path / "calls.jsonl")
    read = load_invocations(tmp_path / "calls.jsonl")
    assert (saved.skipped, read.skipped) == ((), ())
    assert [call.key for call in read.calls] == [call.key for call in saved.calls]
    assert len(read.calls) == 4


def test_a_bad_line_is_skipped_with_a_reason(tmp_path, monkeypatch):
    """The other lines are read."""
    here = f"{__name__}:anything"
    lines = [
        {"kernel": "no.such.module:f", "call": ""},
        {"kernel": here, "call": "x=q7[8]"},
        {"kernel": here},
        {"kernel": f"{__name__}:X", "call": ""},
        {"kernel": here, "args": [{"make": "subprocess:Popen", "fields": {"args": "false"}}]},
        {"kernel": "module_that_exits:f", "call": ""},
        {"kernel": here, "call": "x=f32[8]", "seen": 3},
    ]
    (tmp_path / "module_that_exits.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "calls.jsonl"
    path.write_text("\n".join(["{half a li", *map(json.dumps, lines)]))
    with pytest.warns(UntunedWarning, match="7 recorded calls were not read"):
        read = load_invocations(path)
    assert [call.seen for call in read.calls] == [3]
    assert len(recorded()["anything@v0"]) == 1
    for skipped, reason in zip(
        read.skipped,
        (
            "line 1: it is not JSON",
            "line 2: 'no.such.module:f' cannot be imported: No module named 'no'",
            "line 3: cannot parse the call 'x=q7[8]': at character 3",
            'line 4: it has no arguments: neither "call" nor "args"',
            f"line 5: '{__name__}:X' is of type ShapeDtypeStruct and not a kernel",
            "line 6: 'subprocess:Popen' is not a dataclass or a named tuple",
            "line 7: 'module_that_exits:f' cannot be imported: importing module_that_exits ends the program",
        ),
        strict=True,
    ):
        assert skipped.startswith(reason)


def test_another_program_reads_the_calls_that_a_script_saved(tmp_path, monkeypatch):
    """A module that runs as a program is saved under the name by which others import it."""
    (tmp_path / "mine.py").write_text(
        "import jax.numpy as jnp\n"
        "from asel import kernel, record_invocation, save_invocations\n"
        "@kernel(op_id='mine', configs=[1], heuristic=1)\n"
        "def mine(x, *, cfg): ...\n"
        "if __name__ == '__main__':\n"
        "    record_invocation('dev', 'mine@v0', 'key', mine, (jnp.ones(3),), {})\n"
        "    save_invocations('calls.jsonl')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    runpy.run_module("mine", run_name="__main__", alter_sys=True)  # as `python -m mine`
    assert (tmp_path / "calls.jsonl").read_text() == '{"kernel": "mine:mine", "call": "x=f32[3]", "seen": 1}\n'
    assert len(load_invocations("calls.jsonl").calls) == 1
    monkeypatch.delitem(sys.modules, "mine")
