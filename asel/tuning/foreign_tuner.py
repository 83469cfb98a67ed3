"""Other libraries' tuners, run by asel's rules: alone on the device, off the loop, within the budget."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, Protocol

import anyio

from asel.errors import InvalidRequestError, TuningError
from asel.kernels.devices import environment
from asel.kernels.kernel import Cfg
from asel.runtime.jax_settings import with_settings
from asel.runtime.threads import run_in_thread
from asel.tuning.device_lock import alone_on
from asel.tuning.outcomes import TuneReport
from asel.tuning.request import TuneRequest
from asel.tuning.state import TuneState

__all__ = ["TunerProtocol", "as_tuner"]


class TunerProtocol(Protocol[Cfg]):
    """The method that a selector calls on its tuner."""

    async def tune(self, state: TuneState[Cfg]) -> TuneReport[Cfg]: ...


class _OnlyAutotune(Generic[Cfg]):
    """Adapts a tuner that has only `autotune`, which returns a winner and no outcomes."""

    def __init__(self, tuner: Any) -> None:
        self._tuner = tuner

    async def tune(self, state: TuneState[Cfg]) -> TuneReport[Cfg]:
        request, start = state.request, anyio.current_time()
        # Settled candidates have failed in real calls.
        left = tuple(cfg for i, cfg in enumerate(request.candidates) if i not in state.outcomes)
        given = (partial(_tagged, request), request.args, dict(request.kwargs), left)
        winner = None
        async with alone_on(state.devices, state.left_behind, across_processes=True):
            with anyio.move_on_after(request.tune_budget_s) as budget:
                if inspect.iscoroutinefunction(self._tuner.autotune):
                    winner = await self._tuner.autotune(*given)
                else:
                    work = partial(with_settings, request.settings, partial(self._tuner.autotune, *given))
                    winner = await run_in_thread(
                        "autotune", work, grace_s=request.grace_s, left_behind=state.left_behind, stops=True
                    )
        if winner is None:
            found = f"in {request.tune_budget_s:g} s" if budget.cancelled_caught else "at all"
            raise TuningError(f"the tuner found no config for {request.key.op_id!r} {found}", key=request.key)
        return TuneReport(
            key=request.key,
            winner=winner,
            outcomes=(),
            seconds=anyio.current_time() - start,
            environment=environment(request.device),
            tune_id=request.id,
            checksum=request.checksum,
            objective=request.objective,
        )


def _tagged(request: TuneRequest[Any], cfg: Any) -> Callable[..., Any]:
    """Return a candidate's function with the mark by which ejKernel's tuner decides whether to differentiate it."""
    fn = request.make_fn(cfg)

    def tagged(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    tagged._ejk_validate_backward = request.objective == "forward+backward"  # type: ignore[attr-defined]
    return tagged


def as_tuner(tuner: Any) -> TunerProtocol[Any]:
    """Return `tuner` itself, or an adapter for one that only has ejKernel's `autotune`.

    Raises:
        InvalidRequestError: it has neither method.
    """
    if hasattr(tuner, "tune"):
        return tuner  # type: ignore[no-any-return]
    if hasattr(tuner, "autotune"):
        return _OnlyAutotune(tuner)
    raise InvalidRequestError(f"tuner={tuner!r} has neither a tune nor an autotune method; pass a Tuner")
