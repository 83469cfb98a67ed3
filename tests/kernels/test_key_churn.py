"""An op whose keys differ in one constant only is reported once, with the argument's name."""

from __future__ import annotations

import logging
from typing import Any

import jax
import numpy as np
import pytest
from support.kernels import Blocks

from asel import AutotunePolicy, ConfigSelectorChain, Invocation, Kernel
from asel.kernels.key_churn import MANY_KEYS, ChurnWatch
from asel.testing import RecordingSink

pytestmark = pytest.mark.anyio
HEURISTICS_ONLY = AutotunePolicy(allow_autotune=False)


@pytest.fixture(autouse=True, scope="module")
def _devices() -> None:
    jax.devices()  # the first time, JAX reads files, which no event loop should wait for


class Stepped(Kernel[Blocks, Any]):
    """Takes a step count on which its config does not depend."""

    op_id = "stepped"

    def run(self, x, step=0, *, options=None, cfg):
        return x

    def heuristic_cfg(self, inv):
        return Blocks(1)


class Other(Stepped):
    op_id = "other"


def call(*args: Any, size: int = 4, op_id: str = "stepped", **kwargs: Any) -> Invocation[Any, Any]:
    return Invocation(op_id, (np.zeros(size, np.float32), *args), kwargs)


class Told:
    """A selector with heuristics only, and its `key_churn` events."""

    def __init__(self) -> None:
        self._sink = RecordingSink()
        self.chain: ConfigSelectorChain[Any, Any] = ConfigSelectorChain(policy=HEURISTICS_ONLY, sinks=[self._sink])

    @property
    def events(self) -> list[Any]:
        return self._sink.named("key_churn")


async def test_many_values_of_one_constant_are_reported_once() -> None:
    """At the 64th key, and never again for this op."""
    told, kernel = Told(), Stepped()
    async with told.chain as chain:
        for step in range(MANY_KEYS - 1):
            await chain.choose(call(step), kernel)
        assert told.events == []
        for step in range(MANY_KEYS, 4 * MANY_KEYS):
            await chain.choose(call(step), kernel)
            await chain.choose(call(options={"window": [step]}), kernel)
    (event,) = told.events
    assert (event.argument, event.keys, event.op) == ("step", MANY_KEYS, "stepped@v0")
    assert event.advice == (
        "64 keys of stepped@v0 differ only in step, a constant: each of its values is tuned and kept by itself. "
        "If no config depends on it, pass it as an array or a NumPy scalar, "
        "or give the kernel a key_builder that leaves it out."
    )


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda n: call(n), "step"),
        (lambda n: call(step=n), "step"),
        (lambda n: call(options={"window": [n]}), "options['window'][0]"),
        (lambda n: call(0, n), "args[2]"),
    ],
)
async def test_the_argument_has_the_kernels_parameter_name(make: Any, argument: str) -> None:
    """Including the path inside the argument."""
    told, kernel = Told(), Stepped()
    for n in range(MANY_KEYS):
        told.chain.choose_nowait(make(n), kernel)
    assert [event.argument for event in told.events] == [argument]


async def test_churn_is_found_among_calls_of_other_shapes() -> None:
    """Only calls that are equal except for one constant are compared, so others do not interfere."""
    told, kernel = Told(), Stepped()
    for step in range(MANY_KEYS):
        told.chain.choose_nowait(call(step), kernel)
        for size in range(5, 8):
            told.chain.choose_nowait(call(0, size=size + step * 3), kernel)
    assert len(told.events) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda n: call(0, size=n + 1),
        lambda n: call(n, size=n + 1),
        lambda n: call(n, options=n),
        lambda n: call(np.int32(n)),
        lambda n: call(n % (MANY_KEYS - 1)),
    ],
    ids=["shapes", "shapes and a constant", "two constants", "a NumPy scalar", "few values"],
)
async def test_new_shapes_and_joint_changes_are_not_churn(make: Any) -> None:
    """Shapes need their own keys, and constants that change together are not one constant."""
    told, kernel = Told(), Stepped()
    for n in range(2 * MANY_KEYS):
        told.chain.choose_nowait(make(n), kernel)
    assert told.events == []


async def test_churn_is_reported_for_each_op_and_selector() -> None:
    """Once per op and selector."""
    one, other = Told(), Told()
    for step in range(MANY_KEYS):
        for told in (one, other):
            told.chain.choose_nowait(call(step), Stepped())
        one.chain.choose_nowait(call(step, op_id="other"), Other())
    assert sorted(str(event.op) for event in one.events) == ["other@v0", "stepped@v0"]
    assert [event.op for event in other.events] == ["stepped@v0"]


async def test_a_hit_is_not_checked_for_churn(monkeypatch) -> None:
    """Only new signatures pay for the check."""
    noted = []
    note = ChurnWatch.note
    monkeypatch.setattr(ChurnWatch, "note", lambda *args: noted.append(1) or note(*args))
    told, kernel = Told(), Stepped()
    for _ in range(5):
        for step in range(3):
            told.chain.choose_nowait(call(step), kernel)
    assert len(noted) == 3


async def test_churn_memory_is_bounded() -> None:
    """With any number of constants, shapes and values."""
    told, kernel = Told(), Stepped()
    for n in range(3000):
        told.chain.choose_nowait(call(n % 60, options=[n, n + 1], size=n % 7 + 1), kernel)
    assert len(told.chain._keys._watch._values) <= 4096 + 1
    assert told.events == []


async def test_churn_is_logged_as_a_warning(caplog) -> None:
    """With the default sinks."""
    caplog.set_level(logging.WARNING, logger="asel")
    async with ConfigSelectorChain[Any, Any](policy=HEURISTICS_ONLY) as chain:
        for step in range(MANY_KEYS):
            await chain.choose(call(step), Stepped())
    (record,) = [r for r in caplog.records if "key_churn" in r.getMessage()]
    assert record.levelno == logging.WARNING
    assert "differ only in step" in record.getMessage()
