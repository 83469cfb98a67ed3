"""A kernel bound to a config: the function that is compiled, timed and run."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

from asel.kernels.gradients import differentiable, gradient_methods
from asel.kernels.kernel_methods import variant

__all__ = ["WeakMethod", "bind", "placed_shapes"]


def bind(kernel: Any, inv: Any, platform: str, cfg: Any, *, weakly: bool = False) -> Callable[..., Any]:
    """Return the function of the invocation's arguments that runs `kernel` with `cfg`.

    With `weakly`, it does not keep the kernel alive if `run` is a method.
    """
    hold = _weakly if weakly else _strongly
    if inv.method == "shard_map":
        return _bind_shard_map(kernel, inv, platform, cfg, hold)
    return _with_cfg(kernel, platform, None, cfg, hold)


def placed_shapes(inv: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments, with shapes placed on the mesh according to the specs of its `shard_map`.

    `shard_map` would refuse arrays made on a single device. A shape that does not fit its spec is replicated.
    """
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    args, kwargs = tuple(inv.args), dict(inv.kwargs)
    if inv.method != "shard_map" or inv.mesh is None:
        return args, kwargs

    replicated = PartitionSpec()  # type: ignore[no-untyped-call]

    def shape_on(leaf: Any, spec: Any) -> Any:
        sharding = NamedSharding(inv.mesh, spec)
        sharding.shard_shape(leaf.shape)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type)  # type: ignore[no-untyped-call]

    def place(spec: Any, leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct) or leaf.sharding is not None:
            return leaf
        try:
            return shape_on(leaf, replicated if spec is None else spec)
        except ValueError:  # the specs of a kernel with its own wrapper may be for other arrays
            return shape_on(leaf, replicated)

    def place_all(spec: Any, part: Any) -> Any:
        return jax.tree_util.tree_map(functools.partial(place, spec), part)

    specs = tuple(inv.in_specs) if isinstance(inv.in_specs, list) else inv.in_specs
    try:
        args = jax.tree_util.tree_map(
            place_all, specs, args, is_leaf=lambda spec: spec is None or isinstance(spec, PartitionSpec)
        )
    except ValueError:  # as above
        args = place_all(None, args)
    return args, place_all(None, kwargs)


def _with_cfg(
    kernel: Any, platform: str, context: str | None, cfg: Any, hold: Callable[[Any], Any]
) -> Callable[..., Any]:
    """Return the kernel's `run` with `cfg`, differentiated by the kernel's own gradient if it has one."""
    run = variant(kernel, "run", platform, context) or kernel.run
    methods = gradient_methods(kernel, platform, context)
    if methods is None:
        return functools.partial(hold(run), cfg=cfg)
    return functools.partial(differentiable, hold(run), *map(hold, methods), cfg)


class WeakMethod:
    """A method that does not keep its object alive. Pickling it pickles the bound method."""

    __slots__ = ("_ref",)

    def __init__(self, method: Any) -> None:
        self._ref = weakref.WeakMethod(method)

    @property
    def method(self) -> Any:
        if (method := self._ref()) is None:
            raise ReferenceError("the kernel that this program was made for no longer exists")
        return method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.method(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _strongly, (self.method,)


def _weakly(run: Any) -> Any:
    return WeakMethod(run) if inspect.ismethod(run) else run


def _strongly(run: Any) -> Any:
    return run


def _bind_shard_map(kernel: Any, inv: Any, platform: str, cfg: Any, hold: Callable[[Any], Any]) -> Callable[..., Any]:
    # Partials of importable functions, so that they can be sent to a worker process. They hold no arrays of the call.
    how = {"mesh": inv.mesh, "in_specs": inv.in_specs, "out_specs": inv.out_specs, "check_vma": inv.check_vma}
    wrapper = getattr(kernel, "create_shard_map_wrapper", None)
    if wrapper is not None:
        return functools.partial(_run_wrapped, hold(wrapper), how, cfg)
    return functools.partial(_run_mapped, _with_cfg(kernel, platform, "shard_map", cfg, hold), how)


def _run_wrapped(wrapper: Callable[..., Any], how: dict[str, Any], cfg: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a kernel with its own `shard_map` wrapper, as ejKernel's have, which may also post-process the outputs."""
    mapped, call_args, *callback = wrapper(*args, cfg=cfg, **how, **kwargs)
    outputs = mapped(*call_args)
    return callback[0](outputs, cfg=cfg) if callback and callback[0] is not None else outputs


def _run_mapped(run: Callable[..., Any], how: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    import jax

    return jax.shard_map(functools.partial(run, **kwargs), **how)(*args)
