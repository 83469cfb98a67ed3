"""OpenTelemetry's global providers: reads, sets and unsets them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opentelemetry import _logs, metrics, trace

from asel.telemetry.environment import Signal

__all__ = ["GLOBAL_PROVIDERS", "GlobalProvider"]


@dataclass(frozen=True, slots=True)
class GlobalProvider:
    """The provider of one signal: a `tracer`, `meter` or `logger` provider.

    OpenTelemetry's getters make a provider if an environment variable names one, and it has no function to unset a
    provider. So this uses the private variable behind the getter. If a version of OpenTelemetry renames it, a provider
    stays set after `configure` is closed.
    """

    api: Any
    kind: str

    @property
    def current(self) -> Any:
        """The global provider, or None."""
        return self._state.get(self._variable)

    def set(self, provider: Any) -> None:
        """Make a provider the global one, unless another is set already."""
        getattr(self.api, f"set_{self.kind}_provider")(provider)

    def unset(self, provider: Any) -> None:
        """Unset the provider, if it still is the global one, so that another can be set."""
        state, once = self._state, f"{self._variable}_SET_ONCE"
        if state.get(self._variable) is provider and once in state:
            state[self._variable] = None
            state[once] = type(state[once])()

    @property
    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = getattr(self.api, f"get_{self.kind}_provider").__globals__
        return state

    @property
    def _variable(self) -> str:
        return f"_{self.kind.upper()}_PROVIDER"


GLOBAL_PROVIDERS: dict[Signal, GlobalProvider] = {
    "traces": GlobalProvider(trace, "tracer"),
    "metrics": GlobalProvider(metrics, "meter"),
    "logs": GlobalProvider(_logs, "logger"),
}
