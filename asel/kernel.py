"""What a caller brings: a kernel, and one call of it."""

from __future__ import annotations

import functools
import importlib
import inspect
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Generic, TypeVar

__all__ = [
    "Cfg",
    "FunctionKernel",
    "Invocation",
    "Kernel",
    "Out",
    "bind",
    "kernel",
    "key_builder_of",
    "ranks_of",
    "variant",
]

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

    Raise `version` when the implementation changes: what was tuned before then no longer applies.
    """

    op_id: str
    version: str = "0"
    key_builder: Callable[..., Any] | None = None
    """Replaces the call signature: takes the invocation, returns what its answer depends on."""
    buckets: Mapping[str, Sequence[int]] | None = None
    """Coarsens the signature: `{"q.shape[1]": powers_of_two(128, 32768)}`."""

    def __init__(self, op_id: str | None = None) -> None:
        if op_id is not None:
            self.op_id = op_id
        elif not getattr(self, "op_id", None):
            self.op_id = f"{type(self).__module__}.{type(self).__qualname__}"

    def prepare(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Turn what the user passed into what `run` takes."""
        return args, kwargs

    def run(self, *args: Any, **kwargs: Any) -> Out:
        """Compute the result with the config that comes as `cfg`."""
        raise NotImplementedError(f"{type(self).__qualname__} has no run method")

    def heuristic_cfg(self, inv: Invocation[Cfg, Out]) -> Cfg:
        """Return a config that is right for this call, if not the fastest."""
        raise NotImplementedError(f"{type(self).__qualname__} has no heuristic_cfg method")

    def candidate_cfgs(self, inv: Invocation[Cfg, Out]) -> Iterable[Cfg]:
        """Return the configs to choose among: a pure function of shapes, dtypes and constants."""
        return (self.heuristic_cfg(inv),)


class FunctionKernel(Kernel[Cfg, Out]):
    """A kernel made of a function that takes `cfg` as a keyword."""

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
        functools.update_wrapper(self, fn, updated=())  # its name and doc; its attributes are not the kernel's
        self.fn = fn
        self.version = version
        self.key_builder = key_builder
        self.buckets = buckets
        self._configs = configs if callable(configs) else tuple(configs)
        self._heuristic = heuristic

    def __call__(self, *args: Any, **kwargs: Any) -> Out:
        return self.fn(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # By name, as functions are: the function itself is no longer found under its own.
        module, name = self.fn.__module__, self.fn.__qualname__
        try:
            found = _imported(module, name)
        except (AttributeError, ImportError):
            found = None
        if found is not self:
            raise pickle.PicklingError(f"kernel {self.op_id!r} is not found as {name!r} in module {module!r}")
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
    """Make a kernel of a function that takes `cfg` as a keyword argument.

    `configs` and `heuristic` are values, or functions of the invocation. The kernel can still be
    called as the function it was.
    """

    def make(fn: Callable[..., Out]) -> FunctionKernel[Cfg, Out]:
        name = op_id or f"{fn.__module__}.{fn.__qualname__}"
        return FunctionKernel(fn, name, configs, heuristic, version, key_builder, buckets)

    return make


def _is_function(value: Any) -> bool:
    # A config may be callable in its own right; only what is plainly a function is called.
    return inspect.isroutine(value) or isinstance(value, functools.partial)


def variant(kernel: Any, method: str, platform: str, context: str | None) -> Callable[..., Any] | None:
    """Return the most specific form of `method` this kernel has, or None where it has none.

    The stubs of a base class count as none.
    """
    suffixes = [f"_{context}_{platform}", f"_{context}"] if context else []
    for suffix in (*suffixes, f"_{platform}", ""):
        found = getattr(kernel, method + suffix, None)
        if callable(found) and getattr(found, "__func__", None) is not getattr(Kernel, method, None):
            return found  # type: ignore[no-any-return]
    return None


def ranks_of(kernel: Any, inv: Any, candidates: Sequence[Any]) -> tuple[tuple[int, int], ...] | None:
    """Return each candidate's group and priority, where the kernel has a `candidate_priority(cfg, inv)`.

    It returns a priority, or a group and a priority. Groups are tried from the highest down until one
    has a success; what is negative is never tried.

    Raises:
        TypeError: it returned something else.
    """
    rank = getattr(kernel, "candidate_priority", None)
    return None if rank is None else tuple(_as_rank(rank(cfg, inv), cfg) for cfg in candidates)


def _as_rank(given: Any, cfg: Any) -> tuple[int, int]:
    rank = given if isinstance(given, tuple) else (given,)
    if len(rank) not in (1, 2) or not all(isinstance(number, Real) for number in rank):
        raise TypeError(f"it returned {given!r} for {cfg!r}, which is neither a number nor a group and a priority")
    priority = rank[-1]
    group = rank[0] if len(rank) == 2 else 0 if priority >= 0 else -1
    return group, priority


def example_inputs_of(kernel: Any, inv: Any) -> Callable[[], Any] | None:
    """Return what makes arguments for a call of which only shapes are known, where the kernel can.

    A kernel's `example_inputs(inv)` returns args, or args and kwargs; without it shapes become zeros.
    """
    make = getattr(kernel, "example_inputs", None)
    jax = sys.modules.get("jax")  # there are no shapes of JAX's before it is imported
    if make is None or jax is None:
        return None
    leaves = jax.tree_util.tree_leaves((tuple(inv.args), dict(inv.kwargs)))
    if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return None

    def example() -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        made = make(inv)
        # An array and a dict of parameters are two arguments: kwargs stand beside args in a tuple of their own.
        has_kwargs = isinstance(made, tuple) and len(made) == 2 and _are_args(*made)
        args, kwargs = made if has_kwargs else (made, inv.kwargs)
        return tuple(args), dict(kwargs)

    return example


def _are_args(args: Any, kwargs: Any) -> bool:
    return isinstance(args, tuple | list) and isinstance(kwargs, Mapping)


def has_default_candidates(kernel: Any) -> bool:
    """Tell whether a kernel takes its candidates from `Kernel`: the heuristic's config and no other."""
    names = [name for name in dir(kernel) if name.startswith("candidate_cfgs")]
    return isinstance(kernel, Kernel) and names == ["candidate_cfgs"] and variant(kernel, names[0], "", None) is None


def parameters_of(kernel: Any) -> inspect.Signature | None:
    """Return the parameters that a kernel's arguments are named after, where they can be known."""
    try:
        return inspect.signature(kernel.fn if isinstance(kernel, FunctionKernel) else kernel.run)
    except (TypeError, ValueError):
        return None


def key_builder_of(kernel: Any) -> Callable[[Any], Any] | None:
    """Return the kernel's key builder as a function of the invocation alone.

    A plain function in a class body turns into a method when it is looked up. Whether `self` was
    meant to be its first parameter shows in how many it has. A partial stays what it is, though a later
    Python will make a method of it: looking it up would warn of that.
    """
    declared = inspect.getattr_static(kernel, "key_builder", None)
    if isinstance(declared, functools.partial):
        return declared
    builder = getattr(kernel, "key_builder", None)
    if builder is None or not inspect.ismethod(builder):
        return builder
    try:
        inspect.signature(builder).bind(object())
    except TypeError:
        return builder.__func__
    return builder


def bind(kernel: Any, inv: Any, platform: str, cfg: Any) -> Callable[..., Any]:
    """Return the function of the invocation's arguments that runs `kernel` with `cfg`."""
    if inv.method == "shard_map":
        return _bind_shard_map(kernel, inv, platform, cfg)
    run = variant(kernel, "run", platform, None) or kernel.run
    return functools.partial(run, cfg=cfg)


def _bind_shard_map(kernel: Any, inv: Any, platform: str, cfg: Any) -> Callable[..., Any]:
    # Partials of functions that a worker process can import, and nothing of the call but what they need.
    how = {"mesh": inv.mesh, "in_specs": inv.in_specs, "out_specs": inv.out_specs, "check_vma": inv.check_vma}
    wrapper = getattr(kernel, "create_shard_map_wrapper", None)
    if wrapper is not None:
        return functools.partial(_run_wrapped, wrapper, how, cfg)
    run = variant(kernel, "run", platform, "shard_map") or kernel.run
    return functools.partial(_run_mapped, run, how, cfg)


def _run_wrapped(wrapper: Callable[..., Any], how: dict[str, Any], cfg: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a kernel that wraps itself, as ejKernel's do, and may want the last word on the outputs."""
    mapped, call_args, *callback = wrapper(*args, cfg=cfg, **how, **kwargs)
    outputs = mapped(*call_args)
    return callback[0](outputs, cfg=cfg) if callback and callback[0] is not None else outputs


def _run_mapped(run: Callable[..., Any], how: dict[str, Any], cfg: Any, *args: Any, **kwargs: Any) -> Any:
    import jax

    return jax.shard_map(functools.partial(run, cfg=cfg, **kwargs), **how)(*args)
