"""JAX's coordination service, with a client for each rank of a program: in this process, or in processes of their own.

`python -m support.jax_cluster RANK RANKS ADDRESS` is one rank. It prints its answer at each point.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import anyio

from asel import ConfigCache, ConfigSelectorChain, PersistentCache, Tuner
from asel.testing import ScriptedMeasure
from support.kernels import Bench, Blocks, Toy, call


@contextmanager
def coordination_service(ranks: int = 1):
    """Run a service, and yield the clients of all ranks."""
    from jaxlib import _jax

    from support.redis_server import free_port

    address = f"127.0.0.1:{free_port()}"
    service = _jax.get_distributed_runtime_service(address, ranks)
    clients = [_jax.get_distributed_runtime_client(address, rank) for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as threads:
        list(threads.map(lambda client: client.connect(), clients))  # each waits for all
        try:
            yield clients
        finally:
            list(threads.map(lambda client: client.shutdown(), clients))
            service.shutdown()


def costs_of(rank: int) -> dict[Blocks, float]:
    """Return the cost of each config on a rank; by itself, each rank would choose another config."""
    return {Blocks(m): 0.001 if m == 2 + rank else 0.003 for m in (1, 2, 3)}


def bench_of(rank: int, store, **options) -> Bench:
    return Bench(persistent=PersistentCache("toy", store, cfg_type=Blocks), costs=costs_of(rank), **options)


async def run_rank(rank: int, ranks: int) -> None:
    """Select at the same points as the other ranks; the last rank starts after the first has an answer."""
    from jax._src import distributed

    def meet(point: str) -> None:
        distributed.global_state.client.wait_at_barrier(point, 20_000)

    measure = ScriptedMeasure(costs_of(rank))
    persistent = PersistentCache("toy", "jax://", cfg_type=Blocks)
    async with ConfigSelectorChain(
        ConfigCache(), tuner=Tuner(measure=measure), persistent=persistent, sinks=()
    ) as selector:
        said = []
        if rank == ranks - 1:
            await anyio.to_thread.run_sync(meet, "the first rank has tuned")
        said.append(selector.choose_nowait(call(), Toy()).m)
        said.append((await selector.choose(call(), Toy())).m)
        if rank == 0:
            await anyio.to_thread.run_sync(meet, "the first rank has tuned")
        said.append(selector.choose_nowait(call(), Toy()).m)
        said.append((await selector.retune(call(), Toy())).m)
        said.append(selector.choose_nowait(call(), Toy()).m)
        print(*said, len(measure.compiled), flush=True)


if __name__ == "__main__":
    import jax

    rank, ranks = int(sys.argv[1]), int(sys.argv[2])
    jax.distributed.initialize(sys.argv[3], num_processes=ranks, process_id=rank)
    anyio.run(run_rank, rank, ranks, backend=("asyncio", "trio")[rank % 2])
    jax.distributed.shutdown()
