"""A kernel, and an invocation: one call of it."""

from __future__ import annotations

import functools
import importlib
import inspect
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from asel.errors import InvalidRequestError

__all__ = ["Cfg", "FunctionKernel", "Invocation", "Kernel", "Out", "check_request", "kernel"]

Cfg = TypeVar("Cfg")
Out = TypeVar("Out")


@dataclass(frozen=True, slots=True)
class Invocation(Generic[Cfg, Out]):
    """One call of a kernel: the arguments it would run with.

    The fields and their order are ejKernel's, whose own objects are accepted in its place.
    `method="shard_map"` runs the kernel under `jax.shard_map` with the given mesh and specs.
    """

    op_id: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    batch_axes: Mapping[str, int] | None = None
    override_cfg: Cfg | None = None
    stamp: bool = True
    method: str | None = None
    mesh: Any = None
    in_specs: Any = None
    out_specs: Any = None
    check_vma: bool = False


class Kernel(Generic[Cfg, Out]):
    """A computation that can run with more than one config.

    A duck type: any object with `op_id`, `run`, `heuristic_cfg` and `candidate_cfgs` will do. Each
    of the three methods may have variants for a platform (`run_gpu`), for `shard_map`
    (`run_shard_map`) or for both (`run_shard_map_gpu`); the most specific one is used.

    A kernel with `fwd_with_residuals(*args, cfg)` and `vjp(residuals, dy, *args, cfg)`, each with the same
    variants, is differentiated by them, wherever asel runs or measures it.

    Raise `version` when the implementation changes: configs tuned for an earlier version then no longer apply.

    Attributes are read when the kernel is first used, and are constants of the programs compiled for it, so do not
    change them later. Kernels of one class with equal attributes count as the same kernel.
    """

    op_id: str
    version: str = "0"
    key_builder: Callable[..., Any] | None = None
    """Replaces the call signature: takes the invocation and returns the facts that its answer depends on."""
    buckets: Mapping[str, Sequence[int]] | None = None
    """Coarsens the signature: `{"q.shape[1]": powers_of_two(128, 32768)}`.

    A bucket is tuned once, at its upper bound. `heuristic_cfg` and `candidate_cfgs` are called with an invocation of
    that size, in which shapes replace smaller arrays, and candidates are measured with arrays of that size
    (`example_inputs`, or zeros). So name all dimensions that change together. Every candidate has to work for every
    size in the bucket.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Wrap partials in the class body in `staticmethod`: a later Python version will make methods of bare ones."""
        super().__init_subclass__(**options)
        for name, value in list(vars(cls).items()):
            if isinstance(value, functools.partial):
                setattr(cls, name, staticmethod(value))

    def __init__(self, op_id: str | None = None) -> None:
        if op_id is not None:
            self.op_id = op_id
        elif not getattr(self, "op_id", None):
            self.op_id = f"{type(self).__module__}.{type(self).__qualname__}"

    def prepare(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Turn the user's arguments into the arguments of `run`."""
        return args, kwargs

    def run(self, *args: Any, **kwargs: Any) -> Out:
        """Compute the result with the config in `cfg`."""
        raise NotImplementedError(f"{type(self).__qualname__} has no run method")

    def heuristic_cfg(self, inv: Invocation[Cfg, Out]) -> Cfg:
        """Return a config that works for this call, even if it is not the fastest."""
        raise NotImplementedError(f"{type(self).__qualname__} has no heuristic_cfg method")

    def candidate_cfgs(self, inv: Invocation[Cfg, Out]) -> Iterable[Cfg]:
        """Return the configs to choose among: a pure function of shapes, dtypes and constants."""
        return (self.heuristic_cfg(inv),)


class FunctionKernel(Kernel[Cfg, Out]):
    """A kernel made from a function that takes `cfg` as a keyword argument."""

    def __init__(
        self,
        fn: Callable[..., Out],
        op_id: str,
        configs: Sequence[Cfg] | Callable[[Invocation[Cfg, Out]], Iterable[Cfg]],
        heuristic: Cfg | Callable[[Invocation[Cfg, Out]], Cfg] | None,
        version: str,
        key_builder: Callable[..., Any] | None,
        buckets: Mapping[str, Sequence[int]] | None,
    ) -> None:
        super().__init__(op_id)
        functools.update_wrapper(self, fn, updated=())  # copies name and doc, but not the function's attributes
        self.fn = fn
        self.version = version
        self.key_builder = key_builder
        self.buckets = buckets
        self._configs = configs if callable(configs) else tuple(configs)
        self._heuristic = heuristic

    def __call__(self, *args: Any, **kwargs: Any) -> Out:
        return self.fn(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # By name, like a function: under the function's name, pickle would find this kernel.
        module, name = self.fn.__module__, self.fn.__qualname__
        try:
            found = _imported(module, name)
        except (AttributeError, ImportError):
            found = None
        if found is not self:
            raise pickle.PicklingError(f"kernel {self.op_id!r} cannot be imported as {name!r} from module {module!r}")
        return _imported, (module, name)

    def run(self, *args: Any, **kwargs: Any) -> Out:
        return self.fn(*args, **kwargs)

    def heuristic_cfg(self, inv: Invocation[Cfg, Out]) -> Cfg:
        if self._heuristic is None:
            raise NotImplementedError(f"kernel {self.op_id!r} was made without a heuristic")
        if _is_function(self._heuristic):
            return self._heuristic(inv)  # type: ignore[operator]
        return self._heuristic  # type: ignore[return-value]

    def candidate_cfgs(self, inv: Invocation[Cfg, Out]) -> Iterable[Cfg]:
        return self._configs(inv) if callable(self._configs) else self._configs


def _imported(module: str, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


def kernel(
    *,
    op_id: str | None = None,
    configs: Sequence[Cfg] | Callable[[Invocation[Cfg, Any]], Iterable[Cfg]],
    heuristic: Cfg | Callable[[Invocation[Cfg, Any]], Cfg] | None = None,
    version: str = "0",
    key_builder: Callable[..., Any] | None = None,
    buckets: Mapping[str, Sequence[int]] | None = None,
) -> Callable[[Callable[..., Out]], FunctionKernel[Cfg, Out]]:
    """Make a kernel from a function that takes `cfg` as a keyword argument.

    `configs` and `heuristic` are values, or functions of the invocation. Calling the kernel calls the function.
    """

    def make(fn: Callable[..., Out]) -> FunctionKernel[Cfg, Out]:
        name = op_id or f"{fn.__module__}.{fn.__qualname__}"
        return FunctionKernel(fn, name, configs, heuristic, version, key_builder, buckets)

    return make


def _is_function(value: Any) -> bool:
    # A config may itself be callable, so only a plain function is called.
    return inspect.isroutine(value) or isinstance(value, functools.partial)


def check_request(inv: Any, kernel: Any) -> None:
    """Check that `inv` is an invocation of `kernel`.

    Raises:
        InvalidRequestError: it is not. The message says which of the two is wrong.
    """
    is_call = _is_call(inv)
    is_kernel = not isinstance(kernel, type) and hasattr(kernel, "op_id") and hasattr(kernel, "run")
    if is_call and is_kernel:
        if inv.op_id != kernel.op_id:
            raise InvalidRequestError(
                f"this invocation is of {inv.op_id!r}, and the kernel is {kernel.op_id!r}; "
                f"write Invocation({kernel.op_id!r}, args, kwargs), or pass the other kernel"
            )
        if not isinstance(inv.args, tuple | list):
            advice = f"write Invocation({kernel.op_id!r}, (x,), kwargs)"
            raise InvalidRequestError(f"the args of an invocation are a tuple, not {_kind(inv.args)}; {advice}")
        if not isinstance(inv.kwargs, Mapping):
            advice = f"write Invocation({kernel.op_id!r}, args, {{}})"
            raise InvalidRequestError(f"the kwargs of an invocation are a dict, not {_kind(inv.kwargs)}; {advice}")
        return
    if _is_call(kernel):
        advice = "they are in the wrong order" if hasattr(inv, "run") else f"{_kind(inv)} is not a kernel"
        raise InvalidRequestError(f"an invocation comes first and its kernel second: {advice}")
    if not is_call:
        op_id = getattr(kernel, "op_id", "my_op")
        raise InvalidRequestError(f"{_kind(inv)} is not an invocation; write Invocation({op_id!r}, args, kwargs)")
    raise InvalidRequestError(f"{_kind(kernel)} is not a kernel: it has no op_id and run")


def _is_call(value: Any) -> bool:
    return not isinstance(value, type) and all(hasattr(value, name) for name in ("op_id", "args", "kwargs"))


def _kind(value: Any) -> str:
    """Return the name of a value's type, with an article."""
    if isinstance(value, type):
        return f"a class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
