"""ejKernel's own objects under asel, unchanged: kernels, invocations, caches and tuners, in real time."""

from __future__ import annotations

import importlib
import json
import tempfile
import warnings
from dataclasses import dataclass, fields
from functools import partial

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import asel
from asel import (
    AutotunePolicy,
    ConfigSelectorChain,
    Failed,
    Measured,
    NoConfigError,
    Tuner,
    device_fingerprint,
    get_invocations,
    overlay_cache,
    warm_up,
)
from asel.kernels.keys import call_key
from asel.testing import RecordingSink, ScriptedMeasure

_compilation_cache_dir = jax.config.jax_compilation_cache_dir
with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), tempfile.TemporaryDirectory() as scratch:
    # Importing ejKernel makes directories at home and turns JAX's compilation cache on for the whole process.
    patch.setenv("EJKERNEL_PERSISTENT_CACHE_DIR", scratch)
    warnings.simplefilter("ignore")
    ejops = importlib.import_module("ejkernel.ops")
    from ejkernel.modules.operations import MeanPooling, ScaledDotProductAttention
jax.config.update("jax_compilation_cache_dir", _compilation_cache_dir)


@pytest.fixture(autouse=True)
def _first_call_was_made():
    """asel reads facts about JAX and the machine at its first call; another test covers its cost on the loop."""
    call_key(asel.Invocation("first", (), {}))
    device_fingerprint()


@dataclass(frozen=True)
class Tile:
    size: int
    kind: str = "row"


SMALL, MEDIUM, LARGE = Tile(8), Tile(16), Tile(32)
COSTS = {SMALL: 0.003, MEDIUM: 0.001, LARGE: 0.002}  # real seconds, so few


class Scale(ejops.Kernel):
    """A kernel as ejKernel's users write them: three candidates, of which the heuristic is the first."""

    op_id = "scale"
    version = "2"

    def run(self, x, *, factor=1.0, cfg):
        return x * factor + cfg.size

    def heuristic_cfg(self, inv):
        return SMALL

    def candidate_cfgs(self, inv):
        return [SMALL, MEDIUM, LARGE]


class Chain:
    """A chain over a scripted measure, whose fastest config is `MEDIUM`."""

    def __init__(self, costs=COSTS, **options) -> None:
        self.measure = ScriptedMeasure(costs)
        self.sink = RecordingSink()
        options.setdefault("tuner", Tuner(warmup=0, iters=1, measure=self.measure))
        self.chain = ConfigSelectorChain(sinks=[self.sink], **options)

    async def select(self, inv, kernel):
        async with self.chain as chain:
            return await chain.select(inv, kernel)


def invocation(x=None, op_id="scale", **fields):
    x = jnp.ones((4, 8)) if x is None else x
    return ejops.Invocation(op_id=op_id, args=(x,), kwargs={"factor": 2.0}, **fields)


# ---------------------------------------------------------------------------------------------
# Kernels.


def test_an_ejkernel_kernel_is_tuned(real_backend):
    """Kernels and invocations of ejKernel's classes pass through the tiers as asel's own do."""
    bench, kernel = Chain(), Scale()

    async def main():
        async with bench.chain as chain:
            return await chain.select(invocation(), kernel), await chain.select(invocation(), kernel)

    first, second = anyio.run(main, backend=real_backend)
    assert (first.cfg, first.tier, second.cfg, second.tier) == (MEDIUM, "autotune", MEDIUM, "memory")
    assert first.key.op_id == "scale@v2"
    assert bench.measure.compiled == [SMALL, MEDIUM, LARGE]
    assert first.report.incumbent == SMALL


def test_an_ejkernel_kernel_really_runs(real_backend):
    """The candidates of an ejKernel kernel are compiled and timed with JAX, and a broken one is an outcome."""

    class Picky(Scale):
        def run(self, x, *, factor=1.0, cfg):
            if cfg == MEDIUM:
                raise ValueError("not divisible")
            return super().run(x, factor=factor, cfg=cfg)

    selection = anyio.run(Chain(tuner=Tuner()).select, invocation(), Picky(), backend=real_backend)
    assert selection.tier == "autotune"
    assert [type(outcome) for outcome in selection.report.outcomes] == [Measured, Failed, Measured]
    assert selection.report.outcomes[1].message == "not divisible"


def test_an_executor_runs_an_ejkernel_kernel(real_backend):
    """Unchanged, and with another config if a winner fails."""

    class Picky(Scale):
        def run(self, x, *, factor=1.0, cfg):
            if cfg == MEDIUM:
                raise ValueError("not divisible")
            return super().run(x, factor=factor, cfg=cfg)

    x = jnp.ones((4, 8))

    async def main(kernel):
        async with Chain().chain as chain:
            return await asel.Executor(chain)(kernel, x, factor=2.0)

    for kernel, size in ((Scale(), 16), (Picky(), 32)):
        np.testing.assert_array_equal(anyio.run(main, kernel, backend=real_backend), x * 2 + size)


def test_an_invocation_has_ejkernels_fields_in_ejkernels_order():
    """Code written for ejKernel constructs asel's invocations by position."""
    names = [field.name for field in fields(ejops.Invocation)]
    assert [field.name for field in fields(asel.Invocation)] == names


def test_both_kinds_of_invocation_share_a_key(real_backend):
    """Invocations of ejKernel and asel with the same arguments share their tune."""
    bench, kernel, x = Chain(), Scale(), jnp.ones((4, 8))

    async def main():
        async with bench.chain as chain:
            theirs = await chain.select(invocation(x), kernel)
            ours = await chain.select(asel.Invocation("scale", (x,), {"factor": 2.0}), kernel)
        assert theirs.key == ours.key
        assert ours.tier == "memory"

    anyio.run(main, backend=real_backend)


def test_the_kernels_version_is_part_of_its_name(real_backend):
    """Raising an ejKernel kernel's version makes earlier configs stale."""
    bench = Chain()

    class Newer(Scale):
        version = "3"

    async def main():
        async with bench.chain as chain:
            return [await chain.select(invocation(), kernel) for kernel in (Scale(), Newer())]

    old, new = anyio.run(main, backend=real_backend)
    assert (old.key.op_id, new.key.op_id) == ("scale@v2", "scale@v3")
    assert (old.tier, new.tier) == ("autotune", "autotune")


def by_rows(inv):
    return f"rows={inv.args[0].shape[0]}"


class WithFunction(Scale):
    key_builder = staticmethod(by_rows)


class WithBareFunction(Scale):
    key_builder = by_rows  # a method once it is looked up, though it was not written as one


class WithMethod(Scale):
    def key_builder(self, inv):
        return f"rows={inv.args[0].shape[0]}"


class WithInstanceAttribute(Scale):
    def __init__(self) -> None:
        super().__init__()
        self.key_builder = by_rows


@pytest.mark.parametrize("kind", [WithFunction, WithBareFunction, WithMethod, WithInstanceAttribute])
def test_the_kernels_key_builder_is_used(kind, real_backend):
    """The key depends only on the result of the `key_builder`, in each way of attaching one."""
    bench, kernel = Chain(), kind()

    async def main():
        async with bench.chain as chain:
            calls = [invocation(jnp.ones(shape)) for shape in ((4, 8), (4, 16), (2, 8))]
            return [await chain.select(inv, kernel) for inv in calls]

    first, same_rows, fewer_rows = anyio.run(main, backend=real_backend)
    assert (first.key.call_key, fewer_rows.key.call_key) == ("rows=4", "rows=2")
    assert [selection.tier for selection in (first, same_rows, fewer_rows)] == ["autotune", "memory", "autotune"]


def test_ejkernels_own_key_builder_works(real_backend):
    """ejKernel's own key builder, which reads shardings, works unchanged."""

    class Sharded(Scale):
        key_builder = staticmethod(ejops.default_key_builder_with_sharding)

    inv = invocation()
    selection = anyio.run(Chain().select, inv, Sharded(), backend=real_backend)
    assert (selection.tier, selection.cfg) == ("autotune", MEDIUM)
    assert selection.key.call_key == ejops.default_key_builder_with_sharding(inv)


def test_platform_variants_are_preferred(real_backend):
    """On a CPU, `candidate_cfgs_cpu`, `heuristic_cfg_cpu` and `run_cpu` precede the plain methods."""
    ran = []

    class Variants(Scale):
        def heuristic_cfg_cpu(self, inv):
            return LARGE

        def candidate_cfgs_cpu(self, inv):
            return [LARGE, MEDIUM]

        def candidate_cfgs_gpu(self, inv):
            raise AssertionError("asked for a GPU's candidates on a CPU")

        def run_cpu(self, x, *, factor=1.0, cfg):
            ran.append(cfg)
            return self.run(x, factor=factor, cfg=cfg)

        def run_tpu(self, x, *, factor=1.0, cfg):
            raise AssertionError("ran a TPU's variant on a CPU")

    async def main():
        async with Chain(tuner=Tuner(warmup=0, iters=1)).chain as chain:
            return await chain.select(invocation(), Variants())

    report = anyio.run(main, backend=real_backend).report
    assert [outcome.cfg for outcome in report.outcomes] == [LARGE, MEDIUM]
    assert all(isinstance(outcome, Measured) for outcome in report.outcomes)
    assert report.incumbent == LARGE
    assert set(ran) == {LARGE, MEDIUM}


def test_the_stubs_of_ejkernels_base_class_count_as_missing(real_backend):
    """A kernel without `heuristic_cfg` has no heuristic, and the NoConfigError says so."""

    class Bare(ejops.Kernel):
        op_id = "bare"

        def run(self, x, *, factor=1.0, cfg):
            return x

    with pytest.raises(NoConfigError, match="kernel has no heuristic"):
        anyio.run(Chain().select, invocation(op_id="bare"), Bare(), backend=real_backend)


def test_a_kernel_without_candidates_of_its_own_answers_with_its_heuristic(real_backend):
    """ejKernel's default list of candidates has only the heuristic, which is measured and wins."""

    class Default(ejops.Kernel):
        op_id = "default"

        def run(self, x, *, factor=1.0, cfg):
            return x

        def heuristic_cfg(self, inv):
            return LARGE

    bench = Chain()
    selection = anyio.run(bench.select, invocation(op_id="default"), Default(), backend=real_backend)
    assert (selection.cfg, bench.measure.compiled) == (LARGE, [LARGE])


def test_configs_may_be_unhashable(real_backend):
    """ejKernel lets a config be a dict."""

    class Dicts(Scale):
        def heuristic_cfg(self, inv):
            return {"size": 8}

        def candidate_cfgs(self, inv):
            return [{"size": 8}, {"size": 16}]

        def run(self, x, *, factor=1.0, cfg):
            return x * cfg["size"]

    selection = anyio.run(Chain(tuner=Tuner(warmup=0, iters=1)).select, invocation(), Dicts(), backend=real_backend)
    assert selection.tier == "autotune"
    assert [outcome.cfg for outcome in selection.report.outcomes] == [{"size": 8}, {"size": 16}]
    assert all(isinstance(outcome, Measured) for outcome in selection.report.outcomes)


def test_a_kernel_that_cannot_be_jitted_is_timed_without_jit(real_backend):
    """ejKernel does the same, so asel can tune every kernel that ejKernel can."""

    class Branching(Scale):
        op_id = "branching"

        def run(self, x, *, factor=1.0, cfg):
            return x * cfg.size if float(x.sum()) > 0 else x  # needs the value, so it cannot be traced

    kernel, inv = Branching(), invocation(op_id="branching")
    theirs = ejops.Tuner(warmup=1, iters=1).autotune(
        lambda cfg: partial(kernel.run, cfg=cfg), inv.args, inv.kwargs, [SMALL, MEDIUM]
    )
    assert theirs in (SMALL, MEDIUM)
    selection = anyio.run(Chain(tuner=Tuner(warmup=1, iters=1)).select, inv, kernel, backend=real_backend)
    assert selection.tier == "autotune"


# ---------------------------------------------------------------------------------------------
# Invocations.


def test_an_override_is_returned_and_not_stored(real_backend):
    """ejKernel's Executor sets `override_cfg` too, but ejKernel stores it."""
    bench, kernel = Chain(), Scale()

    async def main():
        async with bench.chain as chain:
            pinned = await chain.select(invocation(override_cfg=Tile(64)), kernel)
            nowait = chain.choose_nowait(invocation(override_cfg=Tile(65)), kernel)
            after = await chain.select(invocation(), kernel)
        assert (pinned.cfg, pinned.tier, nowait) == (Tile(64), "override", Tile(65))
        assert (after.cfg, after.tier) == (MEDIUM, "autotune")

    anyio.run(main, backend=real_backend)


def test_overlays_apply_to_ejkernels_invocations(real_backend):
    """asel's overlay answers a call made with ejKernel's objects."""
    bench, kernel = Chain(), Scale()

    async def main():
        async with bench.chain as chain:
            key = (await chain.explain(invocation(), kernel)).key
            with overlay_cache({key: LARGE}):
                return await chain.select(invocation(), kernel)

    selection = anyio.run(main, backend=real_backend)
    assert (selection.cfg, selection.tier) == (LARGE, "overlay")


def test_a_traced_ejkernel_call_is_recorded_and_tuned_in_the_background(real_backend):
    """Under `jax.jit` it gets the heuristic, is recorded as shapes, and is tuned."""
    bench, kernel = Chain(), Scale()

    async def main():
        async with bench.chain as chain:

            def model(x):
                cfg = chain.choose_nowait(invocation(x), kernel)
                return kernel.run(x, factor=2.0, cfg=cfg)

            x = jnp.ones((4, 8))
            with jax.checking_leaks():
                np.testing.assert_array_equal(jax.jit(model)(x), kernel.run(x, factor=2.0, cfg=SMALL))
            await chain.settled()
            np.testing.assert_array_equal(jax.jit(lambda x: model(x))(x), kernel.run(x, factor=2.0, cfg=MEDIUM))

    anyio.run(main, backend=real_backend)
    [(recorded, args, kwargs)] = get_invocations(device_fingerprint())["scale@v2"].values()
    assert recorded is kernel
    assert (args, kwargs) == ((jax.ShapeDtypeStruct((4, 8), jnp.float32),), {"factor": 2.0})


def test_warming_up_prepares_arguments_as_ejkernel_does(real_backend):
    """`warm_up` takes an ejKernel kernel with plain arguments, and lets the kernel prepare them."""

    class Prepared(Scale):
        def prepare(self, x, **kwargs):
            return (np.asarray(x, np.float32),), {"factor": 2.0}

    async def main():
        kernel = Prepared()
        async with Chain().chain as chain:
            summary = await warm_up(chain, [(kernel, ([[1, 2], [3, 4]],))])
            assert (list(summary.chosen.values()), summary.failed) == ([MEDIUM], [])
            return await chain.select(invocation(jnp.ones((2, 2))), kernel)

    assert anyio.run(main, backend=real_backend).tier == "memory"


# ---------------------------------------------------------------------------------------------
# ejKernel's own modules, as they are installed.


def pooling():
    x = jnp.arange(2 * 64 * 16, dtype=jnp.float32).reshape(2, 64, 16)
    return MeanPooling(), ejops.Invocation(op_id="mean_pooling", args=(), kwargs={"x": x, "chunk_size": 16})


def attention(**fields):
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 16, 2, 8)).astype(np.float32)
    return ScaledDotProductAttention(), ejops.Invocation(
        op_id="scaled_dot_product_attention", args=(q, k, v), kwargs={"causal": True, "softmax_scale": 0.5}, **fields
    )


def output(kernel, inv, cfg):
    arrays = [*inv.args, *(value for value in inv.kwargs.values() if isinstance(value, jax.Array))]
    static = {name: value for name, value in inv.kwargs.items() if not isinstance(value, jax.Array)}
    return jax.jit(partial(kernel.run, cfg=cfg, **static))(*arrays)


# These take long to compile, and do not depend on the loop: one backend has to do.
@pytest.mark.parametrize(
    ("make", "validate_backward"),
    [(pooling, False), (pooling, True), (attention, True)],
    ids=["pooling forward", "pooling forward+backward", "attention forward+backward"],
)
def test_ejkernels_own_modules_are_tuned(make, validate_backward):
    """Kernels that ship with ejKernel are tuned unchanged, and run with their configs."""
    kernel, inv = make()

    async def main():
        policy = AutotunePolicy(validate_backward=validate_backward)
        async with Chain(policy=policy, tuner=Tuner(warmup=0, iters=1)).chain as chain:
            return await chain.select(inv, kernel), await chain.select(inv, kernel)

    first, second = anyio.run(main)
    assert (first.tier, second.tier, second.cfg) == ("autotune", "memory", first.cfg)
    outcomes, guess = first.report.outcomes, kernel.heuristic_cfg(inv)
    assert len(outcomes) >= 2
    assert all(isinstance(outcome, Measured) for outcome in outcomes), outcomes
    assert {repr(outcome.cfg) for outcome in outcomes} == {repr(cfg) for cfg in (guess, *kernel.candidate_cfgs(inv))}
    assert first.report.incumbent == guess
    np.testing.assert_allclose(output(kernel, inv, first.cfg), output(kernel, inv, guess), rtol=1e-5)


def test_an_ejkernel_module_is_tuned_under_shard_map():
    """`method="shard_map"` runs the kernel through the wrapper that ejKernel's kernels make."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    spec = PartitionSpec("x")
    fields = {"method": "shard_map", "mesh": mesh, "in_specs": (spec,) * 3 + (None,) * 4, "out_specs": spec}
    (kernel, mapped), (_, plain) = attention(**fields), attention()

    async def main():
        async with Chain(tuner=Tuner(warmup=0, iters=1)).chain as chain:
            return await chain.select(mapped, kernel), await chain.explain(plain, kernel)

    under_mesh, without = anyio.run(main)
    assert under_mesh.tier == "autotune"
    assert all(isinstance(outcome, Measured) for outcome in under_mesh.report.outcomes)
    assert under_mesh.key != without.key


# ---------------------------------------------------------------------------------------------
# ejKernel's PersistentCache as the store.


def test_ejkernels_persistent_cache_is_a_store(tmp_path, real_backend):
    """ejKernel's cache keeps the result of one process's tune, and the next process does not tune."""
    path = tmp_path / "scale.json"

    def process() -> Chain:
        return Chain(persistent=ejops.PersistentCache("scale", path=str(path), cfg_type=Tile))

    first = process()
    tuned = anyio.run(first.select, invocation(), Scale(), backend=real_backend)
    assert (tuned.cfg, tuned.tier) == (MEDIUM, "autotune")
    assert first.sink.named("persisted")[0].cfg == MEDIUM
    assert json.loads(path.read_text()) == {"|".join(tuned.key): {"size": 16, "kind": "row"}}

    second = process()
    loaded = anyio.run(second.select, invocation(), Scale(), backend=real_backend)
    assert (loaded.cfg, loaded.tier) == (MEDIUM, "persistent")
    assert second.measure.compiled == []
    assert loaded.key == tuned.key


def test_nothing_but_tunes_reaches_ejkernels_persistent_cache(tmp_path, real_backend):
    """Overrides and heuristics stay out of the store; in ejKernel, they hide tuning forever."""
    cache = ejops.PersistentCache("scale", path=str(tmp_path / "scale.json"), cfg_type=Tile)

    async def main():
        async with Chain(persistent=cache).chain as chain:
            await chain.choose(invocation(override_cfg=Tile(64)), Scale())
            with asel.policy_override(chain, allow_autotune=False):
                assert await chain.choose(invocation(), Scale()) == SMALL
        async with Chain(persistent=cache, persist_autotune=False).chain as chain:
            assert await chain.choose(invocation(), Scale()) == MEDIUM

    anyio.run(main, backend=real_backend)
    assert not (tmp_path / "scale.json").exists()


def test_a_retune_replaces_the_config_in_ejkernels_persistent_cache(tmp_path, real_backend):
    """`retune` measures again, and the store keeps the new answer."""
    cache = ejops.PersistentCache("scale", path=str(tmp_path / "scale.json"), cfg_type=Tile)
    costs = dict(COSTS)

    async def main():
        async with Chain(costs, persistent=cache).chain as chain:
            kernel = Scale()
            selection = await chain.select(invocation(), kernel)
            costs[LARGE] = 0.0001
            assert await chain.retune(invocation(), kernel) == LARGE
            return selection.key

    key = anyio.run(main, backend=real_backend)
    assert cache.get(*key) == LARGE


# ---------------------------------------------------------------------------------------------
# ejKernel's Tuner as the tuner.


def test_a_chain_accepts_ejkernels_tuner(real_backend):
    """It measures in a thread, and its winner is the answer from then on."""

    class Spin(Scale):
        op_id = "spin"

        def run(self, x, *, factor=1.0, cfg):
            return jax.lax.fori_loop(0, cfg.size, lambda _, y: jnp.sin(y) * factor, x)

        def heuristic_cfg(self, inv):
            return Tile(20_000)

        def candidate_cfgs(self, inv):
            return [Tile(20_000), Tile(1)]

    bench, kernel = Chain(tuner=ejops.Tuner(warmup=1, iters=3)), Spin()

    async def main():
        async with bench.chain as chain:
            return await chain.select(invocation(op_id="spin"), kernel), await chain.select(
                invocation(op_id="spin"), kernel
            )

    first, second = anyio.run(main, backend=real_backend)
    assert (first.cfg, first.tier, second.cfg, second.tier) == (Tile(1), "autotune", Tile(1), "memory")
    assert first.report.winner == Tile(1)


def test_ejkernels_tuner_that_finds_nothing_leaves_the_heuristic(real_backend):
    """ejKernel's Tuner returns None if all candidates fail; the tune has failed, and the heuristic answers."""

    class Broken(Scale):
        def run(self, x, *, factor=1.0, cfg):
            raise ValueError("not divisible")

    bench = Chain(tuner=ejops.Tuner(warmup=0, iters=1))
    selection = anyio.run(bench.select, invocation(), Broken(), backend=real_backend)
    assert (selection.cfg, selection.tier) == (SMALL, "heuristics")
    assert "found no config" in selection.declined["autotune"]


def test_ejkernels_tuner_times_the_objective_of_the_policy(real_backend):
    """With `validate_backward`, ejKernel's Tuner times forward and backward."""
    gradients = []

    @jax.custom_vjp
    def identity(x):
        return x

    identity.defvjp(lambda x: (x, None), lambda _, g: (gradients.append(g.dtype) or g,))

    class Spied(Scale):
        def run(self, x, *, factor=1.0, cfg):
            return identity(x) * factor

    bench = Chain(policy=AutotunePolicy(validate_backward=True), tuner=ejops.Tuner(warmup=0, iters=1))
    selection = anyio.run(bench.select, invocation(), Spied(), backend=real_backend)
    assert (selection.tier, selection.report.objective) == ("autotune", "forward+backward")
    assert set(gradients) == {jnp.dtype("float32")}
