"""A memo from kernel and signature to the key, the candidates and the checksum of a call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic

from asel.errors import UnstableKeyError
from asel.kernels.call_encoding import device_and_traced
from asel.kernels.call_settings import default_device_setting
from asel.kernels.call_text import call_text
from asel.kernels.candidates import CandidateList, Objective, ask_kernel, checksum, with_incumbent
from asel.kernels.canonical import canonical
from asel.kernels.devices import default_device, device_fingerprint, platform_of
from asel.kernels.kernel import Cfg, check_request
from asel.kernels.kernel_methods import has_default_candidates, key_builder_of, positional_names, ranks_of
from asel.kernels.kernel_numbers import kernel_number
from asel.kernels.key_churn import Churn, ChurnWatch
from asel.kernels.keys import CacheKey, at_tuned_size, build_key, call_key, encode_call
from asel.kernels.signature import refuse_if_endless, signature
from asel.redaction import redact
from asel.runtime.bounded_memo import BoundedMemo
from asel.runtime.loop import ordinary_errors

__all__ = ["KeyMemo", "Resolved"]


class Resolved(Generic[Cfg]):
    """Everything that depends only on kernel and signature: the key, and on demand candidates and checksums.

    `memory_answer` belongs to the selector: its last answer from memory for this signature. `churn` is set if this
    signature is one of many that differ in one constant, until the selector has reported it.
    """

    __slots__ = (
        "_checksums",
        "_listing",
        "churn",
        "device",
        "heuristic",
        "kernel_raised",
        "key",
        "memory_answer",
        "no_heuristic",
        "outside",
        "platform",
        "traced",
        "version",
    )

    def __init__(self, inv: Any, kernel: Any, watch: ChurnWatch | None = None) -> None:
        name, encoder = encode_call(inv, kernel)
        self.version = str(getattr(kernel, "version", "0"))
        self.device = encoder.device if encoder.device is not None else default_device()
        op = f"{kernel.op_id}@v{self.version}"
        self.key = CacheKey(device_fingerprint(self.device), op, name, call_text(inv, kernel, encoder.bucketing))
        self.platform = platform_of(self.device)
        self.traced = encoder.traced
        self.outside = encoder.outside
        self.churn: Churn | None = None
        if watch is not None and encoder.constants:
            names = [name for name, _ in positional_names(kernel)]
            self.churn = watch.note(op, self.key.device, encoder, names)
        self._checksums: dict[Objective, str] = {}
        self.memory_answer: Any = None

        self._listing: CandidateList | None = None
        inv = at_tuned_size(inv, kernel)
        self.heuristic, self.no_heuristic, self.kernel_raised = self._asker(inv, kernel)("heuristic_cfg", "heuristic")

    def _asker(self, inv: Any, kernel: Any) -> Callable[[str, str], tuple[Any, str, bool]]:
        context = "shard_map" if inv.method == "shard_map" else None
        return partial(ask_kernel, kernel, inv, self.platform, context)

    def listing(self, inv: Any, kernel: Any) -> CandidateList:
        """Return the candidates for a call of this signature, which the kernel lists the first time.

        The call is passed rather than stored, since it holds arrays. If the kernel raises, the next call asks it again.

        Raises:
            UnstableKeyError: a candidate has no stable identity.
        """
        if self._listing is not None:
            return self._listing
        inv = at_tuned_size(inv, kernel)
        listed, none, raised = [self.heuristic], "", False
        if self.heuristic is None or not has_default_candidates(kernel):
            listed, none, raised = self._asker(inv, kernel)("candidate_cfgs", "candidates")
        candidates, incumbent = with_incumbent(listed or [], self.heuristic)
        groups = None
        try:
            with ordinary_errors("it"):
                groups = ranks_of(kernel, inv, candidates)
        except Exception as error:  # the candidates are valid without it, so their stored records still apply
            none, raised = f"candidate_priority raised {type(error).__name__}: {redact(error)}", True
        listing = CandidateList(candidates, incumbent, groups, none, raised)
        if not raised:
            self._listing = listing
        return listing

    @property
    def call(self) -> str:
        """The readable call."""
        return self.key.call

    def checksum(self, objective: Objective, listing: CandidateList) -> str:
        """Return the checksum of `listing`, a list of candidates for this signature."""
        if listing is not self._listing:
            return checksum(listing.candidates, version=self.version, objective=objective)
        found = self._checksums.get(objective)
        if found is None:
            found = checksum(listing.candidates, version=self.version, objective=objective)
            self._checksums[objective] = found
        return found


class KeyMemo:
    """A bounded memo of what was resolved for each kernel and signature.

    It has room for `max_entries` signatures, or for twice `keys_in_memory()` if that is more, so that a hit costs the
    same with 100,000 keys in memory as with ten. Twice, because one key may have several signatures.
    """

    def __init__(self, max_entries: int = 8192, keys_in_memory: Callable[[], int] = lambda: 0) -> None:
        self._resolved: BoundedMemo[Resolved[Any]] = BoundedMemo(max_entries, lambda: 2 * keys_in_memory())
        self._watch = ChurnWatch()

    def resolve(self, inv: Any, kernel: Any) -> Resolved[Any]:
        """Return the key and everything else that follows from this call's signature.

        Raises:
            UnstableKeyError: an argument has no stable identity.
        """
        try:
            if getattr(kernel, "key_builder", None) is None:
                token = signature(kernel, inv.args, inv.kwargs, inv)
                if (found := self._resolved.young.get(token)) is not None:
                    return found
            else:
                built = canonical(build_key(key_builder_of(kernel), inv), "key_builder(...)")
                device, traced = device_and_traced(inv)
                token = (kernel_number(kernel), built, device or default_device_setting(), traced, inv.method)
            found = self._resolved.get(token)
            if found is None:
                if type(inv.args) is not tuple or type(inv.kwargs) is not dict:
                    check_request(inv, kernel)
                found = Resolved(inv, kernel, self._watch)
                if not found.kernel_raised:  # an error may be temporary, so the kernel is asked again
                    self._resolved.put(token, found)
        except UnstableKeyError:
            check_request(inv, kernel)  # swapped arguments may also end here: a kernel has no stable identity
            call_key(inv, kernel)  # raises the same error, with the argument's full path
            raise
        except RecursionError:
            raise refuse_if_endless(inv) from None
        except (AttributeError, TypeError):
            check_request(inv, kernel)  # only now, so that valid requests do not pay for the check
            raise
        return found
