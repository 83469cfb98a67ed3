"""From a call to the name of its answer."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Generic, Literal, NamedTuple

from asel.buckets import Bucketing, powers_of_two
from asel.canonical import Canon, canonical, digest
from asel.devices import default_device, device_fingerprint, platform_of
from asel.encoding import Encoder, whereabouts
from asel.errors import InvalidRequestError, UnstableKeyError
from asel.kernel import Cfg, has_default_candidates, key_builder_of, parameters_of, ranks_of, variant
from asel.memo import Memo
from asel.redaction import redact
from asel.signatures import default_device_setting, refuse_if_endless, signature

__all__ = [
    "CacheKey",
    "KeyMemo",
    "Objective",
    "Resolved",
    "alike",
    "call_key",
    "checksum",
    "device_fingerprint",
    "powers_of_two",
    "signature",
]

Objective = Literal["forward", "forward+backward"]


class CacheKey(NamedTuple):
    """What an answer is kept under; equal to the plain tuple."""

    device: str
    op_id: str
    call_key: str


def checksum(candidates: Iterable[Any], *, version: str, objective: Objective = "forward") -> str:
    """Return the digest of everything a tune chose among: ordered candidates, version, objective."""
    forms = tuple(config_form(cfg, f"candidates[{i}]") for i, cfg in enumerate(candidates))
    return digest(("checksum", forms, version, objective))


def config_form(cfg: Any, path: str = "config") -> Canon:
    """Return the canonical form of a config: equal configs have equal forms, hashable or not."""
    return canonical(cfg, path, see_attributes=True)


def alike(one: Any, other: Any) -> bool:
    """Tell whether two configs are the same; what has no canonical form is like nothing but itself."""
    if one is other:
        return True
    try:
        return config_form(one) == config_form(other)
    except UnstableKeyError:
        return False


def call_key(inv: Any, kernel: Any = None) -> str:
    """Return the digest that names this call among all calls of its kernel.

    Raises:
        UnstableKeyError: an argument has no stable identity.
    """
    try:
        return _name_call(inv, kernel)[0]
    except RecursionError:
        raise refuse_if_endless(inv) from None


def _name_call(inv: Any, kernel: Any) -> tuple[str, Encoder]:
    declared = getattr(kernel, "buckets", None)
    encoder = Encoder(Bucketing(declared, parameters_of(kernel)) if declared else None)
    builder = key_builder_of(kernel)
    if builder is None:
        return digest(encoder.call(inv)), encoder
    encoder.device, encoder.traced = whereabouts(inv)
    built = _build_key(builder, inv)
    return built if isinstance(built, str) else digest(canonical(built, "key_builder(...)")), encoder


def _build_key(builder: Any, inv: Any) -> Any:
    built = builder(inv)
    if built is None:
        raise InvalidRequestError(
            f"key_builder returned None for {inv.op_id!r}; it must say what the answer depends on"
        )
    return built


# ---------------------------------------------------------------------------------------------


class Resolved(Generic[Cfg]):
    """All that depends on a kernel and a signature alone, worked out once.

    `lane` is the fast lane: the state of the world in which the memory tier last answered, as the
    cache's generation and the policy, and its answer. One tuple, because threads share it.
    """

    __slots__ = (
        "_checksums",
        "candidates",
        "device",
        "groups",
        "heuristic",
        "incumbent",
        "kernel",
        "kernel_raised",
        "key",
        "lane",
        "no_candidates",
        "no_heuristic",
        "outside",
        "platform",
        "traced",
        "version",
    )

    def __init__(self, inv: Any, kernel: Any) -> None:
        name, encoder = _name_call(inv, kernel)
        self.kernel = kernel  # kept alive, so that its id in the memo's key stays its own
        self.version = str(getattr(kernel, "version", "0"))
        self.device = encoder.device if encoder.device is not None else default_device()
        self.key = CacheKey(device_fingerprint(self.device), f"{kernel.op_id}@v{self.version}", name)
        self.platform = platform_of(self.device)
        self.traced = encoder.traced
        self.outside = encoder.outside
        self._checksums: dict[Objective, str] = {}
        self.lane: tuple[int, Any, Any] | None = None

        context = "shard_map" if inv.method == "shard_map" else None
        ask = partial(_ask, kernel, inv=inv, platform=self.platform, context=context)
        self.heuristic, self.no_heuristic, self.kernel_raised = ask("heuristic_cfg", what="heuristic")
        listed, self.no_candidates = [self.heuristic], ""
        if self.heuristic is None or not has_default_candidates(kernel):
            listed, self.no_candidates, raised = ask("candidate_cfgs", what="candidates")
            self.kernel_raised |= raised
        self.candidates, self.incumbent = _with_incumbent(listed or [], self.heuristic)
        self.groups = None
        try:
            self.groups = ranks_of(kernel, inv, self.candidates)
        except Exception as error:  # the candidates are as they were, so what was stored of them still answers
            self.no_candidates = f"candidate_priority raised {type(error).__name__}: {redact(error)}"
            self.kernel_raised = True

    def checksum(self, objective: Objective) -> str:
        found = self._checksums.get(objective)
        if found is None:
            found = checksum(self.candidates, version=self.version, objective=objective)
            self._checksums[objective] = found
        return found


def _ask(kernel: Any, method: str, inv: Any, platform: str, context: str | None, what: str) -> tuple[Any, str, bool]:
    """Return what the kernel's own method says; else None, why there is nothing, and whether it raised."""
    asked = variant(kernel, method, platform, context)
    if asked is None:
        return None, f"kernel has no {what}", False
    try:
        if method == "candidate_cfgs":
            listed = [cfg for cfg in asked(inv) if cfg is not None]
            return listed, "" if listed else "candidate_cfgs returned no candidates", False
        guess = asked(inv)
        return guess, "" if guess is not None else f"{method} returned None", False
    except NotImplementedError:
        return None, f"kernel has no {what}", False
    except Exception as error:  # a kernel's failure makes its tier decline
        return None, f"{method} raised {type(error).__name__}: {redact(error)}", True


def _with_incumbent(listed: list[Cfg], heuristic: Cfg | None) -> tuple[tuple[Cfg, ...], int | None]:
    """Return the distinct candidates with the heuristic among them, and its position."""
    distinct: dict[Canon, Cfg] = {}
    for i, cfg in enumerate(listed):
        distinct.setdefault(config_form(cfg, f"candidates[{i}]"), cfg)
    if heuristic is None:
        return tuple(distinct.values()), None
    form = config_form(heuristic, "heuristic_cfg(...)")
    if listed:
        distinct.setdefault(form, heuristic)
    return tuple(distinct.values()), (list(distinct).index(form) if distinct else None)


class KeyMemo:
    """From kernel and signature to what follows from them."""

    def __init__(self, max_entries: int = 8192) -> None:
        self._resolved: Memo[Resolved[Any]] = Memo(max_entries)

    def resolve(self, inv: Any, kernel: Any) -> Resolved[Any]:
        """Return what is known of this call, working it out if it is new.

        Raises:
            UnstableKeyError: an argument has no stable identity.
        """
        try:
            if getattr(kernel, "key_builder", None) is None:
                token = signature(inv, kernel)
                if (found := self._resolved.young.get(token)) is not None:
                    return found
            else:
                built = canonical(_build_key(key_builder_of(kernel), inv), "key_builder(...)")
                device, traced = whereabouts(inv)
                token = (id(kernel), built, device or default_device_setting(), traced, inv.method)
            found = self._resolved.get(token)
            if found is None:
                found = Resolved(inv, kernel)
                if not found.kernel_raised:  # which may be a passing trouble
                    self._resolved.put(token, found)
        except UnstableKeyError:
            call_key(inv, kernel)  # raises the same with the whole path of the argument
            raise
        except RecursionError:
            raise refuse_if_endless(inv) from None
        return found
