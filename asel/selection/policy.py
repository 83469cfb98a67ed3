"""The policy: how a call may get its config. It is immutable, with overrides for a task."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from asel.errors import InvalidRequestError
from asel.runtime.scopes import Scope, Stack, open_scopes

if TYPE_CHECKING:
    from asel.kernels.candidates import Objective

__all__ = ["AutotunePolicy", "forward_autotune_only", "policy_override"]

CacheMissFallback = Literal["autotune", "heuristics", "background"]
OnPending = Literal["wait", "heuristics"]
MatchEnvironment = Literal["any", "exact"]


@dataclass(frozen=True, slots=True)
class AutotunePolicy:
    """How a call may get its config.

    `cache_miss_fallback`: wait for a tune (`"autotune"`), skip it (`"heuristics"`), or answer with the
    heuristic immediately and tune in the background (`"background"`). Durations are in seconds.
    """

    allow_autotune: bool = True
    allow_heuristics: bool = True
    cache_miss_fallback: CacheMissFallback = "autotune"
    validate_backward: bool = False
    on_pending: OnPending = "wait"
    wait_s: float | None = None
    tune_budget_s: float = 60.0
    candidate_timeout_s: float = 30.0
    retry_after_s: float = 300.0
    match_environment: MatchEnvironment = "any"

    def __post_init__(self) -> None:
        _check_choice(self, "cache_miss_fallback", CacheMissFallback)
        _check_choice(self, "on_pending", OnPending)
        _check_choice(self, "match_environment", MatchEnvironment)
        for name in ("allow_autotune", "allow_heuristics", "validate_backward"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"AutotunePolicy: {name}={getattr(self, name)!r} must be True or False")
        for name in ("tune_budget_s", "candidate_timeout_s"):
            _check_seconds(self, name, above_zero=True)
        _check_seconds(self, "retry_after_s")
        if self.wait_s is not None:
            _check_seconds(self, "wait_s")


def _check_choice(policy: AutotunePolicy, name: str, choices: Any) -> None:
    value = getattr(policy, name)
    if value not in get_args(choices):
        allowed = ", ".join(map(repr, get_args(choices)))
        raise InvalidRequestError(f"AutotunePolicy: {name}={value!r} is not one of {allowed}")


def _check_seconds(policy: AutotunePolicy, name: str, *, above_zero: bool = False) -> None:
    value = getattr(policy, name)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (value > 0 or (value == 0 and not above_zero)):
        least = "above zero" if above_zero else "zero or more"
        raise InvalidRequestError(f"AutotunePolicy: {name}={value!r} must be seconds, {least}")


_FIELDS = tuple(field.name for field in fields(AutotunePolicy))


@dataclass(frozen=True, slots=True)
class _Override:
    selector: object
    updates: dict[str, Any]


_overrides: Stack[_Override] = Stack()
_forward_only: Stack[None] = Stack()


class policy_override(Scope[_Override]):
    """Change fields of one selector's policy for the current task.

    Raises:
        TypeError: the policy has no such field.
        InvalidRequestError: a value is invalid.
    """

    _stack = _overrides

    def __init__(self, selector: Any, /, **updates: Any) -> None:
        unknown = [name for name in updates if name not in _FIELDS]
        if unknown:
            raise TypeError(
                f"AutotunePolicy has no field {', '.join(map(repr, unknown))}; its fields are {', '.join(_FIELDS)}"
            )
        replace(AutotunePolicy(), **updates)  # refuse an invalid value here rather than at a later call
        self._override = _Override(getattr(selector, "chain", selector), updates)  # a BlockingSelector has a chain

    def _value(self) -> _Override:
        return self._override


class forward_autotune_only(Scope[None]):
    """Tune by forward time alone for the current task, even with `validate_backward=True`."""

    _stack = _forward_only

    def _value(self) -> None:
        return None


def effective_policy(base: AutotunePolicy, selector: object) -> AutotunePolicy:
    """Return `base` with the overrides of `selector` that are active in the current task."""
    if open_scopes():
        for override in _overrides.values():
            if override.selector is selector:
                base = replace(base, **override.updates)
    return base


def lockstep_policy(policy: AutotunePolicy) -> AutotunePolicy:
    """Return the policy without timeouts and background tunes, for the ranks of a cluster.

    Ranks make the same calls, but not at the same moments. The result of a background tune or of a timeout would reach
    one rank before a call and another rank after it, and they would run different configs.
    """
    is_lockstep = policy.on_pending == "wait" and policy.wait_s is None and policy.cache_miss_fallback != "background"
    if is_lockstep:
        return policy
    fallback = "autotune" if policy.cache_miss_fallback == "background" else policy.cache_miss_fallback
    return replace(policy, cache_miss_fallback=fallback, on_pending="wait", wait_s=None)


def objective_of(policy: AutotunePolicy) -> Objective:
    """Return the time that a tune under `policy` minimises in the current task."""
    return "forward+backward" if policy.validate_backward and not _forward_only.values() else "forward"


def tuning_switched_off() -> bool:
    """Return whether the environment forbids tuning: `ASEL_AUTOTUNE=off`."""
    return os.environ.get("ASEL_AUTOTUNE", "").strip().lower() in ("off", "0", "false", "no")
