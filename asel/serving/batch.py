"""Tunes many calls at once: calls recorded while JAX traced, or examples."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from asel.errors import InvalidRequestError
from asel.kernels.call_registry import RecordedCall, recorded_calls
from asel.kernels.devices import device_fingerprint
from asel.kernels.kernel import Invocation, check_request
from asel.runtime.jax_settings import Settings, current_settings, with_settings
from asel.runtime.threads import run_in_thread
from asel.serving.batch_run import BatchCall, Progress, run_batch
from asel.serving.batch_summary import BatchSummary
from asel.serving.preparation import own_prepare, prepared

if TYPE_CHECKING:
    from asel.selection.selector import ConfigSelectorChain

__all__ = ["autotune_recorded", "warm_up"]


async def autotune_recorded(
    selector: ConfigSelectorChain[Any, Any],
    dev: str | None = None,
    *,
    calls: Iterable[RecordedCall] | None = None,
    progress: Progress = None,
    budget_s: float | None = None,
) -> BatchSummary:
    """Select a config for every recorded call of a device, tuning the calls that have none.

    The calls seen most often come first. Once `budget_s` is spent, no more tunes begin; the current one finishes. A
    batch that was interrupted resumes from its stored configs. Several processes may share a batch over one store: a
    key that another process is tuning comes last, and each process ends with all the answers.

    `progress` is a function of a `BatchProgress`, called on the loop, or `"bar"` for a bar on stderr. `calls`, from
    `read_calls`, replace the recorded calls.
    """
    _check_selector(selector, "autotune_recorded")
    if calls is None:
        calls = recorded_calls(device_fingerprint() if dev is None else dev)
    batch = [BatchCall(call.kernel, call.invocation, call.seen, call.settings) for call in calls]
    return await run_batch(selector, batch, progress=progress, budget_s=budget_s)


async def warm_up(
    selector: ConfigSelectorChain[Any, Any],
    examples: Iterable[tuple[Any, Any]],
    *,
    progress: Progress = None,
    budget_s: float | None = None,
) -> BatchSummary:
    """Select a config for each `(kernel, example)`: an invocation, or a tuple of arguments.

    The parameters are those of `autotune_recorded`.

    Raises:
        InvalidRequestError: an example is neither. It is raised before anything is tuned.
    """
    _check_selector(selector, "warm_up")
    calls = example_calls(examples, current_settings())
    return await run_batch(selector, calls, progress=progress, budget_s=budget_s)


def example_calls(examples: Any, settings: Settings) -> list[BatchCall]:
    """Return examples as the calls of a batch.

    Raises:
        InvalidRequestError: an example is neither an invocation nor a tuple.
    """
    if not isinstance(examples, Iterable):
        raise InvalidRequestError(f"warm_up: a {type(examples).__name__} is not a list of (kernel, example)")
    return [_batch_call(number, example, settings) for number, example in enumerate(examples)]


def _check_selector(selector: Any, name: str) -> None:
    if hasattr(selector, "answer"):
        return
    if hasattr(selector, name):
        raise InvalidRequestError(f"{name} is a method of a {type(selector).__name__}: write selector.{name}(...)")
    raise InvalidRequestError(
        f"{name}: a {type(selector).__name__} is not a selector; pass a ConfigSelectorChain first"
    )


def _batch_call(number: int, pair: Any, settings: Settings) -> BatchCall:
    if not isinstance(pair, tuple) or len(pair) != 2 or isinstance(pair[0], type) or not hasattr(pair[0], "run"):
        shown = ", ".join(type(part).__name__ for part in pair) if isinstance(pair, tuple) else type(pair).__name__
        raise InvalidRequestError(f"warm_up: example {number} is ({shown}), not a kernel and an example call of it")
    kernel, example = pair
    if isinstance(example, tuple):
        inv: Invocation[Any, Any] = Invocation(kernel.op_id, example, {})
        prepare = None if own_prepare(kernel) is None else partial(_prepared, kernel, example, settings)
        return BatchCall(kernel, inv, settings=settings, prepare=prepare)
    if not hasattr(example, "args"):
        raise InvalidRequestError(
            f"warm_up: example {number}, of {kernel.op_id!r}, is a {type(example).__name__}; "
            "pass the arguments as a tuple, (kernel, (x,)), or an Invocation"
        )
    check_request(example, kernel)
    return BatchCall(kernel, example, settings=settings)


async def _prepared(kernel: Any, example: tuple[Any, ...], settings: Settings) -> Invocation[Any, Any]:
    """Return the call with its arguments prepared by the kernel, in a thread, since that may compile."""
    work = partial(with_settings, settings, partial(prepared, kernel.prepare, example, {}))
    args, kwargs = await run_in_thread(f"preparing {kernel.op_id}", work)
    return Invocation(kernel.op_id, args, kwargs)
