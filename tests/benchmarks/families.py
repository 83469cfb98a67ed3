"""Families of real kernels to tune on a CPU. A module of its own: worker processes import them by name."""

from __future__ import annotations

import gc
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import ceil
from statistics import fmean, median
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
from side_by_side import without_gc

__all__ = [
    "CLAMPED",
    "CLAMPED_MORE",
    "EQUALS",
    "FAMILIES",
    "LONG",
    "NEAR_EQUALS",
    "WIDE",
    "Blocks",
    "Family",
    "Oracle",
    "program_text",
    "record",
]

# Importing ejKernel turns JAX's cache of compiled programs on, for its whole process and from one run to the
# next: whoever comes after it would be timed reading files.
jax.config.update("jax_enable_compilation_cache", False)

# Far above the timer's noise and the cost of dispatching a run, and several runs of all that is short: they are timed
# warm, as every tuner here times them. Run once and cold, after all the others, another attention is the best.
MIN_SAMPLE_S = 5e-3


@dataclass(frozen=True)
class Blocks:
    a: int
    b: int


@dataclass(frozen=True)
class Family:
    """A kernel, what it may be configured with, and the shapes of what it is called with."""

    name: str
    run: Callable[..., jax.Array]
    candidates: tuple[Blocks, ...]
    shapes: tuple[tuple[int, ...], ...]

    def make(self, cfg: Blocks) -> Callable[..., jax.Array]:
        return partial(self.run, cfg=cfg)

    @property
    def args(self) -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.key(0), len(self.shapes))
        return tuple(jax.random.normal(key, shape) for key, shape in zip(keys, self.shapes, strict=True))


def matmul(x: jax.Array, y: jax.Array, *, cfg: Blocks) -> jax.Array:
    """x @ y by blocks of `a` rows and `b` columns."""
    rows = x.reshape(-1, cfg.a, x.shape[1])
    columns = y.reshape(y.shape[0], -1, cfg.b).transpose(1, 0, 2)
    blocks = jax.lax.map(lambda row: jax.lax.map(lambda column: row @ column, columns), rows)
    return blocks.transpose(0, 2, 1, 3).reshape(x.shape[0], y.shape[1])


def attention(q: jax.Array, k: jax.Array, v: jax.Array, *, cfg: Blocks) -> jax.Array:
    """Softmax attention by chunks of `a` queries and `b` keys, with a running maximum."""
    width = q.shape[1]
    chunks = [x.reshape(-1, cfg.b, width) for x in (k, v)]

    def attend(query: jax.Array) -> jax.Array:
        def step(state: tuple[jax.Array, ...], chunk: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], None]:
            high, total, out = state
            key, value = chunk
            scores = query @ key.T * width**-0.5
            higher = jnp.maximum(high, scores.max(-1))
            weights, shrink = jnp.exp(scores - higher[:, None]), jnp.exp(high - higher)
            return (higher, total * shrink + weights.sum(-1), out * shrink[:, None] + weights @ value), None

        start = jnp.full(cfg.a, -jnp.inf), jnp.zeros(cfg.a), jnp.zeros((cfg.a, width))
        (_, total, out), _ = jax.lax.scan(step, start, chunks)
        return out / total[:, None]

    return jax.lax.map(attend, q.reshape(-1, cfg.a, width)).reshape(q.shape)


def recurrence(decay: jax.Array, x: jax.Array, *, cfg: Blocks, passes: int = 1) -> jax.Array:
    """The last h of h = decay * h + x: chunks of `a` steps, `b` of them unrolled."""

    def step(h: jax.Array, given: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        return given[0] * h + given[1], None

    def chunk(h: jax.Array, given: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        return jax.lax.scan(step, h, given, unroll=cfg.b)

    chunks = decay.reshape(-1, cfg.a, x.shape[1]), x.reshape(-1, cfg.a, x.shape[1])
    start = jnp.zeros(x.shape[1])
    if passes == 1:
        return jax.lax.scan(chunk, start, chunks)[0]
    return jax.lax.fori_loop(0, passes, lambda _, h: jax.lax.scan(chunk, h, chunks)[0], start)


def decoys(decay: jax.Array, x: jax.Array, *, cfg: Blocks) -> jax.Array:
    """A recurrence in which `a` does nothing that takes time."""
    return recurrence(decay, x + cfg.a * 1e-6, cfg=Blocks(128, 4))


def clamped_matmul(x: jax.Array, y: jax.Array, *, cfg: Blocks) -> jax.Array:
    """The same for candidates that are declared once for all shapes: a block is no larger than its array."""
    return matmul(x, y, cfg=Blocks(min(cfg.a, x.shape[0]), min(cfg.b, y.shape[1])))


def _grid(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[Blocks, ...]:
    return tuple(Blocks(a, b) for a, b in product(first, second))


_SIZES = (16, 32, 64, 128, 256, 512, 1024)

# Here compiling dominates running, and every candidate is a program of its own.
FAMILIES = (
    Family("matmul", matmul, _grid(_SIZES[:5], _SIZES[:5]), ((256, 256), (256, 256))),
    Family("attention", attention, _grid((8, *_SIZES[:4]), (8, *_SIZES[:4])), ((512, 64),) * 3),
    Family("recurrence", recurrence, _grid((8, *_SIZES[:5]), (1, 2, 4, 8)), ((4096, 64), (4096, 64))),
)
# The best of these run on two cores at once, and are the best as long as nobody else has one of them.
WIDE = Family("attention, wide chunks", attention, _grid(_SIZES[1:6], _SIZES[1:6]), ((512, 64),) * 3)
# One list of candidates for all shapes: 25 programs of 49 where a prompt is read, 10 of 49 where tokens are made.
CLAMPED = Family("clamped matmul, 256 rows", clamped_matmul, _grid(_SIZES, _SIZES), ((256, 256), (256, 256)))
CLAMPED_MORE = Family("clamped matmul, 32 rows", clamped_matmul, _grid(_SIZES, _SIZES), ((32, 256), (256, 256)))
# Here running dominates compiling.
LONG = Family(
    "recurrence, long",
    partial(recurrence, passes=12),
    _grid((8, 16, 32, 64, 128, 256), (1, 2, 4, 8)),
    ((65536, 256), (65536, 256)),
)
# Here it does not matter who wins, as long as it is the same one next time.
EQUALS = Family("recurrence, eight equals", decoys, _grid(tuple(range(1, 9)), (1,)), ((4096, 64),) * 2)
# And here hardly: four are within a few percent of the best, about as far from it as a tie may be.
NEAR_EQUALS = Family("recurrence, near-equals", recurrence, _grid((16, 32, 64, 128), (4, 8)), ((4096, 64),) * 2)


def program_text(lowered: jax.stages.Lowered) -> str:
    """Return a program without its name."""
    return re.sub(r"module @\S+", "", lowered.as_text(), count=1)


def record(family: Family, samples: int) -> Oracle:
    """Return an oracle that has seen every candidate `samples` times."""
    oracle = Oracle(family)
    oracle.watch(samples)
    return oracle


class Oracle:
    """Knows how much slower than the best every candidate is.

    It may watch by and by: what others do to a shared machine changes from one minute to the next. What slows a
    round slows all that run in it, so a sample counts as a part of its round's. And the best is found in one half
    of the rounds and others are held against it in the other: the best of many noisy figures is the luckiest, too,
    and beside it in its own rounds everyone else would look slow, its equals as well.
    """

    def __init__(self, family: Family) -> None:
        self.family = family
        self._args = family.args
        lowered = [jax.jit(family.make(cfg)).lower(*self._args) for cfg in family.candidates]
        texts = [program_text(one) for one in lowered]
        distinct = list(dict.fromkeys(texts))
        self._programs = [distinct.index(text) for text in texts]
        self._compiled = [lowered[texts.index(text)].compile() for text in distinct]
        once = [min(self._sample(index, 1) for _ in range(2)) for index in range(len(distinct))]
        self._runs = [ceil(MIN_SAMPLE_S / seconds) for seconds in once]
        self._rounds: list[list[float]] = []

    @classmethod
    def of_recorded(cls, family: Family, programs: list[int], rounds: list[list[float]]) -> Oracle:
        """Return an oracle that knows what another one has seen, and can watch no more."""
        oracle = cls.__new__(cls)
        oracle.family, oracle._programs, oracle._rounds = family, programs, rounds
        return oracle

    @property
    def recorded(self) -> dict[str, list[Any]]:
        """What `of_recorded` takes."""
        return {"programs": self._programs, "rounds": self._rounds}

    def watch(self, rounds: int) -> None:
        """Take so many interleaved samples of every program."""
        order = list(range(len(self._compiled)))
        gc.collect()
        with without_gc():
            for _ in range(rounds):
                random.Random(len(self._rounds)).shuffle(order)
                taken = {index: self._sample(index, self._runs[index]) for index in order}
                self._rounds.append([taken[index] for index in sorted(taken)])

    def _sample(self, index: int, runs: int) -> float:
        run = self._compiled[index]
        if runs > 1:
            jax.block_until_ready(run(*self._args))  # cold, after those of others
        start = perf_counter()
        for _ in range(runs):
            jax.block_until_ready(run(*self._args))
        return (perf_counter() - start) / runs

    @property
    def samples_s(self) -> list[list[float]]:
        """Every candidate's samples; those with the same program have them in common."""
        by_program = [list(samples) for samples in zip(*self._rounds, strict=True)]
        return [by_program[program] for program in self._programs]

    def regret(self, cfg: Blocks) -> float:
        """Return by how much, as a fraction, `cfg` is slower than the best."""
        program = self._programs[self.family.candidates.index(cfg)]
        halves = _levels(self._rounds[::2]), _levels(self._rounds[1::2])
        over = [judge[program] / judge[finder.index(min(finder))] - 1 for finder, judge in (halves, halves[::-1])]
        return max(0.0, fmean(over))

    @property
    def best_s(self) -> float:
        return min(map(median, zip(*self._rounds, strict=True)))


def _levels(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of the middle half of every program's samples, each as a part of its round's."""
    paired = [[seconds / median(taken) for seconds in taken] for taken in rounds]
    return [_middle(samples) for samples in zip(*paired, strict=True)]


def _middle(samples: Sequence[float]) -> float:
    cut = (len(samples) + 1) // 4
    return fmean(sorted(samples)[cut : len(samples) - cut])
