"""Configs as JSON values, and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike
from pydantic import BaseModel

from asel.errors import InvalidRequestError
from asel.kernels.keys import CacheKey
from asel.stores.codec import Codec
from asel.stores.record_codec import RecordCodec
from asel.stores.records import RecordError
from asel.tuning.outcomes import Measured, Skipped, TuneReport


class Layout(Enum):
    BTHD = "bthd"
    BHTD = "bhtd"


class Stages(IntEnum):
    TWO = 2


@dataclass(frozen=True)
class Tile:
    shape: tuple[int, ...]
    layout: Layout = Layout.BTHD


@dataclass(frozen=True)
class Attention:
    tile: Tile
    split: int | None = None
    mode: Literal["fast", "safe"] = "fast"
    pair: tuple[int, str] = (1, "x")
    table: dict[int, str] = field(default_factory=dict)
    stages: Stages = Stages.TWO
    scale: float = 1.0


@dataclass(frozen=True)
class Precision:
    accumulate: np.dtype
    inputs: tuple[np.dtype, ...] = ()
    output: np.dtype | None = None
    like: DTypeLike = "float32"
    inner: Attention | None = None


@dataclass(frozen=True)
class Outer:
    precision: Precision
    by_name: dict[str, Precision] = field(default_factory=dict)


class Model(BaseModel):
    block: int
    shape: tuple[int, int]


class Pair(NamedTuple):
    m: int
    n: int


TILE = Tile((64, 128), Layout.BHTD)


@dataclass(frozen=True)
class Holder:
    value: Any


@dataclass(frozen=True)
class Typed:
    dtype: np.dtype


@dataclass(frozen=True)
class Endless:
    dtype: np.dtype
    inner: Endless | None = None


@dataclass(frozen=True)
class Picky:
    m: int

    def __post_init__(self):
        {1: "one"}[self.m]


CONFIGS = [
    (Attention(TILE), Attention),
    (Attention(TILE, 4, "safe", (2, "y"), {3: "z"}), Attention),
    (Precision(np.dtype("bfloat16"), (np.dtype("int8"), np.dtype("float8_e4m3fn"))), Precision),
    (Precision(np.dtype("float32"), output=np.dtype("int4"), like=np.dtype("bool"), inner=Attention(TILE)), Precision),
    (Precision(jnp.bfloat16), Precision),
    (Outer(Precision(np.dtype("int32")), {"a": Precision(np.dtype("int8"))}), Outer),
    (Model(block=1, shape=(2, 3)), Model),
    (Pair(1, 2), Pair),
    ((1, (2, 3)), tuple[int, tuple[int, int]]),
    ({"m": 1, "n": [1, 2]}, dict),
    (frozenset({1, 2}), frozenset[int]),
    (Layout.BTHD, Layout),
    (7, int),
    ("fast", Literal["fast", "safe"]),
    (None, int | None),
]


@pytest.mark.parametrize(("cfg", "cfg_type"), CONFIGS, ids=lambda value: str(value)[:40])
def test_a_config_is_read_back_equal_and_with_its_type(cfg, cfg_type):
    """The config that was tuned is the config that runs."""
    codec = Codec(cfg_type=cfg_type)
    back = codec.load(codec.dump(cfg))
    assert back == cfg
    assert type(back) is type(cfg)


def test_without_a_type_the_json_value_is_returned():
    """A dataclass or a model is written as its fields, without its type."""
    assert Codec().load(Codec().dump(TILE)) == {"shape": [64, 128], "layout": "bhtd"}
    assert Codec().load(Codec().dump(Model(block=1, shape=(2, 3)))) == {"block": 1, "shape": [2, 3]}
    assert Codec().load(Codec().dump({"m": [1, None, True]})) == {"m": [1, None, True]}


def test_a_dumper_and_a_loader_take_precedence():
    """The user's own functions come before pydantic."""
    codec = Codec(loader=lambda text: Pair(*map(int, text.split("x"))), dumper=lambda pair: f"{pair.m}x{pair.n}")
    assert codec.dump(Pair(3, 4)) == "3x4"
    assert codec.load("3x4") == Pair(3, 4)


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"tile": {"shape": [1], "layout": "odd"}}, "tile.layout"),
        ({"tile": {"shape": ["1"]}}, "tile.shape.0"),
        ({"tile": {"shape": [1]}, "gone": 1}, "gone"),
        ({"tile": {"shape": [1], "gone": 1}}, "tile.gone"),
        ({"split": 1}, "tile"),
        ({"tile": {"shape": [1]}, "split": "four"}, "split"),
        (7, "the config"),
        (None, "the config"),
    ],
)
def test_a_misfit_is_refused_with_its_field(value, field):
    """The error names the field that does not fit; a removed field is not dropped silently."""
    with pytest.raises(RecordError, match=rf"^{field}"):
        Codec(cfg_type=Attention).load(value)


def test_a_new_field_with_a_default_keeps_old_records():
    """A config stored before the field was added still fits."""
    assert Codec(cfg_type=Attention).load({"tile": {"shape": [1]}}) == Attention(Tile((1,)))


@pytest.mark.parametrize(
    ("cfg", "cfg_type"),
    [(object(), None), ({1, 2}, None), (float("nan"), None), ([lambda: 0], None), (TILE, Attention), (7, Attention)],
)
def test_an_unstorable_config_is_refused_with_the_reason(cfg, cfg_type):
    """At the put, not at a later get; the message has the fix."""
    with pytest.raises(InvalidRequestError, match=r"cannot be stored.*(dumper|cfg_type)"):
        Codec(cfg_type=cfg_type).dump(cfg)


class Unspeakable:
    def __repr__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    "cfg",
    [
        Holder(np.int64(128)),
        Holder(np.float32(0.5)),
        Holder(Unspeakable),
        Holder(np.dtype(">f4")),
        10**5000,
        Unspeakable(),
    ],
    ids=["int64", "float32", "class", "big-endian", "huge", "unspeakable"],
)
def test_lookalikes_of_dtypes_and_configs_without_a_repr_are_refused(cfg):
    """np.dtype accepts anything with a dtype: 128 must not be stored as "int64", nor a class as "object"."""
    with pytest.raises(InvalidRequestError, match=r"cannot be stored.*(dumper|cfg_type)"):
        Codec().dump(cfg)


def test_a_config_that_would_be_read_back_different_is_refused():
    """Equal and of the same type, or not at all."""
    with pytest.raises(InvalidRequestError, match="would be read again as"):
        Codec(dumper=lambda cfg: {"m": 1, "n": 1}, cfg_type=Pair).dump(Pair(5, 6))


@pytest.mark.parametrize("cfg_type", [object(), "Attention", 7, {}, Endless])
def test_a_type_that_cannot_be_read_is_refused_at_once(cfg_type):
    """A mistake in the set-up shows when the cache is made."""
    with pytest.raises(InvalidRequestError, match="cfg_type"):
        Codec(cfg_type=cfg_type)


@pytest.mark.parametrize(
    ("cfg_type", "value"), [(Picky, {"m": 9}), (Typed, {"dtype": "no such"}), (Typed, {"dtype": {"a": 1}})]
)
def test_a_type_that_raises_rejects_the_record(cfg_type, value):
    """`__post_init__` may raise anything, and numpy a TypeError: only the record is rejected."""
    with pytest.raises(RecordError, match=r"the config type refused it: (KeyError|TypeError)"):
        Codec(cfg_type=cfg_type).load(value)


def test_a_loader_that_raises_rejects_the_record():
    """Any exception rejects only the record."""
    with pytest.raises(RecordError, match="ZeroDivisionError"):
        Codec(loader=lambda value: 1 / 0).load(1)


@pytest.mark.parametrize("name", ["loader", "dumper"])
def test_a_loader_is_a_function(name):
    """A path passed in the wrong place is caught."""
    with pytest.raises(InvalidRequestError, match=name):
        Codec(**{name: "cache.json"})


def test_a_record_of_a_large_search_omits_skipped_candidates():
    """Thousands of skipped candidates would not fit, and only measurements are useful to later tunes."""
    tried = Measured(Tile((1,)), 1e-3, (1e-3,), 0.5)
    skipped = [Skipped(Tile((size,)), "it is not expected to win") for size in range(2, 2002)]
    codec = RecordCodec(Codec(cfg_type=Tile), "here")
    for others, stored in ((skipped, (tried,)), (skipped[:5], (tried, *skipped[:5]))):
        key = CacheKey("dev", "toy@v1", "call")
        report = TuneReport(key, tried.cfg, (tried, *others), 1.0, {})
        assert codec.report(codec.of_tune(report), ()).outcomes == stored
