"""Splits an executor's keywords into those of the call (`shard_map`) and those of the kernel."""

from __future__ import annotations

from typing import Any

from asel.kernels.kernel import Invocation, check_request

__all__ = ["invocation_of", "taken_from"]

_CALL_KEYWORDS = ("method", "mesh", "in_specs", "out_specs", "check_vma")
"""Keywords of a call under `shard_map` that are not the kernel's."""
_MODULE_KEYWORDS = frozenset(("method", "mesh", "in_specs", "out_specs"))


def taken_from(kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Take the keywords that are the call's and not the kernel's; None if there are none.

    ejKernel's modules pass all of them always, `method=None` in a call of one device, and name their config `_cfg`.
    """
    taken = {}
    if "_cfg" in kwargs and (cfg := kwargs.pop("_cfg")) is not None:
        taken["_cfg"] = cfg
    if "method" in kwargs:
        if kwargs["method"] == "shard_map":
            taken |= {name: kwargs.pop(name) for name in _CALL_KEYWORDS if name in kwargs}
        elif kwargs["method"] is None and kwargs.keys() >= _MODULE_KEYWORDS:
            for name in _CALL_KEYWORDS:
                kwargs.pop(name, None)
    return taken or None


def invocation_of(
    kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], cfg: Any, call_keywords: dict[str, Any] | None
) -> Invocation[Any, Any]:
    if not hasattr(kernel, "op_id"):
        check_request(Invocation("", args, kwargs), kernel)
    if call_keywords is None:
        return Invocation(kernel.op_id, args, kwargs, override_cfg=cfg)
    how = {name: value for name, value in call_keywords.items() if name != "_cfg"}
    return Invocation(kernel.op_id, args, kwargs, override_cfg=call_keywords.get("_cfg", cfg), **how)
