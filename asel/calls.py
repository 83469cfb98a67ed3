"""One call on its way through the tiers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asel.answers import Selection, Tier
from asel.devices import Settings
from asel.errors import NoConfigError
from asel.keys import KeyMemo, Resolved
from asel.policy import AutotunePolicy, objective_of

__all__ = ["Call"]


class Call:
    """What a call brings, what is known of it, and why each tier so far had no answer."""

    __slots__ = ("checksum", "declined", "inv", "kernel", "key", "known", "objective", "policy", "settings", "start")

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
