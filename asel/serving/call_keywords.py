"""Splits an executor's keywords into those of the call (`shard_map`) and those of the kernel."""

from __future__ import annotations

from typing import Any

from asel.kernels.kernel import Invocation, check_request

__all__ = ["invocation_of", "pop_call_keywords"]

_CALL_KEYWORDS = ("method", "mesh", "in_specs", "out_specs", "check_vma")
"""The keywords that belong to a call under `shard_map`, not to the kernel."""
_MODULE_KEYWORDS = frozenset(("method", "mesh", "in_specs", "out_specs"))


def pop_call_keywords(kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Remove the keywords that belong to the call from `kwargs`, and return them; None if there are none.

    ejKernel's modules always pass all of them, with `method=None` for a call on one device, and name their config
    `_cfg`.
    """
    popped = {}
    if "_cfg" in kwargs and (cfg := kwargs.pop("_cfg")) is not None:
        popped["_cfg"] = cfg
    if "method" in kwargs:
        if kwargs["method"] == "shard_map":
            popped |= {name: kwargs.pop(name) for name in _CALL_KEYWORDS if name in kwargs}
        elif kwargs["method"] is None and kwargs.keys() >= _MODULE_KEYWORDS:
            for name in _CALL_KEYWORDS:
                kwargs.pop(name, None)
    return popped or None


def invocation_of(
    kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], cfg: Any, call_keywords: dict[str, Any] | None
) -> Invocation[Any, Any]:
    if not hasattr(kernel, "op_id"):
        check_request(Invocation("", args, kwargs), kernel)
    if call_keywords is None:
        return Invocation(kernel.op_id, args, kwargs, override_cfg=cfg)
    mapping = {name: value for name, value in call_keywords.items() if name != "_cfg"}
    return Invocation(kernel.op_id, args, kwargs, override_cfg=call_keywords.get("_cfg", cfg), **mapping)
