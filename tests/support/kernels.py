"""Kernels that tests share. They compute nothing: most tests use scripted measures."""

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
QUICK = {cfg: cost / 1000 for cfg, cost in COSTS.items()}
BEST = Blocks(3)
GUESS = Blocks(1)
TUNE_S = sum(COSTS.values()) * 2  # one warm-up and one sample of each


def call(size: int = 8, device: FakeDevice = H100, **kwargs: Any) -> Invocation[Blocks, Any]:
    return Invocation("toy", (device.array((size, 128)),), {}, **kwargs)


def scripted(costs: Any = COSTS, **script: Any) -> tuple[Tuner[Blocks], ScriptedMeasure]:
    measure = ScriptedMeasure(costs, **script)
    return Tuner(warmup=1, iters=1, measure=measure, strategy="exhaustive"), measure


class Bench:
    """A selector over a scripted measure, with the objects that tests inspect."""

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


def memory_of(bench: Bench) -> list[Blocks]:
    return [bench.cache.get(*key) for key in bench.cache.keys()]


class Listed:
    """A resolved call, with its candidates."""

    def __init__(self, known, inv, kernel):
        self._known = known
        self._listing = known.listing(inv, kernel)

    def __getattr__(self, name):
        return getattr(self._listing if name in self._listing._fields else self._known, name)

    def checksum(self, objective):
        return self._known.checksum(objective, self._listing)


class Picky(Kernel):
    """Three candidates, of which the last wins and the first is the heuristic; `breaks` maps candidates to errors."""

    op_id = "picky"
    candidates = (Blocks(1), Blocks(2), Blocks(3))

    def __init__(self, **breaks) -> None:
        super().__init__()
        self.breaks = {int(name[1:]): error for name, error in breaks.items()}
        self.ran = []

    def run(self, x, *, cfg):
        self.ran.append(cfg.m)
        if (error := self.breaks.get(cfg.m)) is not None:
            raise error
        return f"ran {cfg.m}"

    def heuristic_cfg(self, inv):
        return Blocks(1)

    def candidate_cfgs(self, inv):
        return self.candidates
