"""A trial sent to a worker process: arguments, devices and settings arrive unchanged."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from operator import neg

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support.hostile import Mapped, SelfWrapped
from support.kernels import FakeDevice
from support.paths import TESTS

from asel import InvalidRequestError, Invocation
from asel.kernels.binding import bind
from asel.runtime.jax_settings import Settings, current_settings
from asel.tuning import worker_messages as parcels
from asel.tuning.arrays import concrete
from asel.tuning.measure import Trial
from asel.tuning.worker_messages import _Pickler, pack_arguments, pack_candidate, unpack_arguments, unpack_candidate

MESH = Mesh(np.array(jax.devices()[:1]), ("x",))
SPREAD = NamedSharding(MESH, PartitionSpec("x"))


def sent(*args, **facts) -> Trial:
    """Return a trial as a worker gets it, after a round trip through bytes."""
    trial = Trial("cfg", neg, args, {}, **facts)
    arguments = unpack_arguments([bytes(frame) for frame in pack_arguments(trial)])
    return unpack_candidate([bytes(frame) for frame in pack_candidate(trial)], arguments)


ARRAYS = {
    "numbers": lambda: jnp.arange(6.0).reshape(2, 3),
    "bfloat16": lambda: jnp.ones(3, jnp.bfloat16),
    "float8": lambda: jnp.ones(3, jnp.float8_e4m3fn),
    "complex": lambda: jnp.ones(3, jnp.complex64),
    "bool": lambda: jnp.array([True, False]),
    "nothing": lambda: jnp.zeros((0, 3)),
    "a scalar": lambda: jnp.float32(2.5),
    "a weak number": lambda: jnp.asarray(2.5),
    "a weak integer": lambda: jnp.asarray(2),
    "weak numbers": lambda: jnp.broadcast_to(jnp.asarray(1.5), (2, 3)) * 2,
    "committed": lambda: jax.device_put(jnp.ones(3), jax.devices()[0]),
    "committed and weak": lambda: jax.device_put(jnp.asarray(2.5), jax.devices()[0]),
    "spread": lambda: jax.device_put(jnp.ones(3), SPREAD),
    "a key": lambda: jax.random.key(3),
    "keys": lambda: jax.random.split(jax.random.key(3, impl="rbg"), 4),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_arrives_unchanged(name):
    """Values, type and placement: both processes compile the same program for it."""
    array = ARRAYS[name]()
    [got] = sent(array).args
    assert jax.typeof(got) == jax.typeof(array)
    assert (got.committed, got.sharding) == (array.committed, array.sharding)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        assert jax.random.key_impl(got) == jax.random.key_impl(array)
        got, array = jax.random.key_data(got), jax.random.key_data(array)
    np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize("dtype", ["float64", "int64", "complex128"])
def test_wide_numbers_stay_wide(dtype):
    """Double precision arrives as such, if the caller's settings allow it."""
    with jax.enable_x64(True):
        array, weak, settings = jnp.ones(3, dtype), jnp.asarray(2**40), current_settings()
    got = sent(array, weak, settings=settings).args
    assert [jax.typeof(one) for one in got] == [jax.typeof(array), jax.typeof(weak)]
    assert int(got[1]) == 2**40


def test_arguments_are_unpacked_once_for_all_candidates():
    """Zeros for shapes are made once, and shared by all candidates of a tune."""
    trial = Trial("a", neg, (jax.ShapeDtypeStruct((4,), jnp.float32), jnp.ones(3)), {})
    arguments = unpack_arguments(pack_arguments(trial))
    first, second = (unpack_candidate(pack_candidate(trial), arguments) for _ in range(2))
    assert first.args[1] is second.args[1]
    assert first.shared is second.shared


def test_arguments_that_are_not_jax_arrays_are_left_alone():
    """NumPy arrays stay NumPy arrays, as in a thread; shapes keep their sharding; other values are unchanged."""
    shape = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=SPREAD)
    numbers, tree = np.ones(3), {"n": 1, "name": "x", "none": None}
    got = sent(numbers, shape, tree).args
    assert isinstance(got[0], np.ndarray)
    assert got[1:] == (shape, tree)


def test_the_callers_settings_arrive():
    """Including their devices: the default device, and those of the mesh."""
    place, rbg = jax.default_device(jax.devices()[0]), jax.default_prng_impl("rbg")
    with place, rbg, jax.set_mesh(MESH), jax.enable_x64(True):
        settings = current_settings()
    trial = sent(1, settings=settings, device=jax.devices()[0], objective="forward+backward")
    assert trial.settings == settings == Settings(True, None, jax.devices()[0], settings.guards, MESH, settings.others)
    assert settings.others == (("default_prng_impl", "rbg"),)
    assert (trial.device, trial.objective, trial.cfg, trial.fn) == (jax.devices()[0], "forward+backward", "cfg", neg)


def test_a_device_that_a_worker_does_not_have_is_named(monkeypatch):
    """It sees fewer devices if they were configured outside the environment: the error says so."""
    name = lambda self, one: ("cpu", 7) if isinstance(one, jax.Device) else None  # noqa: E731
    monkeypatch.setattr(_Pickler, "persistent_id", name)
    with pytest.raises(InvalidRequestError, match=r"no device cpu:7, only \d.*XLA_FLAGS"):
        sent(1, device=jax.devices()[0])


def test_a_tpu_is_not_shared():
    """One process owns a TPU, so the error names the other isolation."""
    with pytest.raises(InvalidRequestError, match='use isolation="thread"'):
        pack_candidate(Trial("cfg", neg, (), {}, device=FakeDevice("TPU v5e", platform="tpu")))


_SPREAD = """
import sys; sys.path.insert(0, sys.argv[1])
import anyio, jax, jax.numpy as jnp
from support.hostile import spread
from asel import ConfigSelectorChain, Invocation, Tuner
from asel.testing import RecordingSink

async def main(isolation):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.ones((4, 4)), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
    inv = Invocation("spread", (x, jnp.float32(2)), {})
    sink = RecordingSink()
    async with ConfigSelectorChain(tuner=Tuner(1, 1, isolation=isolation, check=True), sinks=(sink,)) as chain:
        with jax.set_mesh(mesh):
            await chain.choose(inv, spread)
            @jax.jit
            def traced(x, y):
                return spread(x, y, cfg=chain.choose_nowait(Invocation("spread", (x, y), {"n": 2}), spread), n=2)
            traced(*inv.args)
        await chain.settled()
    print(isolation, [event.cfg for event in sink.named("candidate_measured")])
    print([event.message for event in sink.named("candidate_failed")], file=sys.stderr)

for isolation, backend in (("thread", "asyncio"), ("process", "trio")):
    anyio.run(main, isolation, backend=backend)
"""


@pytest.mark.timeout(60)  # another process loads JAX
def test_candidates_get_sharded_arguments_and_the_callers_mesh():
    """In threads and in processes, traced or not."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-c", _SPREAD, str(TESTS)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    lines = [line.partition(" ")[2] for line in ran.stdout.splitlines()]
    assert lines == [str(["as it lies", "as the mesh says"] * 2)] * 2, ran.stdout + ran.stderr


@pytest.mark.parametrize("name", ["numbers", "a weak number", "committed", "spread"])
def test_a_donated_array_is_sent_as_its_shape(name):
    """The worker makes zeros of the same type and placement."""
    array = ARRAYS[name]()
    [here] = sent(array).args
    array.delete()
    [got] = sent(array).args
    assert isinstance(got, jax.ShapeDtypeStruct)
    zeros = concrete(got)
    assert jax.typeof(zeros) == jax.typeof(here)
    assert (zeros.committed, zeros.sharding) == (here.committed, here.sharding)


def test_an_array_donated_while_it_is_packed_is_sent_as_its_shape(monkeypatch):
    """It may be donated between the check and the copy; other errors are raised."""
    array, as_numbers = jnp.ones(3), parcels._as_numbers

    def late(leaf):
        array.delete()
        return as_numbers(leaf)

    monkeypatch.setattr(parcels, "_as_numbers", late)
    [got] = sent(array).args
    assert (type(got), got.shape) == (jax.ShapeDtypeStruct, (3,))

    def broken(leaf):
        raise RuntimeError("no memory")

    monkeypatch.setattr(parcels, "_as_numbers", broken)
    with pytest.raises(RuntimeError, match="no memory"):
        sent(jnp.ones(3))


@pytest.mark.parametrize("wraps_itself", [False, True])
def test_a_kernel_under_shard_map_can_be_sent(wraps_itself):
    """asel's own wrappers around a kernel can be imported, like the kernel."""
    op = SelfWrapped() if wraps_itself else Mapped()
    specs = {"mesh": MESH, "in_specs": (PartitionSpec("x"),), "out_specs": PartitionSpec("x")}
    inv = Invocation("mapped", (jnp.ones(4),), {}, method="shard_map", **specs)
    trial = Trial(3.0, bind(op, inv, "cpu", 3.0), inv.args, {})
    arguments = unpack_arguments([bytes(frame) for frame in pack_arguments(trial)])
    there = unpack_candidate([bytes(frame) for frame in pack_candidate(trial)], arguments)
    assert there.fn(*there.args).tolist() == [3.0] * 4


def test_arguments_may_contain_the_text_main():
    """An object is refused for its class, and not for text in it."""
    assert sent("__main__", {"__main__": b"__main__"}).args == ("__main__", {"__main__": b"__main__"})


@pytest.mark.parametrize("what", ["function", "object", "in a partial"])
def test_code_from_the_main_program_is_refused(what, monkeypatch):
    """A worker does not run the program's own file, so it has none of its functions and classes."""

    def run(x, y):
        return x + y

    class Config:
        pass

    monkeypatch.setattr(run, "__module__", "__main__")
    monkeypatch.setattr(Config, "__module__", "__main__")
    fn = {"function": run, "object": Config(), "in a partial": functools.partial(run, 1)}[what]
    with pytest.raises(InvalidRequestError, match="defined in __main__, which a worker does not run"):
        pack_candidate(Trial("cfg", fn, (), {}))
