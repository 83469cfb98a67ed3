"""A kernel with its config as a function of a call's arrays: tunes measure it, and executors run it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from asel.kernels.arguments import is_numeric, split_leaves
from asel.kernels.binding import WeakMethod
from asel.kernels.candidates import same_config
from asel.kernels.kernel import FunctionKernel
from asel.kernels.kernel_numbers import is_known_by_itself
from asel.runtime.bounded_memo import BoundedMemo

__all__ = ["CallFunction", "Programs", "Runnable", "after_run", "is_jitted"]

_MAX_CONFIGS = 4
# The placements of a call's arrays: each may be committed to its device or not.
_MAX_SIGNATURES = 64

after_run: ContextVar[list[Callable[[], None]] | None] = ContextVar("asel_after_run", default=None)
"""A list in which an executor collects the background tunes that begin after its call has run."""


class CallFunction:
    """A function of the array leaves of a call. All other leaves are constants. It keeps none of the arrays."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        import jax

        _, is_dynamic, call_of = split_leaves((tuple(args), dict(kwargs)), is_array)

        def forward(*arrays: Any) -> Any:
            call_args, call_kwargs = call_of(*arrays)
            return fn(*call_args, **call_kwargs)

        self.forward = forward
        self._is_dynamic = is_dynamic
        self._leaves_of = jax.tree_util.tree_leaves
        # Whether the arrays are exactly the positional arguments.
        self.takes_args = sum(is_dynamic) == len(args) and all(is_array(arg) for arg in args)

    def arrays(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the array leaves of a call of the same structure."""
        if self.takes_args:
            return args
        leaves = self._leaves_of((tuple(args), dict(kwargs)))
        return [leaf for leaf, dynamic in zip(leaves, self._is_dynamic, strict=True) if dynamic]


class Runnable:
    """Runs one config for one signature: as a jitted function of its arrays, or as the kernel's plain function."""

    __slots__ = (
        "_bound_to",
        "_is_quick",
        "_owner",
        "_was_traced",
        "as_is",
        "cfg",
        "direct",
        "function",
        "jitted",
    )

    def __init__(
        self, cfg: Any, as_is: Callable[..., Any], function: CallFunction | None = None, jitted: Any = None
    ) -> None:
        self.cfg = cfg
        self.as_is = as_is
        self.function = function
        self.jitted = jitted
        self._is_quick: dict[Any, bool] = {}
        # The jitted function, if it takes exactly the positional arguments of a call.
        self.direct = jitted if function is not None and function.takes_args else None
        self._was_traced = False
        self._owner: weakref.ref[Any] | None = None
        self._bound_to: Any = None

    def go_with(self, kernel: Any) -> None:
        """Tie this to the kernel that `as_is` runs.

        If no other kernel can use the compiled program, it is released with this kernel.
        """
        if is_known_by_itself(kernel):
            self._owner = weakref.ref(kernel, self._give_up)
        elif not is_jitted(self.as_is):
            self._bound_to = kernel

    def _give_up(self, _: object = None) -> None:
        self.direct = self.jitted = self.function = None

    def serves(self, kernel: Any) -> bool:
        """Return whether this may run for `kernel`, which has the class and state of the kernel it was made for.

        Equal kernels share compiled programs. A plain function is not shared, since its kernel may be mutable.
        """
        return self.jitted is not None or self._bound_to is None or self._bound_to is kernel

    def serving(self, kernel: Any, as_is: Callable[..., Any]) -> Runnable:
        """Return an equivalent for another kernel, whose plain function is `as_is`."""
        other = Runnable(self.cfg, as_is)
        other._is_quick = dict(self._is_quick)
        other.go_with(kernel)
        return other

    @classmethod
    def of(cls, cfg: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Runnable:
        """Return a runnable of `fn` in the form the tuner measures: jitted, unless it already is."""
        if is_jitted(fn):
            return cls(cfg, fn)
        import jax

        function = CallFunction(fn, args, kwargs)
        return cls(cfg, fn, function, jax.jit(function.forward))

    def is_quick(self, token: Any) -> bool | None:
        """Return whether the last run of a signature (with `for_program`) was quick; None before the first run.

        `jax.jit` compiles again for some calls with one key, such as those with committed arrays.
        """
        return self._is_quick.get(token)

    def note_run(self, token: Any, is_quick: bool) -> None:
        if len(self._is_quick) >= _MAX_SIGNATURES:
            self._is_quick.clear()
        self._is_quick[token] = is_quick

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if (direct := self.direct) is not None:
            return direct(*args)
        jitted, function = self.jitted, self.function  # read once: another thread may set them to None
        if jitted is None or function is None:
            return self.as_is(*args, **kwargs)
        return jitted(*function.arrays(args, kwargs))

    def first_run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run for the first time. If the kernel cannot be traced but runs without `jit`, it does so from now on."""
        if self._is_traceable(args, kwargs):
            return self(args, kwargs)
        out = self.as_is(*args, **kwargs)
        self._give_up()
        return out

    def _is_traceable(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        jitted, function = self.jitted, self.function
        if jitted is None or function is None:
            return False
        if not self._was_traced:
            try:
                jitted.trace(*function.arrays(args, kwargs))
            except Exception:  # if the call itself is at fault, running the kernel raises
                return False
            self._was_traced = True
        return True


class Programs:
    """The runnables of a selector's calls, for its executors: a few configs for each of a bounded number of signatures.

    `call` is a call's `Resolved`, together with its signature if the kernel has a `key_builder`.
    """

    def __init__(self, max_signatures: int = 8192) -> None:
        self._by_signature: BoundedMemo[tuple[Runnable, ...]] = BoundedMemo(max_signatures)

    def get(self, call: Any, cfg: Any) -> Runnable | None:
        for runnable in self._by_signature.get(call) or ():
            if same_config(runnable.cfg, cfg):
                return runnable
        return None

    def put(self, call: Any, runnable: Runnable) -> None:
        others = [one for one in self._by_signature.get(call) or () if not same_config(one.cfg, runnable.cfg)]
        self._by_signature.put(call, (runnable, *others[: _MAX_CONFIGS - 1]))

    def add(self, call: Any, kernel: Any, runnable: Runnable) -> None:
        """Keep a tune's compiled program, unless the config has one already."""
        if self.get(call, runnable.cfg) is None:
            runnable.go_with(kernel)
            self.put(call, runnable)


def is_array(leaf: Any) -> bool:
    """Return whether a leaf is a parameter of the compiled function; every other leaf is a constant of it.

    NumPy's scalars are parameters, as for `jax.jit`.
    """
    import jax

    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) or is_numeric(leaf)


def is_jitted(fn: Any) -> bool:
    """Return whether a function is already jitted, looking inside partials, weak methods and function kernels."""
    while True:
        if isinstance(fn, functools.partial):
            fn = fn.func
        elif isinstance(fn, WeakMethod):
            fn = fn.method
        elif isinstance(owner := getattr(fn, "__self__", None), FunctionKernel) and fn.__func__ is FunctionKernel.run:
            fn = owner.fn
        else:
            return callable(getattr(fn, "lower", None))
