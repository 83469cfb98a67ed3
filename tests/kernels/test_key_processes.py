"""Keys are the same in every process, wherever its code is installed and however many devices it has."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import types
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support.key_examples as ex
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from support.kernels import Blocks
from support.key_examples import P
from support.keys import KERNEL, abstract_mesh, during_trace, key, signature_of
from support.library_objects import library_keys
from support.paths import TESTS

from asel import Invocation, UnstableKeyError
from asel.kernels.keys import call_key


@pytest.fixture(scope="module")
def elsewhere():
    """The reports of two processes with other hash seeds and eight devices, which run concurrently."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    with ExitStack() as ending:
        processes = []
        for seed in ("1", "2"):
            process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "support.key_report"],
                cwd=TESTS,
                env={**environment, "PYTHONHASHSEED": seed},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            processes.append(ending.enter_context(process))
            ending.callback(process.kill)
        answers = []
        for process in processes:
            output, errors = process.communicate(timeout=110)
            assert process.returncode == 0, errors
            answers.append(json.loads(output))
        return answers


@pytest.fixture(scope="module")
def sharded(elsewhere):
    """Return the key of a sharded call; fail if it could not be made."""

    def look_up(name: str) -> str:
        found = elsewhere[0]["sharded"][name]
        assert not found.startswith("error"), f"{name}: {found}"
        return found

    return look_up


@pytest.mark.timeout(120)  # another process loads JAX
@pytest.mark.parametrize("name", ex.EXAMPLES)
def test_a_key_is_the_same_in_another_process(name, elsewhere):
    """Stores are shared, so every process gives a call the same key, with any hash seed."""
    here = call_key(ex.EXAMPLES[name](), ex.KERNEL)
    assert [answer["calls"][name] for answer in elsewhere] == [here, here]


@pytest.mark.timeout(120)  # another process loads JAX
@pytest.mark.parametrize("name", ex.SHARDED)
def test_a_key_of_a_sharded_call_is_the_same_in_another_process(name, elsewhere):
    """Shardings and meshes have keys, and processes agree on them."""
    first, second = (answer["sharded"][name] for answer in elsewhere)
    assert first == second
    assert not first.startswith("error"), first


@pytest.mark.timeout(120)  # another process loads JAX
def test_a_checksum_is_the_same_in_another_process(elsewhere):
    """A restarted service recognises its records."""
    assert [answer["checksums"] for answer in elsewhere] == [ex.checksums()] * 2


def test_the_examples_are_all_different():
    """No two examples share a key, or the comparison between processes would prove little."""
    assert len(set(ex.keys_of(ex.EXAMPLES).values())) == len(ex.EXAMPLES)


MODULE = """
import dataclasses, functools

def plain(i, j=1, *, k=(2, 3)):
    "A docstring."
    return [x for x in range(i) if x in {1, 2, 3}] or (lambda: j)

def make(size):
    def inner(i):
        def innermost():
            return i, size
        return innermost
    return inner

closure = make(4)
partial = functools.partial(plain, 1, j=closure)
wrapped = functools.wraps(plain)(lambda *args: plain(*args))

@dataclasses.dataclass(frozen=True)
class Mask:
    size: int
    def __call__(self, i):
        return i < self.size
    def bound(self):
        return super().__repr__()

mask = Mask(3)
bound = mask.bound
"""


@pytest.mark.parametrize("name", ["plain", "closure", "partial", "wrapped", "mask", "bound", "Mask"])
def test_a_function_at_another_path_is_the_same_function(name, tmp_path, monkeypatch):
    """A key contains no path and no line number, so a service installed elsewhere finds its records."""

    def load(where: str, source: str) -> Any:
        path = tmp_path / where / "moved_module.py"
        path.parent.mkdir()
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("moved_module", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "moved_module", module)
        spec.loader.exec_module(module)
        return getattr(module, name)

    here, there = load("here", MODULE), load("there", "\n\n# moved\n" + MODULE)
    assert here is not there
    assert key(here) == key(there)


DECORATED = """
import functools, jax

class Decorator:
    def __init__(self, fn):
        functools.update_wrapper(self, fn)

    def __call__(self, x):
        return self.__wrapped__(x)

@{decorator}
def mask(x):
    return x * {factor}
"""


@pytest.mark.parametrize(
    "decorator",
    ["jax.jit", "jax.custom_jvp", "jax.custom_vjp", "jax.vmap", "jax.checkpoint", "functools.lru_cache", "Decorator"],
)
def test_a_decorated_function_with_an_edited_body_is_another_function(decorator, monkeypatch):
    """The code counts and not only the name: the next release may change it."""

    def release(factor: int) -> str:
        module = types.ModuleType("released_module")
        monkeypatch.setitem(sys.modules, "released_module", module)
        exec(DECORATED.format(decorator=decorator, factor=factor), module.__dict__)
        try:
            return key(module.mask)
        except UnstableKeyError:
            return f"refused {factor}"

    assert release(1) != release(2)


@pytest.mark.timeout(120)  # another process loads JAX
def test_objects_of_libraries_have_the_same_keys_in_another_process(elsewhere):
    """This includes objects of flax and equinox."""
    assert [answer["libraries"] for answer in elsewhere] == [library_keys()] * 2


@pytest.mark.timeout(120)  # another process loads JAX
def test_the_first_call_of_a_process_may_come_while_jax_traces(elsewhere):
    """Tracers have keys from the first call on, and later eager calls are as cheap and correct as usual."""
    assert [answer["first"] for answer in elsewhere] == [[True, True, False]] * 2


@pytest.mark.timeout(120)  # another process loads JAX
def test_a_call_without_placed_arrays_belongs_to_the_default_device(elsewhere):
    """JAX would run it there. A change of the default changes the key, with or without a key_builder."""
    assert elsewhere[0]["default devices"] == [[0, 1, 0, 0, 1, 1]] * 2


# --- meshes and shardings ----------------------------------------------------------------------


@pytest.mark.timeout(120)  # another process loads JAX
def test_the_mesh_that_is_set_is_part_of_the_key(elsewhere):
    """The mesh changes the program. Its devices do not count, so replicas share answers."""
    keys = elsewhere[0]["meshes"]
    assert len({keys[name] for name in ("none", "four", "square", "renamed", "explicit")}) == 5
    assert keys["four"] == keys["four again"] == keys["elsewhere"] == keys["traced"]
    assert keys["none"] == keys["none again"] == key(np.zeros(8, np.float32))
    # Each device has its own part there: a call like any other of that shape.
    assert keys["mapped"] == keys["mapped within"] == keys["none"]


@pytest.mark.timeout(120)  # another process loads JAX
def test_other_meshes_are_other_calls(sharded):
    """Mesh shape, axis names, device order and spec each change the key (ejKernel's defect 11)."""
    apart = [
        "device 0",
        "mesh 8",
        "mesh 4",
        "mesh 4x2",
        "mesh 2x4",
        "mesh 2x4 both axes",
        "mesh 2x4 second axis",
        "mesh 2x4 joined axes",
        "replicated",
        "other axis name",
        "other device order",
    ]
    assert len({sharded(name) for name in apart}) == len(apart)


@pytest.mark.timeout(120)  # another process loads JAX
def test_different_meshes_as_static_arguments_have_different_keys(sharded):
    """A mesh that a kernel takes as an argument counts by shape, names and axis types."""
    apart = [name for name in ex.SHARDED if name.startswith("static mesh")]
    assert len({sharded(name) for name in apart}) == len(apart)


@pytest.mark.timeout(120)  # another process loads JAX
def test_explicitly_sharded_arrays_have_keys_of_their_own(sharded):
    """An array on a mesh with explicit axes, JAX's default, counts by its sharding, traced or not."""
    apart = ["device 0", "explicit", "explicit second axis", "explicit 2x4"]
    assert len({sharded(name) for name in apart}) == len(apart)
    assert sharded("explicit traced") not in (sharded("explicit traced second axis"), sharded("device 0"))


@pytest.mark.timeout(120)  # another process loads JAX
def test_an_explicitly_sharded_array_and_its_tracer_share_a_key(sharded):
    """An aval with a sharding is the same traced and not, so an eager tune serves the jitted call."""
    assert sharded("explicit") == sharded("explicit traced")
    assert sharded("explicit second axis") == sharded("explicit traced second axis")


@pytest.mark.timeout(120)  # another process loads JAX
def test_which_of_equal_devices_a_call_runs_on_does_not_matter(sharded):
    """The identity of devices is not part of the key, only their number, so replicas share answers."""
    here = call_key(ex.call(jnp.zeros((8, 8))), ex.KERNEL)
    assert sharded("device 0") == sharded("device 5") == here
    assert sharded("mesh 4") == sharded("mesh 4 on the upper half")
    assert sharded("mesh 8") == sharded("mesh 8 again") == sharded("shape on mesh 8")


def test_a_mesh_of_one_device_is_a_single_device():
    """All spellings of the placement on one device make the same call."""
    x = jnp.zeros((8, 8))
    mesh = ex.mesh_of(1)
    assert key(jax.device_put(x, NamedSharding(mesh, P("x")))) == key(x)
    assert key(jax.device_put(x, NamedSharding(mesh, P()))) == key(x)
    assert key(jax.device_put(x, SingleDeviceSharding(jax.devices()[0]))) == key(x)


def test_an_explicit_mesh_of_one_device_has_keys():
    """Explicit axes are JAX's default; an array under them has a key, and so has its tracer."""
    mesh = ex.mesh_of(1, axis_type=AxisType.Explicit)
    x = jax.device_put(jnp.zeros((8, 8)), NamedSharding(mesh, P("x")))
    assert key(x) == during_trace(key, x)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: abstract_mesh("x"), lambda: abstract_mesh("y")),
        (lambda: NamedSharding(abstract_mesh(), P("x")), lambda: NamedSharding(abstract_mesh(), P())),
        (
            lambda: jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(abstract_mesh(), P("x"))),
            lambda: jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(abstract_mesh(), P())),
        ),
        (lambda: P(("x", "y")), lambda: P("x", "y")),
        (lambda: P(P.UNCONSTRAINED), lambda: P(None)),
        (lambda: P("x", unreduced={"y"}), lambda: P("x")),
        (lambda: P("x", reduced={"y"}), lambda: P("x", unreduced={"y"})),
    ],
    ids=["mesh", "sharding", "shape", "joined", "unconstrained", "unreduced", "reduced"],
)
def test_abstract_meshes_and_specs_have_keys(one, other):
    """Meshes without devices and all specs are values."""
    assert key(one()) == key(one())
    assert key(one()) != key(other())


def test_how_a_call_is_mapped_is_part_of_it():
    """Method, mesh, specs, check_vma and batch axes each change the signature and the key."""
    mesh = ex.mesh_of(1)
    plain = Invocation("k", (jnp.zeros(8),), {})
    mapped = dataclasses.replace(plain, method="shard_map", mesh=mesh, in_specs=(P("x"),), out_specs=P("x"))
    calls = [
        plain,
        mapped,
        dataclasses.replace(mapped, mesh=ex.mesh_of(1, names="y")),
        dataclasses.replace(mapped, in_specs=(P(),)),
        dataclasses.replace(mapped, out_specs=P()),
        dataclasses.replace(mapped, check_vma=True),
        dataclasses.replace(plain, batch_axes={"q": 0}),
        dataclasses.replace(plain, batch_axes={"q": 1}),
        dataclasses.replace(plain, out_specs=P("x")),
        dataclasses.replace(plain, check_vma=True),
    ]
    assert len({call_key(inv, KERNEL) for inv in calls}) == len(calls)
    assert len({signature_of(inv, KERNEL) for inv in calls}) == len(calls)


def test_a_key_ignores_what_does_not_change_the_answer():
    """An override and the stamp are not part of the call."""
    plain = Invocation("k", (1,), {})
    for other in (dataclasses.replace(plain, override_cfg=Blocks(1)), dataclasses.replace(plain, stamp=False)):
        assert call_key(other, KERNEL) == call_key(plain, KERNEL)
        assert signature_of(other, KERNEL) == signature_of(plain, KERNEL)
