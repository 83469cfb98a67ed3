"""Tokamax's functions and ops as kernels, and their chosen configs as tokamax's own autotuning overlay.

kernel = TokamaxFunction(tokamax.dot_product_attention)   # chooses the implementation
kernel = TokamaxOp(op)                                    # chooses the config of one implementation
with await autotune(selector, bound_arguments): ...       # tokamax uses the configs that asel has chosen
"""

from __future__ import annotations

import hashlib
import inspect
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from asel.errors import InvalidRequestError
from asel.kernels.devices import default_device
from asel.kernels.kernel import FunctionKernel, Invocation

try:
    import tokamax  # type: ignore[import-untyped, unused-ignore]
except ImportError as error:
    raise ImportError('asel.integrations.tokamax needs tokamax: pip install "asel[tokamax]"') from error

if TYPE_CHECKING:
    from asel.selection.selector import ConfigSelectorChain
    from asel.tuning.outcomes import TuneReport

__all__ = ["TokamaxFunction", "TokamaxOp", "autotune", "autotuning_result", "bound_call"]

_VERSION = str(getattr(tokamax, "__version__", "unknown"))
_AUTO = "auto"


def _needed(owner: Any, name: str) -> Any:
    """Return an attribute of an object of tokamax's.

    Raises:
        InvalidRequestError: this version has no such attribute.
    """
    try:
        return getattr(owner, name)
    except AttributeError:
        where = getattr(owner, "__name__", type(owner).__name__)
        raise InvalidRequestError(
            f"tokamax {_VERSION} has no {where}.{name}, which asel needs: install a version from 0.0.12 on that has"
        ) from None


class TokamaxFunction(FunctionKernel[str, Any]):
    """A function of tokamax's API, such as `tokamax.layer_norm`; its config is the name of an implementation.

    The candidates are the names in the function's signature, and `"auto"`, tokamax's own choice, which is the
    heuristic. An implementation that this machine cannot run is a failed outcome.
    """

    def __init__(self, function: Any, implementations: Sequence[str] | None = None) -> None:
        names = tuple(implementations or _implementations(function))
        self._made_of = function, names
        run = _named(partial(_run_implementation, function), inspect.signature(function), function.__name__)
        super().__init__(run, f"tokamax.{function.__name__}", (_AUTO, *names), _AUTO, _VERSION, None, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokamaxFunction, self._made_of


def _run_implementation(function: Any, *args: Any, cfg: str, **kwargs: Any) -> Any:
    return function(*args, implementation=None if cfg == _AUTO else cfg, **kwargs)


def _named(run: Any, signature: inspect.Signature, name: str) -> Any:
    """Give a partial the parameters of its function, so that positional and keyword calls have the same key."""
    cfg = inspect.Parameter("cfg", inspect.Parameter.KEYWORD_ONLY)
    others = [parameter for parameter in signature.parameters.values() if parameter.name != "implementation"]
    run.__signature__ = signature.replace(parameters=[*others, cfg])
    run.__name__ = run.__qualname__ = name
    return run


def _implementations(function: Any) -> tuple[str, ...]:
    names = tuple(_literals(typing.get_type_hints(function).get("implementation")))
    if not names:
        raise InvalidRequestError(
            f"{getattr(function, '__name__', function)!r} names no implementations; "
            "pass a function of tokamax's, such as tokamax.layer_norm, or TokamaxOp(op) for an op"
        )
    return names


def _literals(hint: Any) -> Iterator[str]:
    """Yield the names in a `Literal`, which may be part of a union or the value of a `type` statement."""
    hint = getattr(hint, "__value__", hint)
    if typing.get_origin(hint) is Literal:
        yield from typing.get_args(hint)
    elif typing.get_origin(hint) in (typing.Union, types.UnionType):
        for part in typing.get_args(hint):
            yield from _literals(part)


class TokamaxOp(FunctionKernel[Any, Any]):
    """One implementation of an op, such as `PallasTritonFlashAttention()`; its config is one of the op's configs.

    The heuristic and the candidates are tokamax's for the bound arguments, and gradients are the op's own. Ops of one
    class with different fields have different keys.
    """

    def __init__(self, op: Any, op_id: str | None = None) -> None:
        if not isinstance(op, _needed(tokamax, "Op")):
            raise InvalidRequestError(f"{op!r} is not a tokamax Op; TokamaxFunction takes functions")
        name = type(op).__name__
        self.op = op
        run = _named(partial(_run_op, op), _needed(op, "signature"), name)
        super().__init__(
            run, op_id or f"tokamax.{name}", self._configs_of, self._heuristic_of, _version_of(op), None, None
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return TokamaxOp, (self.op, self.op_id)

    def _heuristic_of(self, inv: Invocation[Any, Any]) -> Any:
        if self.op.config is not None:
            return self.op.config
        device = default_device()
        if not _needed(self.op, "supported_on")(device):
            raise InvalidRequestError(f"tokamax's {type(self.op).__name__} does not run on {device.device_kind}")
        return _needed(self._bound(inv), "heuristics_config")

    def _configs_of(self, inv: Invocation[Any, Any]) -> Iterable[Any]:
        if self.op.config is not None:
            return (self.op.config,)
        # Tokamax returns a set, whose order differs between processes.
        return sorted(_needed(self._bound(inv), "autotuning_configs"), key=repr)

    def _bound(self, inv: Invocation[Any, Any]) -> Any:
        return _needed(self.op, "bind")(*inv.args, **inv.kwargs)


def _run_op(op: Any, *args: Any, cfg: Any, **kwargs: Any) -> Any:
    return op.replace(config=cfg)(*args, **kwargs)


def _version_of(op: Any) -> str:
    """Return tokamax's version, with a digest of the op's fields that differ from their defaults, if any."""
    values = {field.name: (getattr(op, field.name), field.default) for field in fields(op) if field.name != "vjp"}
    changed = sorted((name, value) for name, (value, default) in values.items() if value != default)
    if not changed:
        return _VERSION
    if " at 0x" in (text := repr(changed)):
        raise InvalidRequestError(
            f"{type(op).__name__} has a field that other processes cannot compare: {text}; "
            "subclass the op with another default, so that the name of the class shows the difference"
        )
    return f"{_VERSION}+{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def bound_call(bound: Any) -> tuple[TokamaxOp, Invocation[Any, Any]]:
    """Return bound arguments, from `op.bind(...)` or `tokamax.autotuning.get_bound_args`, as an example for `warm_up`.

    Raises:
        InvalidRequestError: the call is within `vmap`, so it cannot be measured by itself.
    """
    if _needed(bound, "vmap_axis_sizes"):
        raise InvalidRequestError(
            f"{type(bound.op).__name__} was called within vmap over axes of {bound.vmap_axis_sizes}, and asel measures "
            "calls by themselves; use tokamax.autotune for it"
        )
    kernel = TokamaxOp(bound.op.replace(config=None))
    return kernel, Invocation(kernel.op_id, bound.args, bound.kwargs)


async def autotune(selector: ConfigSelectorChain[Any, Any], bound_arguments: Iterable[Any]) -> Any:
    """Select a config for each of the bound arguments; return the measured ones as a `tokamax.AutotuningResult`.

    Within `with result:`, tokamax's ops use these configs. Ops with fewer than two configs are left out.

    Raises:
        NoConfigError: every tier declined an op.
    """
    found = []
    for bound in bound_arguments:
        if bound.op.config is not None or len(_needed(bound, "autotuning_configs")) < 2:
            continue
        kernel, inv = bound_call(bound)
        selection = await selector.select(inv, kernel)
        report = selection.report
        if report is None and selection.tier == "memory":  # preloaded, so its report is still in the store
            report = await selector.find_report(inv, kernel, selection.cfg)
        if report is not None:
            found.append((bound, report))
    return autotuning_result(found)


def autotuning_result(reports: Iterable[tuple[Any, TuneReport[Any]]]) -> Any:
    """Return reports on bound arguments as a `tokamax.AutotuningResult`, a context manager that `dumps` as JSON.

    It has only the winners, because tokamax takes the config with the lowest median without regard to noise.
    """
    data = tuple((bound, _autotuning_data(report)) for bound, report in reports if report.best is not None)
    return _needed(tokamax, "AutotuningResult")(default_device().device_kind, data)


def _autotuning_data(report: TuneReport[Any]) -> Any:
    best = report.best
    assert best is not None
    benchmark = _needed(tokamax, "BenchmarkData")(
        compile_time_ms=1e3 * best.compile_s,
        lower_time_ms=0.0,  # included in `compile_time_ms`
        evaluation_times_ms=tuple(1e3 * seconds for seconds in best.samples_s),
        metadata={"tuned_by": "asel", "tune_id": report.tune_id},
    )
    try:
        from tokamax._src.autotuning.autotuner import AutotuningData  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise InvalidRequestError(
            f"tokamax {_VERSION} has no AutotuningData, which asel needs: install a version from 0.0.12 on that has"
        ) from None
    return AutotuningData({best.cfg: benchmark})
