"""`asel cache verify`: records that are measured again, and records that cannot be."""

from __future__ import annotations

import os
import signal

import anyio
import pytest
from support.command_line import asel, fill
from support.tunable import COSTS

from asel.testing import ScriptedMeasure


@pytest.fixture
def tuned(kernels, script):
    """A cache with two records in which config 3 won."""
    script()
    assert asel("tune", f"{kernels}:square", "--shapes", "x=f32[8]", "--shapes", "x=f32[16]").code == 0
    return ["cache", "verify", "--kernel", f"{kernels}:square"]


def states(ran):
    return {(one["state"], one["why"]) for one in ran.json}


def test_a_record_holds_if_it_wins_again(tuned):
    """The exit code is 0, and the cache does not change."""
    before = asel("cache", "ls", "--json").json
    ran = asel(*tuned)
    assert ran.code == 0
    assert "2 hold, 0 changed" in ran.out
    assert "it won again" in ran.out
    assert asel("cache", "ls", "--json").json == before
    assert "1 more were not picked: --sample 2 measures all" in asel(*tuned, "--sample", "1").out


@pytest.mark.parametrize(
    ("changes", "state", "why"),
    [
        ({"costs": COSTS | {2: 9.95e-5}}, "holds", "it ties with 2, 0.5% apart"),
        ({"costs": COSTS | {3: 4e-4}}, "changed", "4 wins now; it takes 100% longer (noise 2%)"),
        ({"compile_errors": {3: ValueError("gone")}}, "changed", "it failed in compile: ValueError: gone"),
    ],
)
def test_a_record_that_no_longer_holds_is_reported_with_the_reason(tuned, script, changes, state, why):
    """The new winner and the difference; a tie counts as holding."""
    script(**changes)
    ran = asel(*tuned, "--json")
    assert states(ran) == {(state, why)}
    assert ran.code == (1 if state == "changed" else 0)


def test_a_config_that_is_no_longer_a_candidate_counts_as_changed(tuned, kernels):
    """The version is the same, but the list of candidates has changed."""
    import tune_example

    tune_example.square._configs = (1, 2, 4)
    ran = asel(*tuned, "--json")
    assert states(ran) == {("changed", "the kernel does not list it any more; 4 wins now")}


def test_an_unverifiable_record_is_reported_with_the_reason(tuned, kernels):
    """Its kernel, version, device or report is missing. If no record can be verified, that is a problem."""
    import tune_example

    ran = asel("cache", "verify", "--json")
    assert ran.code == 1
    assert states(ran) == {("unknown", "name the kernel of square@v1 with --kernel package.module:name")}
    tune_example.square.version = "2"
    assert states(asel(*tuned, "--json")) == {("unknown", "it is of version 1, and the kernel is of version 2")}
    elsewhere = fill(kernels.parent / "elsewhere")
    ((state, why), *_) = states(asel(*tuned, "--store", elsewhere, "--json"))
    assert state == "unknown"
    assert why.startswith("it was measured on NVIDIA H100, and this is cpu")
    assert "no such records" in asel(*tuned, "--op", "other").err


def test_ctrl_c_ends_verify_and_lists_unmeasured_records(tuned, script, monkeypatch):
    """The exit code is 130, neither that of success nor of a problem."""

    class Interrupting(ScriptedMeasure):
        async def compile(self, trial):
            os.kill(os.getpid(), signal.SIGINT)
            await anyio.wait_all_tasks_blocked()
            return await super().compile(trial)

    script(measure=Interrupting)
    ran = asel(*tuned)
    assert ran.code == 130
    assert ran.out.count("it was interrupted") == 2
    assert "0 hold, 0 changed, 2 could not be verified" in ran.out
