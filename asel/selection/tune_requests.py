"""Makes the request for a tune from a call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from asel.events.dispatcher import Dispatcher
from asel.kernels.binding import bind, placed_shapes
from asel.kernels.kernel_methods import example_inputs_of
from asel.kernels.kernel_numbers import is_known_by_itself
from asel.kernels.keys import at_tuned_size
from asel.runtime.jax_settings import current_settings
from asel.selection.cache import ConfigCache
from asel.selection.call import Call
from asel.selection.selector_state import SelectorState
from asel.selection.withdrawal import barred_outcomes
from asel.tuning.request import TuneRequest
from asel.tuning.runnable import Programs

__all__ = ["TuneRequests"]


class TuneRequests:
    """Makes the requests of one selector's tunes."""

    def __init__(self, state: SelectorState, cache: ConfigCache[Any], events: Dispatcher) -> None:
        self._state = state
        self._cache = cache
        self._events = events
        # Set once an executor asks for the programs that tunes compile.
        self.programs: Programs | None = None

    def keep_programs(self) -> Programs:
        """Have tunes keep the compiled programs of their winners, and return the collection."""
        if self.programs is None:
            self.programs = Programs()
        return self.programs

    def make(self, call: Call, *, on_purpose: bool) -> TuneRequest[Any]:
        """Return the request; a tune on purpose measures everything again."""
        resolved, listing, policy = call.resolved, call.listing, call.policy
        inv = at_tuned_size(call.inv, call.kernel)
        args, kwargs = placed_shapes(inv)
        return TuneRequest(
            candidates=listing.candidates,
            make_fn=partial(bind, call.kernel, inv, resolved.platform, weakly=is_known_by_itself(call.kernel)),
            args=args,
            kwargs=kwargs,
            example=example_inputs_of(call.kernel, inv),
            key=call.key,
            checksum=call.checksum,
            objective=call.objective,
            incumbent=listing.incumbent,
            groups=listing.groups,
            earlier=() if on_purpose else self._cache.reports(call.key),
            settled=dict(barred_outcomes(call.key, listing.candidates, self._cache)),
            device=resolved.device,
            settings=call.settings or current_settings(),
            tune_budget_s=policy.tune_budget_s,
            candidate_timeout_s=policy.candidate_timeout_s,
            grace_s=self._state.grace_s,
            emit=self._events,
            keep=self._keep_for(call),
        )

    def _keep_for(self, call: Call) -> Callable[[Any], None] | None:
        # Calls that share a built key may differ in constants, which are part of a compiled program.
        if self.programs is None or getattr(call.kernel, "key_builder", None) is not None:
            return None
        return partial(self.programs.add, call.resolved, call.kernel)
