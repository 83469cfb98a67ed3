"""From a call to the name of its answer.

`signature` runs on every call and only has to be cheap and faithful; `encode` runs once for each
new signature and is the same in every process. Both see the arguments the same way: arrays count
by shape, dtype, weak type and sharding; everything else is a constant and counts by type and value.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np

from asel.buckets import Bucketing, OutOfRange, powers_of_two
from asel.canonical import Canon, aval_form, canonical, digest
from asel.devices import default_device, device_fingerprint, platform_of
from asel.errors import InvalidRequestError, UnstableKeyError
from asel.kernel import Cfg, key_builder_of, variant

__all__ = [
    "CacheKey",
    "KeyMemo",
    "Objective",
    "Resolved",
    "call_key",
    "checksum",
    "device_fingerprint",
    "powers_of_two",
    "signature",
]

Objective = Literal["forward", "forward+backward"]
T = TypeVar("T")


class CacheKey(NamedTuple):
    """What an answer is kept under; equal to the plain tuple."""

    device: str
    op_id: str
    call_key: str


def checksum(candidates: Iterable[Any], *, version: str, objective: Objective = "forward") -> str:
    """Return the digest of everything a tune chose among: ordered candidates, version, objective."""
    forms = tuple(canonical(cfg, f"candidates[{i}]", see_attributes=True) for i, cfg in enumerate(candidates))
    return digest(("checksum", forms, version, objective))


# ---------------------------------------------------------------------------------------------
# The signature: one flat tuple. Every value is a run of tokens whose first tells how many follow,
# so no two different calls give the same run.


class _Mark(enum.Enum):
    TUPLE = enum.auto()
    LIST = enum.auto()
    DICT = enum.auto()
    NODE = enum.auto()
    END = enum.auto()
    TRACED = enum.auto()
    NUMPY = enum.auto()
    SHAPE = enum.auto()
    DUCK = enum.auto()
    CALL = enum.auto()
    # Enum members hash through a Python method; identity is what we mean.
    __hash__ = object.__hash__


_TUPLE, _LIST, _DICT, _END = _Mark.TUPLE, _Mark.LIST, _Mark.DICT, _Mark.END
_ATOMS = frozenset({int, bool, str, bytes, type(None)})


class _Jax:
    """JAX's types and settings, learnt at the first call: importing asel does not import JAX."""

    known = False
    array: Any = None
    x64: Any = None
    matmul_precision: Any = None
    default_device: Any = None

    @classmethod
    def learn(cls) -> None:
        import jax
        import jax.numpy as jnp

        cls.array = type(jnp.zeros(()))
        # The settings are context managers that know their value; to ask jax.config costs three times as much.
        cls.x64, cls.matmul_precision = jax.enable_x64, jax.default_matmul_precision
        cls.default_device = jax.default_device
        cls.known = True


def signature(inv: Any, kernel: Any) -> tuple[Any, ...]:
    """Return a hashable tuple that differs wherever the answer may.

    Raises:
        UnstableKeyError: an argument has no stable identity.
    """
    if not _Jax.known:
        _Jax.learn()
    array = _Jax.array
    tokens: list[Any] = [id(kernel)]
    append = tokens.append
    # An array is its aval, and its sharding where that is not the array's before: hashing one costs more than all else.
    placed = None
    for value in inv.args:
        if type(value) is array:
            append(value.aval)
            sharding = value.sharding
            if sharding is not placed:
                append(sharding)
                placed = sharding
        else:
            placed = _append(value, tokens, placed)
    if inv.kwargs:
        append(_DICT)
        for name, value in inv.kwargs.items():
            append(name)
            placed = _append(value, tokens, placed)
    append(_Jax.x64.value)
    append(_Jax.matmul_precision.value)
    if placed is None:
        append(_Jax.default_device.value)
    if inv.method is not None or inv.mesh is not None or inv.in_specs is not None or inv.batch_axes is not None:
        append(_Mark.CALL)
        append(_call_form(inv))
    return tuple(tokens)


def _append(value: Any, tokens: list[Any], placed: Any) -> Any:
    """Append the tokens of one value; return the sharding of the last array so far."""
    kind = type(value)
    if kind is _Jax.array:
        tokens.append(value.aval)
        sharding = value.sharding
        if sharding is not placed:
            tokens.append(sharding)
        return sharding
    if kind in _ATOMS:
        tokens.append(kind)
        tokens.append(value)
        return placed
    if kind is dict:
        tokens.append(_DICT)
        for key, item in value.items():
            tokens.append(key if type(key) is str else canonical(key))
            placed = _append(item, tokens, placed)
        tokens.append(_END)
        return placed
    if kind is tuple or kind is list:
        tokens.append(_TUPLE if kind is tuple else _LIST)
        for item in value:
            placed = _append(item, tokens, placed)
        tokens.append(_END)
        return placed
    if kind is float:
        tokens.append(float)
        tokens.append(value.hex())  # 0.0 and -0.0 differ, and nan is itself
        return placed
    return _append_other(value, tokens, placed)


def _append_other(value: Any, tokens: list[Any], placed: Any) -> Any:
    import jax

    if isinstance(value, jax.core.Tracer):
        tokens += (_Mark.TRACED, value.aval)
        return placed
    if isinstance(value, jax.Array):
        tokens += (value.aval, value.sharding)
        return value.sharding
    if isinstance(value, jax.ShapeDtypeStruct):
        tokens += (_Mark.SHAPE, value.shape, value.dtype, value.weak_type, value.sharding)
        return placed if value.sharding is None else value.sharding
    if _is_numeric(value):
        tokens += (_Mark.NUMPY, value.shape, value.dtype)
        return placed
    if _is_duck_array(value):
        devices = frozenset(value.devices())
        tokens += (_Mark.DUCK, tuple(value.shape), str(value.dtype), devices)
        return devices
    if (node := _flatten_node(value)) is not None:
        children, aux = node
        tokens += (_Mark.NODE, type(value), canonical(aux))
        for child in children:
            placed = _append(child, tokens, placed)
        tokens.append(_END)
        return placed
    tokens.append(canonical(value))
    return placed


def _is_numeric(value: Any) -> bool:
    # An array JAX could take as an argument. Arrays of objects or text are constants.
    return isinstance(value, np.ndarray) and (value.dtype.kind in "biufc" or value.dtype.kind == "V")


def _is_duck_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and callable(getattr(value, "devices", None))


def _flatten_node(value: Any) -> tuple[tuple[Any, ...], Any] | None:
    import jax

    flat = jax.tree_util.default_registry.flatten_one_level(value)
    return None if flat is None else (tuple(flat[0]), flat[1])


def _call_form(inv: Any) -> Canon:
    return (
        "call",
        inv.method,
        canonical(inv.mesh, "mesh"),
        canonical(inv.in_specs, "in_specs"),
        canonical(inv.out_specs, "out_specs"),
        int(inv.check_vma),
        canonical(inv.batch_axes, "batch_axes"),
    )


# ---------------------------------------------------------------------------------------------
# The encoding: the same facts, with paths, in a form that every process agrees on.


class _Encoder:
    def __init__(self, bucketing: Bucketing | None) -> None:
        self._bucketing = bucketing
        self.device: Any = None
        self.traced = False
        self.outside: list[OutOfRange] = []

    def call(self, inv: Any) -> Canon:
        args = tuple(self.value(v, f"args[{i}]") for i, v in enumerate(inv.args))
        kwargs = self.pairs(inv.kwargs, "kwargs")
        settings = (int(_Jax.x64.value), _Jax.matmul_precision.value)
        return (args, kwargs, settings, _call_form(inv))

    def value(self, value: Any, path: str) -> Canon:
        import jax

        if isinstance(value, jax.core.Tracer):
            self.traced = True
            return self.array(path, *aval_form(value.aval))
        if isinstance(value, jax.Array):
            shape, dtype, weak, _ = aval_form(value.aval)
            return self.array(path, shape, dtype, weak, self.placement(value.sharding, path))
        if isinstance(value, jax.ShapeDtypeStruct):
            dtype = str(jax.dtypes.canonicalize_dtype(value.dtype, allow_extended_dtype=True))
            placement = () if value.sharding is None else self.placement(value.sharding, path)
            return self.array(path, value.shape, dtype, int(value.weak_type), placement)
        if _is_numeric(value):
            return self.array(path, value.shape, str(jax.dtypes.canonicalize_dtype(value.dtype)), 0, ())
        if _is_duck_array(value):
            devices = sorted(value.devices(), key=lambda d: getattr(d, "id", 0))
            self.device = self.device or devices[0]
            return self.array(path, tuple(value.shape), str(value.dtype), 0, (len(devices),))
        if type(value) is dict:
            return ("dict", self.pairs(value, path))
        if type(value) in (tuple, list):
            items = tuple(self.value(item, f"{path}[{i}]") for i, item in enumerate(value))
            return (type(value).__name__, items)
        if value is not None and (node := _flatten_node(value)) is not None:
            children, aux = node
            names = getattr(value, "_fields", None)
            paths = [f".{name}" for name in names] if names else [f"[{i}]" for i in range(len(children))]
            inner = tuple(self.value(child, path + step) for child, step in zip(children, paths, strict=True))
            return ("node", canonical(type(value)), canonical(aux, f"{path} (static fields)"), inner)
        return ("constant", canonical(value, path))

    def pairs(self, mapping: Mapping[Any, Any], path: str) -> Canon:
        encoded = (
            (canonical(key, f"{path} key"), self.value(item, f"{path}[{key!r}]")) for key, item in mapping.items()
        )
        return tuple(sorted(encoded, key=repr))

    def array(self, path: str, shape: tuple[int, ...], dtype: str, weak: int, placement: Canon) -> Canon:
        dims: tuple[Any, ...] = shape
        if self._bucketing is not None:
            dims, outside = self._bucketing.apply(path, shape)
            self.outside += outside
        return ("array", dims, dtype, weak, placement)

    def placement(self, sharding: Any, path: str) -> Canon:
        devices = sharding.device_set
        if self.device is None:
            self.device = min(devices, key=lambda d: d.id)
        return canonical(sharding, f"{path}.sharding") if len(devices) > 1 else ()


def call_key(inv: Any, kernel: Any = None) -> str:
    """Return the digest that names this call among all calls of its kernel.

    Raises:
        UnstableKeyError: an argument has no stable identity.
    """
    return _name_call(inv, kernel)[0]


def _name_call(inv: Any, kernel: Any) -> tuple[str, _Encoder]:
    if not _Jax.known:
        _Jax.learn()
    declared = getattr(kernel, "buckets", None)
    encoder = _Encoder(Bucketing(declared, kernel.run) if declared else None)
    builder = key_builder_of(kernel)
    if builder is None:
        return digest(encoder.call(inv)), encoder
    encoder.device, encoder.traced = _whereabouts(inv)
    built = _build_key(builder, inv)
    return built if isinstance(built, str) else digest(canonical(built, "key_builder(...)")), encoder


def _whereabouts(inv: Any) -> tuple[Any, bool]:
    """Return the device a call's arguments live on, if they do, and whether some are being traced."""
    import jax

    device, traced = None, False
    for leaf in jax.tree_util.tree_leaves((inv.args, dict(inv.kwargs))):
        if isinstance(leaf, jax.core.Tracer):
            traced = True
        elif device is None and callable(getattr(leaf, "devices", None)):
            device = min(leaf.devices(), key=lambda d: getattr(d, "id", 0))
    return device, traced


def _build_key(builder: Any, inv: Any) -> Any:
    built = builder(inv)
    if built is None:
        raise InvalidRequestError(
            f"key_builder returned None for {inv.op_id!r}; it must say what the answer depends on"
        )
    return built


# ---------------------------------------------------------------------------------------------


class Resolved(Generic[Cfg]):
    """All that depends on a kernel and a signature alone, worked out once.

    The last three slots are the fast lane: the answer that the memory tier gave, and the state of
    the world it was given in.
    """

    __slots__ = (
        "_checksums",
        "candidates",
        "device",
        "heuristic",
        "incumbent",
        "kernel",
        "key",
        "lane_cfg",
        "lane_generation",
        "lane_policy",
        "no_candidates",
        "no_heuristic",
        "outside",
        "platform",
        "traced",
        "version",
    )

    def __init__(self, inv: Any, kernel: Any) -> None:
        name, encoder = _name_call(inv, kernel)
        self.kernel = kernel  # kept alive, so that its id in the memo's key stays its own
        self.version = str(getattr(kernel, "version", "0"))
        self.device = encoder.device if encoder.device is not None else default_device()
        self.key = CacheKey(device_fingerprint(self.device), f"{kernel.op_id}@v{self.version}", name)
        self.platform = platform_of(self.device)
        self.traced = encoder.traced
        self.outside = encoder.outside
        self._checksums: dict[Objective, str] = {}
        self.lane_cfg: Any = None
        self.lane_generation = -1
        self.lane_policy: Any = None

        context = "shard_map" if inv.method == "shard_map" else None
        self.heuristic, self.no_heuristic = _ask_heuristic(inv, kernel, self.platform, context)
        listed, self.no_candidates = _ask_candidates(inv, kernel, self.platform, context)
        self.candidates, self.incumbent = _with_incumbent(listed, self.heuristic)

    def checksum(self, objective: Objective) -> str:
        found = self._checksums.get(objective)
        if found is None:
            found = checksum(self.candidates, version=self.version, objective=objective)
            self._checksums[objective] = found
        return found


def _ask_heuristic(inv: Any, kernel: Any, platform: str, context: str | None) -> tuple[Any, str]:
    """Return the kernel's own guess, or None and why there is none."""
    method = variant(kernel, "heuristic_cfg", platform, context)
    if method is None:
        return None, "kernel has no heuristic"
    try:
        guess = method(inv)
    except NotImplementedError:
        return None, "kernel has no heuristic"
    except Exception as error:  # a kernel's failure makes its tier decline
        return None, f"heuristic_cfg raised {type(error).__name__}: {error}"
    return guess, "" if guess is not None else "heuristic_cfg returned None"


def _ask_candidates(inv: Any, kernel: Any, platform: str, context: str | None) -> tuple[list[Any], str]:
    """Return the kernel's candidates, or none and why."""
    method = variant(kernel, "candidate_cfgs", platform, context) or getattr(kernel, "candidate_cfgs", None)
    if method is None:
        return [], "kernel has no candidate_cfgs"
    try:
        listed = list(method(inv))
    except NotImplementedError:
        return [], "kernel has no candidates"
    except Exception as error:  # a kernel's failure makes its tier decline
        return [], f"candidate_cfgs raised {type(error).__name__}: {error}"
    return listed, "" if listed else "candidate_cfgs returned no candidates"


def _with_incumbent(listed: list[Cfg], heuristic: Cfg | None) -> tuple[tuple[Cfg, ...], int | None]:
    """Return the distinct candidates with the heuristic among them, and its position."""
    distinct: dict[Canon, Cfg] = {}
    for i, cfg in enumerate(listed):
        distinct.setdefault(canonical(cfg, f"candidates[{i}]", see_attributes=True), cfg)
    if heuristic is None:
        return tuple(distinct.values()), None
    form = canonical(heuristic, "heuristic_cfg(...)", see_attributes=True)
    if listed:
        distinct.setdefault(form, heuristic)
    return tuple(distinct.values()), (list(distinct).index(form) if distinct else None)


class Memo(Generic[T]):
    """A bounded mapping that costs one dict look-up on a hit.

    Two generations: when the young one is full it becomes the old one. What is asked for while old
    is young again; what is not asked for during a whole generation is forgotten. No lock: each step
    is one dict operation, and a race costs a recomputation at most.
    """

    def __init__(self, max_entries: int) -> None:
        self._half = max(1, max_entries // 2)
        self.young: dict[Any, T] = {}
        self._old: dict[Any, T] = {}

    def get(self, key: Any) -> T | None:
        found = self.young.get(key)
        if found is None and (found := self._old.get(key)) is not None:
            self.put(key, found)
        return found

    def put(self, key: Any, value: T) -> None:
        if len(self.young) >= self._half:
            self._old, self.young = self.young, {}
        self.young[key] = value

    def __len__(self) -> int:
        return len(self.young.keys() | self._old.keys())


class KeyMemo:
    """From kernel and signature to what follows from them."""

    def __init__(self, max_entries: int = 8192) -> None:
        self._resolved: Memo[Resolved[Any]] = Memo(max_entries)

    def resolve(self, inv: Any, kernel: Any) -> Resolved[Any]:
        """Return what is known of this call, working it out if it is new.

        Raises:
            UnstableKeyError: an argument has no stable identity.
        """
        try:
            if getattr(kernel, "key_builder", None) is None:
                token = signature(inv, kernel)
                if (found := self._resolved.young.get(token)) is not None:
                    return found
            else:
                built = canonical(_build_key(key_builder_of(kernel), inv), "key_builder(...)")
                token = (id(kernel), built, *_whereabouts(inv))
        except UnstableKeyError:
            call_key(inv, kernel)  # raises the same with the whole path of the argument
            raise
        found = self._resolved.get(token)
        if found is None:
            found = Resolved(inv, kernel)
            self._resolved.put(token, found)
        return found
