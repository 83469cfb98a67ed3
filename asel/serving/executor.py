"""`Executor`: chooses a config, then runs the kernel with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, cast

from asel.errors import InvalidRequestError, UnstableKeyError
from asel.kernels.binding import bind
from asel.kernels.kernel import Cfg, Invocation, Kernel, Out
from asel.kernels.key_memo import Resolved
from asel.kernels.signature import signature
from asel.runtime.bounded_memo import BoundedMemo
from asel.selection.cache_entries import Hit
from asel.selection.policy import objective_of
from asel.selection.results import Selection
from asel.selection.selector import ConfigSelectorChain
from asel.serving.call_keywords import invocation_of, pop_call_keywords
from asel.serving.compiled_call import jitted_call
from asel.serving.preparation import Preparation, own_prepare
from asel.serving.runs import QUICK_S, RunResult, Runs, in_a_thread, program_signature, timed
from asel.serving.winner_faults import WinnerFaults
from asel.tuning.runnable import Programs, Runnable, after_run

__all__ = ["Executor"]

_MAX_WARM = 65_536
_NO_PREPARE = Kernel.prepare


class Executor(Generic[Cfg, Out]):
    """Runs kernels with the configs that a chain chooses.

    A call runs the kernel's `prepare`, if it has one, and then its `run` with `cfg`, in the variant for the device's
    platform. `run` is jitted as in a tune: arrays are parameters of the compiled function, and everything else is a
    constant. A program that a tune compiled for its winner is used again. `run` is not jitted if it is jitted already,
    if it cannot be traced, or with `jit=False`. With `method="shard_map"`, the keywords `mesh`, `in_specs`,
    `out_specs` and `check_vma` belong to the call; all other keywords are the kernel's.

    A run may compile, so it happens in a thread, with the caller's context variables, JAX settings and mesh. Once a run
    has returned within a millisecond, the next one with the same signature, array placement and config happens on the
    loop; likewise `prepare`. If that takes longer (after `jax.clear_caches()`), the next one is in a thread again. The
    first run with a config waits for its result, and so notices every error. Report errors that JAX raises when the
    result of a later run is read with `selector.withdraw`. With `cache_miss_fallback="background"`, a tune begins after
    the call that needs it has run.

    If a config from memory, the store or a tune raises, the next best of its tune runs, and so on until one raises the
    same type of error; then the heuristic's config. If one of them works, its result is returned and the winner runs
    again. If the winner fails again, it is withdrawn for a while, with a `winner_failed` event. If none works, or an
    argument was donated and cannot be used again, the first error is raised and nothing is withdrawn.
    """

    def __init__(self, selector: ConfigSelectorChain[Cfg, Out], *, jit: bool = True) -> None:
        if not hasattr(selector, "answer_from_memory"):
            kind = type(selector).__name__
            advice = "; use a BlockingExecutor with it" if kind == "BlockingSelector" else ""
            raise InvalidRequestError(f"Executor: a {kind} is not a ConfigSelectorChain{advice}")
        self.selector = selector
        self._runs = Runs(selector.keep_programs() if jit else Programs(), jit=jit)
        self._preparation = Preparation()
        self._faults = WinnerFaults(selector, self._runs)
        self._warm: BoundedMemo[_Warm] = BoundedMemo(_MAX_WARM)

    async def __call__(self, kernel: Kernel[Cfg, Out], *args: Any, cfg: Cfg | None = None, **kwargs: Any) -> Out:
        """Run `kernel` with `cfg`, or with the config that the chain chooses, and return its result.

        If the caller is cancelled, a run in a thread continues without it.

        Raises:
            NoConfigError: every tier declined. `choose` lists the other errors.
            Exception: the kernel raised it.
        """
        call_keywords = pop_call_keywords(kwargs) if kwargs else None
        prepare = getattr(kernel, "prepare", None)
        if prepare is not None and getattr(prepare, "__func__", None) is not _NO_PREPARE:
            prepared = self._preparation.prepare_if_quick(kernel, prepare, args, kwargs)
            args, kwargs = prepared or await self._preparation.prepare(kernel, prepare, args, kwargs)
        if cfg is None and call_keywords is None and (warm := self._find_warm(kernel, args, kwargs)) is not None:
            chosen = self.selector.answer_from_memory(warm.resolved)
            if chosen is not None:
                runnable = warm.runnable
                direct = runnable.direct
                is_current = chosen is runnable.cfg and (direct is not None or runnable.serves(kernel))
                if not is_current or not warm.is_quick:
                    return await self._run_warm(warm, kernel, args, kwargs, chosen)
                start = time.perf_counter()
                try:
                    out: Out = runnable(args, kwargs) if direct is None else direct(*args)
                except Exception as error:
                    return await self._recover(warm.resolved, kernel, args, kwargs, chosen, error)
                if time.perf_counter() - start >= QUICK_S:
                    warm.is_quick = False
                    runnable.note_run(warm.token, False)
                self._faults.clear_suspect(warm.resolved)
                return out
        inv: Invocation[Cfg, Out] = invocation_of(kernel, args, kwargs, cfg, call_keywords)
        selection, ran = await self._select_and_run(inv, kernel)
        resolved = self.selector.resolve(inv, kernel)
        if ran.error is None:
            if cfg is None and call_keywords is None:
                self._remember_warm(inv, kernel, resolved, program_signature(inv, kernel))
            self._faults.clear_suspect(resolved)
            return cast(Out, ran.out)
        if selection.tier in ("override", "overlay", "heuristics") or resolved.traced:
            raise ran.error
        return cast(Out, await self._faults.fall_back(inv, kernel, resolved, selection, ran.error))

    async def _select_and_run(
        self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]
    ) -> tuple[Selection[Cfg], RunResult]:
        """Choose and run. A background tune of this key begins after the run, which needs the cores until then."""
        later: list[Callable[[], None]] = []
        try:
            after_run.set(later)
            try:
                selection = await self.selector.select(inv, kernel)
            finally:
                after_run.set(None)
            resolved = self.selector.resolve(inv, kernel)
            return selection, await self._runs.run(inv, kernel, resolved, selection.cfg)
        finally:
            for begin_tune in later:  # even if nothing ran, because there was no config
                begin_tune()

    def nowait(self, kernel: Kernel[Cfg, Out], *args: Any, cfg: Cfg | None = None, **kwargs: Any) -> Out:
        """Run `kernel` in the calling thread with the config of `choose_nowait`. Safe while JAX traces.

        The kernel's exceptions are raised, and nothing is withdrawn.
        """
        call_keywords = pop_call_keywords(kwargs) if kwargs else None
        prepare = getattr(kernel, "prepare", None)
        if prepare is not None and getattr(prepare, "__func__", None) is not _NO_PREPARE:
            args, kwargs = prepare(*args, **kwargs)
            args = tuple(args)
        chosen: Cfg | None = None
        if cfg is None and call_keywords is None and (warm := self._find_warm(kernel, args, kwargs)) is not None:
            runnable, chosen = warm.runnable, self.selector.answer_from_memory(warm.resolved)
            if chosen is runnable.cfg and ((direct := runnable.direct) is not None or runnable.serves(kernel)):
                try:
                    return runnable(args, kwargs) if direct is None else direct(*args)  # type: ignore[no-any-return]
                except Exception as error:
                    return self._recover_for_nowait(
                        invocation_of(kernel, args, kwargs, None, None), kernel, chosen, error
                    )
        inv: Invocation[Cfg, Out] = invocation_of(kernel, args, kwargs, cfg, call_keywords)
        if chosen is None:
            chosen = self._choose_for_nowait(inv, kernel)
        resolved = self.selector.resolve(inv, kernel)
        if resolved.traced:
            return cast(Out, bind(kernel, inv, resolved.platform, chosen)(*inv.args, **inv.kwargs))
        runnable, token = self._runs.runnable(inv, kernel, resolved, chosen), program_signature(inv, kernel)
        try:
            if runnable.is_quick(token) is None:
                out = runnable.first_run(args, kwargs)
                runnable.note_run(token, False)  # for `__call__`: its time is unknown, so it counts as slow
            else:
                out = runnable(args, kwargs)
        except Exception as error:
            return self._recover_for_nowait(inv, kernel, chosen, error)
        if cfg is None and call_keywords is None:
            self._remember_warm(inv, kernel, resolved, token)
        return cast(Out, out)

    def _choose_for_nowait(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Cfg:
        return self.selector.choose_nowait(inv, kernel)

    def _recover_for_nowait(
        self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out], cfg: Cfg, error: Exception
    ) -> Out:
        raise error

    async def choose_config(self, kernel: Kernel[Cfg, Out], *args: Any, cfg: Cfg | None = None, **kwargs: Any) -> Cfg:
        """Return the config that a call would run with, without running the kernel.

        Raises what `choose` raises.
        """
        return (await self._select(kernel, args, kwargs, cfg))[1].cfg

    async def compile(
        self, kernel: Kernel[Cfg, Out], *example_args: Any, cfg: Cfg | None = None, **example_kwargs: Any
    ) -> Callable[..., Out]:
        """Return a plain jitted function that runs `kernel` with the config of this example call.

        It takes the arguments that the kernel's user would pass, and is compiled for those of the example, which may
        be shapes. Arguments without arrays are static. It does not use the selector: another shape compiles again, with
        the same config. The kernel's `prepare` is part of the program.

        Raises:
            InvalidRequestError: an argument can be neither a pytree of arrays nor a static value.
            Exception: `choose` raised it, or the kernel while it was traced.
        """
        call_keywords = pop_call_keywords(example_kwargs) if example_kwargs else None
        inv, selection = await self._select(kernel, example_args, {**example_kwargs, **(call_keywords or {})}, cfg)
        platform = self.selector.resolve(inv, kernel).platform
        prepare = own_prepare(kernel)
        fn = jitted_call(kernel, inv, platform, selection.cfg, prepare, example_args, example_kwargs)

        def compile_it() -> None:
            fn.lower(*example_args, **example_kwargs).compile()  # a call of `fn` finds this program in JAX's cache

        ran = await in_a_thread(f"compiling {kernel.op_id}", partial(timed, compile_it))
        if ran.error is not None:
            raise ran.error
        return cast(Callable[..., Out], fn)

    async def _select(
        self, kernel: Kernel[Cfg, Out], args: tuple[Any, ...], kwargs: dict[str, Any], cfg: Cfg | None
    ) -> tuple[Invocation[Cfg, Out], Selection[Cfg]]:
        call_keywords = pop_call_keywords(kwargs)
        if (prepare := own_prepare(kernel)) is not None:
            args, kwargs = await self._preparation.prepare(kernel, prepare, args, kwargs)
        inv: Invocation[Cfg, Out] = invocation_of(kernel, args, kwargs, cfg, call_keywords)
        return inv, await self.selector.select(inv, kernel)

    # The warm path, for signatures that memory has answered before and that have run.

    def _find_warm(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Warm | None:
        try:
            token = signature(kernel, args, kwargs, for_program=True)
        except (UnstableKeyError, RecursionError):
            return None
        return self._warm.young.get(token) or self._warm.get(token)

    def _remember_warm(self, inv: Any, kernel: Any, resolved: Resolved[Any], token: Any) -> None:
        """Have the next call of this signature take the warm path, if memory answers it."""
        if resolved.memory_answer is None or resolved.traced or getattr(kernel, "key_builder", None) is not None:
            return
        runnable = self._runs.compiled(resolved, resolved.memory_answer.cfg)
        if token is not None and runnable is not None:
            runnable.cfg = resolved.memory_answer.cfg  # the same object, since the warm path compares by identity
            self._warm.put(token, _Warm(token, resolved, runnable))

    async def _run_warm(self, warm: _Warm, kernel: Any, args: Any, kwargs: Any, cfg: Any) -> Out:
        resolved, runnable = warm.resolved, warm.runnable
        if cfg is not runnable.cfg or not runnable.serves(kernel):
            runnable = self._runs.runnable(invocation_of(kernel, args, kwargs, None, None), kernel, resolved, cfg)
            runnable.cfg = cfg
            warm.runnable = runnable
        ran = await self._runs.run_one(runnable, warm.token, resolved, args, kwargs)
        if ran.error is None:
            warm.is_quick = warm.runnable is runnable and bool(runnable.is_quick(warm.token))
            self._faults.clear_suspect(resolved)
            return cast(Out, ran.out)
        return await self._recover(resolved, kernel, args, kwargs, cfg, ran.error)

    async def _recover(
        self, resolved: Resolved[Any], kernel: Any, args: Any, kwargs: Any, cfg: Any, error: Exception
    ) -> Out:
        inv: Invocation[Cfg, Out] = invocation_of(kernel, args, kwargs, None, None)
        selection = self._memory_selection(inv, kernel, resolved, cfg)
        return cast(Out, await self._faults.fall_back(inv, kernel, resolved, selection, error))

    def _memory_selection(self, inv: Any, kernel: Any, resolved: Resolved[Any], cfg: Any) -> Selection[Any]:
        """Return the memory tier's full answer; the warm path has only its config."""
        checksum = resolved.checksum(objective_of(self.selector.policy), resolved.listing(inv, kernel))
        found = self.selector.cache.peek(resolved.key, checksum)
        report = found.provenance.report if isinstance(found, Hit) else None
        return Selection(cfg, "memory", resolved.key, checksum, report, {})


class _Warm:
    """A signature that memory answers, with its program, for all kernels that share the signature."""

    __slots__ = ("is_quick", "resolved", "runnable", "token")

    def __init__(self, token: Any, resolved: Resolved[Any], runnable: Runnable) -> None:
        self.token = token
        self.resolved = resolved
        self.runnable = runnable
        self.is_quick = bool(runnable.is_quick(token))
