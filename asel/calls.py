"""One call on its way through the tiers."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

from asel.answers import Selection, Tier
from asel.devices import Settings
from asel.errors import NoConfigError
from asel.events import Answer, Event
from asel.fanout import FanOut
from asel.keys import KeyMemo, Resolved
from asel.policy import AutotunePolicy, objective_of

__all__ = ["Asked", "Call", "asking", "tell"]


class Asked(NamedTuple):
    """What telemetry knows a call by, while it has no answer: a number of its own, and when it was made."""

    id: int
    start: float


asking: ContextVar[Asked | None] = ContextVar("asel_asking", default=None)
"""The call that the current task is walking the tiers for. Holds no arrays: events keep it until they are told."""

_ids = count()


class Call:
    """What a call brings, what is known of it, and why each tier so far had no answer."""

    __slots__ = (
        "began",
        "checksum",
        "declined",
        "inv",
        "kernel",
        "key",
        "known",
        "objective",
        "policy",
        "settings",
        "start",
        "tune_id",
        "waiting_since",
    )

    def __init__(self, inv: Any, kernel: Any, known: Resolved[Any], policy: AutotunePolicy, start: float) -> None:
        self.inv = inv
        self.kernel = kernel
        self.known = known
        self.key = known.key
        self.policy = policy
        self.objective = objective_of(policy)
        self.checksum = known.checksum(self.objective)
        self.start = start
        self.settings: Settings | None = None
        self.declined: dict[str, str] = {}
        self.tune_id: str | None = None
        self.began = False
        self.waiting_since: float | None = None

    def asked(self) -> Asked:
        return Asked(next(_ids), self.start)

    def meet(self, tune_id: str, began: bool) -> None:
        """Note the tune this call began, or found pending."""
        self.tune_id, self.began = tune_id, began or (self.began and self.tune_id == tune_id)

    def account(self, now: float) -> dict[str, Any]:
        """Return what every kind of answer tells of the way to it."""
        wait_s = 0.0 if self.waiting_since is None else now - self.waiting_since
        return {"declined": dict(self.declined), "tune_id": self.tune_id, "began": self.began, "wait_s": wait_s}

    def decline(self, tier: Tier, why: str) -> Selection[Any] | None:
        """Note why a tier has no answer; returns the None that sends the walk to the next."""
        self.declined[tier] = why
        return None

    def answer(self, tier: Tier, cfg: Any, report: Any = None) -> Selection[Any]:
        return Selection(cfg, tier, self.key, self.checksum, report, self.declined)

    def without_tracers(self, keys: KeyMemo) -> Call:
        """Return this call with shapes in the place of tracers, which must not outlive their trace."""
        import jax

        from asel.benchmark import abstract

        args, kwargs = jax.tree_util.tree_map(abstract, (tuple(self.inv.args), dict(self.inv.kwargs)))
        inv = replace(self.inv, args=args, kwargs=kwargs)
        return Call(inv, self.kernel, keys.resolve(inv, self.kernel), self.policy, self.start)

    def no_config(self) -> NoConfigError:
        """Return the error that says what happened, to what, and the next step."""
        key, hints = self.key, []
        if self.known.heuristic is None:
            hints.append("give the kernel a heuristic_cfg")
        elif not self.policy.allow_heuristics:
            hints.append("allow heuristics with AutotunePolicy(allow_heuristics=True)")
        if not self.policy.allow_autotune:
            hints.append("allow autotuning with AutotunePolicy(allow_autotune=True)")
        said = ", ".join(why for tier, why in self.declined.items() if tier not in ("override", "overlay"))
        advice = ", or ".join(hints) or "pass a config as the invocation's override_cfg"
        return NoConfigError(
            f"no config for {key.op_id!r} on {key.device!r} (key {key.call_key[:8]}): {said}. "
            f"{advice[0].upper()}{advice[1:]}.",
            key=key,
            declined=self.declined,
        )


def tell(events: FanOut, kind: type[Event], call: Call, **facts: Any) -> None:
    """Emit an event about a call, where anybody wants its kind."""
    if events.wants(kind):
        now = events.now()
        if issubclass(kind, Answer):
            facts |= call.account(now)
        events(kind(key=call.key, start=call.start, end=now, **facts))
