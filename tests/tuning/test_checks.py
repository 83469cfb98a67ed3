"""Candidates whose outputs are compared with the incumbent's."""

from __future__ import annotations

import threading

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels import Bench
from support.measures import Computing
from support.tunes import tune_among

from asel import Failed, Invocation, Measured, Tuner, kernel
from asel.tuning.output_check import OutputCheck


@kernel(op_id="sum", configs=["right", "wrong", "shape", "raises"], heuristic="right")
def total(x, *, cfg):
    match cfg:
        case "wrong":
            return x.sum(keepdims=True)[:0].sum() + 3.5
        case "shape":
            return x.sum(keepdims=True)
        case "raises":
            raise ValueError("no")
    return x.sum()


def tune_total(backend, check):
    async def main():
        async with Bench(tuner=Tuner(1, 1, check=check, strategy="exhaustive")).chain as chain:
            return (await chain.select(Invocation("sum", (jnp.arange(8.0),), {}), total)).report

    return anyio.run(main, backend=backend)


def test_a_candidate_that_computes_something_else_cannot_win(real_backend):
    """A wrong candidate is a Failed outcome with the largest difference (ejKernel's defect 13)."""
    report = tune_total(real_backend, True)
    assert report.winner == "right"
    assert report.outcomes[1] == Failed("wrong", "check", "OutputMismatch", "output 0 differs by up to 24.5")
    assert report.outcomes[2].message == "output 0 has shape (1,) in the place of ()"
    assert report.outcomes[3].stage == "compile"


@pytest.mark.parametrize(
    ("check", "failed"),
    [
        (OutputCheck(rtol=10.0), {"shape"}),
        (lambda expected, actual: True, set()),
        (lambda expected, actual: np.allclose(expected[0], actual[0]), {"wrong"}),
        (lambda expected, actual: "not today", {"wrong", "shape"}),
        (None, set()),
    ],
)
def test_the_check_is_the_users_own(real_backend, check, failed):
    """Tolerances, or any function of both outputs that returns a verdict or a description of the difference."""
    outcomes = tune_total(real_backend, check).outcomes
    assert {o.cfg for o in outcomes if isinstance(o, Failed) and o.stage == "check"} == failed


def array(*values):
    return np.array(values)


@pytest.mark.parametrize(
    ("expected", "actual", "wrong"),
    [
        ([array(1.0, 1.0), array(0.0, 0.0)], [array(1.5, 1.0), array(0.25, 3.0)], "output 1 differs by up to 3"),
        ([array(0.0, 0.0), array(1.0, 1.0)], [array(0.25, 3.0), array(1.5, 1.0)], "output 0 differs by up to 3"),
        ([array(1.0), array(1.0)], [array(1.0), array(np.nan)], "output 1 is nan where the other is not"),
        ([array(5.0), array(1.0)], [array(9.0), array(np.nan)], "output 1 is nan where the other is not"),
        (
            [array(1.0, 1.0)],
            [array(np.nan, 3.5)],
            "output 0 is nan where the other is not, and differs by up to 2.5 elsewhere",
        ),
        ([array(1 + 1j)], [array(1 - 1j)], "output 0 differs by up to 2"),
        ([array(3.0)], [array(3 + 4j)], "output 0 has dtype complex128 in the place of float64"),
        ([array(1 + 1j)], [array(1 + 1j)], None),
        ([array(1.0)], [], "0 outputs in the place of 1"),
        ([array(1, 2)], [array(True, True)], "output 0 has dtype bool in the place of int64"),
    ],
)
def test_a_check_names_the_largest_difference(expected, actual, wrong):
    """Over all outputs, including imaginary parts; NaN is worse than any number."""
    assert OutputCheck()(expected, actual) == wrong


@pytest.mark.parametrize(
    ("check", "off", "passes"),
    [
        (OutputCheck(rtol=0.0, atol=0.5), 0.4, True),
        (OutputCheck(rtol=0.0, atol=0.5), 0.6, False),
        (OutputCheck(rtol=0.5, atol=0.0), 4.0, True),
        (OutputCheck(rtol=0.5, atol=0.0), 6.0, False),
        (OutputCheck(rtol=0.0, atol=0.0), 1e-9, False),
    ],
)
def test_both_tolerances_are_honoured(check, off, passes):
    """The allowed difference is `rtol` times the value, plus `atol`."""
    assert (check([array(10.0)], [array(10.0 + off)]) is None) is passes


def checked_among(configs, run, *args, check=True, **allow):
    """Tune real candidates whose outputs are checked; return the outcomes."""

    async def main():
        op = kernel(op_id="checked", configs=configs, heuristic=configs[0])(run)
        async with Bench(tuner=Tuner(0, 1, check=check), allow=allow).chain as chain:
            return (await chain.select(Invocation("checked", args, {}), op)).report.outcomes

    return anyio.run(main)


def test_checks_compare_the_outputs_of_a_forward_run():
    """In every timing mode, the checked outputs are the kernel's own, and not its loss or gradients."""
    seen = []

    def check(expected, actual):
        seen.append([output.tolist() for output in actual])
        return True

    def run(x, *, cfg):
        return {"doubled": x * cfg, "order": jnp.argsort(x)}

    outcomes = checked_among([2.0, 3.0], run, jnp.arange(2.0), check=check, validate_backward=True)
    assert [o.how for o in outcomes] == ["forward+backward"] * 2
    assert seen == [[[0.0, 3.0], [0, 1]]]


def test_random_keys_can_be_checked():
    """A PRNG key among the outputs is compared by its data."""

    def run(key, *, cfg):
        return jax.random.fold_in(key, 1 if cfg == "wrong" else 0), jnp.float32(0 if cfg == "first" else 1e-7)

    first, same, wrong = checked_among(["first", "same", "wrong"], run, jax.random.key(0))
    assert [type(first), type(same)] == [Measured, Measured]
    assert (wrong.stage, wrong.error_type) == ("check", "OutputMismatch")
    assert wrong.message.startswith("output 0 differs by up to ")


def test_outputs_are_compared_off_the_loop(real_backend):
    """Comparing large outputs takes long, and must not block the event loop."""
    threads = []

    def check(expected, actual):
        threads.append(threading.current_thread())
        return True

    anyio.run(Tuner(measure=Computing(), check=check).tune, tune_among("a", "b"), backend=real_backend)
    assert len(threads) == 1
    assert threading.main_thread() not in threads


def test_a_comparison_that_hangs_is_one_outcome(real_backend):
    """After its timeout, the candidate has failed its check; the others are measured, and its thread is named."""
    release = threading.Event()

    def check(expected, actual):
        return release.wait(10) if actual[0] else True

    state = tune_among("a", "wrong", "c", candidate_timeout_s=0.3)
    try:
        report = anyio.run(Tuner(measure=Computing(), check=check).tune, state, backend=real_backend)
    finally:
        release.set()
    assert [type(o) for o in report.outcomes] == [Measured, Failed, Measured]
    assert (report.outcomes[1].stage, report.outcomes[1].error_type) == ("check", "TimeoutError")
    assert report.outcomes[1].message == "took longer than 0.3 s; its thread is still busy"
    assert [busy.what for busy in state.left_behind] == ["comparing the outputs of 'wrong'"]


@pytest.mark.parametrize("verdict", [np.True_, np.bool_(True), 1, None])
def test_a_check_may_answer_with_any_truth(real_backend, verdict):
    """NumPy's True is true."""
    outcomes = tune_total(real_backend, lambda expected, actual: verdict).outcomes
    assert not [o for o in outcomes if isinstance(o, Failed) and o.stage == "check"]


def test_nan_on_one_side_is_a_difference():
    """Equal infinities and equal nans agree; a nan on one side does not."""
    check = OutputCheck()
    infinite, nan = np.array([np.inf, 1.0]), np.array([np.nan, 1.0])
    assert check([infinite], [infinite]) is None
    assert check([nan], [nan]) is None
    assert check([infinite], [nan]) == "output 0 is nan where the other is not"
    assert check([np.ones(2)], [np.ones(2) * 3]) == "output 0 differs by up to 2"
