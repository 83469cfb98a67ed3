"""Choose, then run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, cast

import anyio
from anyio.lowlevel import RunVar

from asel.answers import Selection
from asel.devices import current_settings, with_settings
from asel.kernel import Cfg, Invocation, Kernel, Out, bind
from asel.keys import Resolved, alike
from asel.memo import Memo
from asel.selection import ConfigSelectorChain
from asel.threads import run_in_thread
from asel.withdrawal import fallbacks

__all__ = ["Executor"]

# A run that came back in less than this is made where its caller is, the next time.
_QUICK_S = 1e-3
_MOST_THREADS = 40
_threads: RunVar[anyio.CapacityLimiter] = RunVar("asel_executor_threads")
_OF_THE_CALL = ("method", "mesh", "in_specs", "out_specs", "check_vma")


class Ran(NamedTuple):
    """How a run ended: with what it returned, or what it raised, and after how long."""

    out: Any
    error: Exception | None
    seconds: float


class Executor(Generic[Cfg, Out]):
    """Runs kernels with the configs that a chain chooses.

    A kernel is called as its user would call it: its `prepare`, if it has one, then its `run` in the form for
    the device's platform, with `cfg`. Nothing is jitted here: the tuner times kernels as `jax.jit` runs them,
    so jit your `run`, with `cfg` static. With `method="shard_map"`, `mesh`, `in_specs`, `out_specs` and
    `check_vma` are the call's; all other keywords are the kernel's.

    A run may compile, so it happens in a thread, with the caller's context variables, JAX settings and mesh. One that
    came back within a millisecond, of the very same signature and config, happens on the loop from there on:
    JAX computes behind it. Where it takes longer than that after all (`jax.clear_caches()`), it is back in
    a thread the next time. The first run with a config is waited for until its result is there, so that what
    fails does so here; what a later one raises when its result is read is for `selector.withdraw`.

    A config from memory, the store or a tune that raises is run against: the next best of its tune, and so
    on until one raises the same type of error; then the heuristic. If one of them works, the winner was at
    fault: it is withdrawn, told as `winner_failed`, and the other's result returned. If none does, the call
    was at fault: the first error is raised and nothing is withdrawn. So it is where an argument was donated,
    and cannot be used again. Whatever else a kernel does to the world, it does once for each config that is tried.
    """

    def __init__(self, selector: ConfigSelectorChain[Cfg, Out]) -> None:
        self.selector = selector
        # The config that a signature last ran with, and whether that was quick.
        self._ran: Memo[tuple[Any, bool]] = Memo(8192)

    async def __call__(self, kernel: Kernel[Cfg, Out], *args: Any, cfg: Cfg | None = None, **kwargs: Any) -> Out:
        """Return what `kernel` computes, with `cfg` or else with the config the chain chooses.

        A caller that is cancelled leaves its run to its thread.

        Raises:
            NoConfigError: every tier declined; and what else `choose` raises.
            Exception: what the kernel raises.
        """
        inv: Invocation[Cfg, Out] = await _prepared(kernel, args, kwargs, cfg)
        selection = await self.selector.select(inv, kernel)
        known = self.selector.resolve(inv, kernel)
        ran = await self._run(inv, kernel, known, selection.cfg)
        if ran.error is None:
            return cast(Out, ran.out)
        if selection.tier in ("override", "overlay", "heuristics") or known.traced:
            raise ran.error
        return await self._fall_back(inv, kernel, known, selection, ran.error)

    def nowait(self, kernel: Kernel[Cfg, Out], *args: Any, cfg: Cfg | None = None, **kwargs: Any) -> Out:
        """Run `kernel` here and now with what `choose_nowait` says: a plain function, safe while JAX traces.

        Nothing is withdrawn: what the kernel raises is raised.
        """
        inv: Invocation[Cfg, Out] = _invocation(kernel, args, kwargs, cfg)
        chosen = self.selector.choose_nowait(inv, kernel)
        run = bind(kernel, inv, self.selector.resolve(inv, kernel).platform, chosen)
        return cast(Out, run(*inv.args, **inv.kwargs))

    async def _fall_back(
        self,
        inv: Invocation[Cfg, Out],
        kernel: Kernel[Cfg, Out],
        known: Resolved[Cfg],
        selection: Selection[Cfg],
        error: Exception,
    ) -> Out:
        """Find out whether the winner was at fault or the call: run another config with the same arguments."""
        allowed = self.selector.policy.allow_heuristics
        others = fallbacks(selection, known, self.selector.cache, allow_heuristics=allowed)
        while others and not _was_donated(inv):
            cfg = others.pop(0)
            ran = await self._run(inv, kernel, known, cfg)
            if ran.error is None:
                await self.selector.withdraw(inv, kernel, selection.cfg, error, tier=selection.tier, instead=cfg)
                return cast(Out, ran.out)
            if alike(cfg, known.heuristic):
                break
            if type(ran.error) is type(error):
                others = [other for other in others if alike(other, known.heuristic)]
        raise error

    async def _run(self, inv: Any, kernel: Any, known: Resolved[Any], cfg: Any) -> Ran:
        before = self._ran.get(known)
        again = before is not None and alike(before[0], cfg)
        run = partial(bind(kernel, inv, known.platform, cfg), *inv.args, **inv.kwargs)
        # A kernel with keys of its own has one for calls that compile apart.
        if known.traced or (
            again and before is not None and before[1] and getattr(kernel, "key_builder", None) is None
        ):
            ran = _timed(run)
        else:
            ran = await _in_a_thread(f"running {known.key.op_id}", partial(_timed, run, wait=not again))
        if ran.error is None:
            self._ran.put(known, (cfg, ran.seconds < _QUICK_S))
        return ran


async def _prepared(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], cfg: Any) -> Invocation[Any, Any]:
    """Return the call, as the kernel prepares it: in a thread, since that may compile, too."""
    if _prepare_of(kernel) is None:
        return _invocation(kernel, args, kwargs, cfg)
    make = partial(_invocation, kernel, args, kwargs, cfg)
    return await _in_a_thread(f"preparing {kernel.op_id}", make)  # type: ignore[no-any-return]


def _invocation(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], cfg: Any) -> Invocation[Any, Any]:
    of_the_call: dict[str, Any] = {}
    if kwargs.get("method") == "shard_map":
        of_the_call = {name: kwargs.pop(name) for name in _OF_THE_CALL if name in kwargs}
    if (prepare := _prepare_of(kernel)) is not None:
        args, kwargs = prepare(*args, **kwargs)
    return Invocation(kernel.op_id, tuple(args), kwargs, override_cfg=cfg, **of_the_call)


def _prepare_of(kernel: Any) -> Callable[..., Any] | None:
    prepare: Callable[..., Any] | None = getattr(kernel, "prepare", None)
    return None if getattr(prepare, "__func__", None) is Kernel.prepare else prepare


def _timed(run: Callable[[], Any], *, wait: bool = False) -> Ran:
    """Run, and take the time until it returns; with `wait`, stay until what it returned is computed."""
    start = time.perf_counter()
    try:
        out = run()
        seconds = time.perf_counter() - start
        if wait and (jax := sys.modules.get("jax")) is not None:
            jax.block_until_ready(out)
    except Exception as error:
        return Ran(None, error, time.perf_counter() - start)
    return Ran(out, None, seconds)


async def _in_a_thread(what: str, work: Callable[[], Any]) -> Any:
    """Return what `work` returns, from a thread that has the caller's settings."""
    try:
        limiter = _threads.get()
    except LookupError:
        _threads.set(limiter := anyio.CapacityLimiter(_MOST_THREADS))
    here = partial(with_settings, current_settings(), work)
    async with limiter:
        return await run_in_thread(what, here)


def _was_donated(inv: Any) -> bool:
    """Tell whether an argument is gone: a run may give its inputs' memory to its outputs, and then fail."""
    if (jax := sys.modules.get("jax")) is None:
        return False
    leaves = jax.tree_util.tree_leaves((inv.args, dict(inv.kwargs)))
    return any(leaf.is_deleted() for leaf in leaves if isinstance(leaf, jax.Array))
