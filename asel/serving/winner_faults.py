"""Decides whether a failed config or its call is at fault, and runs another config in its place."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, Protocol

from asel.kernels.candidates import same_config
from asel.kernels.key_memo import Resolved
from asel.runtime.bounded_memo import BoundedMemo
from asel.selection.cache import ConfigCache
from asel.selection.policy import AutotunePolicy
from asel.selection.results import Selection, Tier
from asel.selection.withdrawal import fallbacks
from asel.serving.runs import Runs
from asel.tuning.outcomes import TuneReport

__all__ = ["WinnerFaults", "WithdrawingSelector"]


class WithdrawingSelector(Protocol):
    """The part of a selector that `WinnerFaults` uses."""

    @property
    def policy(self) -> AutotunePolicy: ...
    @property
    def changes_together(self) -> bool: ...
    @property
    def cache(self) -> ConfigCache[Any]: ...
    async def find_report(self, inv: Any, kernel: Any, cfg: Any) -> TuneReport[Any] | None: ...
    async def withdraw(
        self,
        inv: Any,
        kernel: Any,
        cfg: Any,
        error: Exception,
        *,
        tier: Tier = ...,
        instead: Any = ...,
        evidence: str = ...,
    ) -> bool: ...


class WinnerFaults:
    """Runs other configs for a call whose config raised, and withdraws the config if it proves to be at fault."""

    def __init__(self, selector: WithdrawingSelector, runs: Runs) -> None:
        self._selector = selector
        self._runs = runs
        # For each signature, the config that failed in its last call and could not be run again.
        self._suspects: BoundedMemo[Any] = BoundedMemo(1024)

    def clear_suspect(self, resolved: Resolved[Any]) -> None:
        if self._suspects.young:
            self._suspects.forget(resolved)

    async def fall_back(
        self, inv: Any, kernel: Any, resolved: Resolved[Any], selection: Selection[Any], error: Exception
    ) -> Any:
        """Return the result of another config with the same arguments.

        Raises:
            Exception: `error`, because no other config works, so the call is at fault.
        """
        if self._selector.changes_together:  # another config on this rank alone would hang all ranks
            raise error
        if selection.report is None:
            report = await self._selector.find_report(inv, kernel, selection.cfg)
            selection = replace(selection, report=report)
        allowed = self._selector.policy.allow_heuristics
        others = fallbacks(selection, resolved, self._selector.cache, allow_heuristics=allowed)
        while others and not _was_donated(inv):
            cfg = others.pop(0)
            ran = await self._runs.run(inv, kernel, resolved, cfg)
            if ran.error is None:
                if (evidence := await self._evidence(inv, kernel, resolved, selection.cfg, cfg)) is not None:
                    await self._selector.withdraw(
                        inv, kernel, selection.cfg, error, tier=selection.tier, instead=cfg, evidence=evidence
                    )
                return ran.out
            if same_config(cfg, resolved.heuristic):
                break
            if type(ran.error) is type(error):
                others = [other for other in others if same_config(other, resolved.heuristic)]
        raise error

    async def _evidence(self, inv: Any, kernel: Any, resolved: Resolved[Any], winner: Any, other: Any) -> str | None:
        """Run the failed winner again after another config has worked; return None if the winner works now.

        If the other run consumed donated arguments, the winner cannot run again, and a failure in the next call counts
        instead.
        """
        if not _was_donated(inv):
            if (await self._runs.run(inv, kernel, resolved, winner)).error is None:
                return None
            return f"failed twice, before and after {other!r} ran with the same arguments"
        suspect = self._suspects.get(resolved)
        self._suspects.put(resolved, winner)
        if suspect is None or not same_config(suspect, winner):
            return None
        return f"failed in two calls in a row, and {other!r} ran with the arguments of both"


def _was_donated(inv: Any) -> bool:
    """Return whether an argument was donated: a run may give an input's memory to an output, and then fail."""
    if (jax := sys.modules.get("jax")) is None:
        return False
    leaves = jax.tree_util.tree_leaves((inv.args, dict(inv.kwargs)))
    return any(leaf.is_deleted() for leaf in leaves if isinstance(leaf, jax.Array))
