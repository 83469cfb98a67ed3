"""From a call to the name of its answer: what shares a key, what must not, and what is refused."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import textwrap
import threading
import types
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import key_examples as ex
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from kernels import A100, H100, Blocks, Toy
from key_examples import P, captured

from asel import CacheKey, InvalidRequestError, Invocation, Kernel, UnstableKeyError, kernel, powers_of_two
from asel.devices import device_fingerprint
from asel.keys import KeyMemo, Memo, call_key, checksum, signature
from asel.testing import FakeArray, FakeDevice

TESTS = Path(__file__).parent
KERNEL: Kernel[Any, Any] = Kernel("k")
CALL: Invocation[Any, Any] = Invocation("toy", (1,), {})


def key(*args: Any, **kwargs: Any) -> str:
    return call_key(Invocation("k", args, kwargs), KERNEL)


def sig(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return signature(Invocation("k", args, kwargs), KERNEL)


def resolve(inv: Invocation[Any, Any], of: Any = KERNEL) -> Any:
    return KeyMemo().resolve(inv, of)


def key_or_refusal(value: Any) -> str:
    try:
        return key(value)
    except UnstableKeyError:
        return f"refused {id(value)}"


def sharing(*values: Any) -> int:
    """Return how many of the values share their key with an earlier one; refusing is not sharing."""
    return len(values) - len({key_or_refusal(value) for value in values})


def during_trace(fn: Any, *args: Any) -> Any:
    """Return what `fn` returns while JAX traces it."""
    seen = []
    jax.jit(lambda *xs: seen.append(fn(*xs)))(*args)
    return seen[0]


# --- constants: type and value, at any depth ---------------------------------------------------

ALIKE = {
    "1": 1,
    "True": True,
    "1.0": 1.0,
    "0": 0,
    "False": False,
    "0.0": 0.0,
    "-0.0": -0.0,
    "nan": float("nan"),
    "None": None,
    "'1'": "1",
    "b'1'": b"1",
    "1+0j": 1 + 0j,
    "1-0j": complex(1, -0.0),
    "int32 1": np.int32(1),
    "int64 1": np.int64(1),
    "float32 1": np.float32(1),
    "float64 1": np.float64(1),
    "numpy True": np.bool_(True),
    "level 1": ex.Level.LOW,
    "(1,)": (1,),
    "[1]": [1],
    "()": (),
    "[]": [],
    "{}": {},
    "set()": set(),
    "frozenset()": frozenset(),
}

PLACES = {
    "argument": lambda v: ((v,), {}),
    "keyword": lambda v: ((), {"scale": v}),
    "tuple": lambda v: (((v,),), {}),
    "list": lambda v: (([0, v],), {}),
    "dict value": lambda v: (({"k": v},), {}),
    "deep": lambda v: (({"a": [({"b": (v,)},)]},), {}),
    "OrderedDict": lambda v: ((collections.OrderedDict(k=v),), {}),
    "defaultdict": lambda v: ((collections.defaultdict(int, k=v),), {}),
    "mapping proxy": lambda v: ((types.MappingProxyType({"k": v}),), {}),
    "namedtuple": lambda v: ((ex.Pair(v, 0),), {}),
    "namespace": lambda v: ((types.SimpleNamespace(v=v),), {}),
    "slice": lambda v: ((slice(v),), {}),
    "dataclass": lambda v: ((ex.Window(v),), {}),
    "slotted dataclass": lambda v: ((ex.Slotted(v),), {}),
    "attrs": lambda v: ((ex.Attributes(v),), {}),
    "pydantic model": lambda v: ((ex.Settings(value=v),), {}),
    "node child": lambda v: ((ex.Node(v, 0),), {}),
    "node's static field": lambda v: ((ex.Node(0, 0, v),), {}),
    "registered dataclass": lambda v: ((ex.Layer(v),), {}),
    "registered dataclass's static field": lambda v: ((ex.Layer(0, v),), {}),
    "closure": lambda v: ((ex.window(v),), {}),
    "closure's list": lambda v: ((ex.window([v]),), {}),
    "default": lambda v: ((types.FunctionType(ex.causal.__code__, {}, "f", (v, 0)),), {}),
    "partial": lambda v: ((functools.partial(ex.causal, v),), {}),
    "partial keyword": lambda v: ((functools.partial(ex.causal, j=v),), {}),
    "jax partial": lambda v: ((jax.tree_util.Partial(ex.causal, v),), {}),
    "method's object": lambda v: ((ex.Window(v).reach,), {}),
    "bound builtin's object": lambda v: (([v].count,), {}),
    "jitted closure": lambda v: ((jax.jit(ex.window(v)),), {}),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_constants_that_compare_equal_stay_apart_wherever_they_are(place):
    """A constant counts by type and value, at any depth: 1, True and 1.0 are three calls."""
    calls = [place(value) for value in ALIKE.values()]
    assert len({key(*args, **kwargs) for args, kwargs in calls}) == len(ALIKE)
    assert len({sig(*args, **kwargs) for args, kwargs in calls}) == len(ALIKE)


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_equal_constants_share_a_key_wherever_they_are(place):
    """The same value made twice is one call, NaN included."""

    def made(nan: str) -> Any:
        return place((float(nan), "a", 1, {"x": -0.0}, None))

    (args, kwargs), (args2, kwargs2) = made("nan"), made("nan")
    assert key(*args, **kwargs) == key(*args2, **kwargs2)
    assert sig(*args, **kwargs) == sig(*args2, **kwargs2)


@pytest.mark.parametrize(
    "wrap",
    [lambda k: {k: 0}, lambda k: {(k,): 0}, lambda k: frozenset({k}), lambda k: {k}, lambda k: {"d": {k: 0}}],
    ids=["dict key", "tuple in a dict key", "frozenset", "set", "nested dict key"],
)
def test_hashable_constants_stay_apart_as_keys_and_members(wrap):
    """A dict key or a member of a set counts by type and value too, though Python's own dict merges them."""
    hashable = [value for value in ALIKE.values() if not isinstance(value, list | dict | set)]
    assert len({key(wrap(value)) for value in hashable}) == len(hashable)
    assert len({sig(wrap(value)) for value in hashable}) == len(hashable)


def test_positional_and_keyword_arguments_are_different_calls():
    """Where an argument stands is part of the call."""
    calls = [((1, 2), {}), ((1,), {"b": 2}), ((), {"a": 1, "b": 2}), (((1, 2),), {}), (({"a": 1, "b": 2},), {})]
    assert len({key(*args, **kwargs) for args, kwargs in calls}) == len(calls)
    assert len({sig(*args, **kwargs) for args, kwargs in calls}) == len(calls)


def test_the_order_of_keywords_and_of_dict_entries_does_not_matter():
    """Insertion order is how a dict was made, not what it says."""
    assert key(a=1, b={"x": 1, "y": 2}) == key(b={"y": 2, "x": 1}, a=1)
    one, other = (collections.defaultdict(int, items) for items in ({"a": 1, "b": 2}, {"b": 2, "a": 1}))
    assert key(one) == key(other)
    assert key(captured(one)) == key(captured(other))
    assert key(types.MappingProxyType(one)) == key(types.MappingProxyType(other))


def test_the_order_of_an_ordered_dict_matters():
    """An OrderedDict of another order is another value, and another pytree."""
    assert sharing(collections.OrderedDict(a=1, b=2), collections.OrderedDict(b=2, a=1)) == 0


def test_text_cannot_reach_across_fields():
    """No separator can be forged: '|' and quotes inside a field stay inside it."""
    calls = [("a|b", "c"), ("a", "b|c"), ("a|b|c",), ("a", "b", "c"), ("a', 'b", "c"), ("a,b", "c"), ("a\x00b", "c")]
    assert len({key(*args) for args in calls}) == len(calls)
    assert key({"a|b": "c"}) != key({"a": "b|c"})
    assert key(**{"a|b": "c"}) != key(a="b|c")


@pytest.mark.parametrize("size", [2**63, 10**4299, 10**5000, -(10**5000)], ids=["2**63", "10**4299", "big", "-big"])
def test_an_integer_of_any_length_has_a_key(size):
    """Python refuses to print very long integers; they are still plain constants."""
    assert key(size) == key(size + 0)
    assert key(size) != key(size + 1)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"dtype": jnp.float32}, {"dtype": jnp.bfloat16}),
        ({"dtype": jnp.dtype("float32")}, {"dtype": jnp.dtype("bfloat16")}),
        ({"dtype": np.float32}, {"dtype": np.float16}),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}),
        ({"dtype": jnp.float8_e4m3fn}, {"dtype": jnp.float8_e5m2}),
        ({"dtype": jnp.dtype(jnp.int4)}, {"dtype": jnp.dtype(jnp.uint4)}),
        ({"precision": jax.lax.Precision.HIGH}, {"precision": jax.lax.Precision.HIGHEST}),
        ({"out": jax.Array}, {"out": np.ndarray}),
        ({"out": FakeArray}, {"out": FakeDevice}),
    ],
)
def test_dtypes_and_other_types_as_keywords_count_by_name(one, other):
    """Which dtype a kernel was asked for is part of the call (ejKernel's defect 11)."""
    assert key(**one) == key(**one)
    assert key(**one) != key(**other)


@pytest.mark.parametrize("array_type", [jax.Array, np.ndarray, FakeArray])
def test_an_array_type_is_a_constant_and_not_an_array(array_type):
    """A class has the attributes of its instances, and is none of them."""
    assert key(array_type) == key(array_type)
    assert resolve(Invocation("k", (array_type,), {})).key.device == device_fingerprint()


# --- the same in every process -----------------------------------------------------------------


def child(*command: str, seed: str = "0", **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", *command],
        cwd=TESTS,
        env={**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu", **env},
        capture_output=True,
        text=True,
        timeout=18,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def elsewhere():
    """The example keys of two processes with other hash seeds and eight devices."""
    eight = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    return [json.loads(child("key_examples.py", seed=seed, **eight)) for seed in ("1", "2")]


@pytest.fixture(scope="module")
def sharded(elsewhere):
    """Look a sharded call's key up; one that could not be made is a failure here and now."""

    def look_up(name: str) -> str:
        found = elsewhere[0]["sharded"][name]
        assert not found.startswith("error"), f"{name}: {found}"
        return found

    return look_up


@pytest.mark.parametrize("name", ex.EXAMPLES)
def test_a_key_is_the_same_in_another_process(name, elsewhere):
    """Keys name answers in stores, so every process gives a call the same one, whatever its hash seed."""
    here = call_key(ex.EXAMPLES[name](), ex.KERNEL)
    assert [answer["calls"][name] for answer in elsewhere] == [here, here]


@pytest.mark.parametrize("name", ex.SHARDED)
def test_a_key_of_a_sharded_call_is_the_same_in_another_process(name, elsewhere):
    """Shardings and meshes have keys, and processes agree on them."""
    first, second = (answer["sharded"][name] for answer in elsewhere)
    assert first == second
    assert not first.startswith("error"), first


def test_a_checksum_is_the_same_in_another_process(elsewhere):
    """A restarted service recognises what it stored."""
    assert [answer["checksums"] for answer in elsewhere] == [ex.checksums()] * 2


def test_the_examples_are_all_different():
    """The comparison between processes means something: no two examples share a key."""
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
    """A key holds no path and no line number: a service installed elsewhere finds its answers."""

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
def test_a_decorated_function_whose_body_was_edited_is_another_function(decorator, monkeypatch):
    """A name is not enough where the code can be seen: the next release may hold other code under it."""

    def release(factor: int) -> str:
        module = types.ModuleType("released_module")
        monkeypatch.setitem(sys.modules, "released_module", module)
        exec(DECORATED.format(decorator=decorator, factor=factor), module.__dict__)
        try:
            return key(module.mask)
        except UnstableKeyError:
            return f"refused {factor}"

    assert release(1) != release(2)


def test_the_first_call_of_a_process_may_come_while_jax_traces():
    """Tracers have keys from the first call on, and the eager calls after it are as cheap and right as ever."""
    script = """
        import jax, jax.numpy as jnp
        from asel import Invocation, Kernel
        from asel.keys import KeyMemo
        memo, kernel, seen = KeyMemo(), Kernel("k"), []
        ask = lambda x: memo.resolve(Invocation("k", (x,), {}), kernel)
        jax.jit(lambda x: seen.append(ask(x)))(jnp.ones(3))
        traced, eager = seen[0], ask(jnp.ones(3))
        print(traced.key == eager.key, traced.traced, eager.traced)
    """
    assert child("-c", textwrap.dedent(script)).split() == ["True", "True", "False"]


# --- meshes and shardings ----------------------------------------------------------------------


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


def test_meshes_as_static_arguments_are_told_apart(sharded):
    """A mesh that a kernel takes as an argument counts by shape, names and axis types."""
    apart = [name for name in ex.SHARDED if name.startswith("static mesh")]
    assert len({sharded(name) for name in apart}) == len(apart)


def test_explicitly_sharded_arrays_are_told_apart(sharded):
    """An array on a mesh with explicit axes, JAX's default, counts by its sharding, traced or not."""
    apart = ["device 0", "explicit", "explicit second axis", "explicit 2x4"]
    assert len({sharded(name) for name in apart}) == len(apart)
    assert sharded("explicit traced") not in (sharded("explicit traced second axis"), sharded("device 0"))


def test_an_explicitly_sharded_array_and_its_tracer_share_a_key(sharded):
    """An aval that carries its sharding says the same traced and not, so an eager tune serves the jitted call."""
    assert sharded("explicit") == sharded("explicit traced")
    assert sharded("explicit second axis") == sharded("explicit traced second axis")


def test_which_of_equal_devices_a_call_runs_on_does_not_matter(sharded):
    """Placement on one device, or on another set of as many, does not enter the key: replicas share answers."""
    here = call_key(ex.call(jnp.zeros((8, 8))), ex.KERNEL)
    assert sharded("device 0") == sharded("device 5") == here
    assert sharded("mesh 4") == sharded("mesh 4 on the upper half")
    assert sharded("mesh 8") == sharded("mesh 8 again") == sharded("shape on mesh 8")


def test_a_mesh_of_one_device_is_a_single_device():
    """However the placement on one device was spelt, the call is the same."""
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


def _abstract(names: str = "x") -> Any:
    return jax.sharding.AbstractMesh((2,), tuple(names))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: _abstract("x"), lambda: _abstract("y")),
        (lambda: NamedSharding(_abstract(), P("x")), lambda: NamedSharding(_abstract(), P())),
        (
            lambda: jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(_abstract(), P("x"))),
            lambda: jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(_abstract(), P())),
        ),
        (lambda: P("x"), lambda: P("x", None)),
        (lambda: P(("x", "y")), lambda: P("x", "y")),
        (lambda: P(P.UNCONSTRAINED), lambda: P(None)),
        (lambda: P("x", unreduced={"y"}), lambda: P("x")),
        (lambda: P("x", reduced={"y"}), lambda: P("x", unreduced={"y"})),
    ],
    ids=["mesh", "sharding", "shape", "None", "joined", "unconstrained", "unreduced", "reduced"],
)
def test_abstract_meshes_and_specs_have_keys(one, other):
    """A mesh without devices and every spec that JAX can write are values like any other."""
    assert key(one()) == key(one())
    assert key(one()) != key(other())


def test_how_a_call_is_mapped_is_part_of_it():
    """Method, mesh, specs, check_vma and batch axes each make another call, in the signature as in the key."""
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
    assert len({signature(inv, KERNEL) for inv in calls}) == len(calls)


def test_what_does_not_change_the_answer_is_not_in_the_key():
    """An override and the stamp say how to answer, not what was asked."""
    plain = Invocation("k", (1,), {})
    for other in (dataclasses.replace(plain, override_cfg=Blocks(1)), dataclasses.replace(plain, stamp=False)):
        assert call_key(other, KERNEL) == call_key(plain, KERNEL)
        assert signature(other, KERNEL) == signature(plain, KERNEL)


# --- refusals ----------------------------------------------------------------------------------

UNSTABLE = {
    "object": object,
    "opaque callable": ex.Opaque,
    "method of an opaque object": lambda: ex.Opaque().method,
    "closure over an opaque object": lambda: captured(ex.Opaque()),
    "partial of an opaque callable": lambda: functools.partial(ex.Opaque()),
    "opaque default": lambda: types.FunctionType(ex.causal.__code__, {}, "f", (ex.Opaque(), 0)),
    "generator": lambda: (i for i in range(3)),
    "iterator": lambda: iter([1]),
    "lock": threading.Lock,
    "weak reference": lambda: weakref.ref(ex.Opaque),
    "random generator": np.random.default_rng,
    "method of a random generator": lambda: np.random.default_rng().normal,
    "object array": lambda: np.array([object()], dtype=object),
    "closure over an object array": lambda: captured(np.array([object()], dtype=object)),
    "structured array of objects": lambda: captured(np.array([(ex.Opaque(),)], dtype=[("a", object)])),
    "set of opaque objects": lambda: {ex.Opaque()},
    "opaque dict key": lambda: {ex.Opaque(): 1},
    "model with an opaque field": lambda: ex.Settings(value=ex.Opaque()),
    "opaque static field": lambda: ex.Node(1, 2, ex.Opaque()),
}


@pytest.mark.parametrize("make", UNSTABLE.values(), ids=UNSTABLE)
def test_an_object_without_a_stable_identity_is_refused_by_name(make):
    """What another process could not recognise is refused: the error names the argument and the way out."""
    with pytest.raises(UnstableKeyError, match=r"kwargs\['mask_fn'\]") as caught:
        resolve(Invocation("k", (jnp.zeros(2),), {"mask_fn": make()}))
    assert caught.value.argument.startswith("kwargs['mask_fn']")
    assert "key_builder" in str(caught.value)
    assert "dataclass" in str(caught.value)


@pytest.mark.parametrize(
    ("args", "kwargs", "path"),
    [
        ((ex.Opaque(),), {}, "args[0]"),
        ((1, [0, ex.Opaque()]), {}, "args[1][1]"),
        (({"k": [0, ex.Opaque()]},), {}, "args[0]['k'][1]"),
        (({1: ex.Opaque()},), {}, "args[0][1]"),
        ((), {"mask_fn": ex.Opaque()}, "kwargs['mask_fn']"),
        ((), {"masks": {"left": (0, ex.Opaque())}}, "kwargs['masks']['left'][1]"),
        ((ex.Window(ex.Opaque()),), {}, "args[0].size"),
        (([ex.Window({"a": ex.Opaque()})],), {}, "args[0][0].size['a']"),
        ((ex.Pair(0, ex.Opaque()),), {}, "args[0].right"),
        ((collections.OrderedDict(k=ex.Opaque()),), {}, "args[0]['k']"),
        ((collections.defaultdict(int, k=ex.Opaque()),), {}, "args[0]['k']"),
        ((ex.Layer(ex.Opaque()),), {}, "args[0].weights"),
        ((ex.Node(0, ex.Opaque()),), {}, "args[0][1]"),
        ((functools.partial(abs, ex.Opaque()),), {}, "args[0].args[0]"),
        ((functools.partial(abs, x=ex.Opaque()),), {}, "args[0].keywords['x']"),
        ((captured([ex.Opaque()]),), {}, "args[0] closing over 'value'[0]"),
        ((np.array([None], dtype=object),), {}, "args[0]"),
    ],
)
def test_a_refusal_carries_the_whole_path_of_the_argument(args, kwargs, path):
    """The error points at the one object that is to blame, however deep, in the user's own terms."""
    with pytest.raises(UnstableKeyError) as caught:
        resolve(Invocation("k", args, kwargs))
    assert caught.value.argument == path
    assert path in str(caught.value)


@pytest.mark.parametrize("field", ["mesh", "in_specs", "out_specs", "batch_axes"])
def test_a_refusal_names_the_field_of_the_call(field):
    """What describes the call rather than the arguments is named as such."""
    with pytest.raises(UnstableKeyError) as caught:
        resolve(Invocation("k", (), {}, method="shard_map", **{field: ex.Opaque()}))
    assert caught.value.argument == field


def _endless_list() -> list[Any]:
    endless: list[Any] = [1]
    endless.append(endless)
    return endless


def _endless_dict() -> dict[str, Any]:
    endless: dict[str, Any] = {}
    endless["self"] = [endless]
    return endless


def _deep_list() -> list[Any]:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    return deep


@pytest.mark.parametrize("make", [_endless_list, _endless_dict, _deep_list])
def test_a_structure_without_end_is_refused(make):
    """A list that contains itself is no call JAX could make: a clear error, not a stack overflow."""
    for ask in (resolve, call_key):
        with pytest.raises(InvalidRequestError, match=r"args\[0\]"):
            ask(Invocation("k", (make(),), {}), KERNEL)


def test_a_cycle_through_a_constant_ends():
    """A dataclass may point back at itself; its key is finite and its state still counts."""

    def ring(value):
        first = ex.Slotted([value])
        first.value.append(first)
        return first

    assert key(ring(1)) == key(ring(1))
    assert key(ring(1)) != key(ring(2))


def test_a_dataclass_field_that_was_never_set_is_refused_or_counted():
    """A half-made dataclass ends in an answer of ours, not in an AttributeError."""

    @dataclasses.dataclass
    class Half:
        x: int = dataclasses.field(init=False)

    half, whole = Half(), Half()
    whole.x = 1
    assert sharing(half, whole) == 0


def test_a_mapping_with_keys_that_do_not_compare_has_a_key():
    """JAX sorts the keys of a defaultdict; where they cannot be sorted there is still a key, or a clear refusal."""
    one = collections.defaultdict(int, {1: 1, "a": 2})
    other = collections.defaultdict(int, {1: 1, "a": 3})
    assert sharing(one, other) == 0


# --- arrays ------------------------------------------------------------------------------------

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32, jnp.uint8, jnp.bool_, jnp.complex64]
SMALL = [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int4]


@pytest.mark.parametrize("dtype", [*DTYPES, *SMALL], ids=lambda dtype: jnp.dtype(dtype).name)
@pytest.mark.parametrize("shape", [(), (8, 128)], ids=str)
def test_an_array_counts_by_its_aval_however_it_is_given(dtype, shape):
    """A JAX array, a numpy array, a ShapeDtypeStruct and a tracer of one aval are one call."""
    x = jnp.zeros(shape, dtype)
    expected = key(x)
    assert key(np.ones(shape, dtype)) == expected
    assert key(jax.ShapeDtypeStruct(shape, dtype)) == expected
    assert during_trace(key, x) == expected
    assert during_trace(lambda y: key({"q": [y]}), x) == key({"q": [x]})


def test_arrays_count_the_same_inside_any_pytree():
    """Lists, tuples, dicts, namedtuples, registered nodes and dataclasses carry arrays, not constants."""
    x = jnp.zeros(3)
    trees = [
        lambda v: [v],
        lambda v: (v,),
        lambda v: {"k": v},
        lambda v: collections.OrderedDict(k=v),
        lambda v: collections.defaultdict(int, k=v),
        lambda v: ex.Pair(v, None),
        lambda v: ex.Node(v, None),
        lambda v: ex.Layer(v),
        lambda v: jax.tree_util.Partial(ex.causal, v),
    ]
    for tree in trees:
        assert key(tree(x)) == key(tree(x + 1)) == key(tree(np.ones(3, np.float32)))
        assert key(tree(x)) == during_trace(lambda y, tree=tree: key(tree(y)), x)
        assert key(tree(x)) != key(tree(jnp.zeros(4)))
    assert len({key(tree(x)) for tree in trees}) == len(trees)


def test_shapes_dtypes_and_weak_types_differ():
    """Each part of an aval makes another call, in the signature as in the key."""
    arrays = [jnp.zeros(shape) for shape in ((), (1,), (8,), (1, 8), (8, 1), (0,), (0, 8))]
    arrays += [jnp.zeros(8, dtype) for dtype in [*DTYPES, *SMALL] if dtype is not jnp.float32]
    arrays += [jnp.asarray(1.0), jnp.asarray(1), jnp.asarray(1, jnp.int32), jnp.full((8,), 2.0)]
    avals = {str(x.aval) for x in arrays}
    assert len(avals) == len({key(x) for x in arrays}) == len({sig(x) for x in arrays})


def test_weak_types_differ_in_shapes_and_tracers_too():
    """A weakly typed argument compiles to another program, however it is given."""
    weak, strong = jnp.asarray(1.0), jnp.asarray(1.0, jnp.float32)
    assert key(jax.ShapeDtypeStruct((), jnp.float32, weak_type=True)) == key(weak) == during_trace(key, weak)
    assert key(jax.ShapeDtypeStruct((), jnp.float32)) == key(strong) == during_trace(key, strong)
    assert key(weak) != key(strong)


def test_a_shape_of_numpy_integers_is_the_same_shape():
    """A size computed with numpy is the size."""
    assert key(jax.ShapeDtypeStruct((np.int64(8), 2), jnp.float32)) == key(jnp.zeros((8, 2)))
    assert key(H100.array((np.int64(8), 2))) == key(H100.array((8, 2)))


def test_numpy_arrays_count_by_the_dtype_jax_will_give_them():
    """float64 input becomes float32 unless x64 is on, and so does its key."""
    wide, narrow = np.zeros(3, np.float64), np.zeros(3, np.float32)
    assert key(wide) == key(narrow) == key(jax.ShapeDtypeStruct((3,), np.float64))
    with jax.enable_x64(True):
        assert key(wide) != key(narrow)
        assert key(wide) == key(jnp.zeros(3, jnp.float64))


def test_the_contents_of_an_argument_do_not_count_but_those_of_a_constant_do():
    """An array is what the kernel runs on; one captured by a function is part of the function."""
    assert key(jnp.zeros(3)) == key(jnp.ones(3))
    assert key(captured(jnp.zeros(3))) == key(captured(np.zeros(3, np.float32)))
    assert (
        sharing(captured(np.zeros(3)), captured(np.ones(3)), captured(np.zeros((3, 1))), captured(np.zeros(3, "i4")))
        == 0
    )
    assert sharing(captured(jnp.zeros(2, jnp.bfloat16)), captured(jnp.zeros(2, jnp.float16))) == 0


def test_a_captured_array_counts_by_its_items_and_not_by_its_strides():
    """A transposed view and its copy hold the same items."""
    x = np.arange(6).reshape(2, 3).T
    assert key(captured(x)) == key(captured(x.copy()))
    assert key(captured(x)) != key(captured(x.T))


def test_random_keys_are_arrays():
    """A typed PRNG key counts by implementation and shape, not by its seed; a captured one by its seed too."""
    one, two = jax.random.key(0), jax.random.key(1)
    assert key(one) == key(two) == during_trace(key, one) == key(jax.ShapeDtypeStruct((), one.dtype))
    assert sharing(one, jax.random.key(0, impl="rbg"), jax.random.PRNGKey(0), jax.random.split(one)) == 0
    assert key(captured(one)) != key(captured(two))


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(2, [("a", "f4")]),
        np.zeros(2, "V8"),
        np.zeros(2, "U3"),
        np.zeros(2, "M8[s]"),
        np.zeros(2, jax.dtypes.float0),
        np.zeros(2, ">f4"),
        np.zeros(2, np.longdouble),
    ],
    ids=lambda array: str(array.dtype),
)
def test_unusual_numpy_arrays_have_keys(array):
    """What JAX could not take as an argument is a constant; none of it ends in a stray TypeError."""
    assert key(array) == key(array.copy())
    assert key(array) != key(np.zeros(3, array.dtype))
    assert key(array) != key(np.zeros(2, np.float32))


def test_a_custom_node_may_have_a_fields_attribute_of_its_own():
    """Only namedtuples name their children in `_fields`; elsewhere it is somebody's private attribute."""

    class Table:
        _fields = ("id", "name", "age")

        def __init__(self, *rows):
            self.rows = rows

    jax.tree_util.register_pytree_node(Table, lambda t: (t.rows, None), lambda _, rows: Table(*rows))
    assert key(Table(jnp.zeros(2))) == key(Table(jnp.ones(2)))
    assert key(Table(jnp.zeros(2))) != key(Table(jnp.zeros(2), jnp.zeros(2)))


def test_settings_that_change_the_program_change_the_key():
    """x64 and the default matmul precision compile to other programs."""

    def seen() -> tuple[str, Any]:
        return key(jnp.zeros(2, jnp.float32)), sig(np.zeros(2, np.float32))

    answers = [seen()]
    with jax.enable_x64(True):
        answers.append(seen())
    for precision in ("bfloat16", "float32"):
        with jax.default_matmul_precision(precision):
            answers.append(seen())
    keys, signatures = zip(*answers, strict=True)
    assert len(set(keys)) == len(set(signatures)) == len(answers)
    assert seen() == answers[0]


# --- tracers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hide",
    [
        lambda x: x,
        lambda x: {"q": [x]},
        lambda x: ex.Layer(x),
        lambda x: functools.partial(ex.causal, x),
        lambda x: captured(x),
        lambda x: ex.Window(x),
        lambda x: captured(ex.Window([x])),
    ],
    ids=["argument", "pytree", "registered dataclass", "partial", "closure", "dataclass", "closure over a dataclass"],
)
def test_a_call_that_holds_a_tracer_is_traced(hide):
    """Nothing is ever measured with tracers, so a call knows of each of them, wherever it hides."""
    assert during_trace(lambda x: resolve(Invocation("k", (hide(x),), {})).traced, jnp.zeros(3)) is True


def test_a_call_without_tracers_is_not_traced_even_while_jax_traces():
    """Constants and concrete arrays can be measured wherever they are met."""
    x = jnp.zeros(3)
    assert during_trace(lambda _: resolve(Invocation("k", (x, 1), {})).traced, x) is False


def test_traced_and_eager_calls_share_a_key_but_not_what_else_is_known():
    """They have one answer; only one of them can be measured."""
    memo, x = KeyMemo(), jnp.zeros(3)
    eager = memo.resolve(Invocation("k", (x,), {}), KERNEL)
    traced = during_trace(lambda y: memo.resolve(Invocation("k", (y,), {}), KERNEL), x)
    assert (eager.traced, traced.traced) == (False, True)
    assert eager.key == traced.key


# --- signature and key -------------------------------------------------------------------------


class _Sample:
    """An array with a name, so that a structure of them prints faithfully."""

    def __init__(self, name: str, array: Any) -> None:
        self.name, self.array = name, array

    def __repr__(self) -> str:
        return self.name


ARRAYS = [
    _Sample("f32[2]", jnp.zeros(2)),
    _Sample("f32[2]", jax.device_put(np.ones(2, np.float32))),
    _Sample("f32[2,1]", jnp.zeros((2, 1))),
    _Sample("bf16[2]", jnp.zeros(2, jnp.bfloat16)),
    _Sample("f32[]", jnp.zeros(())),
    _Sample("weak f32[]", jnp.asarray(0.0)),
]

atoms = st.one_of(
    st.sampled_from(ARRAYS),
    st.sampled_from([0, 1, True, False, 0.0, -0.0, 1.0, float("nan"), None, "", "a", "ab", "1", b"", b"a", ...]),
    st.sampled_from([1j, "|", "'", "(", "int", "END", "dict", "none"]),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
)
names = st.sampled_from(["a", "b", "", 1, True, 1.0, None, (1,), ("a", True)])
structures = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(names, inner, max_size=3),
        st.builds(ex.Pair, inner, inner),
        st.builds(ex.Node, inner, inner),
    ),
    max_leaves=6,
)
calls = st.tuples(
    st.lists(structures, max_size=3).map(tuple),
    st.dictionaries(st.sampled_from(["a", "b", "q"]), structures, max_size=2),
)


def _rebuilt(value: Any, leaf: Any, in_order: bool) -> Any:
    """Return a copy of the structure with `leaf` applied, dict entries in a canonical order if asked for."""
    again = functools.partial(_rebuilt, leaf=leaf, in_order=in_order)
    if type(value) is dict:
        items = sorted(value.items(), key=lambda item: repr(item[0])) if in_order else value.items()
        return {name: again(item) for name, item in items}
    if type(value) in (list, tuple):
        return type(value)(map(again, value))
    if type(value) is ex.Pair:
        return ex.Pair(*map(again, value))
    if type(value) is ex.Node:
        return ex.Node(again(value.left), again(value.right))
    return leaf(value)


def _arrays(value: Any, in_order: bool = False) -> Any:
    return _rebuilt(value, lambda leaf: leaf.array if type(leaf) is _Sample else leaf, in_order)


def _faithful(value: Any) -> str:
    """Print a structure so that two print alike exactly when they are the same call: the model to compare with."""
    if type(value) is dict:
        return "{" + ", ".join(sorted(f"{name!r}: {_faithful(item)}" for name, item in value.items())) + "}"
    if type(value) in (list, tuple, ex.Pair):
        return f"{type(value).__name__}<{', '.join(map(_faithful, value))}>"
    if type(value) is ex.Node:
        return f"Node<{_faithful(value.left)}, {_faithful(value.right)}>"
    return repr(value)


CONFUSABLE = [[1, True, 1.0, 1j, "1"], [0, False, 0.0, -0.0], ["", b"", None, ()], ["a", b"a", "ab"], ARRAYS]


@st.composite
def pairs(draw):
    """Two calls: unrelated, or the second made from the first by exchanging some leaves for ones that look alike."""
    one = draw(calls)
    if draw(st.booleans()):
        return one, draw(calls)
    random = draw(st.randoms(use_true_random=False))

    def twin(leaf: Any) -> Any:
        groups = [group for group in CONFUSABLE if any(leaf is member for member in group)]
        return random.choice(groups[0]) if groups and random.random() < 0.3 else leaf

    return one, tuple(_rebuilt(part, twin, random.random() < 0.5) for part in one)


@settings(deadline=None, max_examples=250, database=None)
@given(pairs())
def test_signature_and_key_tell_the_same_calls_apart(pair):
    """Equal signatures have equal keys, equal keys equal signatures up to dict order, and neither merges two calls."""
    one, other = pair

    def both(call: Any, in_order: bool) -> tuple[Any, str]:
        args, kwargs = (_arrays(part, in_order) for part in call)
        return sig(*args, **kwargs), key(*args, **kwargs)

    (one_sig, one_key), (other_sig, other_key) = both(one, False), both(other, False)
    assert one_sig != other_sig or one_key == other_key
    assert (one_key == other_key) == (_faithful(one) == _faithful(other))
    (one_sig, one_key2), (other_sig, other_key2) = both(one, True), both(other, True)
    assert (one_key, other_key) == (one_key2, other_key2)
    assert (one_key == other_key) == (one_sig == other_sig)


@settings(deadline=None, max_examples=100, database=None)
@given(calls, st.randoms(use_true_random=False))
def test_a_call_made_again_has_the_same_key_in_any_dict_order(call, random):
    """A key is a function of what was asked, not of the objects that asked."""

    def shuffled(value: Any) -> Any:
        if type(value) is dict:
            items = list(value.items())
            random.shuffle(items)
            return {name: shuffled(item) for name, item in items}
        if type(value) in (list, tuple):
            return type(value)(map(shuffled, value))
        return value

    args, kwargs = map(_arrays, call)
    again_args, again_kwargs = (shuffled(_arrays(part)) for part in call)
    assert key(*args, **kwargs) == key(*again_args, **again_kwargs)
    assert sig(*args, **kwargs) == sig(*map(_arrays, call[0]), **_arrays(call[1]))


def test_every_signature_is_hashable():
    """The signature indexes a dict, so whatever has a key has a hashable signature."""
    signatures = [signature(make(), ex.KERNEL) for make in ex.EXAMPLES.values()]
    assert len(set(signatures)) == len(ex.EXAMPLES)


# --- checksums ---------------------------------------------------------------------------------


class _Plain:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class _SlotBase:
    __slots__ = ("m",)

    def __init__(self, m: int) -> None:
        self.m = m


class _SlotDerived(_SlotBase):
    """Has a `__dict__`, and keeps its state elsewhere."""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["ab", "c"], ["a", "bc"]),
        (["ab"], ["a", "b"]),
        ([Blocks(1), Blocks(2)], [Blocks(2), Blocks(1)]),
        ([Blocks(1)], [Blocks(1), Blocks(1)]),
        ([Blocks(1)], [Blocks(True)]),
        ([Blocks(1)], [{"m": 1, "n": 1}]),
        ([{"m": 1}], [{"m": 1.0}]),
        ([{"m": 1}], [{"n": 1}]),
        ([{"m": {"k": [1]}}], [{"m": {"k": (1,)}}]),
        ([_Plain(m=1)], [_Plain(m=2)]),
        ([_Plain(m=1)], [_Plain(n=1)]),
        ([_Plain(m=_Plain(k=1))], [_Plain(m=_Plain(k=2))]),
        ([1, 2], [(1, 2)]),
        ([], [None]),
        ([10**5000], [10**5000 + 1]),
    ],
)
def test_other_candidates_have_another_checksum(one, other):
    """Candidates are kept apart from each other, in order, by type and value."""
    assert checksum(one, version="1") == checksum(list(one), version="1")
    assert checksum(one, version="1") != checksum(other, version="1")


def test_state_in_slots_counts_in_a_checksum():
    """A config that mixes slots and a dict is data in both, or refused."""

    def of(m: int) -> str:
        try:
            return checksum([_SlotDerived(m)], version="1")
        except UnstableKeyError:
            return f"refused {m}"

    assert of(1) != of(2)


@pytest.mark.parametrize("make", [lambda: Blocks(1), lambda: {"b": 1, "a": {"x", "y"}}, lambda: _Plain(b=1, a=[2])])
def test_equal_candidates_have_equal_checksums(make):
    """Dataclasses, dicts and plain objects made again are the same candidates."""
    assert checksum([make()], version="1") == checksum(iter([make()]), version="1")


def test_the_order_of_a_plain_objects_attributes_does_not_matter():
    """How a config was filled in is not what it says."""
    assert checksum([_Plain(a=1, b=2)], version="1") == checksum([_Plain(b=2, a=1)], version="1")


def test_version_and_objective_are_in_the_checksum():
    """An answer to another question is stale: each of the three parts is checked on its own."""
    sums = [
        checksum([Blocks(1)], version="1"),
        checksum([Blocks(1)], version="2"),
        checksum([Blocks(1)], version="1", objective="forward+backward"),
        checksum([], version="1"),
        checksum(["1"], version=""),
        checksum([], version="('1',)"),
    ]
    assert len(set(sums)) == len(sums)
    assert checksum([Blocks(1)], version="1", objective="forward") == sums[0]


@pytest.mark.parametrize(
    "candidate", [ex.Opaque(), _Plain(fn=ex.Opaque()), {"f": [ex.Opaque()]}, _Plain(l=threading.Lock())]
)
def test_an_opaque_callable_in_a_candidate_is_refused(candidate):
    """A config is data; what hides behaviour has no checksum, and the error says which candidate it was."""
    with pytest.raises(UnstableKeyError) as caught:
        checksum([Blocks(1), candidate], version="1")
    assert caught.value.argument.startswith("candidates[1]")


# --- CacheKey and what a call resolves to ------------------------------------------------------


def test_a_cache_key_is_a_plain_tuple():
    """A user may write the tuple wherever asel gives the key."""
    found = CacheKey("dev", "op@v1", "abc")
    assert found == ("dev", "op@v1", "abc")
    assert {found: 1}[("dev", "op@v1", "abc")] == 1
    assert (found.device, found.op_id, found.call_key) == found


def test_an_operation_carries_its_version():
    """What was tuned for another version of the kernel does not apply."""
    newer = Toy()
    newer.version = "2"
    assert [resolve(CALL, toy).key.op_id for toy in (Toy(), newer, Kernel("toy"))] == ["toy@v1", "toy@v2", "toy@v0"]
    assert resolve(CALL, newer).key.call_key == resolve(CALL, Toy()).key.call_key


def test_a_key_belongs_to_the_device_the_arguments_live_on():
    """The hardware in the key is the one the call would run on, in a pytree as at the top."""
    on_h100, on_a100 = (resolve(Invocation("toy", ({"q": [dev.array((8,))]},), {}), Toy()) for dev in (H100, A100))
    assert on_h100.key.device == device_fingerprint(H100)
    assert on_a100.key.device == device_fingerprint(A100)
    assert on_h100.device is H100
    assert on_h100.platform == "gpu"
    assert on_h100.key.call_key == on_a100.key.call_key
    assert resolve(Invocation("toy", (np.zeros(3),), {}), Toy()).key.device == device_fingerprint()


DEFAULT_DEVICE = """
    import jax, jax.numpy as jnp, numpy as np
    from asel import Invocation, Kernel
    from asel.keys import KeyMemo
    class Built(Kernel):
        op_id = "built"
        def key_builder(self, inv):
            return "constant"
    first, second = jax.devices()
    shape = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(second))
    for kernel in (Kernel("k"), Built()):
        memo = KeyMemo()
        ask = lambda *args: memo.resolve(Invocation("k", args, {}), kernel).device.id
        seen = [ask(np.zeros(3))]
        with jax.default_device(second):
            seen += [ask(np.zeros(3)), ask(jax.device_put(jnp.zeros(3), first))]
        seen += [ask(np.zeros(3)), ask(jax.device_put(jnp.zeros(3), second)), ask(shape)]
        print(*seen)
"""


def test_a_call_without_placed_arrays_belongs_to_the_default_device():
    """JAX would run it there; the memo notices when the default changes, with a key_builder or without."""
    two = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    answers = child("-c", textwrap.dedent(DEFAULT_DEVICE), **two).splitlines()
    assert answers == ["0 1 0 0 1 1"] * 2


class _Counting(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def heuristic_cfg(self, inv):
        self.asked.append("heuristic")
        return Blocks(1)

    def candidate_cfgs(self, inv):
        self.asked.append("candidates")
        return [Blocks(1), Blocks(2)]


def test_each_new_signature_is_worked_out_once():
    """Candidates are a pure function of the signature, so equal calls share one resolution."""
    memo, kernel = KeyMemo(), _Counting()
    first = memo.resolve(Invocation("toy", (jnp.zeros(3), 1), {"a": {"b": 1}}), kernel)
    again = memo.resolve(Invocation("toy", (jnp.ones(3), 1), {"a": {"b": 1}}), kernel)
    assert again is first
    assert kernel.asked == ["heuristic", "candidates"]
    other = memo.resolve(Invocation("toy", (jnp.zeros(4), 1), {"a": {"b": 1}}), kernel)
    assert other is not first
    assert kernel.asked == ["heuristic", "candidates"] * 2


def test_arrays_of_one_placement_are_one_call_whoever_made_them():
    """JAX makes a sharding object for each source of arrays; equal ones are equal, in any mixture."""
    fresh, doubled = jnp.zeros(2), jax.jit(lambda x: x * 2)(jnp.zeros(2))
    moved = jax.device_put(np.zeros(2, np.float32), jax.devices()[0])
    memo, kernel = KeyMemo(), _Counting()
    for args in itertools.product([fresh, doubled, moved], repeat=3):
        memo.resolve(Invocation("toy", (*args[:2], {"v": args[2]}), {}), kernel)
    assert kernel.asked == ["heuristic", "candidates"]


def test_a_kernel_made_per_call_is_still_right():
    """A new kernel at an old one's address never gets the old one's candidates."""
    memo = KeyMemo(max_entries=4)
    for n in range(2, 50):
        fresh = Toy()
        fresh.candidates = [Blocks(n), Blocks(n + 1)]
        assert memo.resolve(CALL, fresh).candidates == (Blocks(n), Blocks(n + 1), Blocks(1))
        del fresh


def test_the_memo_is_bounded():
    """However many kernels and signatures pass by, only so many are kept alive."""
    memo, alive = KeyMemo(max_entries=8), weakref.WeakSet()
    for n in range(100):
        kernel = Toy()
        alive.add(kernel)
        memo.resolve(Invocation("toy", (n,), {}), kernel)
        del kernel
    gc.collect()
    assert 1 <= len(alive) <= 8


@pytest.mark.parametrize("bound", [2, 3, 8])
def test_a_memo_keeps_what_is_asked_for_and_forgets_the_rest(bound):
    """An entry in use survives any number of newcomers; the memo never outgrows its bound."""
    memo: Memo[str] = Memo(bound)
    for n in range(10 * bound):
        memo.put(n, str(n))
        assert memo.get(n) == str(n)
        assert len(memo) <= bound
    kept: Memo[str] = Memo(8)
    kept.put("mine", "yes")
    for n in range(100):
        kept.put(n, str(n))
        assert kept.get("mine") == "yes"
    assert kept.get(0) is None


# --- heuristics and candidates -----------------------------------------------------------------


def _kernel(**methods: Any) -> Any:
    return type("Made", (Toy,), methods)()


def _raises(error: Exception) -> Any:
    def method(self, inv):
        raise error

    return method


@pytest.mark.parametrize(
    ("heuristic", "said"),
    [
        (_raises(NotImplementedError("no")), "kernel has no heuristic"),
        (Kernel.heuristic_cfg, "kernel has no heuristic"),
        (None, "kernel has no heuristic"),
        (_raises(ZeroDivisionError("by zero")), "heuristic_cfg raised ZeroDivisionError: by zero"),
        (lambda self, inv: None, "heuristic_cfg returned None"),
    ],
    ids=["NotImplementedError", "base stub", "None", "raises", "returns None"],
)
def test_a_kernel_without_a_guess_says_why(heuristic, said):
    """A missing or failing heuristic makes its tier decline; the candidates are unharmed."""
    found = resolve(CALL, _kernel(heuristic_cfg=heuristic))
    assert (found.heuristic, found.no_heuristic, found.incumbent) == (None, said, None)
    assert found.candidates == (Blocks(1), Blocks(2), Blocks(3))


@pytest.mark.parametrize(
    ("candidates", "said"),
    [
        (_raises(NotImplementedError("no")), "kernel has no candidates"),
        (_raises(KeyError("x")), "candidate_cfgs raised KeyError: 'x'"),
        (lambda self, inv: [], "candidate_cfgs returned no candidates"),
        (lambda self, inv: None, "candidate_cfgs raised TypeError: 'NoneType' object is not iterable"),
    ],
    ids=["NotImplementedError", "raises", "empty", "returns None"],
)
def test_a_kernel_without_candidates_says_why(candidates, said):
    """Missing or failing candidates mean no tune; the heuristic still answers."""
    found = resolve(CALL, _kernel(candidate_cfgs=candidates))
    assert (found.candidates, found.no_candidates, found.incumbent) == ((), said, None)
    assert found.heuristic == Blocks(1)


def test_a_kernel_with_neither_has_neither():
    """A kernel that only runs is still a kernel; both tiers have something to say."""
    found = resolve(CALL, types.SimpleNamespace(op_id="bare", run=lambda x, cfg: x))
    assert (found.heuristic, found.candidates) == (None, ())
    assert "no heuristic" in found.no_heuristic
    assert "no candidate" in found.no_candidates


def test_the_default_candidate_is_the_heuristic():
    """A kernel with nothing but a guess has that as its only candidate."""
    found = resolve(CALL, _kernel(candidate_cfgs=Kernel.candidate_cfgs))
    assert (found.candidates, found.incumbent) == ((Blocks(1),), 0)


@pytest.mark.parametrize(
    ("listed", "guess", "expected", "incumbent"),
    [
        ([Blocks(1), Blocks(2)], Blocks(2), [Blocks(1), Blocks(2)], 1),
        ([Blocks(1), Blocks(2)], Blocks(3), [Blocks(1), Blocks(2), Blocks(3)], 2),
        ([Blocks(1), Blocks(1), Blocks(2), Blocks(1)], Blocks(2), [Blocks(1), Blocks(2)], 1),
        ([{"m": 1}, {"m": 1.0}, {"m": True}, {"m": 1}], {"m": True}, [{"m": 1}, {"m": 1.0}, {"m": True}], 2),
        ([{"a": 1, "b": 2}, {"b": 2, "a": 1}], {"b": 2, "a": 1}, [{"a": 1, "b": 2}], 0),
        ([0, 1], 0, [0, 1], 0),
        (["", "x"], "", ["", "x"], 0),
        ([float("nan")], float("nan"), [float("nan")], 0),
    ],
)
def test_candidates_are_distinct_and_hold_the_incumbent(listed, guess, expected, incumbent):
    """No candidate is timed twice, none is lost, and the default always competes, in the kernel's own order."""
    found = resolve(CALL, _kernel(candidate_cfgs=lambda self, inv: iter(listed), heuristic_cfg=lambda self, inv: guess))
    assert list(map(repr, found.candidates)) == list(map(repr, expected))
    assert found.incumbent == incumbent


def test_duplicates_do_not_change_the_checksum():
    """What a tune chose among is the distinct candidates."""
    once = resolve(CALL, _kernel(candidate_cfgs=lambda self, inv: [Blocks(1), Blocks(2)]))
    twice = resolve(CALL, _kernel(candidate_cfgs=lambda self, inv: [Blocks(1), Blocks(1), Blocks(2)]))
    assert once.checksum("forward") == twice.checksum("forward") == checksum([Blocks(1), Blocks(2)], version="1")
    assert once.checksum("forward") != once.checksum("forward+backward")


def test_an_opaque_candidate_is_refused_where_it_enters():
    """The error names the candidate, since no store could hold the answer."""
    with pytest.raises(UnstableKeyError) as caught:
        resolve(CALL, _kernel(candidate_cfgs=lambda self, inv: [Blocks(1), ex.Opaque()]))
    assert caught.value.argument == "candidates[1]"


# --- key builders ------------------------------------------------------------------------------


def _by_rank(inv):
    return ("rank", len(inv.args[0].shape))


class _AsFunction(Toy):
    key_builder = _by_rank


class _AsLambda(Toy):
    key_builder = lambda inv: ("rank", len(inv.args[0].shape))  # noqa: E731  # the spelling under test


class _AsMethod(Toy):
    def key_builder(self, inv):
        assert isinstance(self, _AsMethod)
        return _by_rank(inv)


class _AsStaticMethod(Toy):
    @staticmethod
    def key_builder(inv):
        return _by_rank(inv)


class _AsClassMethod(Toy):
    @classmethod
    def key_builder(cls, inv):
        assert cls is _AsClassMethod
        return _by_rank(inv)


class _AsBody(Toy):
    def key_builder(inv):  # noqa: N805  # takes the invocation and nothing else
        return _by_rank(inv)


def _as_attribute() -> Toy:
    toy = Toy()
    toy.key_builder = _by_rank
    return toy


def _as_partial() -> Toy:
    toy = Toy()
    toy.key_builder = functools.partial(lambda prefix, inv: _by_rank(inv), "rank")
    return toy


@kernel(op_id="toy", configs=[Blocks(1)], key_builder=_by_rank)
def _as_option(x, *, cfg):
    return x


BUILDERS = [_AsFunction, _AsLambda, _AsMethod, _AsStaticMethod, _AsClassMethod, _AsBody, _as_attribute, _as_partial]


@pytest.mark.parametrize("make", [*BUILDERS, lambda: _as_option], ids=lambda make: make.__name__.strip("_<>"))
def test_a_key_builder_may_be_written_any_way(make):
    """As an attribute, a function or lambda in the class body, or a method, it replaces the signature."""
    memo, toy = KeyMemo(), make()

    def named(*shape: int) -> Any:
        return memo.resolve(Invocation("toy", (H100.array(shape),), {"mask": ex.Opaque()}), toy)

    assert named(8) is named(16)
    assert named(8).key != named(8, 8).key
    assert named(8).key.call_key == call_key(Invocation("toy", (H100.array((4,)),), {}), toy)
    assert named(8).key.device == device_fingerprint(H100)


def _building(result: Any) -> Toy:
    toy = Toy()
    toy.key_builder = lambda inv: result
    return toy


def test_text_from_a_key_builder_is_the_key_itself():
    """A user who names calls finds those names in the store."""
    assert call_key(CALL, _building("decode/8k")) == "decode/8k"
    assert resolve(CALL, _building("decode/8k")).key.call_key == "decode/8k"


def test_structured_values_from_a_key_builder_are_digested():
    """Anything with a stable identity will do, told apart by type and value."""
    built = [1, True, 1.0, (1,), [1], {"a": 1}, ex.Window(1), jnp.float32, {"x", "y"}, 0, False, ""]
    assert len({call_key(CALL, _building(value)) for value in built}) == len(built)
    assert call_key(CALL, _building({"a": 1, "b": 2})) == call_key(CALL, _building({"b": 2, "a": 1}))


def test_a_key_builder_that_forgets_to_return_is_a_clear_error():
    """None names nothing: every call of the kernel would share one answer."""
    for ask in (resolve, call_key):
        with pytest.raises(InvalidRequestError, match="key_builder returned None for 'toy'"):
            ask(CALL, _building(None))


def test_an_opaque_value_from_a_key_builder_is_refused():
    """A key builder answers for stability, and is held to it."""
    with pytest.raises(UnstableKeyError) as caught:
        resolve(CALL, _building([1, ex.Opaque()]))
    assert caught.value.argument == "key_builder(...)[1]"


@pytest.mark.parametrize(
    "argument",
    [
        object(),
        ex.Opaque(),
        threading.Lock(),
        np.array([object()], dtype=object),
        {1: 0, "a": object()},
        {ex.Opaque(): 1},
    ],
    ids=["object", "callable", "lock", "object array", "keys of several types", "opaque key"],
)
def test_with_a_key_builder_any_argument_is_accepted(argument):
    """The builder says what matters; what does not is never looked at."""
    toy = _building("constant")
    assert resolve(Invocation("toy", (argument,), {"again": [argument]}), toy).key.call_key == "constant"


def test_with_a_key_builder_a_shape_on_an_abstract_mesh_is_accepted():
    """A shape that was given no devices yet belongs to the default one."""
    shape = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(_abstract(), P("x")))
    assert resolve(Invocation("toy", (shape,), {}), _building("constant")).key == (
        device_fingerprint(),
        "toy@v1",
        "constant",
    )


def test_with_a_key_builder_tracers_and_devices_are_still_noticed():
    """What the key says is the builder's; whether a call can be measured, and where, is not."""
    memo, toy = KeyMemo(), _building("constant")
    on_h100 = memo.resolve(Invocation("toy", ([H100.array((8,))],), {}), toy)
    on_a100 = memo.resolve(Invocation("toy", (), {"q": A100.array((8,))}), toy)
    assert (on_h100.device, on_a100.device) == (H100, A100)
    traced = during_trace(lambda x: memo.resolve(Invocation("toy", ({"q": x},), {}), toy), jnp.zeros(3))
    assert (on_h100.traced, traced.traced) == (False, True)


def test_with_a_key_builder_mapped_calls_keep_their_own_candidates():
    """A kernel may offer other candidates under shard_map; a plain call of the same key does not change them."""

    class Mapped(Toy):
        def key_builder(self, inv):
            return "constant"

        def candidate_cfgs_shard_map(self, inv):
            return [Blocks(1), Blocks(9)]

    memo, toy, mesh = KeyMemo(), Mapped(), Mesh(np.array(jax.devices()[:1]), ("x",))
    plain = Invocation("toy", (1,), {})
    mapped = Invocation("toy", (1,), {}, method="shard_map", mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    assert memo.resolve(plain, toy).candidates == (Blocks(1), Blocks(2), Blocks(3))
    assert memo.resolve(mapped, toy).candidates == (Blocks(1), Blocks(9))


# --- buckets in keys ---------------------------------------------------------------------------


class _Bucketed(Toy):
    buckets = {"x.shape[0]": powers_of_two(8, 64)}


def _shaped(rows: int, columns: int = 4) -> Invocation[Any, Any]:
    return Invocation("toy", (jax.ShapeDtypeStruct((rows, columns), jnp.float32),), {})


def test_calls_in_one_bucket_share_a_key_and_those_in_two_do_not():
    """A declared range of sizes has one answer; the other dimensions still count."""
    toy = _Bucketed()
    keys = {rows: call_key(_shaped(rows), toy) for rows in range(8, 65)}
    assert keys[9] == keys[16]
    assert keys[16] != keys[17]
    assert keys[17] == keys[32]
    assert len(set(keys.values())) == 4
    assert call_key(_shaped(9, 5), toy) != keys[9]
    assert call_key(_shaped(16), Toy()) != keys[16]


def test_calls_outside_the_buckets_have_keys_of_their_own():
    """Beyond the declared range nothing is assumed: each size stands for itself, and the call says so."""
    memo, toy = KeyMemo(), _Bucketed()
    found = {rows: memo.resolve(_shaped(rows), toy) for rows in (1, 7, 8, 64, 65, 66)}
    assert len({known.key.call_key for known in found.values()}) == len(found)
    assert [known.outside for known in found.values()] == [
        [("x.shape[0]", 1, 8, 64)],
        [("x.shape[0]", 7, 8, 64)],
        [],
        [],
        [("x.shape[0]", 65, 8, 64)],
        [("x.shape[0]", 66, 8, 64)],
    ]


def test_a_bucket_applies_to_tracers_numpy_arrays_and_fakes_alike():
    """However an array is given, its size is coarsened."""
    toy = _Bucketed()

    def named(x: Any) -> str:
        return call_key(Invocation("toy", (x,), {}), toy)

    expected = named(jnp.zeros((16, 4)))
    assert named(np.zeros((12, 4), np.float32)) == expected
    assert during_trace(named, jnp.zeros((11, 4))) == expected
    assert named(H100.array((10, 4))) == named(H100.array((16, 4)))
