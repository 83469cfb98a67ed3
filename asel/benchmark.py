"""Compiles and times one candidate with JAX, off the event loop."""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from asel.canonical import aval_form
from asel.devices import real_mesh, settings_held
from asel.measure import How, Lowered, Sampler, Trial
from asel.redaction import redact
from asel.signatures import is_numeric
from asel.threads import Busy, run_in_thread

__all__ = ["LEAST_SAMPLE_S", "JaxMeasure", "Program", "Timing", "abstract", "concrete", "weak_zeros"]

# A sample this long is far above the timer's noise and the cost of dispatching one run.
LEAST_SAMPLE_S = 200e-6
_MOST_RUNS = 1000
# A batch shorter than the one is one of three, and than the other one of two: the first of them is cold, and the system
# takes a run away for milliseconds now and then.
_TINY_S = 0.5e-3
_SHORT_S = 2e-3
_BREATH_S = 100e-6
# A constant with more elements than this is not read to find out whose program is whose.
_MOST_ELEMENTS = 4096
logger = logging.getLogger("asel")
T = TypeVar("T")


class JaxMeasure:
    """Times a candidate as `jax.jit` would run it.

    Array leaves of the arguments are parameters of the compiled function; everything else is a
    constant. Tracers and shapes become zeros of the same shape, dtype and sharding. Where a kernel
    cannot be differentiated it is timed forward, and where it cannot be traced as it is, un-jitted;
    the sampler's `how` says so. A run shorter than `least_sample_s` is repeated within a sample.
    """

    def __init__(
        self, *, timer: Callable[[], float] = time.perf_counter, least_sample_s: float = LEAST_SAMPLE_S
    ) -> None:
        self._timer = timer
        self._least_sample_s = max(least_sample_s, 100 * time.get_clock_info("perf_counter").resolution)

    async def lower(self, trial: Trial[Any]) -> Lowered:
        step = _in_thread(trial)
        program = await step(f"lowering {trial.cfg!r}", partial(Program, trial))

        async def compile() -> Sampler:
            await step(f"compiling {trial.cfg!r}", program.compile)
            return _InThread(self, trial, Timing(program, self._timer, self._least_sample_s))

        return Lowered(program.fingerprint, compile, program.release, runs=program.how == "eager")

    async def compile(self, trial: Trial[Any]) -> Sampler:
        return await (await self.lower(trial)).compile()

    async def series(
        self, samplers: Sequence[_InThread], taken: list[tuple[float, float]], left_behind: list[Busy]
    ) -> None:
        """Sample some of its samplers, as a `Bench` does."""

        def work() -> None:
            for sampler in samplers:
                if left_behind:
                    return
                start = time.perf_counter()
                seconds = sampler.timing.sample()
                if not left_behind:
                    taken.append((seconds, time.perf_counter() - start))

        def what() -> str:
            return samplers[min(len(taken), len(samplers) - 1)].what

        await run_in_thread(what, work, grace_s=samplers[0].trial.grace_s, left_behind=left_behind)


def _in_thread(trial: Trial[Any]) -> Callable[..., Any]:
    return partial(run_in_thread, grace_s=trial.grace_s, left_behind=trial.left_behind)


class Program:
    """A candidate as a function of its arrays: lowered when made, runnable once compiled."""

    def __init__(self, trial: Trial[Any]) -> None:
        self._trial = trial
        with settings_held(trial.settings):
            fn = trial.build()
            leaves, structure = jax.tree_util.tree_flatten((trial.args, dict(trial.kwargs)))
            dynamic = [_is_array(leaf) for leaf in leaves]
            # Under a mesh a shape of unknown place is JAX's to place, as the caller's own array would be.
            self._device = trial.device if trial.settings is None or trial.settings.mesh is None else None
            if (arrays := trial.shared.get("arrays")) is None:
                given = zip(leaves, dynamic, strict=True)
                arrays = [concrete(leaf, self._device) for leaf, is_array in given if is_array]
                trial.shared["arrays"] = arrays

            def forward(*values: Any) -> Any:
                given = iter(values)
                merged = [next(given) if is_array else leaf for leaf, is_array in zip(leaves, dynamic, strict=True)]
                args, kwargs = jax.tree_util.tree_unflatten(structure, merged)
                _breathe()
                outputs = fn(*args, **kwargs)
                _breathe()
                return outputs

            self._arrays = arrays
            self._forward: Callable[..., Any] = forward
            self._executable: Callable[..., Any] | None = None
            self.how, self._lowered, self._refused = _lower(forward, arrays, trial.objective)
            self.fingerprint = None if self._lowered is None else _fingerprint(self.how, self._lowered)

    def compile(self) -> None:
        """Be ready to run. What could not be lowered is run once, as it is, to see whether it runs at all."""
        with settings_held(self._trial.settings):
            if self._lowered is not None:
                self._executable = self._lowered.compile()
            else:
                self._prove()
                self._executable = self._forward
            self._lowered = self._refused = None

    def _prove(self) -> None:
        try:
            self._whatever_is_donated(partial(self._timed_with, self._forward, 1, time.perf_counter))
        except Exception:
            assert self._refused is not None
            raise self._refused from None  # it does not run at all

    def run(self, times: int, timer: Callable[[], float]) -> float:
        """Return the seconds that `times` runs took, each waited for."""
        assert self._executable is not None
        with settings_held(self._trial.settings):
            return self._whatever_is_donated(partial(self._timed_with, self._executable, times, timer))

    def _timed_with(self, executable: Callable[..., Any], times: int, timer: Callable[[], float]) -> float:
        arrays = self._arrays
        if self.how == "eager":
            arrays, times = _copies(arrays), 1
        start = timer()
        for _ in range(times):
            jax.block_until_ready(executable(*arrays))  # type: ignore[no-untyped-call]
        return timer() - start

    def _whatever_is_donated(self, work: Callable[[], T]) -> T:
        """Return what `work` returns; done again with zeros in the place of arguments that the caller has donated."""
        try:
            return work()
        except Exception:  # a RuntimeError or a ValueError, by the way that JAX took
            deleted = [index for index, array in enumerate(self._arrays) if _is_deleted(array)]
            if not deleted:
                raise
        for index in deleted:  # for all candidates: they share the list
            self._arrays[index] = concrete(self._arrays[index], self._device)
        self._trial.shared["donations"] = self._trial.shared.get("donations", 0) + 1
        return work()

    def outputs(self) -> list[Any]:
        """Return what a forward run returns, on the host: numbers, since an object might do anything if unpickled.

        Raises:
            RuntimeError: the caller has donated an argument since the first outputs, so that these would be others.
        """
        with settings_held(self._trial.settings):
            return self._whatever_is_donated(self._outputs)

    def _outputs(self) -> list[Any]:
        shared = self._trial.shared
        donations = shared.get("donations", 0)
        if shared.get("compared_after", donations) != donations:
            raise RuntimeError("an argument was donated by its caller while outputs were being compared")
        if self.how == "eager":
            outputs = self._forward(*_copies(self._arrays))
        elif self.how == "forward" and self._executable is not None:
            outputs = self._executable(*self._arrays)
        else:
            outputs = jax.jit(self._forward)(*self._arrays)
        on_host = [_on_host(leaf) for leaf in jax.tree_util.tree_leaves(outputs)]
        shared["compared_after"] = donations
        return on_host

    @property
    def pace(self) -> Pace:
        pace: Pace = self._trial.shared.setdefault("pace", Pace())
        return pace

    def release(self) -> None:
        """Let go of the executable, and with the function of all that JAX keeps for it."""
        self._executable = self._lowered = self._refused = None
        self._arrays = []
        self._forward = _released
        _breathe()


def _released(*values: Any) -> Any:
    raise RuntimeError("a candidate that is out of the race was run again")


@dataclass(slots=True)
class Pace:
    """How the runs of a tune's candidates are sampled: all alike, or the best of three would beat the best of two.

    It is that of the fastest, for all that may be its rivals: what is far slower makes twice the runs that it needs.
    """

    runs: int = 1
    """How many make a batch: as many as are well above the timer's noise."""
    batch_s: float = math.inf
    """The best batch that was seen."""

    @property
    def batches(self) -> int:
        """How many make a sample, of which the best counts."""
        return 3 if self.batch_s < _TINY_S else 2 if self.batch_s < _SHORT_S else 1


class Timing:
    """Samples of a compiled program, or of one run as it is: then each is one run.

    The first run is cold, and a sample all the same where it is long enough to be timed at all: a race throws it
    away, or makes do with it where runs are long. The second sample is a batch of runs. From then on, short runs are
    cold again after those of others, and disturbed now and then: a sample is the best of some batches. On a machine
    that others use, the best of a cold and a warm run tells nearly twice as much as the warm one alone.
    """

    def __init__(self, program: Program, timer: Callable[[], float], least_sample_s: float) -> None:
        self.program = program
        self._timer = timer
        self._least_sample_s = least_sample_s
        self._runs = 1  # in a batch, as far as this program alone needs them
        self._taken = 0

    def sample(self) -> float:
        """Return the seconds one run takes; roughly, the first time."""
        self._taken += 1
        if self.program.how == "eager":
            return self._run(1)
        if self._taken == 1 and (cold_s := self._run(1)) >= self._least_s():
            return cold_s
        pace = self.program.pace
        asked = min(pace.runs, 2 * self._runs) if self._taken > 2 else 1
        runs, batch_s = self._batch(asked)
        if runs > asked:
            self._runs = runs
        if self._taken > 2:
            batch_s = min([batch_s, *(self._run(runs) for _ in range(pace.batches - 1))])
        pace.runs, pace.batch_s = max(pace.runs, runs), min(pace.batch_s, batch_s)
        return batch_s / runs

    def _batch(self, runs: int) -> tuple[int, float]:
        """Return so many runs, or as many more as are well above the timer's noise, and the seconds they took."""
        taken = self._run(runs)
        while 0 < taken < self._least_s() and runs < _MOST_RUNS:
            runs = min(_MOST_RUNS, max(runs + 1, math.ceil(1.2 * runs * self._least_s() / taken)))
            taken = self._run(runs)
        return runs, taken

    def _run(self, times: int) -> float:
        return self.program.run(times, self._timer)

    def _least_s(self) -> float:
        return max(self._least_sample_s, 10 * dispatch_overhead_s())


@functools.cache
def dispatch_overhead_s() -> float:
    """Return what it costs to run a compiled program that does nothing, and to wait for it."""
    with jax.transfer_guard("allow"):  # a guard is on what the caller's programs do
        zero, taken = jnp.zeros(()), []
    nothing = jax.jit(lambda x: x).lower(zero).compile()
    for _ in range(20):
        start = time.perf_counter()
        jax.block_until_ready(nothing(zero))  # type: ignore[no-untyped-call]
        taken.append(time.perf_counter() - start)
    return sorted(taken)[len(taken) // 2]


class _InThread:
    """A compiled candidate, sampled in threads of this process."""

    def __init__(self, bench: JaxMeasure, trial: Trial[Any], timing: Timing) -> None:
        self.how: How = timing.program.how
        self.bench = bench
        self.trial = trial
        self.timing = timing
        self.what = f"measuring {trial.cfg!r}"
        self._step = _in_thread(trial)

    async def __call__(self) -> float:
        seconds: float = await self._step(self.what, self.timing.sample)
        return seconds

    async def outputs(self) -> list[Any]:
        outputs: list[Any] = await self._step(f"checking, {self.what}", self.timing.program.outputs)
        return outputs

    def release(self) -> None:
        self.timing.program.release()


def _on_host(leaf: Any) -> Any:
    with jax.transfer_guard("allow"):  # it is us who want it there
        is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
    if array.dtype.hasobject:
        raise TypeError(f"an output is of type {type(leaf).__name__}, which is no array")
    return array


def _copies(arrays: list[Any]) -> list[Any]:
    """Return copies to run un-jitted with: a kernel's own jit may donate its inputs, and they are the caller's."""
    with jax.transfer_guard("allow"):
        return jax.block_until_ready([jnp.copy(array) for array in arrays])  # type: ignore[no-untyped-call, no-any-return]


def _lower(
    forward: Callable[..., Any], arrays: list[Any], objective: str
) -> tuple[How, jax.stages.Lowered | None, Exception | None]:
    """Return the best that can be timed of a function, lowered; or why it can only be run as it is, if it can."""
    if objective == "forward+backward" and (backward := _with_backward(forward, arrays)) is not None:
        try:
            if _has_gradient(forward, arrays):
                return "forward+backward", _lowered(backward, arrays), None
        except Exception as error:
            # Whatever it is, the forward pass tells if it matters; `how` tells that the backward is missing.
            logger.debug("not differentiated: %s", redact(error))
    try:
        return "forward", _lowered(forward, arrays), None
    except Exception as error:
        return "eager", None, error


def _lowered(function: Callable[..., Any], arrays: list[Any]) -> Any:
    traced = jax.jit(function).trace(*arrays)
    _breathe()
    lowered = traced.lower()
    _breathe()
    return lowered


def _breathe() -> None:
    """Let go of the interpreter for a moment, so that the event loop has its turn.

    Tracing and lowering hold it for 15 to 25 ms a candidate. The loop gets it from a thread that does not
    let go only by waiting 5 ms for it, and asyncio has to twice before a task that slept is awake.
    """
    time.sleep(_BREATH_S)


def _fingerprint(how: How, lowered: Any) -> str | None:
    """Return what tells a program from others; None where that is more than a short text."""
    module = lowered.compiler_ir("stablehlo")
    text = module.operation.get_asm(large_elements_limit=_MOST_ELEMENTS, enable_debug_info=False)
    # Captured arrays make megabytes of text, which takes longer to read than to compile, with the interpreter held.
    if "__elided__" in text:
        return None
    if "callback" in text:  # a call to the host is in the text by number, and what it calls is not
        return None
    # Functions are named after what was jitted: two programs are the same whatever their parts are called.
    defined = re.findall(r"(?:^module|func\.func private) (@[\w.$-]+)", text)
    names = {name: f"@{number}" for number, name in enumerate(defined)}
    text = re.sub(r"@[\w.$-]+", lambda found: names.get(found[0], found[0]), text)
    return hashlib.sha256(f"{how}\n{text}".encode()).hexdigest()


def _with_backward(forward: Callable[..., Any], arrays: list[Any]) -> Callable[..., Any] | None:
    """Return forward and gradient of every inexact output with respect to every inexact input."""
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
        return total, outputs  # the outputs too, so that none of the forward pass is dead code

    return jax.value_and_grad(loss, argnums=wanted, has_aux=True)


def _has_gradient(forward: Callable[..., Any], arrays: list[Any]) -> bool:
    shapes = jax.tree_util.tree_leaves(jax.eval_shape(forward, *arrays))
    return any(jnp.issubdtype(shape.dtype, jnp.inexact) for shape in shapes)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) or is_numeric(leaf)


def concrete(leaf: Any, device: Any = None) -> Any:
    """Return an array that can be computed with: `leaf` itself, or zeros in the place of a shape."""
    leaf = abstract(leaf)
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    with jax.transfer_guard("allow"):  # a guard is on what the caller's programs do
        zeros = weak_zeros(leaf.shape, leaf.dtype) if leaf.weak_type else jnp.zeros(leaf.shape, leaf.dtype)
        place = device if leaf.sharding is None else _on_real_devices(leaf.sharding)
        return zeros if place is None else jax.device_put(zeros, place)


def weak_zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Return zeros whose type gives way to others: only Python's own numbers have such, and what is made of them."""
    number = {"f": 0.0, "c": 0j}.get(np.dtype(dtype).kind, 0)
    return jnp.broadcast_to(jnp.asarray(number), shape)


def _on_real_devices(sharding: Any) -> Any:
    """Return a sharding as it is, or over devices of this process where its mesh is abstract."""
    if not isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
        return sharding
    return jax.sharding.NamedSharding(real_mesh(sharding.mesh), sharding.spec)


def abstract(leaf: Any) -> Any:
    """Return `leaf`, or its shape where it is a tracer, which must not outlive its trace, or was donated."""
    if _is_deleted(leaf):
        sharding = leaf.sharding if leaf.committed else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type)  # type: ignore[no-untyped-call]
    if not isinstance(leaf, jax.core.Tracer):
        return leaf
    aval: Any = leaf.aval
    sharding = aval.sharding if aval_form(aval)[3] else None
    weak_type = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak_type)  # type: ignore[no-untyped-call]


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted()
