"""A kernel's own gradient: makes JAX differentiate `run` by `fwd_with_residuals` and `vjp`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from asel.kernels.arguments import split_leaves
from asel.kernels.kernel_methods import variant

__all__ = ["differentiable", "gradient_methods"]


def gradient_methods(
    kernel: Any, platform: str, context: str | None
) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the kernel's `fwd_with_residuals` and `vjp`, the most specific of each; None unless it has both."""
    forward = variant(kernel, "fwd_with_residuals", platform, context)
    backward = variant(kernel, "vjp", platform, context)
    return None if forward is None or backward is None else (forward, backward)


def differentiable(
    run: Callable[..., Any],
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    cfg: Any,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a kernel so that JAX differentiates it with the kernel's own gradient.

    `forward(*args, cfg=cfg)` returns the outputs and any residuals. `backward(residuals, dy, *args, cfg=cfg)`
    returns a gradient for each positional argument: a pytree like the argument, in which None means zero. It also gets
    the outputs if it is declared as `vjp(residuals, y, dy, ...)`, under any names. Further gradients belong to the
    next parameters of `run`, for arguments passed by keyword; the gradient of any other keyword argument is zero.
    """
    import jax

    arrays, is_dynamic, call_of = split_leaves((args, kwargs), _is_array)
    if not any(isinstance(array, jax.core.Tracer) for array in arrays):
        return run(*args, cfg=cfg, **kwargs)  # nothing to differentiate, and `run` may not be traceable

    def primal(*values: Any) -> Any:
        call_args, call_kwargs = call_of(*values)
        return run(*call_args, cfg=cfg, **call_kwargs)

    def with_residuals(*values: Any) -> Any:
        call_args, call_kwargs = call_of(*values)
        outputs, residuals = forward(*call_args, cfg=cfg, **call_kwargs)
        return outputs, _carried((values, outputs, residuals))

    def gradients(carried: Any, cotangent: Any) -> Any:
        values, outputs, residuals = carried()
        call_args, call_kwargs = call_of(*values)
        wants_outputs = _wants_outputs(backward, len(call_args), call_kwargs)
        cotangents = (outputs, cotangent) if wants_outputs else (cotangent,)
        found = backward(residuals, *cotangents, *call_args, cfg=cfg, **call_kwargs)
        found, by_name = _by_parameter(found, len(call_args), run)
        aligned = _aligned(found, call_args)
        for name in sorted(call_kwargs):  # as JAX flattens them
            aligned += _aligned((by_name.get(name),), (call_kwargs[name],))
        grads = (grad for grad, dynamic in zip(aligned, is_dynamic, strict=True) if dynamic)
        return tuple(_as_cotangent(grad, array) for grad, array in zip(grads, values, strict=True))

    function = jax.custom_vjp(primal)
    function.defvjp(with_residuals, gradients)
    return function(*arrays)


def _by_parameter(gradients: Any, positional: int, run: Any) -> tuple[Any, dict[str, Any]]:
    """Return the gradients of the positional arguments, and those of the parameters after them by name."""
    if not isinstance(gradients, tuple | list) or len(gradients) <= positional:
        return gradients, {}
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(getattr(run, "method", run)).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind in by_position]
    if len(gradients) > len(names):
        return gradients, {}
    return gradients[:positional], dict(zip(names[positional:], gradients[positional:], strict=False))


def _aligned(gradients: Any, args: tuple[Any, ...]) -> list[Any]:
    """Return a gradient, or None, for every leaf of the positional arguments.

    Raises:
        TypeError: there is not one gradient for each argument.
    """
    import jax

    if not isinstance(gradients, tuple | list) or len(gradients) != len(args):
        got = f"{len(gradients)} of them" if isinstance(gradients, tuple | list) else f"a {type(gradients).__name__}"
        raise TypeError(f"vjp returns a tuple with one gradient for each of the {len(args)} arguments; got {got}")
    aligned: list[Any] = []

    def align(gradient: Any, part: Any) -> None:
        count = len(jax.tree_util.tree_leaves(part))
        if gradient is not None and count != 1:
            raise TypeError(f"vjp returned one gradient for an argument, or a part of one, that has {count} arrays")
        aligned.extend([gradient] * count)

    jax.tree_util.tree_map(align, tuple(gradients), args, is_leaf=lambda leaf: leaf is None)
    return aligned


def _carried(value: Any) -> Any:
    """Return a pytree of the arrays in `value` that returns `value` when called.

    Residuals may also hold a config, a name, or a Python number that has to remain one.
    """
    import jax

    arrays, _, rebuild = split_leaves(value, _is_array)
    return jax.tree_util.Partial(rebuild, *arrays)  # type: ignore[no-untyped-call]


def _is_array(leaf: Any) -> bool:
    import jax
    import numpy as np

    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _as_cotangent(gradient: Any, array: Any) -> Any:
    """Return a gradient in the form that JAX expects for `array`: None means zero, as for every integer array.

    Within `shard_map(check_vma=True)` it is summed here over the devices that share the array; otherwise JAX does that.
    """
    import jax

    if gradient is None or not jax.numpy.issubdtype(array.dtype, jax.numpy.inexact):
        return None
    shared_by = tuple(sorted(_varying_axes(gradient) - _varying_axes(array)))
    return jax.lax.psum(gradient, shared_by) if shared_by else gradient  # type: ignore[no-untyped-call]


def _varying_axes(array: Any) -> frozenset[Any]:
    """Return the mesh axes along which an array differs from device to device."""
    import jax

    of_type: Any = jax.typeof(array)
    found = of_type.mat.varying if hasattr(of_type, "mat") else getattr(of_type, "vma", frozenset())
    return frozenset(found)


_OUTPUTS = ("y", "o", "primal", "result")
_COTANGENTS = ("d", "g", "ct", "cot")


def _wants_outputs(backward: Callable[..., Any], positional: int, kwargs: dict[str, Any]) -> bool:
    """Return whether `vjp` takes the outputs, as ejKernel documents it; ejKernel's executor calls it without.

    The number of its parameters decides. If it takes any number of arguments, the names of two parameters do.
    """
    try:
        signature = inspect.signature(backward)
    except (TypeError, ValueError):
        return False
    with_outputs = _takes(signature, positional + 3, kwargs)
    if with_outputs != _takes(signature, positional + 2, kwargs):
        return with_outputs
    names = [*signature.parameters][1:3]
    return len(names) == 2 and names[0].startswith(_OUTPUTS) and names[1].startswith(_COTANGENTS)


def _takes(signature: inspect.Signature, positional: int, kwargs: dict[str, Any]) -> bool:
    try:
        signature.bind(*[None] * positional, cfg=None, **kwargs)
    except TypeError:
        return False
    return True
