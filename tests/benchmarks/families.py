"""Families of real kernels to tune on a CPU, in their own module, because worker processes import them by name."""

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

# Importing ejKernel turns on JAX's persistent cache of compiled programs: later tunes would only read files.
jax.config.update("jax_enable_compilation_cache", False)

# Far above the timer's noise and the cost of dispatching a run, with several runs of short programs, so that they are
# timed warm, as every tuner here does. In single cold runs, another attention is the best.
MIN_SAMPLE_S = 5e-3


@dataclass(frozen=True)
class Blocks:
    a: int
    b: int


@dataclass(frozen=True)
class Family:
    """A kernel, its candidates, and the shapes of its arguments."""

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
    """A recurrence in which `a` has no effect."""
    return recurrence(decay, x + cfg.a * 1e-6, cfg=Blocks(128, 4))


def clamped_matmul(x: jax.Array, y: jax.Array, *, cfg: Blocks) -> jax.Array:
    """The same for candidates that are declared once for all shapes: a block is at most as large as its array."""
    return matmul(x, y, cfg=Blocks(min(cfg.a, x.shape[0]), min(cfg.b, y.shape[1])))


def _grid(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[Blocks, ...]:
    return tuple(Blocks(a, b) for a, b in product(first, second))


_SIZES = (16, 32, 64, 128, 256, 512, 1024)

# Compiling dominates running, and every candidate has its own program.
FAMILIES = (
    Family("matmul", matmul, _grid(_SIZES[:5], _SIZES[:5]), ((256, 256), (256, 256))),
    Family("attention", attention, _grid((8, *_SIZES[:4]), (8, *_SIZES[:4])), ((512, 64),) * 3),
    Family("recurrence", recurrence, _grid((8, *_SIZES[:5]), (1, 2, 4, 8)), ((4096, 64), (4096, 64))),
)
# The best of these use two cores at once, and are the best only while both are free.
WIDE = Family("attention, wide chunks", attention, _grid(_SIZES[1:6], _SIZES[1:6]), ((512, 64),) * 3)
# One list of candidates for all shapes: of 49, 25 programs for reading a prompt, and 10 for generating tokens.
CLAMPED = Family("clamped matmul, 256 rows", clamped_matmul, _grid(_SIZES, _SIZES), ((256, 256), (256, 256)))
CLAMPED_MORE = Family("clamped matmul, 32 rows", clamped_matmul, _grid(_SIZES, _SIZES), ((32, 256), (256, 256)))
# Running dominates compiling.
LONG = Family(
    "recurrence, long",
    partial(recurrence, passes=12),
    _grid((8, 16, 32, 64, 128, 256), (1, 2, 4, 8)),
    ((65536, 256), (65536, 256)),
)
# Equals: any may win, if it is the same each time.
EQUALS = Family("recurrence, eight equals", decoys, _grid(tuple(range(1, 9)), (1,)), ((4096, 64),) * 2)
# Near-equals: four are within a few percent of the best, about the width of a tie.
NEAR_EQUALS = Family("recurrence, near-equals", recurrence, _grid((16, 32, 64, 128), (4, 8)), ((4096, 64),) * 2)


def program_text(lowered: jax.stages.Lowered) -> str:
    """Return a program without its name."""
    return re.sub(r"module @\S+", "", lowered.as_text(), count=1)


def record(family: Family, samples: int) -> Oracle:
    """Return an oracle with `samples` samples of every candidate."""
    oracle = Oracle(family)
    oracle.watch(samples)
    return oracle


class Oracle:
    """Measures by how much every candidate is slower than the best.

    Samples are taken over time, since the load of a shared machine changes by the minute. A disturbance slows a whole
    round, so each sample is divided by the median of its round. The best candidate is chosen in one half of the rounds
    and compared with the others in the other half: the best of many noisy figures is also the luckiest, and in its own
    rounds even its equals would look slow.
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
        """Return an oracle with the samples of another one, which takes no more samples."""
        oracle = cls.__new__(cls)
        oracle.family, oracle._programs, oracle._rounds = family, programs, rounds
        return oracle

    @property
    def recorded(self) -> dict[str, list[Any]]:
        """The argument of `of_recorded`."""
        return {"programs": self._programs, "rounds": self._rounds}

    def watch(self, rounds: int) -> None:
        """Take interleaved samples of every program, one in each round."""
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
        """The samples of every candidate; candidates with one program share them."""
        by_program = [list(samples) for samples in zip(*self._rounds, strict=True)]
        return [by_program[program] for program in self._programs]

    def regret(self, cfg: Blocks) -> float:
        """Return by how much, as a fraction, `cfg` is slower than the best."""
        program = self._programs[self.family.candidates.index(cfg)]
        halves = _relative_times(self._rounds[::2]), _relative_times(self._rounds[1::2])
        over = [judge[program] / judge[finder.index(min(finder))] - 1 for finder, judge in (halves, halves[::-1])]
        return max(0.0, fmean(over))

    @property
    def best_s(self) -> float:
        return min(map(median, zip(*self._rounds, strict=True)))


def _relative_times(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Return the trimmed mean of every program's samples, each relative to its round."""
    paired = [[seconds / median(taken) for seconds in taken] for taken in rounds]
    return [_middle(samples) for samples in zip(*paired, strict=True)]


def _middle(samples: Sequence[float]) -> float:
    cut = (len(samples) + 1) // 4
    return fmean(sorted(samples)[cut : len(samples) - cut])
