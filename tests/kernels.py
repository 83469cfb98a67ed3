"""Kernels that tests share. None of them computes anything: tests above `benchmark.py` use scripted measures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from asel import AutotunePolicy, ConfigCache, ConfigSelectorChain, Invocation, Kernel, Tuner
from asel.testing import FakeDevice, RecordingSink, ScriptedMeasure

H100 = FakeDevice("NVIDIA H100")
A100 = FakeDevice("NVIDIA A100")


@dataclass(frozen=True)
class Blocks:
    m: int
    n: int = 1


class Toy(Kernel[Blocks, Any]):
    """Three candidates; the heuristic is the slowest of them, the last the fastest."""

    op_id = "toy"
    version = "1"
    candidates: Iterable[Blocks] = (Blocks(1), Blocks(2), Blocks(3))

    def run(self, x, *, cfg):
        return x

    def heuristic_cfg(self, inv):
        return Blocks(1)

    def candidate_cfgs(self, inv):
        return self.candidates


class NoHeuristic(Toy):
    heuristic_cfg = Kernel.heuristic_cfg


COSTS = {Blocks(1): 0.3, Blocks(2): 0.2, Blocks(3): 0.1}
BEST = Blocks(3)
GUESS = Blocks(1)
TUNE_S = sum(COSTS.values()) * 2  # one warm-up and one sample of each


def call(size: int = 8, device: FakeDevice = H100, **kwargs: Any) -> Invocation[Blocks, Any]:
    return Invocation("toy", (device.array((size, 128)),), {}, **kwargs)


def scripted(costs: Any = COSTS, **script: Any) -> tuple[Tuner[Blocks], ScriptedMeasure]:
    measure = ScriptedMeasure(costs, **script)
    return Tuner(warmup=1, iters=1, measure=measure, strategy="exhaustive"), measure


class Bench:
    """A chain over a scripted measure, with everything a test wants to look at."""

    def __init__(self, *, costs: Any = COSTS, script: dict[str, Any] | None = None, cache=None, **chain: Any) -> None:
        tuner, self.measure = scripted(costs, **(script or {}))
        self.sink = RecordingSink()
        self.cache = ConfigCache() if cache is None else cache
        chain.setdefault("tuner", tuner)
        policy = chain.pop("policy", None) or AutotunePolicy(**chain.pop("allow", {}))
        self.chain: ConfigSelectorChain[Blocks, Any] = ConfigSelectorChain(
            self.cache, policy, sinks=[self.sink], **chain
        )

    @property
    def tunes(self) -> int:
        return len(self.sink.named("autotune_start"))
