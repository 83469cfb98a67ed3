"""Kernels that harm their process in ways a service must survive. Workers can import them."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from asel import Kernel, kernel


def _spin(_):
    while True:
        pass


def _leave(_):
    os._exit(3)


class Hostile(Kernel):
    """Its config decides which harm it does, while it is traced or while it runs."""

    op_id = "hostile"
    configs = ("slow", "fast")

    def run(self, x, *, cfg):
        match cfg:
            case "exit":
                os._exit(3)
            case "segfault":
                ctypes.string_at(0)
            case "spin":
                _spin(None)
            case "say who, and spin":
                print(os.getpid(), flush=True)
                _spin(None)
            case "raise":
                raise ZeroDivisionError("on purpose")
            case "exit while running":
                return jax.pure_callback(_leave, x, x)
            case "spin while running":
                return jax.pure_callback(_spin, x, x)
            case "spin when compiled again":
                marker = Path(os.environ["ASEL_TEST_MARKER"])
                if marker.exists():
                    _spin(None)
                marker.touch()
                return x + 2
            case "print":
                print("noise between the answers", flush=True)
                sys.stdout.write("more")
            case "garbage":
                return object()
            case "wrong":
                return x + 3
            case "wrong too":
                return x + 4
            case "fast" | "fast too":
                return x + 1
        return jax.lax.fori_loop(0, 3000, lambda i, y: jnp.sin(y), x) * 0 + x + 1

    def heuristic_cfg(self, inv):
        return "slow"

    def candidate_cfgs(self, inv):
        return self.configs


def hostile_maker(cfg):
    """Is hostile while a candidate is being made."""
    match cfg:
        case "exit":
            os._exit(7)
        case "raise":
            raise ValueError("on purpose")
    return partial(Hostile().run, cfg=cfg)


@kernel(op_id="decorated", configs=[1, 2000], heuristic=2000)
def decorated(x, *, cfg):
    return jax.lax.fori_loop(0, cfg, lambda i, y: jnp.sin(y), x)


@kernel(op_id="pytree", configs=["a"], heuristic="a")
def of_tree(tree, *, scale, cfg):
    assert scale == 2
    assert tree["half"].dtype == jnp.bfloat16
    return tree["x"] * scale + np.float32(1)


def of_config(cfg):
    """Return a candidate's function, for a tuner without a selector."""
    return partial(decorated.run, cfg=cfg)


@kernel(op_id="spread", configs=["as it lies", "as the mesh says"], heuristic="as it lies")
def spread(x, y, *, cfg, n=1):
    """Needs a sharded argument, and for one config the caller's mesh."""
    if cfg == "as the mesh says":
        x = jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec(None, "x"))
    return x * y * n


_started = False


def _start_slowly(_):
    global _started
    time.sleep(0.001 if _started else 0.2)
    _started = True
    return np.float32(0)


def slow_start(x, *, cfg):
    """Is slow in its first run in each process."""
    return x + jax.pure_callback(_start_slowly, jax.ShapeDtypeStruct((), np.float32), x[0])


def slow_start_of(cfg):
    return partial(slow_start, cfg=cfg)


class Mapped(Kernel):
    """Not hostile, but under `shard_map`."""

    op_id = "mapped"

    def run(self, x, *, cfg):
        return x * cfg

    def heuristic_cfg(self, inv):
        return 1.0


class SelfWrapped(Mapped):
    """Has its own `shard_map` wrapper, as ejKernel's kernels do."""

    def create_shard_map_wrapper(self, x, *, cfg, mesh, in_specs, out_specs, check_vma):
        return jax.shard_map(partial(self.run, cfg=cfg), mesh=mesh, in_specs=in_specs, out_specs=out_specs), (x,)


@kernel(op_id="checked", configs=[1, 2], heuristic=1)
def different(x, *, cfg):
    """Computes a different result with each config."""
    return x * cfg
