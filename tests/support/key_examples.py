"""Calls whose keys must be equal in every process, so nothing here may depend on the process."""

from __future__ import annotations

import collections
import dataclasses
import decimal
import enum
import functools
import pathlib
import types
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pydantic
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from asel import Invocation, Kernel
from asel.kernels.candidates import checksum
from asel.kernels.keys import call_key

P = PartitionSpec
KERNEL: Kernel[Any, Any] = Kernel("example")


def call(*args: Any, **kwargs: Any) -> Invocation[Any, Any]:
    return Invocation("example", args, kwargs)


def captured(value: Any) -> Callable[[], Any]:
    return lambda: value


# --- importable definitions: what a module of a user would hold -------------------------------


def causal(i, j):
    return i >= j


def window(size, *, words=frozenset({"alpha", "beta", "gamma", "delta"})):
    def mask(i, j):
        return abs(i - j) < size and "alpha" in {"alpha", "beta", "gamma", "delta"} and bool(words)

    return mask


def logged(fn):
    @functools.wraps(fn)
    def wrapper(*args):
        return fn(*args)

    return wrapper


@logged
def decorated(i, j):
    return i == j


def countdown():
    def down(n):
        return down(n - 1) if n else 0

    return down


def ping_pong(stop):
    def ping(n):
        return stop if n == 0 else pong(n - 1)

    def pong(n):
        return ping(n)

    return ping


@functools.lru_cache
def cached(n):
    return n + 1


@jax.jit
def jitted(x):
    return x * 2


@jax.custom_vjp
def with_vjp(x):
    return x


with_vjp.defvjp(lambda x: (x, None), lambda _, g: (g * 2,))


@jax.custom_jvp
def with_jvp(x):
    return x


with_jvp.defjvp(lambda primals, tangents: (primals[0], tangents[0] * 2))


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass(frozen=True)
class Window:
    size: Any
    tags: frozenset[str] = frozenset({"left", "right", "up", "down"})

    def __call__(self, i, j):
        return abs(i - j) < self.size

    def reach(self):
        return self.size


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    value: Any


class Pair(NamedTuple):
    left: Any
    right: Any


class Settings(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    value: Any = None
    names: set[str] = {"one", "two", "three"}


@attrs.frozen
class Attributes:
    value: Any


@jax.tree_util.register_pytree_node_class
class Node:
    """A custom pytree node: two children and one static field."""

    def __init__(self, left, right, static=None):
        self.left, self.right, self.static = left, right, static

    def tree_flatten(self):
        return (self.left, self.right), self.static

    @classmethod
    def tree_unflatten(cls, static, children):
        return cls(*children, static)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weights"], meta_fields=["mode"])
@dataclasses.dataclass
class Layer:
    weights: Any
    mode: Any = "train"


@jax.tree_util.register_static
class Static:
    """A leafless node that compares by value, without being a dataclass."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, Static) and self.value == other.value

    def __hash__(self):
        return hash(self.value)


def block_class(size):
    class Constants:
        block = size

    return Constants


class Opaque:
    """An object whose behaviour may hide anywhere."""

    def __init__(self, state=0):
        self.state = state

    def __call__(self, i, j):
        return i - j < self.state

    def method(self):
        return self.state


def mesh_of(*shape: int, names: str = "xyz", axis_type: AxisType = AxisType.Auto) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, tuple(names[: len(shape)]), axis_types=(axis_type,) * len(shape))


# --- the calls: each made anew in the process that asks ----------------------------------------

WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta")

EXAMPLES: dict[str, Callable[[], Invocation[Any, Any]]] = {
    "numbers": lambda: call(1, True, 1.0, 1j, -0.0, float("nan"), None, ..., 2**70),
    "text": lambda: call("a|b", b"a|b", "é", "\ud800", bytearray(b"x")),
    "nested dict": lambda: call({"b": {"y": 1, "x": [2, {3, 4}]}, "a": ()}),
    "other keys": lambda: call({1: "int", True + 1: "two", 1.5: "float", (1, "t"): "tuple", None: "none"}),
    "set of text": lambda: call(set(WORDS)),
    "frozenset of text": lambda: call(frozenset(WORDS)),
    "set of sets": lambda: call({frozenset(WORDS[:3]), frozenset(WORDS[2:])}),
    "set of enums": lambda: call({Colour.RED, Colour.BLUE}),
    "set as dict key": lambda: call({frozenset(WORDS): 1}),
    "function": lambda: call(mask_fn=causal),
    "closure": lambda: call(mask_fn=window(128)),
    "closure over a set": lambda: call(mask_fn=window(set(WORDS))),
    "lambda": lambda: call(mask_fn=lambda i, j: i in {"alpha", "beta", "gamma"} or j),
    "decorated function": lambda: call(mask_fn=decorated),
    "recursive closure": lambda: call(countdown()),
    "mutually recursive closures": lambda: call(ping_pong({"alpha", "beta"})),
    "partial": lambda: call(functools.partial(window, 3, words=frozenset(WORDS))),
    "jax partial": lambda: call(jax.tree_util.Partial(causal, jnp.zeros(2), j=1)),
    "lru_cache": lambda: call(cached),
    "bound method": lambda: call(Window(3).reach),
    "builtins": lambda: call(len, [3].count, dict.fromkeys, int, list[int]),
    "ufunc": lambda: call(np.add),
    "jitted": lambda: call(jitted, jnp.sum, jax.nn.relu, jnp.exp),
    "custom_vjp": lambda: call(with_vjp),
    "custom_jvp": lambda: call(with_jvp),
    "grad": lambda: call(jax.grad(jitted)),
    "module": lambda: call(np),
    "dataclass": lambda: call(Window(3)),
    "slotted dataclass": lambda: call(Slotted({"a", "b", "c"})),
    "dataclass in a closure": lambda: call(window(Window(3))),
    "attrs": lambda: call(Attributes({"a", "b", "c"})),
    "pydantic": lambda: call(Settings(value={"z": 1, "a": {"x", "y"}})),
    "enum": lambda: call(Colour.RED, Level.LOW, Access.READ | Access.WRITE, Access(0)),
    "dtypes": lambda: call(jnp.float32, jnp.bfloat16, np.dtype("int8"), np.float32, jnp.dtype(jnp.float8_e4m3fn)),
    "structured dtype": lambda: call(np.dtype([("a", "f4"), ("b", "i8")])),
    "numpy scalars": lambda: call(np.float32(1), np.int8(1), np.bool_(True), np.str_("a"), np.datetime64("2024-01-01")),
    "standard library": lambda: call(
        decimal.Decimal("1.0"),
        uuid.UUID(int=1),
        pathlib.PurePosixPath("/a"),
        slice(1, None, 2),
        range(3),
    ),
    "arrays": lambda: call(jnp.zeros((2, 3)), np.zeros(3, np.int64), jax.ShapeDtypeStruct((4,), jnp.bfloat16)),
    "small floats": lambda: call(jnp.zeros(2, jnp.float8_e5m2), np.zeros(2, jnp.int4)),
    "array in a closure": lambda: call(window(np.arange(6).reshape(2, 3))),
    "random keys": lambda: call(jax.random.key(0), jax.random.PRNGKey(0), window(jax.random.key(3))),
    "containers": lambda: call(
        Pair(1, jnp.zeros(2)),
        collections.OrderedDict(b=1, a=2),
        collections.defaultdict(list, b=1, a=2),
        collections.Counter("abba"),
        types.MappingProxyType({"b": 1, "a": 2}),
    ),
    "registered nodes": lambda: call(Node(jnp.zeros(2), 1, {"s", "t"}), Layer(np.zeros(2), {"s", "t"})),
    "mesh": lambda: call(mesh_of(1)),
    "specs": lambda: call(P("x"), P(None, ("x", "y")), P()),
    "shardings": lambda: call(NamedSharding(mesh_of(1), P("x")), SingleDeviceSharding(jax.devices()[0])),
    "device": lambda: call(jax.devices()[0]),
    "shard_map": lambda: Invocation(
        "example",
        (jnp.zeros(8),),
        {},
        batch_axes={"q": 0, "k": 1, "a": 2},
        method="shard_map",
        mesh=mesh_of(1),
        in_specs=(P("x"),),
        out_specs=P("x"),
    ),
}

CHECKSUMS: dict[str, Callable[[], list[Any]]] = {
    "dataclasses": lambda: [Window(1), Window(2)],
    "dicts": lambda: [{"b": 1, "a": {"x", "y", "z"}}],
    "plain objects": lambda: [types.SimpleNamespace(m=1), collections.Counter("ab")],
}


def _placed(*shape: int, spec: P, names: str = "xyz", reverse: bool = False, offset: int = 0) -> Invocation[Any, Any]:
    count = int(np.prod(shape))
    devices = jax.devices()[offset : offset + count]
    mesh = Mesh(np.array(devices[::-1] if reverse else devices).reshape(shape), tuple(names[: len(shape)]))
    return call(jax.device_put(jnp.zeros((8, 8)), NamedSharding(mesh, spec)))


def _explicit(spec: P, *, traced: bool = False, shape: tuple[int, ...] = (8,)) -> str:
    mesh = mesh_of(*shape, axis_type=AxisType.Explicit)
    x = jax.device_put(jnp.zeros((8, 8)), NamedSharding(mesh, spec))
    if not traced:
        return call_key(call(x), KERNEL)
    found = []
    jax.jit(lambda y: found.append(call_key(call(y), KERNEL)))(x)
    return found[0]


# Only where there are eight devices.
SHARDED: dict[str, Callable[[], Any]] = {
    "device 0": lambda: call(jax.device_put(jnp.zeros((8, 8)), jax.devices()[0])),
    "device 5": lambda: call(jax.device_put(jnp.zeros((8, 8)), jax.devices()[5])),
    "mesh 8": lambda: _placed(8, spec=P("x")),
    "mesh 8 again": lambda: _placed(8, spec=P("x")),
    "mesh 4": lambda: _placed(4, spec=P("x")),
    "mesh 4 on the upper half": lambda: _placed(4, spec=P("x"), offset=4),
    "mesh 4x2": lambda: _placed(4, 2, spec=P("x")),
    "mesh 2x4": lambda: _placed(2, 4, spec=P("x")),
    "mesh 2x4 both axes": lambda: _placed(2, 4, spec=P("x", "y")),
    "mesh 2x4 second axis": lambda: _placed(2, 4, spec=P(None, "x")),
    "mesh 2x4 joined axes": lambda: _placed(2, 4, spec=P(("x", "y"))),
    "replicated": lambda: _placed(8, spec=P()),
    "other axis name": lambda: _placed(8, spec=P("a"), names="a"),
    "other device order": lambda: _placed(8, spec=P("x"), reverse=True),
    "explicit": lambda: _explicit(P("x")),
    "explicit second axis": lambda: _explicit(P(None, "x")),
    "explicit 2x4": lambda: _explicit(P("x"), shape=(2, 4)),
    "explicit traced": lambda: _explicit(P("x"), traced=True),
    "explicit traced second axis": lambda: _explicit(P(None, "x"), traced=True),
    "static mesh 8": lambda: call(mesh_of(8)),
    "static mesh 2x4": lambda: call(mesh_of(2, 4)),
    "static mesh 4x2": lambda: call(mesh_of(4, 2)),
    "static mesh other names": lambda: call(mesh_of(8, names="a")),
    "static mesh explicit": lambda: call(mesh_of(8, axis_type=AxisType.Explicit)),
    "shape on mesh 8": lambda: call(
        jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh_of(8), P("x")))
    ),
}


def _key(make: Callable[[], Any]) -> str:
    try:
        made = make()
        return made if isinstance(made, str) else call_key(made, KERNEL)
    except Exception as error:  # said instead of the key, so that one failure hides no other
        return f"error: {type(error).__name__}: {error}"


def keys_of(examples: dict[str, Callable[[], Any]]) -> dict[str, str]:
    return {name: _key(make) for name, make in examples.items()}


def checksums() -> dict[str, str]:
    return {name: checksum(make(), version="1") for name, make in CHECKSUMS.items()}
