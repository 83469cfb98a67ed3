"""Results of the checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "State", "note", "ok", "problem"]

State = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check, with advice if it is not ok."""

    topic: str
    state: State
    text: str
    fix: str = ""


def ok(topic: str, text: str) -> Finding:
    return Finding(topic, "ok", text)


def note(topic: str, text: str, advice: str = "") -> Finding:
    """Return a finding that is not a problem, but that the reader should know."""
    return Finding(topic, "note", text, advice)


def problem(topic: str, text: str, fix: str) -> Finding:
    return Finding(topic, "problem", text, fix)
