"""The errors, as a tree:

    AselError
    |- InvalidRequestError (ValueError)
    |  '- UnstableKeyError          .argument
    |- NoConfigError (RuntimeError)       .key .declined
    |- TuningError (RuntimeError)         .key .outcomes
    |- StoreError (OSError)               .location
    '- SelectorClosedError (RuntimeError)

    UntunedWarning (UserWarning)

Every message says what happened, to what, and the next step; the attributes hold the same facts.
All of them copy and pickle, because each waiter of a shared tune raises its own copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from asel.redaction import redact

if TYPE_CHECKING:
    from asel.kernels.keys import CacheKey
    from asel.tuning.outcomes import Outcome

__all__ = [
    "AselError",
    "InvalidRequestError",
    "NoConfigError",
    "SelectorClosedError",
    "StoreError",
    "TuningError",
    "UnstableKeyError",
    "UntunedWarning",
]


class AselError(Exception):
    """The base class of all errors that asel raises. No message contains the secrets of a URL."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(redact(arg) if isinstance(arg, (str, BaseException)) else arg for arg in args))


class InvalidRequestError(AselError, ValueError):
    """A request is invalid; nothing was changed."""


class UnstableKeyError(InvalidRequestError):
    """An argument has no identity that other processes could recognise."""

    def __init__(self, message: str, *, argument: str = "") -> None:
        super().__init__(message)
        self.argument = argument


class NoConfigError(AselError, RuntimeError):
    """Every tier declined."""

    def __init__(self, message: str, *, key: CacheKey | None = None, declined: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.key = key
        self.declined = {tier: redact(why) for tier, why in (declined or {}).items()}


class TuningError(AselError, RuntimeError):
    """A tune ended without a usable measurement.

    Its cause is an ExceptionGroup of the candidates' errors, if there are any.
    """

    def __init__(self, message: str, *, key: CacheKey | None = None, outcomes: Sequence[Outcome[Any]] = ()) -> None:
        super().__init__(message)
        self.key = key
        self.outcomes = tuple(outcomes)


class StoreError(AselError, OSError):
    """A store could not be read or written."""

    def __init__(self, message: str, *, location: str = "") -> None:
        super().__init__(message)
        self.location = redact(location)


class SelectorClosedError(AselError, RuntimeError):
    """The selector closed before there was an answer."""


class UntunedWarning(UserWarning):
    """A key that could be tuned is not, and its calls get the heuristic. Issued once for each selector and key."""
