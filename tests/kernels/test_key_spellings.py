"""Different spellings of one program share a key, and different programs do not."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding
from support.keys import signature_of

from asel import AutotunePolicy, ConfigSelectorChain, Executor, Invocation, Kernel, UnstableKeyError, kernel
from asel.kernels.key_memo import KeyMemo
from asel.kernels.keys import call_key

KERNEL: Kernel[Any, Any] = Kernel("k")


def key(*args: Any) -> str:
    return call_key(Invocation("k", args, {}), KERNEL)


@pytest.mark.parametrize(("one", "other"), [(P("x"), P("x", None)), (P(("x",)), P("x")), (P(), P(None, None))])
def test_specs_that_mean_the_same_share_a_key(one: Any, other: Any) -> None:
    """JAX shards by both in the same way."""
    assert key(one) == key(other)
    assert key(P("x")) != key(P(None, "x"))
    assert key(P(("x", "y"))) != key(P("x", "y"))


@pytest.mark.parametrize("name", ["bfloat16", "float32", "int8", "float8_e4m3fn"])
def test_a_scalar_type_of_jax_is_its_dtype(name: str) -> None:
    """`jnp.bfloat16`, `jnp.dtype("bfloat16")` and NumPy's own type of that name make one program."""
    assert key(getattr(jnp, name)) == key(jnp.dtype(name)) == key(jnp.dtype(name).type)
    assert key(jnp.float16) != key(jnp.bfloat16)


def test_a_type_that_names_no_dtype_is_a_class_like_any_other() -> None:
    """NumPy's abstract types and a user's subclass are no dtypes."""

    class Mine(np.float64):
        pass

    assert len({key(np.floating), key(np.integer), key(np.generic), key(Mine), key(np.float64)}) == 5


def test_arrays_in_another_memory_of_one_device_have_another_key() -> None:
    """An array's memory is part of its program; the device's default memory is not named in the key."""
    device = jax.devices()[0]
    own = device.default_memory().kind
    others = [memory.kind for memory in device.addressable_memories() if memory.kind != own]
    x = np.zeros(3, np.float32)
    plain = key(jax.device_put(x, device))
    assert key(jax.device_put(x, SingleDeviceSharding(device, memory_kind=own))) == plain
    for kind in others:
        assert key(jax.device_put(x, SingleDeviceSharding(device, memory_kind=kind))) != plain


def settings_key(setting: Any, *args: Any) -> tuple[str, Any]:
    """Return the key and the signature of a call."""
    with setting:
        inv = Invocation("k", args, {})
        return call_key(inv, KERNEL), signature_of(inv, KERNEL)


@pytest.mark.parametrize("setting", [lambda: jax.default_prng_impl("rbg"), lambda: jax.threefry_partitionable(False)])
def test_the_random_number_generator_is_part_of_the_key(setting: Any) -> None:
    """It changes programs that draw random numbers. JAX's default is not named in the key."""
    x = np.zeros(3, np.float32)
    usual = settings_key(nullcontext(), x)
    other = settings_key(setting(), x)
    assert other[0] != usual[0]
    assert other[1] != usual[1]
    assert settings_key(jax.default_prng_impl("threefry2x32"), x) == usual


def no_mesh() -> Any:
    return jax.set_mesh(jax.sharding.Mesh(np.empty((), dtype=object), ()))


def test_an_empty_mesh_counts_as_none() -> None:
    """Both make the same program, in either order."""
    x = np.zeros(3, np.float32)
    for setting in (nullcontext(), no_mesh(), nullcontext()):
        assert settings_key(setting, x) == settings_key(nullcontext(), x)


@pytest.mark.filterwarnings("ignore:.with mesh.. context manager:DeprecationWarning")
def test_the_mesh_of_a_with_block_is_part_of_the_key() -> None:
    """A kernel's bare `PartitionSpec`s refer to that mesh, so other axis names make another program."""
    x, devices = np.zeros(3, np.float32), np.array(jax.devices()[:1])
    meshes = [jax.sharding.Mesh(devices, ("x",)), jax.sharding.Mesh(devices.reshape(1, 1), ("x", "y"))]
    found = [settings_key(setting, x) for setting in (nullcontext(), *meshes)]
    assert len({key for _, key in found}) == len({token for token, _ in found}) == 3


NUMBERS = [np.int32, np.float32, np.float64, np.bool_, np.complex64, jnp.dtype("bfloat16").type]


@pytest.mark.parametrize("kind", NUMBERS, ids=lambda kind: kind.__name__)
def test_a_numpy_scalar_is_an_array_of_no_dimensions(kind: Any) -> None:
    """As for `jax.jit`: every step of a loop has one key, with NumPy's numbers as with JAX's."""
    assert key(kind(1)) == key(kind(0)) == key(np.array(1, kind)) == key(jnp.asarray(kind(1)))
    assert key(kind(1)) != key(1)
    memo = KeyMemo()
    first = memo.resolve(Invocation("k", (kind(1),), {"n": [kind(1)]}), KERNEL)
    assert memo.resolve(Invocation("k", (kind(0),), {"n": [kind(0)]}), KERNEL) is first


def test_text_and_dates_of_numpy_are_constants() -> None:
    """JAX has no arrays of these types."""
    assert key(np.str_("a")) != key(np.str_("b"))
    assert key(np.datetime64("2026-01-01")) != key(np.datetime64("2026-01-02"))
    assert key(1) != key(2)
    assert key(1.0) != key(2.0)


@pytest.mark.anyio
async def test_a_numpy_scalar_is_traced_once_by_an_executor() -> None:
    """One program serves all values."""
    traced = []

    @kernel(op_id="stepped", configs=[1], heuristic=1)
    def stepped(x: Any, step: Any, *, cfg: int) -> Any:
        traced.append(step)
        return x + step * cfg

    async with ConfigSelectorChain(policy=AutotunePolicy(allow_autotune=False), sinks=()) as selector:
        execute: Executor[Any, Any] = Executor(selector)
        outs = [await execute(stepped, jnp.ones(2), np.int32(step)) for step in range(5)]
    assert [int(out[0]) for out in outs] == [1, 2, 3, 4, 5]
    assert len(traced) == 1


@pytest.mark.anyio
async def test_an_executor_draws_the_random_numbers_that_its_caller_would_draw() -> None:
    """JAX keeps the generator setting per thread, and the kernel's first run is in another thread."""

    @kernel(op_id="drawing", configs=[1], heuristic=1)
    def drawing(x: Any, *, cfg: int) -> Any:
        return x + jax.random.normal(jax.random.key(0), x.shape)

    x = jnp.zeros(4)
    async with ConfigSelectorChain(policy=AutotunePolicy(allow_autotune=False), sinks=()) as selector:
        execute: Executor[Any, Any] = Executor(selector)
        usual = await execute(drawing, x)
        with jax.default_prng_impl("rbg"):
            np.testing.assert_array_equal(await execute(drawing, x), drawing(x, cfg=1))
            assert not np.array_equal(usual, drawing(x, cfg=1))


class Streams:
    """Has every attribute, like flax's `nnx.Rngs`, and counts the look-ups."""

    def __init__(self) -> None:
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def draw(*args: Any) -> int:
            self.count += 1
            return self.count

        return draw


jax.tree_util.register_pytree_node(Streams, lambda s: ((), s.__dict__["count"]), lambda aux, _: Streams())


def test_an_object_with_every_attribute_is_not_called() -> None:
    """Checking for an array's attributes must not draw random numbers."""
    streams = Streams()
    known = KeyMemo().resolve(Invocation("k", (streams,), {}), KERNEL)
    assert streams.__dict__["count"] == 0
    assert known.call == "Streams()"


class Touchy:
    """Raises when a missing attribute is looked up."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"asked for {name}")


def test_an_object_that_raises_on_inspection_is_refused_like_any_other() -> None:
    """As an argument. A kernel may have one as an attribute."""
    with pytest.raises(UnstableKeyError, match="Touchy"):
        KeyMemo().resolve(Invocation("k", (Touchy(),), {}), KERNEL)
    touchy = Kernel[Any, Any]("k")
    touchy.model = Touchy()  # type: ignore[attr-defined]
    assert KeyMemo().resolve(Invocation("k", (1,), {}), touchy).key.call_key == key(1)
