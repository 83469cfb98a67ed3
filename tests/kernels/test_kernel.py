"""Invocations, the several forms of kernels, and the variants of their methods."""

from __future__ import annotations

import dataclasses
import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support.key_examples as ex
from support.kernels import H100, Blocks, Listed, Toy
from support.key_examples import P

from asel import ConfigSelectorChain, Executor, Invocation, Kernel, Tuner, kernel
from asel.kernels.binding import bind
from asel.kernels.kernel import FunctionKernel
from asel.kernels.kernel_methods import example_inputs_of, key_builder_of, variant
from asel.kernels.key_memo import KeyMemo
from asel.testing import FakeDevice, ScriptedMeasure

TPU = FakeDevice("TPU v5e", "tpu")
CPU = FakeDevice("cpu", "cpu")
MESH = ex.mesh_of(1)


def resolve(of: Any, dev: FakeDevice = H100, **call: Any) -> Any:
    inv = Invocation("toy", (dev.array((8,)),), {}, **call)
    return Listed(KeyMemo().resolve(inv, of), inv, of)


def mapped(*args: Any, **kwargs: Any) -> Invocation[Any, Any]:
    return Invocation("toy", args, kwargs, method="shard_map", mesh=MESH, in_specs=(P("x"),), out_specs=P("x"))


# --- invocations -------------------------------------------------------------------------------


def test_an_invocation_is_a_value():
    """It can be compared, copied with changes and sent to another process, but not mutated."""
    inv = Invocation("op", (1,), {"a": 2})
    assert inv == Invocation("op", (1,), {"a": 2})
    assert pickle.loads(pickle.dumps(inv)) == inv
    assert dataclasses.replace(inv, args=(2,)) != inv
    with pytest.raises(dataclasses.FrozenInstanceError):
        inv.args = ()


# --- kernels -----------------------------------------------------------------------------------


def test_a_kernel_without_an_op_id_is_named_after_its_class():
    """By argument, by class attribute, or by where its class lives."""

    class Anonymous(Kernel):
        pass

    assert Kernel("given").op_id == "given"
    assert Toy().op_id == "toy"
    assert Toy("other").op_id == "other"
    assert Anonymous().op_id == f"{__name__}.{Anonymous.__qualname__}"


def test_a_missing_method_raises_with_its_name():
    """The stubs name the class and the method."""
    with pytest.raises(NotImplementedError, match="Kernel has no run method"):
        Kernel("k").run(1, cfg=None)
    with pytest.raises(NotImplementedError, match="Kernel has no heuristic_cfg method"):
        Kernel("k").heuristic_cfg(Invocation("k", (), {}))


def test_preparing_changes_nothing_unless_it_is_overridden():
    """`run` gets the user's arguments."""
    assert Kernel("k").prepare(1, 2, a=3) == ((1, 2), {"a": 3})


# --- variants ----------------------------------------------------------------------------------


def _variants(*suffixes: str) -> Any:
    """Return a kernel with the given variants, each of which returns its own name."""
    methods: dict[str, Any] = {"op_id": "toy"}
    for suffix in suffixes:
        methods[f"run{suffix}"] = lambda self, x, *, cfg, said=f"run{suffix}": said
        methods[f"heuristic_cfg{suffix}"] = lambda self, inv, said=f"heuristic{suffix}": said
        methods[f"candidate_cfgs{suffix}"] = lambda self, inv, said=f"candidate{suffix}": [said]
    return type("Variants", (Kernel,), methods)()


ALL = ("", "_gpu", "_tpu", "_cpu", "_shard_map", "_shard_map_gpu")


@pytest.mark.parametrize(
    ("suffixes", "platform", "context", "expected"),
    [
        (ALL, "gpu", None, "_gpu"),
        (ALL, "tpu", None, "_tpu"),
        (ALL, "cpu", None, "_cpu"),
        (ALL, "metal", None, ""),
        (ALL, "gpu", "shard_map", "_shard_map_gpu"),
        (ALL, "tpu", "shard_map", "_shard_map"),
        (("", "_gpu"), "gpu", "shard_map", "_gpu"),
        (("", "_gpu"), "tpu", "shard_map", ""),
        (("", "_shard_map"), "gpu", "shard_map", "_shard_map"),
        (("", "_shard_map"), "gpu", None, ""),
        (("", "_shard_map_gpu"), "tpu", "shard_map", ""),
        (("_gpu",), "gpu", None, "_gpu"),
        (("_gpu",), "tpu", None, None),
        ((), "gpu", "shard_map", None),
    ],
)
@pytest.mark.parametrize("method", ["run", "heuristic_cfg", "candidate_cfgs"])
def test_the_most_specific_variant_is_used(suffixes, platform, context, expected, method):
    """In order: shard_map with platform, shard_map, platform, plain. A base class's stub does not count."""
    of = _variants(*suffixes)
    found = variant(of, method, platform, context)
    assert found == (None if expected is None else getattr(of, method + expected))


def test_a_variant_that_is_not_callable_is_ignored():
    """Setting a variant to None in a subclass removes it."""
    of = _variants("", "_gpu")
    of.run_gpu = None
    assert variant(of, "run", "gpu", None) == of.run


@pytest.mark.parametrize(
    ("dev", "suffix"), [(H100, "_gpu"), (FakeDevice("A100", "cuda"), "_gpu"), (TPU, "_tpu"), (CPU, "_cpu")]
)
def test_candidates_and_heuristic_are_those_of_the_arguments_platform(dev, suffix):
    """The arguments' device decides, and not the process's default."""
    known = resolve(_variants(*ALL), dev)
    assert (known.heuristic, known.candidates[0]) == (f"heuristic{suffix}", f"candidate{suffix}")


def test_mapped_calls_have_their_own_candidates():
    """Under shard_map a kernel sees a shard, so it may list other configs."""
    of = _variants(*ALL)
    mapping = {"method": "shard_map", "mesh": MESH, "in_specs": P("x"), "out_specs": P("x")}
    assert resolve(of, H100, **mapping).candidates[0] == "candidate_shard_map_gpu"
    assert resolve(of, TPU, **mapping).heuristic == "heuristic_shard_map"
    assert resolve(of, H100).candidates[0] == "candidate_gpu"


def test_candidates_default_to_the_platforms_own_heuristic():
    """A kernel with only a heuristic for this platform has that as its only candidate."""

    class Guess(Toy):
        candidate_cfgs = Kernel.candidate_cfgs

        def heuristic_cfg_tpu(self, inv):
            return Blocks(128)

    assert resolve(Guess(), TPU).candidates == (Blocks(128),)
    assert resolve(Guess(), H100).candidates == (Blocks(1),)


def test_any_object_with_the_right_methods_is_a_kernel():
    """It need not inherit from `Kernel`."""

    class Duck:
        op_id = "duck"

        def run(self, x, *, cfg):
            return x + cfg

        def run_tpu(self, x, *, cfg):
            return x - cfg

        def heuristic_cfg(self, inv):
            return 1

        def candidate_cfgs(self, inv):
            return (1, 2)

    inv = Invocation("duck", (1,), {})
    known = Listed(KeyMemo().resolve(inv, Duck()), inv, Duck())
    assert (known.key.op_id, known.candidates, known.incumbent) == ("duck@v0", (1, 2), 0)
    assert bind(Duck(), inv, "gpu", 10)(1) == 11
    assert bind(Duck(), inv, "tpu", 10)(1) == -9


# --- the decorator -----------------------------------------------------------------------------


@kernel(op_id="scale", configs=[2, 3], heuristic=2, version="7")
def scale(x, *, cfg=1, offset=0):
    """Multiply by the config."""
    return x * cfg + offset


def test_a_decorated_function_is_a_kernel_and_can_still_be_called():
    """It keeps its name and docstring, too."""
    assert isinstance(scale, FunctionKernel)
    assert scale(2) == 2
    assert scale(2, cfg=5, offset=1) == 11
    assert (scale.__name__, scale.__doc__) == ("scale", "Multiply by the config.")
    assert (scale.op_id, scale.version) == ("scale", "7")
    assert scale.run(2, cfg=3) == 6
    assert bind(scale, Invocation("scale", (2,), {"offset": 1}), "cpu", 3)(2, offset=1) == 7


def test_a_decorated_function_resolves_like_any_kernel():
    """Its configs are the candidates, its heuristic the incumbent, its version in the key."""
    known = resolve(scale)
    assert (known.candidates, known.incumbent, known.heuristic) == ((2, 3), 0, 2)
    assert known.key.op_id == "scale@v7"


def test_a_decorated_function_is_named_after_itself():
    """Without an op_id, its module and qualified name are used."""

    @kernel(configs=[1])
    def unnamed(x, *, cfg):
        return x

    assert unnamed.op_id == f"{__name__}.{unnamed.__qualname__}"
    assert unnamed.version == "0"


def test_configs_and_heuristic_may_be_functions_of_the_invocation():
    """Both get the invocation."""

    @kernel(op_id="k", configs=lambda inv: [inv.args[0].shape[0], 1], heuristic=lambda inv: inv.args[0].shape[0])
    def computed(x, *, cfg):
        return x

    known = resolve(computed)
    assert (known.candidates, known.heuristic, known.incumbent) == ((8, 1), 8, 0)


@pytest.mark.parametrize(
    "heuristic", [functools.partial(lambda base, inv: base + 1, 4), Toy().heuristic_cfg], ids=["partial", "method"]
)
def test_a_heuristic_may_be_any_plain_function(heuristic):
    """Partials and bound methods are functions of the invocation too."""
    made = kernel(op_id="k", configs=[1], heuristic=heuristic)(lambda x, *, cfg: x)
    assert resolve(made).heuristic == heuristic(Invocation("k", (), {}))


def test_a_callable_config_is_not_called():
    """Only plain functions are called; a callable dataclass is a config."""
    made = kernel(op_id="k", configs=[ex.Window(1), ex.Window(2)], heuristic=ex.Window(2))(lambda x, *, cfg: x)
    known = resolve(made)
    assert (known.heuristic, known.incumbent) == (ex.Window(2), 1)


def test_a_decorated_function_without_a_heuristic_has_none():
    """The heuristics tier declines with that reason."""
    made = kernel(op_id="k", configs=[1, 2])(lambda x, *, cfg: x)
    known = resolve(made)
    assert (known.heuristic, known.incumbent, known.no_heuristic) == (None, None, "kernel has no heuristic")
    assert known.candidates == (1, 2)


def test_configs_are_the_same_for_every_call():
    """Each new signature sees the whole list, even if a generator was given."""
    made = kernel(op_id="k", configs=(n for n in (1, 2)))(lambda x, *, cfg: x)
    memo = KeyMemo()
    calls = [Invocation("k", (size,), {}) for size in (1, 2)]
    seen = [memo.resolve(inv, made).listing(inv, made).candidates for inv in calls]
    assert seen == [(1, 2), (1, 2)]


def test_attributes_of_the_function_do_not_replace_those_of_the_kernel():
    """A function may have its own `version`; the kernel's is the decorator's argument."""

    def tagged(x, *, cfg):
        return x

    tagged.version = "function's"
    tagged.op_id = "function's"
    tagged.key_builder = lambda inv: "function's"
    made = kernel(op_id="k", configs=[1], version="2")(tagged)
    assert (made.op_id, made.version, made.key_builder) == ("k", "2", None)


# --- key builders ------------------------------------------------------------------------------


def test_a_kernel_without_a_key_builder_has_none():
    """Absent, None, or a duck type without the attribute."""
    assert key_builder_of(Toy()) is None
    assert key_builder_of(object()) is None
    assert key_builder_of(None) is None


@pytest.mark.parametrize(
    "written",
    [
        lambda inv: inv.op_id,
        lambda self, inv: inv.op_id,
        lambda self, inv, extra="x": inv.op_id,
        staticmethod(lambda inv: inv.op_id),
        classmethod(lambda cls, inv: inv.op_id),
        functools.partial(lambda prefix, inv: inv.op_id, "x"),
    ],
    ids=["function", "method", "method with a default", "staticmethod", "classmethod", "partial"],
)
def test_a_key_builder_in_a_class_body_takes_the_invocation(written):
    """The number of parameters shows whether it expects `self`."""
    of = type("Built", (Toy,), {"key_builder": written})()
    assert key_builder_of(of)(Invocation("the op", (), {})) == "the op"


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["key_builder", "heuristic_cfg", "candidate_cfgs", "run", "prepare"])
async def test_a_partial_in_a_class_body_is_not_made_a_method(name):
    """Python 3.13 warns when one is looked up, and 3.14 makes it a method; for kernels it stays a function."""
    written = {
        "key_builder": functools.partial(lambda prefix, inv: prefix, "any"),
        "heuristic_cfg": functools.partial(lambda guess, inv: guess, 1),
        "candidate_cfgs": functools.partial(lambda listed, inv: listed, [1, 2]),
        "run": functools.partial(lambda scale, x, *, cfg: scale * x * cfg, 1),
        "prepare": functools.partial(lambda more, x: ((x + more,), {}), 0),
    }
    plain = {
        "op_id": "partial",
        "heuristic_cfg": lambda self, inv: 1,
        "candidate_cfgs": lambda self, inv: [1, 2],
        "run": lambda self, x, *, cfg: x * cfg,
    }
    of = type("Partial", (Kernel,), {**plain, name: written[name]})()
    tuner = Tuner(0, 1, measure=ScriptedMeasure({1: 0.2, 2: 0.1}))
    async with ConfigSelectorChain(tuner=tuner, sinks=[]) as chain:
        assert await Executor(chain, jit=False)(of, 3) == 6


# --- bind --------------------------------------------------------------------------------------


def test_bind_gives_the_function_that_runs_the_config():
    """The chosen variant of `run` with the config, to be called with the arguments."""
    of = _variants("", "_gpu")
    inv = Invocation("toy", (1,), {})
    assert bind(of, inv, "gpu", None)(1) == "run_gpu"
    assert bind(of, inv, "cpu", None)(1) == "run"


def test_a_bound_kernel_without_run_raises():
    """The stub's own message reaches the caller."""
    with pytest.raises(NotImplementedError, match="has no run method"):
        bind(Kernel("k"), Invocation("k", (1,), {}), "cpu", None)(1)


class _Shardable(Kernel[int, Any]):
    op_id = "shardable"

    def run(self, x, *, cfg, offset=0.0):
        return x * cfg + offset + jax.lax.axis_index("x")


class _ShardableOnGpu(_Shardable):
    def run_shard_map(self, x, *, cfg, offset=0.0):
        return x * 100

    def run_shard_map_gpu(self, x, *, cfg, offset=0.0):
        return x * 1000

    def run_gpu(self, x, *, cfg, offset=0.0):
        raise AssertionError("a mapped call prefers its own variant")


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_mapped_call_runs_under_shard_map(jit):
    """The kernel sees the mesh's axis names; keywords are constants of the mapped function."""
    x = jnp.arange(4.0)
    fn = bind(_Shardable(), mapped(x), "cpu", 3)
    fn = jax.jit(fn, static_argnames="offset") if jit else fn
    np.testing.assert_array_equal(fn(x), [0.0, 3.0, 6.0, 9.0])
    np.testing.assert_array_equal(fn(x, offset=1.0), [1.0, 4.0, 7.0, 10.0])


@pytest.mark.parametrize(("platform", "factor"), [("gpu", 1000), ("cpu", 100)])
def test_a_mapped_call_runs_its_own_variant(platform, factor):
    """shard_map with the platform first, then shard_map."""
    x = jnp.ones(2)
    assert bind(_ShardableOnGpu(), mapped(x), platform, 3)(x).tolist() == [factor, factor]


class _Wrapping(_Shardable):
    """Has its own `shard_map` wrapper, as ejKernel's kernels do."""

    def __init__(self, callback: Any = "none"):
        super().__init__()
        self.callback, self.asked = callback, []

    def create_shard_map_wrapper(self, x, *, cfg, mesh, in_specs, out_specs, check_vma, **kwargs):
        self.asked.append((cfg, mesh, in_specs, out_specs, check_vma, kwargs))
        fn = jax.shard_map(lambda y: y * cfg, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
        return (fn, (x + 1,)) if self.callback == "none" else (fn, (x + 1,), self.callback)


@pytest.mark.parametrize(
    ("callback", "expected"),
    [("none", [6.0, 6.0]), (None, [6.0, 6.0]), (lambda outputs, cfg: outputs + 10 * cfg, [36.0, 36.0])],
    ids=["two parts", "no callback", "callback"],
)
def test_a_kernels_own_wrapper_may_post_process_outputs(callback, expected):
    """ejKernel's protocol: the wrapper returns the mapped function, its arguments, and optionally a callback."""
    of, x = _Wrapping(callback), jnp.ones(2)
    inv = mapped(x, scale=2)
    assert bind(of, inv, "cpu", 3)(x, scale=2).tolist() == expected
    assert of.asked == [(3, MESH, (P("x"),), P("x"), False, {"scale": 2})]


def test_a_kernels_own_wrapper_is_not_used_outside_shard_map():
    """The protocol is for mapped calls only."""

    class Plain(_Wrapping):
        def run(self, x, *, cfg):
            return x * cfg

    of, x = Plain(), jnp.ones(2)
    assert bind(of, Invocation("k", (x,), {}), "cpu", 3)(x).tolist() == [3.0, 3.0]
    assert of.asked == []


@pytest.mark.parametrize(
    ("made", "args", "kwargs"),
    [
        ((1, {"w": 2}), (1, {"w": 2}), {"given": 0}),
        (((1, {"w": 2}), {"scale": 3}), (1, {"w": 2}), {"scale": 3}),
        (((1,), {}), (1,), {}),
        ([1, {"w": 2}], (1, {"w": 2}), {"given": 0}),
        ((1, 2), (1, 2), {"given": 0}),
    ],
    ids=repr,
)
def test_example_inputs_are_args_or_args_and_kwargs(made, args, kwargs):
    """`(array, dict)` is two arguments; `((array,), dict)` is args and kwargs."""

    class Exemplary(Kernel):
        def example_inputs(self, inv):
            return made

    shape = jax.ShapeDtypeStruct((4,), "float32")
    example = example_inputs_of(Exemplary("k"), Invocation("k", (shape,), {"given": 0}))
    assert example() == (args, kwargs)
