"""Runs a kernel with one config: in a thread while it may compile, and on the loop once it was quick."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import anyio
from anyio.lowlevel import RunVar

from asel.errors import UnstableKeyError
from asel.kernels.binding import bind
from asel.kernels.kernel_numbers import is_known_by_itself
from asel.kernels.key_memo import Resolved
from asel.kernels.signature import signature
from asel.runtime.jax_settings import current_settings, with_settings
from asel.runtime.threads import run_in_thread
from asel.tuning.runnable import Programs, Runnable

__all__ = ["QUICK_S", "RunResult", "Runs", "in_a_thread", "program_signature", "timed"]

QUICK_S = 1e-3
"""Seconds. After a run that took less, the next one is in the caller's thread."""
_MAX_THREADS = 40
_threads: RunVar[anyio.CapacityLimiter] = RunVar("asel_executor_threads")


class RunResult(NamedTuple):
    """A run that has ended: its result or its error, and its duration."""

    out: Any
    error: Exception | None
    seconds: float


class Runs:
    """Runs calls with configs, and keeps the runnables; with `jit`, they are the compiled programs of a chain."""

    def __init__(self, programs: Programs, *, jit: bool) -> None:
        self._programs = programs
        self._jits = jit

    async def run(self, inv: Any, kernel: Any, resolved: Resolved[Any], cfg: Any) -> RunResult:
        if resolved.traced:
            return timed(partial(bind(kernel, inv, resolved.platform, cfg), *inv.args, **inv.kwargs))
        token = program_signature(inv, kernel)
        return await self.run_one(self.runnable(inv, kernel, resolved, cfg), token, resolved, inv.args, inv.kwargs)

    async def run_one(
        self, runnable: Runnable, token: Any, resolved: Resolved[Any], args: Any, kwargs: Any
    ) -> RunResult:
        if is_quick := runnable.is_quick(token):
            ran = timed(partial(runnable, args, kwargs))
        else:
            is_first = is_quick is None
            run = partial(runnable.first_run if is_first else runnable, args, kwargs)
            ran = await in_a_thread(f"running {resolved.key.op_id}", partial(timed, run, wait=is_first))
        if ran.error is None:
            runnable.note_run(token, ran.seconds < QUICK_S)
        return ran

    def runnable(self, inv: Any, kernel: Any, resolved: Resolved[Any], cfg: Any) -> Runnable:
        """Return the runnable of this call with `cfg`: one kept from an earlier call or a tune, or else a new one."""
        key: Any = resolved
        if getattr(kernel, "key_builder", None) is not None:
            # Calls that share a built key may need separate programs.
            if (token := program_signature(inv, kernel)) is None:
                return Runnable(cfg, bind(kernel, inv, resolved.platform, cfg))
            key = (resolved, token)
        runnable = self._programs.get(key, cfg)
        if runnable is not None and runnable.serves(kernel):
            return runnable
        fn = bind(kernel, inv, resolved.platform, cfg, weakly=is_known_by_itself(kernel))
        if runnable is not None:
            runnable = runnable.serving(kernel, fn)
        else:
            runnable = Runnable.of(cfg, fn, inv.args, inv.kwargs) if self._jits else Runnable(cfg, fn)
            runnable.go_with(kernel)
        self._programs.put(key, runnable)  # before it has run, so that concurrent callers share it
        return runnable

    def compiled(self, resolved: Resolved[Any], cfg: Any) -> Runnable | None:
        """Return the runnable that has run this signature with `cfg`; None if it is no longer kept."""
        return self._programs.get(resolved, cfg)


def program_signature(inv: Any, kernel: Any) -> tuple[Any, ...] | None:
    """Return a tuple that differs if JAX compiles calls separately; None if an argument has no stable identity."""
    try:
        return signature(kernel, inv.args, inv.kwargs, inv, for_program=True)
    except (UnstableKeyError, RecursionError):
        return None


def timed(run: Callable[[], Any], *, wait: bool = False) -> RunResult:
    """Call `run` and measure the time until it returns; with `wait`, block until the result is computed."""
    start = time.perf_counter()
    try:
        out = run()
        seconds = time.perf_counter() - start
        if wait and (jax := sys.modules.get("jax")) is not None:
            jax.block_until_ready(out)
    except Exception as error:
        return RunResult(None, error, time.perf_counter() - start)
    return RunResult(out, None, seconds)


async def in_a_thread(what: str, work: Callable[[], Any]) -> Any:
    """Run `work` in a thread with the caller's JAX settings, and return its result."""
    try:
        limiter = _threads.get()
    except LookupError:
        _threads.set(limiter := anyio.CapacityLimiter(_MAX_THREADS))
    work = partial(with_settings, current_settings(), work)
    async with limiter:
        return await run_in_thread(what, work)
