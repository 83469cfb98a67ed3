"""`BlockingSelector`: a selector for code without `await`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any, Generic, Literal, Self

from asel.errors import InvalidRequestError, SelectorClosedError
from asel.events import Event, EventStream
from asel.events.context import Statistics
from asel.kernels.call_registry import RecordedCall, record_invocation
from asel.kernels.kernel import Cfg, Invocation, Kernel, Out
from asel.kernels.key_memo import Resolved
from asel.runtime.fork import renew_after_fork
from asel.runtime.jax_settings import current_settings
from asel.selection.cache import ConfigCache
from asel.selection.policy import AutotunePolicy
from asel.selection.results import Explanation, Selection, Tier
from asel.selection.selector import ConfigSelectorChain
from asel.serving.batch import autotune_recorded, example_calls
from asel.serving.batch_run import Progress, run_batch
from asel.serving.batch_summary import BatchSummary
from asel.serving.loop_thread import LoopThread
from asel.tuning.outcomes import TuneReport

__all__ = ["BlockingEvents", "BlockingSelector"]

_INTERRUPTED_GRACE_S = 0.2


class BlockingSelector(Generic[Cfg, Out]):
    """A `ConfigSelectorChain` for scripts, notebooks and threads: the same names, without `await`.

    It takes the chain's arguments. The chain is open in an event loop in its own thread, from the first call that
    needs it, or from `with`, until `close` or the end of the program. Any number of threads may call concurrently.
    Answers from memory do not leave the caller's thread.

    While JAX traces, `choose` may tune as well, so the first trace has the tuned config already. The trace waits, and
    the tune runs in other threads with arrays of its own: the kernel's `example_inputs`, or else zeros (random arrays,
    if outputs are checked). Ctrl-C ends a wait immediately; the tune continues until the selector is closed.
    """

    def __init__(self, *args: Any, backend: Literal["asyncio", "trio"] = "asyncio", **options: Any) -> None:
        self.chain: ConfigSelectorChain[Cfg, Out] = ConfigSelectorChain(*args, **options)
        self._backend = backend
        self._loop: LoopThread | None = None
        self._is_closed = False
        self.renew()
        renew_after_fork(self)
        # Stops the loop of a selector that was garbage-collected without being closed.
        self._finalizer: weakref.finalize[..., Any] | None = None

    # ---------------------------------------------------------------------------------------
    # Opening and closing.

    def renew(self) -> None:
        """In the child of a fork: make a new lock."""
        self._opening = threading.Lock()

    def __enter__(self) -> Self:
        if self._loop is not None:
            raise InvalidRequestError("this selector is open already; share the object instead of entering it again")
        self._is_closed = False
        self._opened()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            _hurry(self.chain)
        self.close()

    def close(self) -> None:
        """End all tunes, and return when the selector is closed. Callers still waiting get `SelectorClosedError`."""
        with self._opening:
            loop, self._loop, self._is_closed = self._loop, None, True
            if self._finalizer is not None:
                self._finalizer.detach()
            self._finalizer = None
        if loop is not None:
            loop.stop()
            loop.join()

    def _opened(self) -> LoopThread:
        if (loop := self._loop) is not None:
            return loop
        with self._opening:
            if self._loop is None:
                if self._is_closed:
                    raise SelectorClosedError("the selector is closed; enter it again, or make another")
                self._loop = LoopThread(self.chain, self._backend, hurry=partial(_hurry, self.chain))
                self._finalizer = weakref.finalize(self, self._loop.stop)
                self._finalizer.atexit = False  # at exit, the loop stops itself
            return self._loop

    def run_soon(self, work: Callable[[], object]) -> None:
        """Run `work` on the selector's event loop without waiting for it; do nothing if the selector is not open."""
        if (loop := self._loop) is not None:
            loop.run_soon(work)

    # ---------------------------------------------------------------------------------------
    # Choosing.

    def choose(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Cfg:
        """Return the config `inv` should run with; see `ConfigSelectorChain.choose`.

        Raises:
            InvalidRequestError: called on the selector's own event loop, for instance by a kernel's `heuristic_cfg`.
        """
        chain = self.chain
        if inv.override_cfg is None and inv.op_id == kernel.op_id:
            cfg = chain.answer_from_memory(chain.resolve(inv, kernel))
            if cfg is not None:
                return cfg
        return self.select(inv, kernel).cfg

    def select(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Selection[Cfg]:
        """Return the config, the tier that it came from, and why the earlier tiers declined."""
        loop, chain = self._opened(), self.chain
        selection = loop.call(chain.answer, chain.call_elsewhere(inv, kernel))
        if selection.tier in ("autotune", "heuristics") and (resolved := chain.resolve(inv, kernel)).traced:
            call = chain.call_elsewhere(inv, kernel)
            record_invocation(*resolved.key, kernel, call.inv.args, call.inv.kwargs, invocation=call.inv)
        return selection

    def choose_nowait(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Cfg:
        """Return the config without waiting, if need be the heuristic's; a missing key is tuned in the background."""
        self._opened()
        return self.chain.choose_nowait(inv, kernel)

    def explain(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Explanation[Cfg]:
        """Return what every tier would answer to this call, changing nothing and emitting nothing."""
        return self._opened().call(self.chain.explain, self.chain.call_elsewhere(inv, kernel), kernel)

    def retune(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Cfg:
        """Measure again, replace the config, and return the new one."""
        return self._opened().call(self.chain.retune, self.chain.call_elsewhere(inv, kernel), kernel)

    def find_report(self, inv: Any, kernel: Any, cfg: Cfg) -> TuneReport[Cfg] | None:
        """Return the report of the tune that chose `cfg`; None if there is none."""
        return self._opened().call(self.chain.find_report, self.chain.call_elsewhere(inv, kernel), kernel, cfg)

    def withdraw(
        self,
        inv: Any,
        kernel: Any,
        cfg: Cfg,
        error: Exception,
        *,
        tier: Tier = "memory",
        instead: Cfg | None = None,
        evidence: str = "reported by a caller of withdraw",
    ) -> bool:
        """Withdraw a config that failed in a real call; see `ConfigSelectorChain.withdraw`."""
        withdraw = partial(self.chain.withdraw, tier=tier, instead=instead, evidence=evidence)
        return self._opened().call(withdraw, self.chain.call_elsewhere(inv, kernel), kernel, cfg, error)

    def autotune_recorded(
        self,
        dev: str | None = None,
        *,
        calls: Iterable[RecordedCall] | None = None,
        progress: Progress = None,
        budget_s: float | None = None,
    ) -> BatchSummary:
        """Select a config for every recorded call of a device; `progress` is called in the selector's thread."""
        work = partial(autotune_recorded, calls=calls, progress=progress, budget_s=budget_s)
        return self._opened().call(work, self.chain, dev)

    def warm_up(
        self, examples: Iterable[tuple[Any, Any]], *, progress: Progress = None, budget_s: float | None = None
    ) -> BatchSummary:
        """Select a config for each `(kernel, example)`; `progress` is called in the selector's thread."""
        calls = example_calls(examples, current_settings())
        work = partial(run_batch, progress=progress, budget_s=budget_s)
        return self._opened().call(work, self.chain, calls)

    # ---------------------------------------------------------------------------------------
    # Everything else.

    @property
    def policy(self) -> AutotunePolicy:
        """The policy of the current context, with its overrides."""
        return self.chain.policy

    @policy.setter
    def policy(self, policy: AutotunePolicy) -> None:
        self.chain.policy = policy

    @property
    def cache(self) -> ConfigCache[Cfg]:
        """The selector's memory of configs."""
        return self.chain.cache

    def resolve(self, inv: Any, kernel: Any) -> Resolved[Cfg]:
        """Return the key and everything else that depends on a kernel and a call's signature alone."""
        return self.chain.resolve(inv, kernel)

    def statistics(self) -> Statistics:
        """Return the numbers of tunes, waiters and queued keys at the moment."""
        return self.chain.statistics()

    def settled(self) -> None:
        """Return once every tune in flight or in the queue has ended."""
        self._opened().call(self.chain.settled)

    def freeze(self) -> None:
        """Begin no more tunes; a call that would have begun one emits `late_tune`."""
        self.chain.freeze()

    @contextmanager
    def events(self, buffer: int = 4096) -> Iterator[BlockingEvents]:
        """Yield an iterator over the events, for one reader, until the selector closes or the block ends."""
        loop, block = self._opened(), self.chain.events(buffer)
        stream = loop.call(block.__aenter__)
        try:
            yield BlockingEvents(loop, stream)
        finally:
            stream.end()
            with suppress(SelectorClosedError):
                loop.call(block.__aexit__, None, None, None)


def _hurry(chain: ConfigSelectorChain[Any, Any]) -> None:
    """Limit the wait for a selector to close, because the program was interrupted."""
    chain.close_grace_s = min(chain.close_grace_s, _INTERRUPTED_GRACE_S)


class BlockingEvents:
    """An iterator over events, which waits for the next one."""

    def __init__(self, loop: LoopThread, stream: EventStream) -> None:
        self._loop = loop
        self._stream = stream

    @property
    def dropped(self) -> int:
        """How many events were lost because the reader fell behind."""
        return self._stream.dropped

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        event = self._loop.call(self._next)
        if event is None:
            raise StopIteration
        return event

    async def _next(self) -> Event | None:
        async for event in self._stream:
            return event
        return None
