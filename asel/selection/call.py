"""A call while it is being answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any

from asel.errors import NoConfigError
from asel.events import Answer, Event
from asel.events.context import Asked
from asel.events.dispatcher import Dispatcher
from asel.kernels.candidates import CandidateList
from asel.kernels.devices import environment
from asel.kernels.key_memo import KeyMemo, Resolved
from asel.runtime.jax_settings import Settings
from asel.selection.policy import AutotunePolicy, objective_of
from asel.selection.results import TIERS, Selection, Tier
from asel.stores.config_store import StoreQuery

__all__ = ["Call", "emit"]

_PLACES: dict[str, int] = {tier: place for place, tier in enumerate(TIERS)}

_ids = count()


class Call:
    """A call's invocation and kernel, the values derived from them, and the reason of each tier that declined."""

    __slots__ = (
        "_checksum",
        "_listing",
        "began",
        "declined",
        "inv",
        "kernel",
        "key",
        "objective",
        "policy",
        "resolved",
        "settings",
        "start",
        "tune_id",
        "waiting_since",
    )

    def __init__(self, inv: Any, kernel: Any, resolved: Resolved[Any], policy: AutotunePolicy, start: float) -> None:
        self.inv = inv
        self.kernel = kernel
        self.resolved = resolved
        self.key = resolved.key
        self.policy = policy
        self.objective = objective_of(policy)
        self._listing: CandidateList | None = None
        self._checksum: str | None = None
        self.start = start
        self.settings: Settings | None = None
        self.declined: dict[str, str] = {}
        self.tune_id: str | None = None
        self.began = False
        self.waiting_since: float | None = None

    @property
    def listing(self) -> CandidateList:
        """The kernel's candidates, listed only if a tier needs them."""
        if self._listing is None:
            self._listing = self.resolved.listing(self.inv, self.kernel)
        return self._listing

    @property
    def candidates_raised(self) -> bool:
        """Whether the kernel raised when it was asked for its candidates."""
        return self._listing is not None and self._listing.raised

    @property
    def checksum(self) -> str:
        """The digest of the candidates, computed only if a tier needs it."""
        if self._checksum is None:
            self._checksum = self.resolved.checksum(self.objective, self.listing)
        return self._checksum

    def asked(self) -> Asked:
        """Return this call as telemetry identifies it."""
        return Asked(next(_ids), self.start)

    def note_tune(self, tune_id: str, began: bool) -> None:
        """Record the tune that this call began or found pending."""
        self.tune_id, self.began = tune_id, began or (self.began and self.tune_id == tune_id)

    def query(self) -> StoreQuery[Any]:
        """Return the query for a store."""
        exact = self.policy.match_environment == "exact"
        return StoreQuery(self.key, self.checksum, environment(self.resolved.device), exact, self.listing.candidates)

    def declined_before(self, tier: Tier | None) -> Mapping[str, str]:
        """Return the reasons of the tiers before `tier`, or of all tiers.

        Later tiers may have declined too: memory is asked again after the store was read, and another process's record
        may arrive while this call waits for the right to tune.
        """
        end = len(TIERS) if tier is None else _PLACES[tier]
        if len(self.declined) == end:
            return self.declined  # the usual case: only earlier tiers have declined
        return {name: why for name, why in self.declined.items() if _PLACES[name] < end}

    def answer(self, tier: Tier, cfg: Any, report: Any = None) -> Selection[Any]:
        # Few callers read the checksum, so it is left empty unless a tier computed it; `select` fills it in.
        return Selection(cfg, tier, self.key, self._checksum or "", report, self.declined_before(tier))

    def without_tracers(self, keys: KeyMemo) -> Call:
        """Return this call with its tracers replaced by shapes, since tracers must not outlive their trace."""
        import jax

        from asel.tuning.arrays import abstract

        args, kwargs = jax.tree_util.tree_map(abstract, (tuple(self.inv.args), dict(self.inv.kwargs)))
        inv = replace(self.inv, args=args, kwargs=kwargs)
        return Call(inv, self.kernel, keys.resolve(inv, self.kernel), self.policy, self.start)

    def no_config(self) -> NoConfigError:
        """Return the error for a call that every tier declined, with advice."""
        key, hints = self.key, []
        if self._listing is not None and self._listing.no_candidates and not self._listing.raised:
            hints.append("give the kernel candidate_cfgs for this call")
        if self.resolved.heuristic is None:
            hints.append("give the kernel a heuristic_cfg")
        elif not self.policy.allow_heuristics:
            hints.append("allow heuristics with AutotunePolicy(allow_heuristics=True)")
        if not self.policy.allow_autotune:
            hints.append("allow autotuning with AutotunePolicy(allow_autotune=True)")
        reasons = ", ".join(why for tier, why in self.declined.items() if tier not in ("override", "overlay"))
        advice = ", or ".join(hints) or "pass a config as the invocation's override_cfg"
        return NoConfigError(
            f"no config for {key.op_id!r} on {key.device!r} (key {key.call_key[:8]}): {reasons}. "
            f"{advice[0].upper()}{advice[1:]}.",
            key=key,
            declined=self.declined_before(None),
        )


def emit(events: Dispatcher, kind: type[Event], call: Call, tier: Tier | None = None, **facts: Any) -> None:
    """Emit an event about a call, if a sink wants its kind. `tier` is the tier that answered, if any."""
    if events.wants(kind):
        now = events.now()
        if issubclass(kind, Answer):
            wait_s = 0.0 if call.waiting_since is None else now - call.waiting_since
            facts |= {"declined": dict(call.declined_before(tier)), "wait_s": wait_s}
            facts |= {"tune_id": call.tune_id, "began": call.began}
        events(kind(key=call.key, start=call.start, end=now, **facts))
