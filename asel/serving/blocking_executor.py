"""`BlockingExecutor`: an executor for code without `await`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Generic, TypeVar, cast

from asel.errors import InvalidRequestError
from asel.kernels.candidates import same_config
from asel.kernels.kernel import Cfg, Invocation, Kernel, Out
from asel.kernels.key_memo import Resolved
from asel.selection.policy import AutotunePolicy
from asel.serving.blocking import BlockingSelector
from asel.serving.call_keywords import invocation_of, pop_call_keywords
from asel.serving.compiled_call import jitted_call
from asel.serving.executor import Executor
from asel.serving.preparation import own_prepare, prepared
from asel.serving.runs import QUICK_S, RunResult, Runs, timed
from asel.serving.winner_faults import WinnerFaults
from asel.tuning.outcomes import TuneReport
from asel.tuning.runnable import Programs, Runnable, after_run

__all__ = ["BlockingExecutor"]

T = TypeVar("T")


class BlockingExecutor(Generic[Cfg, Out]):
    """Runs kernels with the configs that a `BlockingSelector` chooses: an `Executor` without `await`.

    A kernel runs in its caller's thread, with that thread's settings. While JAX traces, the kernel becomes part of the
    trace, which waits for the kernel's tune. Winners that fail are handled as in an `Executor`.
    """

    def __init__(self, selector: BlockingSelector[Cfg, Out], *, jit: bool = True) -> None:
        if not isinstance(selector, BlockingSelector):
            raise InvalidRequestError(f"BlockingExecutor: a {type(selector).__name__} is not a BlockingSelector")
        self.selector = selector
        self._waiting = _WaitingExecutor(selector, jit=jit)
        self.nowait = _OpeningExecutor(selector, jit=jit).nowait

    def __call__(self, kernel: Kernel[Cfg, Out], *args: Any, cfg: Cfg | None = None, **kwargs: Any) -> Out:
        """Run `kernel` with `cfg`, or with the config that the selector chooses, and return its result.

        Raises:
            NoConfigError: every tier declined. `choose` lists the other errors.
            Exception: the kernel raised it.
        """
        try:
            return self._waiting.nowait(kernel, *args, cfg=cfg, **kwargs)
        finally:
            self._waiting.begin_postponed_tunes()

    def choose_config(self, kernel: Kernel[Cfg, Out], *args: Any, cfg: Cfg | None = None, **kwargs: Any) -> Cfg:
        """Return the config that a call would run with, without running the kernel."""
        return self.selector.choose(_prepared_call(kernel, args, kwargs, cfg), kernel)

    def compile(
        self, kernel: Kernel[Cfg, Out], *example_args: Any, cfg: Cfg | None = None, **example_kwargs: Any
    ) -> Callable[..., Out]:
        """Return a plain jitted function that runs `kernel` with the config of this example call.

        See `Executor.compile`.
        """
        inv = _prepared_call(kernel, example_args, dict(example_kwargs), cfg)
        pop_call_keywords(example_kwargs)
        chosen, platform = self.selector.choose(inv, kernel), self.selector.resolve(inv, kernel).platform
        fn = jitted_call(kernel, inv, platform, chosen, own_prepare(kernel), example_args, example_kwargs)
        fn.lower(*example_args, **example_kwargs).compile()  # a call of `fn` finds this program in JAX's cache
        return cast(Callable[..., Out], fn)


def _prepared_call(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], cfg: Any) -> Invocation[Any, Any]:
    call_keywords = pop_call_keywords(kwargs)
    if (prepare := own_prepare(kernel)) is not None:
        args, kwargs = prepared(prepare, args, kwargs)
    return invocation_of(kernel, args, kwargs, cfg, call_keywords)


class _OpeningExecutor(Executor[Cfg, Out]):
    """An executor whose `nowait` opens the selector, if it is not open yet."""

    def __init__(self, blocking: BlockingSelector[Cfg, Out], *, jit: bool) -> None:
        super().__init__(blocking.chain, jit=jit)
        self._blocking = blocking

    def _choose_for_nowait(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Cfg:
        return self._blocking.choose_nowait(inv, kernel)


class _WaitingExecutor(_OpeningExecutor[Cfg, Out]):
    """An executor whose `nowait` does wait for a config, and runs another one if a winner fails."""

    def __init__(self, blocking: BlockingSelector[Cfg, Out], *, jit: bool) -> None:
        super().__init__(blocking, jit=jit)
        runs = _CallerRuns(blocking.chain.keep_programs() if jit else Programs(), jit=jit)
        self._caller_faults = WinnerFaults(_LoopSelector(blocking), runs)
        self._postponed = _PostponedTunes()

    def _choose_for_nowait(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Cfg:
        later: list[Callable[[], None]] = []
        after_run.set(later)
        try:
            return self._blocking.choose(inv, kernel)
        finally:
            after_run.set(None)
            self._postponed.tunes += later

    def begin_postponed_tunes(self) -> None:
        """Begin the background tunes that waited for the call of this thread to end."""
        if tunes := self._postponed.tunes:
            self._postponed.tunes = []
            for begin_tune in tunes:
                self._blocking.run_soon(begin_tune)

    def _recover_for_nowait(
        self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out], cfg: Cfg, error: Exception
    ) -> Out:
        resolved = self.selector.resolve(inv, kernel)
        selection = self._blocking.select(inv, kernel)
        if selection.tier in ("override", "overlay", "heuristics") or not same_config(selection.cfg, cfg):
            raise error
        return cast(Out, _result(self._caller_faults.fall_back(inv, kernel, resolved, selection, error)))


class _PostponedTunes(threading.local):
    """The background tunes that begin once the call of this thread has run."""

    def __init__(self) -> None:
        self.tunes: list[Callable[[], None]] = []


class _CallerRuns(Runs):
    """Runs kernels in the caller's thread, however long they take."""

    async def run_one(
        self, runnable: Runnable, token: Any, resolved: Resolved[Any], args: Any, kwargs: Any
    ) -> RunResult:
        is_first = runnable.is_quick(token) is None
        ran = timed(partial(runnable.first_run if is_first else runnable, args, kwargs), wait=is_first)
        if ran.error is None:
            runnable.note_run(token, ran.seconds < QUICK_S)
        return ran


class _LoopSelector:
    """The selector as `WinnerFaults` needs it; its coroutine functions run on the selector's event loop."""

    def __init__(self, blocking: BlockingSelector[Any, Any]) -> None:
        self._blocking = blocking
        self.cache = blocking.cache

    @property
    def policy(self) -> AutotunePolicy:
        return self._blocking.policy

    @property
    def changes_together(self) -> bool:
        return self._blocking.chain.changes_together

    async def find_report(self, inv: Any, kernel: Any, cfg: Any) -> TuneReport[Any] | None:
        return self._blocking.find_report(inv, kernel, cfg)

    async def withdraw(self, inv: Any, kernel: Any, cfg: Any, error: Exception, **facts: Any) -> bool:
        return self._blocking.withdraw(inv, kernel, cfg, error, **facts)


def _result(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as end:
        return cast(T, end.value)
    raise AssertionError("the coroutine waited")
