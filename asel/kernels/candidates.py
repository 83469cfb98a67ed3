"""The candidates that a kernel lists for a call, and their checksum."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from enum import Enum
from typing import Any, Literal, NamedTuple

from asel.errors import UnstableKeyError
from asel.kernels.canonical import Canon, canonical, digest
from asel.kernels.kernel import Cfg
from asel.kernels.kernel_methods import variant
from asel.redaction import redact
from asel.runtime.bounded_memo import BoundedMemo
from asel.runtime.loop import ordinary_errors

__all__ = ["CandidateList", "Objective", "ask_kernel", "checksum", "config_form", "same_config", "with_incumbent"]

Objective = Literal["forward", "forward+backward"]


class CandidateList(NamedTuple):
    """A kernel's candidates for a call, with the heuristic's config among them at position `incumbent`."""

    candidates: tuple[Any, ...]
    incumbent: int | None
    groups: tuple[tuple[int, int], ...] | None
    no_candidates: str
    """Why there is nothing to tune among; empty if there is."""
    raised: bool
    """True if the kernel raised while it was asked: the next call asks it again."""


def ask_kernel(
    kernel: Any, inv: Any, platform: str, context: str | None, method: str, what: str
) -> tuple[Any, str, bool]:
    """Return the result of a kernel's method; or None, the reason, and whether the kernel raised."""
    asked = variant(kernel, method, platform, context)
    if asked is None:
        return None, f"kernel has no {what}", False
    try:
        with ordinary_errors("it"):
            if method == "candidate_cfgs":
                listed = [cfg for cfg in asked(inv) if cfg is not None]
                return listed, "" if listed else "candidate_cfgs returned no candidates", False
            guess = asked(inv)
        return guess, "" if guess is not None else f"{method} returned None", False
    except NotImplementedError:
        return None, f"kernel has no {what}", False
    except Exception as error:  # a kernel's failure makes its tier decline
        return None, f"{method} raised {type(error).__name__}: {redact(error)}", True


def with_incumbent(listed: list[Cfg], heuristic: Cfg | None) -> tuple[tuple[Cfg, ...], int | None]:
    """Return the distinct candidates, with the heuristic's config among them, and that config's position."""
    distinct: dict[Canon, Cfg] = {}
    for i, cfg in enumerate(listed):
        distinct.setdefault(config_form(cfg, f"candidates[{i}]"), cfg)
    if heuristic is None:
        return tuple(distinct.values()), None
    form = config_form(heuristic, "heuristic_cfg(...)")
    if listed:
        distinct.setdefault(form, heuristic)
    return tuple(distinct.values()), (list(distinct).index(form) if distinct else None)


def checksum(candidates: Iterable[Any], *, version: str, objective: Objective = "forward") -> str:
    """Return the digest of the ordered candidates, the kernel's version and the objective."""
    forms = tuple(config_form(cfg, f"candidates[{i}]") for i, cfg in enumerate(candidates))
    token = (forms, version, objective)
    if (found := _digests.get(token)) is None:
        _digests.put(token, found := digest(("checksum", *token)))
    return found


def config_form(cfg: Any, path: str = "config") -> Canon:
    """Return the canonical form of a config: equal configs have equal forms, hashable or not.

    For flat dataclasses, as most configs are, forms are cached: kernels list equal configs for every shape.
    """
    if (token := _flat_token(cfg)) is None:
        return canonical(cfg, path, see_attributes=True)
    if (form := _forms.get(token)) is None:
        _forms.put(token, form := canonical(cfg, path, see_attributes=True))
    return form


_FLAT = frozenset({int, bool, str, bytes, type(None)})
_forms: BoundedMemo[Canon] = BoundedMemo(65_536)
_digests: BoundedMemo[str] = BoundedMemo(1024)
_fields: BoundedMemo[tuple[str, ...]] = BoundedMemo(1024)


def _flat_token(cfg: Any) -> tuple[Any, ...] | None:
    """Return the class and values of a flat dataclass as a hashable tuple; None for any other config."""
    names = _compared_fields(type(cfg))
    if not names:
        return None
    token: list[Any] = [type(cfg)]
    for name in names:
        value = getattr(cfg, name, cfg)
        if (kind := type(value)) not in _FLAT:
            return None
        token += (kind, value)
    return tuple(token)


def _compared_fields(cls: type[Any]) -> tuple[str, ...]:
    if (found := _fields.get(cls)) is not None:
        return found
    is_own = "__dataclass_fields__" in vars(cls) and not issubclass(cls, Enum)
    names = tuple(f.name for f in dataclasses.fields(cls) if f.compare) if is_own else ()
    _fields.put(cls, names)
    return names


def same_config(one: Any, other: Any) -> bool:
    """Return whether two configs are equal. A config without a canonical form equals only itself."""
    if one is other:
        return True
    try:
        return config_form(one) == config_form(other)
    except UnstableKeyError:
        return False
