"""The key of a call, under which its config is stored."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

from asel.errors import InvalidRequestError
from asel.kernels.buckets import Bucketing
from asel.kernels.call_encoding import Encoder, at_upper_bounds, device_and_traced
from asel.kernels.canonical import canonical, digest
from asel.kernels.kernel_methods import key_builder_of, parameters_of, positional_names
from asel.kernels.signature import refuse_if_endless
from asel.runtime.loop import ordinary_errors

__all__ = ["CacheKey", "at_tuned_size", "build_key", "call_key", "encode_call"]


class _KeyParts(NamedTuple):
    device: str
    op_id: str
    call_key: str


class CacheKey(_KeyParts):
    """The key that a config is stored under; equal to the plain tuple.

    `call` is the readable call (`q=bf16[8,1024,128], causal=True`), or empty. It takes no part in equality.
    """

    call = ""

    def __new__(cls, device: str, op_id: str, call_key: str, call: str = "") -> Self:
        made = super().__new__(cls, device, op_id, call_key)
        if call:
            made.call = call
        return made

    @property
    def kernel_name(self) -> str:
        """The op without its kernel's version."""
        return self.op_id.partition("@")[0]


def call_key(inv: Any, kernel: Any = None) -> str:
    """Return the digest that identifies this call among all calls of its kernel.

    Raises:
        UnstableKeyError: an argument has no stable identity.
    """
    try:
        return encode_call(inv, kernel)[0]
    except RecursionError:
        raise refuse_if_endless(inv) from None


def encode_call(inv: Any, kernel: Any) -> tuple[str, Encoder]:
    declared = getattr(kernel, "buckets", None)
    bucketing = Bucketing(declared, parameters_of(kernel)) if declared else None
    encoder = Encoder(bucketing, positional_names(kernel))
    builder = key_builder_of(kernel)
    if builder is None:
        return digest(encoder.call(inv)), encoder
    encoder.device, encoder.traced = device_and_traced(inv)
    built = build_key(builder, inv)
    return built if isinstance(built, str) else digest(canonical(built, "key_builder(...)")), encoder


def at_tuned_size(inv: Any, kernel: Any) -> Any:
    """Return the call at its buckets' upper bounds: candidates are listed for that call, and measured with it."""
    declared = getattr(kernel, "buckets", None)
    if not declared or key_builder_of(kernel) is not None:
        return inv
    return at_upper_bounds(inv, Bucketing(declared, parameters_of(kernel)))


def build_key(builder: Any, inv: Any) -> Any:
    try:
        built = builder(inv)
    except BaseException:
        with ordinary_errors(f"key_builder of {inv.op_id!r}"):
            raise
    if built is None:
        raise InvalidRequestError(
            f"key_builder returned None for {inv.op_id!r}; it must return the facts that the answer depends on"
        )
    return built
