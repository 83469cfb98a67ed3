"""What every tier would say to a call: the walk without its steps."""

from __future__ import annotations

from typing import Any

from asel.answers import Explanation, TierSays
from asel.cache import ConfigCache, Lookup, Miss, Pending, overlaid
from asel.calls import Call
from asel.keeper import Keeper
from asel.kernel import Cfg
from asel.persistence import Sought
from asel.redaction import redact
from asel.tuning import inside_a_tune

__all__ = ["explain", "why_memory_declines"]


async def explain(
    call: Call, sought: Sought[Cfg], cache: ConfigCache[Cfg], keeper: Keeper[Cfg] | None, why_not_tune: str | None
) -> Explanation[Cfg]:
    """Return an account of all tiers; nothing is changed, and nobody is told."""
    found = cache.peek(call.key, call.checksum)
    override = call.inv.override_cfg
    return Explanation(
        call.key,
        call.checksum,
        (
            TierSays.of("override", override, "the caller's own", "no override"),
            TierSays.of("overlay", overlaid(call.key), "an active overlay has the key", "no overlay has the key"),
            TierSays.of("memory", getattr(found, "cfg", None), "known", why_memory_declines(found)),
            await _persistent(sought, keeper),
            _autotune(call, found, why_not_tune),
            _heuristics(call),
        ),
    )


async def _persistent(sought: Sought[Cfg], keeper: Keeper[Cfg] | None) -> TierSays[Cfg]:
    if keeper is None:
        return TierSays("persistent", None, "there is no store", answers=False)
    try:
        stored = await keeper.peek(sought)
        cfg = None if stored is None else stored.cfg
        return TierSays.of("persistent", cfg, "stored", "store missed")
    except Exception as error:  # a store's failure makes its tier decline
        return TierSays("persistent", None, f"store failed: {type(error).__name__}: {redact(error)}", answers=False)


def _autotune(call: Call, found: Lookup[Cfg], why_not: str | None) -> TierSays[Cfg]:
    if why_not is not None:
        return TierSays("autotune", None, why_not, answers=False)
    background = call.policy.cache_miss_fallback == "background"
    would = f"would tune {len(call.known.candidates)} candidates" + (" in the background" if background else "")
    waits = not background and not inside_a_tune()
    if isinstance(found, Pending):
        would = f"tune {found.tune.id} is in flight"
        waits = waits and call.policy.on_pending == "wait"
    return TierSays("autotune", None, would, answers=waits)


def _heuristics(call: Call) -> TierSays[Any]:
    if not call.policy.allow_heuristics:
        return TierSays("heuristics", None, "heuristics are off", answers=False)
    return TierSays.of("heuristics", call.known.heuristic, "the kernel's guess", call.known.no_heuristic)


def why_memory_declines(found: Lookup[Any]) -> str:
    if isinstance(found, Pending):
        return "a tune is pending"
    return "memory has it for other candidates" if isinstance(found, Miss) and found.stale else "memory missed"
