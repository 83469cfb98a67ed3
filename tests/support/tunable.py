"""A module with kernels for commands to find, and the costs of its candidates."""

from __future__ import annotations

KERNELS = """
from asel import kernel


@kernel(op_id="square", configs=[1, 2, 3, 4], heuristic=1, version="1")
def square(x, scale: float = 1.0, *, cfg):
    return x * x * scale + 0 * cfg


@kernel(op_id="broken", configs=[1, 2], heuristic=1)
def broken(x, *, cfg):
    raise ValueError("there is no such shape")
"""
COSTS = {1: 4e-4, 2: 3e-4, 3: 1e-4, 4: 2e-4}
