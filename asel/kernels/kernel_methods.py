"""A kernel's methods: variants for platforms, optional methods, and parameter names."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from asel.kernels.kernel import FunctionKernel, Kernel

__all__ = [
    "example_inputs_of",
    "has_default_candidates",
    "key_builder_of",
    "parameters_of",
    "positional_names",
    "ranks_of",
    "variant",
]


_RAISES_IN_EJKERNEL = frozenset({"run", "fwd_with_residuals", "vjp"})


def variant(kernel: Any, method: str, platform: str, context: str | None) -> Callable[..., Any] | None:
    """Return the most specific variant of `method` that this kernel defines, or None.

    A base class's stub, which only raises, does not count.
    """
    suffixes = [f"_{context}_{platform}", f"_{context}"] if context else []
    for suffix in (*suffixes, f"_{platform}", ""):
        found = getattr(kernel, method + suffix, None)
        if callable(found) and not _is_stub(found, method, suffix):
            return found  # type: ignore[no-any-return]
    return None


def _is_stub(found: Any, method: str, suffix: str) -> bool:
    """Return whether a method is a stub of our base class, or of ejKernel's, that only raises."""
    function: Any = getattr(found, "__func__", None)
    if function is getattr(Kernel, method, None):
        return True
    if method not in _RAISES_IN_EJKERNEL or getattr(function, "__module__", None) != "ejkernel.ops.core.kernel":
        return False
    return str(function.__qualname__) == f"Kernel.{method}{suffix}"


def ranks_of(kernel: Any, inv: Any, candidates: Sequence[Any]) -> tuple[tuple[int, int], ...] | None:
    """Return each candidate's group and priority; None if the kernel has no `candidate_priority(cfg, inv)`.

    That method returns a priority, or a group and a priority. Groups are tried from the highest down until a candidate
    succeeds. A candidate with a negative group or priority is never tried.

    Raises:
        TypeError: it returned something else.
    """
    rank = getattr(kernel, "candidate_priority", None)
    return None if rank is None else tuple(_as_rank(rank(cfg, inv), cfg) for cfg in candidates)


def _as_rank(given: Any, cfg: Any) -> tuple[int, int]:
    rank = given if isinstance(given, tuple) else (given,)
    if len(rank) not in (1, 2) or not all(isinstance(number, Real) for number in rank):
        raise TypeError(f"it returned {given!r} for {cfg!r}, neither a priority nor a tuple of group and priority")
    priority = rank[-1]
    group = rank[0] if len(rank) == 2 else 0 if priority >= 0 else -1
    return group, priority


def example_inputs_of(kernel: Any, inv: Any) -> Callable[[], Any] | None:
    """Return a function that makes arguments for a call that has only shapes; None if the kernel cannot make any.

    A kernel's `example_inputs(inv)` returns args, or args and kwargs. Without it, shapes become zeros.
    """
    make = getattr(kernel, "example_inputs", None)
    jax = sys.modules.get("jax")  # before JAX is imported, no argument can be one of its shapes
    if make is None or jax is None:
        return None
    leaves = jax.tree_util.tree_leaves((tuple(inv.args), dict(inv.kwargs)))
    if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return None

    def example() -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        made = make(inv)
        # `(array, dict)` is two arguments; `((array,), dict)` is args and kwargs.
        has_kwargs = isinstance(made, tuple) and len(made) == 2 and _are_args(*made)
        args, kwargs = made if has_kwargs else (made, inv.kwargs)
        return tuple(args), dict(kwargs)

    return example


def _are_args(args: Any, kwargs: Any) -> bool:
    return isinstance(args, tuple | list) and isinstance(kwargs, Mapping)


def has_default_candidates(kernel: Any) -> bool:
    """Return whether a kernel inherits `candidate_cfgs` from `Kernel`, so that the heuristic is its only candidate."""
    names = [name for name in dir(kernel) if name.startswith("candidate_cfgs")]
    return isinstance(kernel, Kernel) and names == ["candidate_cfgs"] and variant(kernel, names[0], "", None) is None


def parameters_of(kernel: Any) -> inspect.Signature | None:
    """Return the signature of a kernel's `run`; None if it has none that can be inspected."""
    try:
        return inspect.signature(kernel.fn if isinstance(kernel, FunctionKernel) else kernel.run)
    except (AttributeError, TypeError, ValueError):
        return None


@functools.lru_cache(maxsize=1024)
def _positional(code: Any, is_method: bool) -> tuple[tuple[str, bool], ...]:
    names = code.co_varnames[: code.co_argcount][is_method:]
    return tuple((name, i + is_method < code.co_posonlyargcount) for i, name in enumerate(names))


def positional_names(kernel: Any) -> tuple[tuple[str, bool], ...]:
    """Return the names of the parameters that take positional arguments, and whether each is positional-only.

    Empty if the kernel's parameters cannot be known, or if they are `*args`.
    """
    run = kernel.fn if isinstance(kernel, FunctionKernel) else getattr(kernel, "run", None)
    function = getattr(run, "__func__", run)
    # A fast path for plain functions, which most are: `inspect.signature` costs more than the rest of a key.
    if isinstance(function, types.FunctionType) and not hasattr(function, "__wrapped__"):
        return _positional(function.__code__, function is not run)
    parameters = parameters_of(kernel)
    if parameters is None:
        return ()
    listed = parameters.parameters.values()
    positional = (p for p in listed if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    return tuple((p.name, p.kind is p.POSITIONAL_ONLY) for p in positional)


def key_builder_of(kernel: Any) -> Callable[[Any], Any] | None:
    """Return the kernel's key builder as a function of the invocation alone.

    A plain function in a class body becomes a method when it is looked up; its number of parameters shows whether
    it expects `self`. A partial is read without attribute lookup, which would warn that a later Python version will
    make a method of it.
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
