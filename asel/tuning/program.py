"""A candidate's program: lowered, compiled, run and released."""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from asel.redaction import redact
from asel.runtime.jax_settings import settings_held
from asel.tuning.arrays import (
    concrete,
    copies_of,
    dtype_text,
    has_nan,
    is_deleted,
    on_host,
    place_of_shapes,
    random_inputs,
)
from asel.tuning.measure import TimingMode, Trial
from asel.tuning.output_check import Outputs
from asel.tuning.runnable import CallFunction, Runnable, is_jitted
from asel.tuning.timing import Pace

__all__ = ["Program"]


_YIELD_S = 100e-6
# Programs with larger constants are not compared with others.
_MAX_ELEMENTS = 4096
logger = logging.getLogger("asel")
T = TypeVar("T")


class Program:
    """A candidate as a function of its arrays: lowered by the constructor, runnable after `compile`."""

    def __init__(self, trial: Trial[Any]) -> None:
        self._trial = trial
        with settings_held(trial.settings):
            fn = trial.build()
            self._function = CallFunction(partial(_yielding, fn), trial.args, trial.kwargs)
            given = self._function.arrays(trial.args, trial.kwargs)
            self._device = place_of_shapes(trial.device, trial.settings)
            if (arrays := trial.shared.get("arrays")) is None:
                trial.shared["arrays"] = arrays = self._concrete(given)
            self._arrays = arrays
            self._forward: Callable[..., Any] = self._function.forward
            self._jitted = None if is_jitted(fn) else jax.jit(self._forward)
            self._executable: Callable[..., Any] | None = None
            self.nan_outputs: frozenset[int] | None = None
            self.how, self._lowered, self._refused = _lower(
                self._forward, arrays, trial.objective, self._jitted or jax.jit(self._forward)
            )
            self.fingerprint = None if self._lowered is None else _fingerprint(self.how, self._lowered)

    def _concrete(self, given: Iterable[Any]) -> list[Any]:
        """Return arrays to run with: zeros for shapes, or random arrays if outputs are checked."""
        if self._trial.shared.get("checked"):
            given, _ = random_inputs(tuple(given), {}, self._device)
        return [concrete(leaf, self._device) for leaf in given]

    def compile(self) -> None:
        """Get ready to run. A function that could not be lowered is run once, to see whether it runs at all."""
        with settings_held(self._trial.settings):
            if self._lowered is not None:
                self._executable = self._lowered.compile()
            else:
                self._try_eager()
                self._executable = self._forward
            self._lowered = self._refused = None

    def _try_eager(self) -> None:
        try:
            self._with_live_arrays(partial(self._timed_with, self._forward, 1, time.perf_counter))
        except Exception:
            assert self._refused is not None
            raise self._refused from None  # it does not run at all

    def run(self, times: int, timer: Callable[[], float]) -> float:
        """Return the seconds that `times` consecutive runs take."""
        assert self._executable is not None
        with settings_held(self._trial.settings):
            return self._with_live_arrays(partial(self._timed_with, self._executable, times, timer))

    def _timed_with(self, executable: Callable[..., Any], times: int, timer: Callable[[], float]) -> float:
        arrays = self._arrays
        if self.how == "eager":
            arrays, times = copies_of(arrays), 1
        outputs = None
        start = timer()
        for _ in range(times):
            outputs = jax.block_until_ready(executable(*arrays))  # type: ignore[no-untyped-call]
        taken_s = timer() - start
        donations = self._trial.shared.get("donations", 0)
        # Only outputs of the same arguments are comparable: zeros in the place of a donated argument may make NaN. This
        # looks at a run that was needed anyway.
        if self.nan_outputs is None and self._trial.shared.setdefault("looked_at_after", donations) == donations:
            self.nan_outputs = frozenset(i for i, leaf in enumerate(jax.tree.leaves(outputs)) if has_nan(leaf))
        return taken_s

    def _with_live_arrays(self, work: Callable[[], T]) -> T:
        """Return the result of `work`. If the caller has donated arguments, replace those and try again."""
        try:
            return work()
        except Exception:  # RuntimeError or ValueError, depending on JAX's code path
            if not any(map(is_deleted, self._arrays)):
                raise
        self._arrays[:] = self._concrete(self._arrays)  # for all candidates: they share the list
        self._trial.shared["donations"] = self._trial.shared.get("donations", 0) + 1
        return work()

    def outputs(self) -> Outputs:
        """Return the outputs of a forward run as arrays on the host; unpickling other objects could run their code.

        Raises:
            RuntimeError: the caller has donated an argument since the first outputs, so these are not comparable.
        """
        with settings_held(self._trial.settings):
            return self._with_live_arrays(self._outputs)

    def _outputs(self) -> Outputs:
        shared = self._trial.shared
        donations = shared.get("donations", 0)
        if shared.get("compared_after", donations) != donations:
            raise RuntimeError("an argument was donated by its caller while outputs were being compared")
        if self.how == "eager":
            outputs = self._forward(*copies_of(self._arrays))
        elif self.how == "forward" and self._executable is not None:
            outputs = self._executable(*self._arrays)
        else:
            outputs = jax.jit(self._forward)(*self._arrays)
        leaves, structure = jax.tree_util.tree_flatten(outputs)
        # Addresses in static parts differ between processes, and between runs that make new objects.
        shown = re.sub(r" at 0x[0-9a-f]+", "", str(structure))
        arrays = Outputs([on_host(leaf) for leaf in leaves], shown, [dtype_text(leaf) for leaf in leaves])
        shared["compared_after"] = donations
        return arrays

    def runnable(self) -> Runnable:
        """Return the compiled program for executors. It holds none of the tune's arguments."""
        if self.how == "eager":
            return Runnable(self._trial.cfg, self._trial.fn)
        with settings_held(self._trial.settings):
            self._with_live_arrays(self._run_as_called)
        return Runnable(self._trial.cfg, self._trial.fn, self._function, self._jitted)

    def _run_as_called(self) -> None:
        # A kernel's own jit may donate its inputs, so it gets copies.
        run, arrays = (self._forward, copies_of(self._arrays)) if self._jitted is None else (self._jitted, self._arrays)
        jax.block_until_ready(run(*arrays))  # type: ignore[no-untyped-call]

    @property
    def pace(self) -> Pace:
        pace: Pace = self._trial.shared.setdefault("pace", Pace())
        return pace

    def release(self) -> None:
        """Release the executable, and the function with everything that JAX caches for it."""
        self._executable = self._lowered = self._refused = None
        self._arrays = []
        self._forward = _released
        self._jitted = None
        del self._function
        _yield_interpreter()


def _yielding(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    _yield_interpreter()
    outputs = fn(*args, **kwargs)
    _yield_interpreter()
    return outputs


def _released(*values: Any) -> Any:
    raise RuntimeError("a candidate that is out of the race was run again")


def _lower(
    forward: Callable[..., Any], arrays: list[Any], objective: str, jitted: Any
) -> tuple[TimingMode, jax.stages.Lowered | None, Exception | None]:
    """Return the best timing mode that a function allows, with the lowered program or the reason why there is none."""
    if objective == "forward+backward" and (backward := _with_backward(forward, arrays)) is not None:
        try:
            if _has_gradient(forward, arrays):
                return "forward+backward", _lowered(jax.jit(backward), arrays), None
        except Exception as error:
            # If the kernel is broken, the forward pass fails, too. `how` shows that the backward pass is missing.
            logger.debug("not differentiated: %s", redact(error))
    try:
        return "forward", _lowered(jitted, arrays), None
    except Exception as error:
        return "eager", None, error


def _lowered(jitted: Any, arrays: list[Any]) -> Any:
    traced = jitted.trace(*arrays)
    _yield_interpreter()
    lowered = traced.lower()
    _yield_interpreter()
    return lowered


def _yield_interpreter() -> None:
    """Release the interpreter lock for a moment, so that the event loop can run.

    Tracing and lowering hold it for 15 to 25 ms per candidate. Otherwise the loop gets it after 5 ms, and asyncio needs
    it twice to wake a sleeping task.
    """
    time.sleep(_YIELD_S)


def _fingerprint(how: TimingMode, lowered: Any) -> str | None:
    """Return a digest that equal programs share; None if the program's text is too long or incomplete."""
    module = lowered.compiler_ir("stablehlo")
    text = module.operation.get_asm(large_elements_limit=_MAX_ELEMENTS, enable_debug_info=False)
    # Captured arrays make megabytes of text, which would take longer to read than to compile.
    if "__elided__" in text:
        return None
    if "callback" in text:  # the text has a number for each callback, but not the function
        return None
    # Functions are named after the Python functions. Equal programs may have different names.
    defined = re.findall(r"(?:^module|func\.func private) (@[\w.$-]+)", text)
    names = {name: f"@{number}" for number, name in enumerate(defined)}
    text = re.sub(r"@[\w.$-]+", lambda found: names.get(found[0], found[0]), text)
    # The text does not contain the structure of the outputs.
    return hashlib.sha256(f"{how}\n{lowered.out_tree}\n{text}".encode()).hexdigest()


def _with_backward(forward: Callable[..., Any], arrays: list[Any]) -> Callable[..., Any] | None:
    """Return a function that computes the forward pass and the gradient with respect to every inexact input."""
    wanted = tuple(i for i, array in enumerate(arrays) if jnp.issubdtype(array.dtype, jnp.inexact))
    if not wanted:
        return None

    def loss(*values: Any) -> Any:
        outputs = [jnp.asarray(leaf) for leaf in jax.tree_util.tree_leaves(forward(*values))]
        total = jnp.zeros((), jnp.float32)
        for leaf in outputs:
            if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
                total += jnp.sum(leaf.real).astype(jnp.float32) + jnp.sum(leaf.imag).astype(jnp.float32)
            elif jnp.issubdtype(leaf.dtype, jnp.inexact):
                total += jnp.sum(leaf.astype(jnp.float32))
        return total, outputs  # with the outputs, so that no part of the forward pass is dead code

    return jax.value_and_grad(loss, argnums=wanted, has_aux=True)


def _has_gradient(forward: Callable[..., Any], arrays: list[Any]) -> bool:
    shapes = jax.tree_util.tree_leaves(jax.eval_shape(forward, *arrays))
    return any(jnp.issubdtype(shape.dtype, jnp.inexact) for shape in shapes)
