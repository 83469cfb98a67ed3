"""Scripted measures that also count steps, lower, compute, or recognise equal programs."""

from __future__ import annotations

from collections import Counter
from functools import partial

import anyio
import numpy as np

from asel.testing import ScriptedMeasure
from asel.tuning.measure import BaseMeasure, Lowered
from support.kernels import Blocks, Toy
from support.tunes import SamplerOf

__all__ = ["Aliasing", "Checked", "Computing", "Lowering", "Watched", "Wider"]


class Watched(BaseMeasure):
    """A measure whose every step takes a second, and which counts concurrent steps."""

    def __init__(self, compile_s: float = 1.0) -> None:
        self._compile_s = compile_s
        self._now: Counter = Counter()
        self.most: Counter = Counter()

    async def _step(self, *places, seconds: float = 1.0) -> None:
        self._now.update(places)
        for place in places:
            self.most[place] = max(self.most[place], self._now[place])
        await anyio.sleep(seconds)
        self._now.subtract(places)

    async def compile(self, trial):
        await self._step("compiling", seconds=self._compile_s)

        async def sample() -> float:
            await self._step("sampling", trial.device)
            return 1.0

        return sample


class Lowering(Watched):
    """A watched measure that lowers, too."""

    async def lower(self, trial):
        await self._step("lowering")
        return Lowered(None, partial(self.compile, trial))


class Aliasing(ScriptedMeasure):
    """A measure that lowers: configs of the same parity have the same program."""

    async def lower(self, trial):
        return Lowered(str(trial.cfg.m % 2), lambda: self.compile(trial))


class Computing(ScriptedMeasure):
    """A scripted measure with outputs, which differ for "wrong" candidates."""

    async def compile(self, trial):
        sample = await super().compile(trial)

        async def outputs():
            return [np.array(float("wrong" in trial.cfg))]

        return SamplerOf(sample, outputs=outputs)


class Wider(Toy):
    candidates = (*Toy.candidates, Blocks(4))


class Checked(ScriptedMeasure):
    """A measure whose candidates take a second to return their outputs, which are all equal."""

    def __init__(self, *args, **script) -> None:
        super().__init__(*args, **script)
        self.checked = []

    async def compile(self, trial):
        sample = await super().compile(trial)

        async def outputs():
            self.checked.append(trial.cfg)
            await anyio.sleep(1.0)
            return [np.ones(2)]

        return SamplerOf(sample, outputs=outputs)
