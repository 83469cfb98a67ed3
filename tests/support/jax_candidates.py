"""Candidates that JAX compiles and runs."""

from __future__ import annotations

import anyio
import jax
import jax.numpy as jnp

from asel import AutotunePolicy, ConfigSelectorChain, Invocation, Tuner, kernel
from asel.testing import RecordingSink
from asel.tuning.jax_measure import JaxMeasure
from asel.tuning.measure import Trial

__all__ = ["ONE_BACKEND", "PATIENCE_S", "chosen_among", "is_parameter", "measure", "seen_by_candidate", "spin"]

PATIENCE_S = 10.0  # after this a closed gate fails the test; no passing test waits so long
# The arguments of a compiled candidate do not depend on the loop, so their tests run on one backend.
ONE_BACKEND = "asyncio"


def measure(backend, fn, *args, objective="forward", **kwargs) -> float:
    """Compile `fn` as a candidate, and take one sample of it."""

    async def main() -> float:
        sample = await JaxMeasure().compile(Trial(None, fn, args, kwargs, objective=objective))
        return await sample()

    return anyio.run(main, backend=backend)


def seen_by_candidate(backend, *args, **kwargs):
    """Return the arguments that the candidate gets while it is compiled."""
    seen = []

    def fn(*args, **kwargs):
        seen.append((args, kwargs))
        return jnp.zeros(())

    measure(backend, fn, *args, **kwargs)
    return seen[-1]


def is_parameter(value) -> bool:
    return isinstance(value, jax.core.Tracer)


def spin(rounds: int):
    """Return a function whose run time is proportional to `rounds`, and whose compile time is constant."""
    return lambda x: jax.lax.fori_loop(0, rounds, lambda _, y: jnp.sin(y) + 1.0, x)


def chosen_among(backend, configs, run, x=None, *, check=None, **policy):
    """Tune real candidates in threads; return the report and the events."""
    sink = RecordingSink()

    async def main():
        op = kernel(op_id="survivor", configs=configs, heuristic=configs[0])(run)
        async with ConfigSelectorChain(
            policy=AutotunePolicy(**policy), tuner=Tuner(1, 2, check=check), sinks=[sink], close_grace_s=0.1
        ) as chain:
            args = (jnp.ones(64) if x is None else x,)
            return (await chain.select(Invocation("survivor", args, {}), op)).report

    return anyio.run(main, backend=backend), sink
