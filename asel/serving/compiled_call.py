"""A kernel with a fixed config, as a plain jitted function of the arguments that a user passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asel.errors import InvalidRequestError
from asel.kernels.binding import bind
from asel.tuning.runnable import is_array

__all__ = ["jitted_call"]


def jitted_call(
    kernel: Any, inv: Any, platform: str, cfg: Any, prepare: Callable[..., Any] | None, args: Any, kwargs: Any
) -> Any:
    """Return `jax.jit` of the kernel's `prepare` and `run` with `cfg`; `args` and `kwargs` are an example call.

    An argument without arrays is static, as in a tune: the function compiles again for another value.

    Raises:
        InvalidRequestError: an argument can be neither a pytree of arrays nor a static value.
    """
    import jax

    fn = bind(kernel, inv, platform, cfg)

    def call(*call_args: Any, **call_kwargs: Any) -> Any:
        if prepare is not None:
            call_args, call_kwargs = prepare(*call_args, **call_kwargs)
        return fn(*call_args, **call_kwargs)

    call.__name__ = call.__qualname__ = str(kernel.op_id)
    positions = [i for i, value in enumerate(args) if _is_static(value, f"argument {i}", kernel)]
    names = [name for name, value in kwargs.items() if _is_static(value, f"argument {name!r}", kernel)]
    return jax.jit(call, static_argnums=positions, static_argnames=names)


def _is_static(value: Any, name: str, kernel: Any) -> bool:
    import jax

    leaves = jax.tree_util.tree_leaves(value)
    arrays = sum(map(is_array, leaves))
    if arrays == len(leaves):
        return not leaves and _is_hashable(value)
    if arrays == 0 and _is_hashable(value):
        return True
    problem = "holds both arrays and constants" if arrays else f"is a {type(value).__name__}, which is not hashable"
    raise InvalidRequestError(
        f"compile: {name} of {kernel.op_id!r} {problem}, but `jax.jit` takes a pytree of arrays or a hashable value. "
        "Pass the constants as arguments of their own, or run the kernel with the executor itself."
    )


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
