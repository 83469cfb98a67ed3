"""The request for a tune: the candidates, how to run them, and the limits."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic

from asel.events import Event
from asel.kernels.candidates import Objective
from asel.kernels.kernel import Cfg
from asel.kernels.keys import CacheKey
from asel.runtime.jax_settings import Settings
from asel.tuning.outcomes import Outcome, TuneReport

__all__ = ["MAX_LESSONS", "TuneRequest", "compile_width_of_tunes", "tunes_compiling"]

MAX_LESSONS = 64
"""The number of earlier tunes of a kernel's other calls that are used, newest first."""
_NO_KEY = CacheKey("", "", "")

compile_width_of_tunes: ContextVar[int | None] = ContextVar("asel_compile_width", default=None)
"""The compile width of tunes begun in this context; None for the tuner's own."""


@contextmanager
def tunes_compiling(width: int) -> Iterator[None]:
    """Let tunes begun inside the block compile `width` candidates at once."""
    token = compile_width_of_tunes.set(width)
    try:
        yield
    finally:
        compile_width_of_tunes.reset(token)


@dataclass(frozen=True, slots=True)
class TuneRequest(Generic[Cfg]):
    """The candidates, arguments and limits of one tune."""

    candidates: Sequence[Cfg]
    make_fn: Callable[[Cfg], Callable[..., Any]]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    key: CacheKey = _NO_KEY
    checksum: str = ""
    objective: Objective = "forward"
    incumbent: int | None = None
    groups: Sequence[tuple[int, int]] | None = None
    """Each candidate's group and its priority in the group; None for one group in declared order."""
    example: Callable[[], tuple[tuple[Any, ...], Mapping[str, Any]]] | None = None
    """Makes the arguments to measure with, if only their shapes are known."""
    earlier: Sequence[TuneReport[Cfg]] = ()
    """Reports of earlier tunes of this kernel and call, possibly with other candidates."""
    settled: Mapping[int, Outcome[Cfg]] = field(default_factory=dict)
    """Outcomes that are settled beforehand: configs that failed in real calls."""
    factory_is_portable: bool = False
    """Whether `make_fn` may be called in a worker process: it comes from a user and holds no arguments."""
    device: Any = None
    settings: Settings | None = None
    compile_width: int | None = field(default_factory=compile_width_of_tunes.get)
    """The number of candidates compiled at once; None for the tuner's own width."""
    tune_budget_s: float = 60.0
    candidate_timeout_s: float = 30.0
    grace_s: Callable[[], float] = lambda: 0.0
    emit: Callable[[Event], None] = lambda event: None
    keep: Callable[[Any], None] | None = None
    """Receives the winner's `Runnable`, for the selector's executors."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:16])
