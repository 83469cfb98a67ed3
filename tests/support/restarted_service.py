"""A service's first trace: `python -m support.restarted_service DIRECTORY` prints its configs."""

from __future__ import annotations

import json
import sys

import anyio
import jax
import jax.numpy as jnp

from asel import ConfigSelectorChain, Invocation, PersistentCache, Tuner, kernel
from asel.testing import RecordingSink, ScriptedMeasure

COSTS = {1: 0.03, 2: 0.02, 3: 0.01}
TOLD = ("heuristics", "autotune_start", "autotune_finish", "cache_hit")


@kernel(op_id="scale", configs=list(COSTS), heuristic=1)
def scale(x, *, cfg):
    return x * cfg


async def main(directory: str) -> None:
    sink = RecordingSink()
    tuner = Tuner(warmup=1, iters=1, measure=ScriptedMeasure(COSTS), strategy="exhaustive")
    store = PersistentCache("service", directory, cfg_type=int)
    async with ConfigSelectorChain(tuner=tuner, persistent=store, sinks=[sink]) as selector:

        @jax.jit
        def step(x):
            cfg = selector.choose_nowait(Invocation("scale", (x,), {}), scale)
            return scale.run(x, cfg=cfg)

        traced = int(step(jnp.ones(8)).sum() / 8)
        await selector.settled()
        then = await selector.choose(Invocation("scale", (jnp.ones(8),), {}), scale)
    print(json.dumps({"traced": traced, "then": then, "events": [name for name in sink.names if name in TOLD]}))


if __name__ == "__main__":
    anyio.run(main, sys.argv[1])
