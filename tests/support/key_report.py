"""One process's keys, printed as JSON: tests compare several, with other hash seeds and eight devices."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

from asel import Invocation, Kernel
from asel.kernels.key_memo import KeyMemo
from asel.kernels.keys import call_key
from support import key_examples, library_objects

KERNEL: Kernel[Any, Any] = Kernel("k")


class Built(Kernel[Any, Any]):
    op_id = "built"

    def key_builder(self, inv: Any) -> str:
        return "constant"


def first_call_while_tracing() -> list[bool]:
    """Make a call while JAX traces, then eagerly. Return whether the keys are equal, and which call was traced."""
    memo, seen = KeyMemo(), []

    def ask(x: Any) -> Any:
        return memo.resolve(Invocation("k", (x,), {}), KERNEL)

    jax.jit(lambda x: seen.append(ask(x)))(jnp.ones(3))
    traced, eager = seen[0], ask(jnp.ones(3))
    return [traced.key == eager.key, traced.traced, eager.traced]


def default_devices(kernel: Any) -> list[int]:
    """Return the device of each call: without arrays, with another default device, with arrays elsewhere."""
    first, second = jax.devices()[:2]
    shape = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=SingleDeviceSharding(second))
    memo = KeyMemo()

    def ask(x: Any) -> int:
        return memo.resolve(Invocation("k", (x,), {}), kernel).device.id

    seen = [ask(np.zeros(3))]
    with jax.default_device(second):
        seen += [ask(np.zeros(3)), ask(jax.device_put(jnp.zeros(3), first))]
    return [*seen, ask(np.zeros(3)), ask(jax.device_put(jnp.zeros(3), second)), ask(shape)]


def keys_within_meshes() -> dict[str, str]:
    """Return the key of one call under each of several current meshes."""
    x, memo = np.zeros(8, np.float32), KeyMemo()
    devices = np.array(jax.devices())

    def key() -> str:
        inv = Invocation("k", (x,), {})
        name = call_key(inv, KERNEL)
        assert memo.resolve(inv, KERNEL).key.call_key == name
        return name

    def mesh(shape: Any, names: str, kind: Any = AxisType.Auto, devices: Any = devices[:4]) -> Mesh:
        return Mesh(devices.reshape(shape), tuple(names), axis_types=(kind,) * len(names))

    def within(one: Mesh, ask: Callable[[], str] = key) -> str:
        with jax.set_mesh(one):
            return ask()

    def traced() -> str:
        found = []
        jax.jit(lambda x: found.append(key()) or x)(x)
        return found[0]

    def mapped() -> str:
        found: list[str] = []
        jax.shard_map(
            lambda x: found.append(key()) or x, mesh=mesh((4,), "x"), in_specs=jax.P("x"), out_specs=jax.P("x")
        )(x)
        return found[0]

    four = mesh((4,), "x")
    return {
        "none": key(),
        "four": within(four),
        "four again": within(mesh((4,), "x")),
        "elsewhere": within(mesh((4,), "x", devices=devices[4:])),
        "traced": within(four, traced),
        "square": within(mesh((2, 2), "xy")),
        "renamed": within(mesh((4,), "y")),
        "explicit": within(mesh((4,), "x", AxisType.Explicit)),
        "mapped": mapped(),
        "mapped within": within(four, mapped),
        "none again": key(),
    }


def report() -> dict[str, Any]:
    return {
        "first": first_call_while_tracing(),  # before any other call
        "default devices": [default_devices(kernel) for kernel in (KERNEL, Built())],
        "meshes": keys_within_meshes(),
        "calls": key_examples.keys_of(key_examples.EXAMPLES),
        "sharded": key_examples.keys_of(key_examples.SHARDED),
        "checksums": key_examples.checksums(),
        "libraries": library_objects.library_keys(),
    }


if __name__ == "__main__":
    json.dump(report(), sys.stdout)
