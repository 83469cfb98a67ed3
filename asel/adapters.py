"""Tuners of other make, under asel's rules: alone on the device, off the loop, within the budget."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, Protocol

import anyio

from asel.devices import environment, with_settings
from asel.errors import InvalidRequestError, TuningError
from asel.jobs import TuneJob
from asel.kernel import Cfg
from asel.lanes import alone_on
from asel.outcomes import TuneReport
from asel.threads import run_in_thread

__all__ = ["Tunes", "as_tuner"]


class Tunes(Protocol[Cfg]):
    """What a chain needs of its tuner."""

    async def tune(self, job: TuneJob[Cfg]) -> TuneReport[Cfg]: ...


class _OnlyAutotune(Generic[Cfg]):
    """A tuner that has `autotune` and no `tune`: it names a winner, and says nothing of the rest."""

    def __init__(self, tuner: Any) -> None:
        self._tuner = tuner

    async def tune(self, job: TuneJob[Cfg]) -> TuneReport[Cfg]:
        start = anyio.current_time()
        # Those that are settled have failed in real calls.
        left = tuple(cfg for i, cfg in enumerate(job.candidates) if i not in job.outcomes)
        given = (partial(_tagged, job), job.args, dict(job.kwargs), left)
        winner = None
        async with alone_on(job.devices, job.left_behind):
            with anyio.move_on_after(job.tune_budget_s) as budget:
                if inspect.iscoroutinefunction(self._tuner.autotune):
                    winner = await self._tuner.autotune(*given)
                else:
                    work = partial(with_settings, job.settings, partial(self._tuner.autotune, *given))
                    winner = await run_in_thread("autotune", work, grace_s=job.grace_s, left_behind=job.left_behind)
        if winner is None:
            found = f"in {job.tune_budget_s:g} s" if budget.cancelled_caught else "at all"
            raise TuningError(f"the tuner found no config for {job.key.op_id!r} {found}", key=job.key)
        return TuneReport(
            key=job.key,
            winner=winner,
            outcomes=(),
            seconds=anyio.current_time() - start,
            environment=environment(job.device),
            tune_id=job.id,
            checksum=job.checksum,
            objective=job.objective,
        )


def _tagged(job: TuneJob[Any], cfg: Any) -> Callable[..., Any]:
    """Return a candidate's function, marked as ejKernel's tuner wants one that it shall differentiate."""
    fn = job.make_fn(cfg)

    def tagged(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    tagged._ejk_validate_backward = job.objective == "forward+backward"  # type: ignore[attr-defined]
    return tagged


def as_tuner(tuner: Any) -> Tunes[Any]:
    """Return `tuner` itself, or an adapter for one that only has ejKernel's `autotune`.

    Raises:
        InvalidRequestError: it has neither method.
    """
    if hasattr(tuner, "tune"):
        return tuner  # type: ignore[no-any-return]
    if hasattr(tuner, "autotune"):
        return _OnlyAutotune(tuner)
    raise InvalidRequestError(f"tuner={tuner!r} has neither a tune nor an autotune method; pass a Tuner")
