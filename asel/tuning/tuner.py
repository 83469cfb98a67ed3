"""Finds the fastest candidate within a budget.

A strategy decides which candidates to compile and which to sample next, alone on their device. A candidate that fails
or takes too long is an outcome like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Literal, Self

import anyio

from asel.errors import InvalidRequestError, TuningError
from asel.kernels.call_encoding import device_and_traced
from asel.kernels.devices import default_device, environment
from asel.kernels.kernel import Cfg, Invocation
from asel.runtime.jax_settings import current_settings, with_settings
from asel.runtime.loop import PerLoop
from asel.runtime.threads import run_in_thread
from asel.tuning.candidate_steps import STUCK, timed
from asel.tuning.compilation import keep_winner, try_uncompilable
from asel.tuning.device_lock import DeviceStuck, default_compile_width
from asel.tuning.groups import groups_of
from asel.tuning.measure import BaseMeasure, Measure, as_measure
from asel.tuning.outcomes import Failed, TuneReport
from asel.tuning.output_check import OutputCheck, as_check
from asel.tuning.plan_execution import carry_out
from asel.tuning.process_measure import ProcessMeasure
from asel.tuning.race import Race
from asel.tuning.report import failure_text, recorded_timings, report_on
from asel.tuning.request import TuneRequest
from asel.tuning.scoreboard import Scoreboard
from asel.tuning.search.strategy import Auto, Search
from asel.tuning.state import TuneState
from asel.tuning.strategies import Exhaustive, Plan, Sample, Strategy

__all__ = ["Tuner"]


class Tuner(Generic[Cfg]):
    """Times candidates with a `Measure`, by default JAX's.

    Args:
        warmup: samples of each candidate that are discarded. With 0, the first run counts, although it is cold.
        iters: the minimum number of samples of a finalist.
        measure: compiles and times a candidate.
        strategy: `"race"` compiles all candidates. `"search"` compiles those that a model of their fields expects to
            win. `"auto"` races if the candidates are few and can be compiled within the budget, and searches
            otherwise. `"exhaustive"` takes `iters` samples of each. Or any object with a `plan` method.
        max_compiles: the maximum number of candidates that a search compiles.
        seed: for the order of samples and the choices of a search.
        learn: let earlier tunes of the kernel's other calls decide which candidates to compile first, or at all.
        check: a candidate whose outputs differ from the incumbent's cannot win. True, an `OutputCheck` or a function of
            both outputs. Arguments that are only shapes are then random. Without a check, only a candidate
            with NaN in an output in which the incumbent has none cannot win.
        isolation: `"process"` runs candidates in worker processes, which are killed when they hang. Workers are kept
            while a selector that uses the tuner is open, or the tuner itself (`async with`).
        compile_width: candidates that are compiled at once. By default half the number of cores, less one, and at
            least one, which leaves the event loop its share.
    """

    def __init__(
        self,
        warmup: int = 1,
        iters: int = 3,
        *,
        measure: Measure | None = None,
        strategy: Literal["auto", "race", "search", "exhaustive"] | Strategy = "auto",
        max_compiles: int | None = None,
        seed: int = 0,
        learn: bool = True,
        check: bool | OutputCheck | Callable[..., Any] | None = None,
        isolation: Literal["thread", "process"] = "thread",
        compile_width: int | None = None,
    ) -> None:
        if isolation not in ("thread", "process"):
            raise InvalidRequestError(f"Tuner: isolation={isolation!r} is neither 'thread' nor 'process'")
        if warmup < 0 or iters < 1:
            raise InvalidRequestError(f"Tuner: warmup={warmup} must be 0 or more and iters={iters} 1 or more")
        if compile_width is not None and compile_width < 1:
            raise InvalidRequestError(f"Tuner: compile_width={compile_width} must be 1 or more")
        if max_compiles is not None and max_compiles < 1:
            raise InvalidRequestError(f"Tuner: max_compiles={max_compiles} must be 1 or more")
        if max_compiles is not None and strategy not in ("auto", "search"):
            raise InvalidRequestError(f"Tuner: max_compiles needs strategy='auto' or 'search', not {strategy!r}")
        self.learn = learn
        self.warmup, self.iters, self.compile_width = warmup, iters, compile_width
        self._measure = None if measure is None else as_measure(measure)
        if measure is None and isolation == "process":
            self._measure = ProcessMeasure()
        self._users = PerLoop(_Users)
        self._strategy: Strategy = _as_strategy(strategy, iters, seed, max_compiles)
        self._check = as_check(check)

    async def __aenter__(self) -> Self:
        self._users.here().count += 1
        return self

    async def __aexit__(self, *error: object) -> None:
        self._users.here().count -= 1
        await self._end_workers()

    async def _end_workers(self) -> None:
        if self._users.here().count == 0 and self._measure is not None:
            with anyio.CancelScope(shield=True):
                await self._measure.aclose()

    async def measure(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> float:
        """Return the median duration of one call of `fn`, compiled, in seconds.

        Raises:
            TuningError: it could not be measured.
        """
        state = await _standalone_state(lambda cfg: fn, args, kwargs, (None,))
        try:
            report = await self.tune(state)
        except TuningError as error:
            (outcome,) = error.outcomes
            why = failure_text(outcome) if isinstance(outcome, Failed) else getattr(outcome, "reason", "")
            cause = outcome.error if isinstance(outcome, Failed) else None
            raise TuningError(f"could not measure {fn!r}: {why}", outcomes=error.outcomes) from cause
        assert report.best is not None
        return report.best.median_s

    async def autotune(
        self,
        make_fn: Callable[[Cfg], Callable[..., Any]],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        candidates: Iterable[Cfg],
    ) -> Cfg:
        """Return the candidate whose `make_fn(cfg)(*args, **kwargs)` is fastest.

        Raises:
            RuntimeError: there are no candidates.
            TuningError: none of them could be measured.
        """
        state: TuneState[Cfg] = await _standalone_state(make_fn, tuple(args), kwargs, tuple(candidates))
        return (await self.tune(state)).winner

    async def tune(self, state: TuneState[Cfg]) -> TuneReport[Cfg]:
        """Try the candidates as the strategy directs, within the budget, and return the report.

        Raises:
            TuningError: none of them could be measured.
        """
        request = state.request
        if not request.candidates:
            raise TuningError("there are no candidates to tune among", key=request.key)
        if state.report is not None:
            return state.report
        start = anyio.current_time()
        state.runs_on_device = self._get_measure().runs_on_device
        self._users.here().count += 1  # the workers stay until this tune ends
        try:
            await self._make_inputs(state)
            state.reuse({} if self._check is not None else recorded_timings(state))  # their outputs were not checked
            await self._try_groups(state)
            if state.recorded and not any(map(state.is_runnable, range(len(request.candidates)))):
                state.reuse({})  # so that every candidate is measured
                await self._try_groups(state)
        finally:
            state.seconds += anyio.current_time() - start
            self._users.here().count -= 1
            await self._end_workers()
        try:
            state.report = report_on(state)
            if request.keep is not None:
                await keep_winner(state, request.keep)
        finally:
            self._get_measure().end_tune(state.shared)
            state.release_all()
        return state.report

    async def _make_inputs(self, state: TuneState[Cfg]) -> None:
        """Replace arguments that are only shapes by examples; if outputs are checked, by random arrays.

        Given zeros, most wrong candidates return zeros, too.
        """
        if (example := state.request.example) is not None and not state.has_example:
            await self._replace_inputs(state, "making example inputs", example)
        if self._check is None:
            return
        import jax

        from asel.tuning.arrays import abstract, place_of_shapes, random_inputs

        state.shared["checked"] = True
        leaves = jax.tree_util.tree_leaves((state.args, state.kwargs))
        if any(isinstance(abstract(leaf), jax.ShapeDtypeStruct) for leaf in leaves):
            device = place_of_shapes(state.request.device, state.request.settings)
            make = partial(random_inputs, state.args, state.kwargs, device)
            await self._replace_inputs(state, "making random inputs", make)

    async def _replace_inputs(self, state: TuneState[Cfg], what: str, make: Callable[[], Any]) -> None:
        request = state.request
        work = partial(with_settings, request.settings, make)
        with timed(state):
            made = await run_in_thread(what, work, grace_s=request.grace_s, left_behind=state.left_behind, stops=True)
        state.replace_inputs(*made)

    async def _try_groups(self, state: TuneState[Cfg]) -> None:
        if state.board is None:
            state.board = Scoreboard(
                [],
                state.request.incumbent,
                self.warmup,
                configs=state.request.candidates,
                aliases=state.aliases,
                compile_width=self.compile_width or state.request.compile_width or default_compile_width(),
                budget=state.budget,
                call=state.request.key.call,
                lessons=self._lessons(state),
            )
        for group in groups_of(state):
            await self._try_group(state, state.board, group)
            state.release_retired()  # before the next group is compiled
            rivals = [index for index in group if index != state.request.incumbent] or group
            if any(map(state.is_runnable, rivals)):
                break  # after a success, the groups below are not tried

    def _lessons(self, state: TuneState[Cfg]) -> tuple[TuneReport[Cfg], ...]:
        if not self.learn or not state.lessons:
            return ()
        from asel.tuning.search.lessons import lessons_in  # imports numpy, which a race does not need

        request = state.request
        return lessons_in(state.lessons, request.key, request.objective, environment(request.device))

    async def _try_group(self, state: TuneState[Cfg], board: Scoreboard, group: Sequence[int]) -> None:
        """Carry out the strategy's plan for a group, then try the candidates that cannot be compiled.

        The candidates in the best timing mode race. Others are only timed for the report, unless all in the best mode
        fail: then those in the next mode race.
        """
        board.offer(index for index in group if not state.has_begun(index))
        stuck = False
        try:
            await self._carry_out(state, board, self._strategy.plan(board))
            board.count_warmups_as_samples()
            if state.uncompilable:  # after all others: a candidate that hangs keeps the device
                await try_uncompilable(state, list(state.uncompilable))
            for mode in state.by_timing_mode(state.runners):
                if board.measured:
                    await self._carry_out(state, board, _sample_for_report(board, mode))
                else:
                    board.enter(mode)
                    await self._carry_out(state, board, self._strategy.plan(board))
                    board.count_warmups_as_samples()  # a warm-up in this mode is worth more than a sample in the next
        except DeviceStuck:
            stuck = True
        for index in group:
            if not state.has_begun(index):
                asked = index in board.compiling
                why = "the tune ended before it was compiled" if asked else "the strategy did not ask for it"
                state.leave_out(index, why)
        board.count_warmups_as_samples()
        for index in [index for index in group if index in state.runners and not board.samples.get(index)]:
            # The current limit: `asel tune` lowers it at Ctrl-C.
            state.skip(index, STUCK if stuck else f"the tune's budget of {state.budget.limit_s:g} s was spent")
            state.retire(index)

    async def _carry_out(self, state: TuneState[Cfg], board: Scoreboard, plan: Plan) -> None:
        await carry_out(plan, state, board, self._get_measure(), self._check)

    def _get_measure(self) -> BaseMeasure:
        if self._measure is None:
            from asel.tuning.jax_measure import JaxMeasure

            self._measure = JaxMeasure()
        return self._measure


class _Users:
    """The number of selectors, tunes and `async with` blocks of one event loop that use a tuner."""

    count = 0


def _as_strategy(strategy: Any, iters: int, seed: int, max_compiles: int | None) -> Strategy:
    if strategy == "auto":
        return Auto(iters, seed, max_compiles)
    if strategy == "search":
        return Search(iters, seed, max_compiles)
    if strategy == "race":
        return Race(iters, seed=seed)
    if strategy == "exhaustive":
        return Exhaustive(iters)
    if callable(getattr(strategy, "plan", None)):
        return strategy  # type: ignore[no-any-return]
    raise InvalidRequestError(
        f"Tuner: strategy={strategy!r} is none of 'auto', 'race', 'search' and 'exhaustive', and has no plan"
    )


async def _standalone_state(
    make_fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], candidates: tuple[Any, ...]
) -> TuneState[Any]:
    """Return the state of a tune without a selector, on its arguments' device and with its caller's settings."""
    settings = current_settings()
    device, _ = device_and_traced(Invocation("", args, kwargs))
    if device is None:
        device = await run_in_thread("finding the device", partial(with_settings, settings, default_device))
    facts = {"factory_is_portable": True, "device": device, "settings": settings}
    return TuneState(TuneRequest(candidates, make_fn, args, dict(kwargs), **facts))


def _sample_for_report(board: Scoreboard, indices: Sequence[int]) -> Plan:
    """Plan a warm-up and one sample of each candidate."""
    for index in indices:
        for _ in range(board.warmup + 1):
            if not board.samples.get(index):
                yield Sample((index,))
