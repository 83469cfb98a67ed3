"""Invalid requests are refused with one sentence, before anything is done."""

from __future__ import annotations

import subprocess
import sys
import threading

import anyio
import jax.numpy as jnp
import pytest
from support.kernels import BEST, H100, Bench, Toy, call

from asel import ConfigCache, ConfigSelectorChain, Executor, InvalidRequestError, Invocation, kernel, warm_up
from asel.kernels.keys import call_key
from asel.testing import RecordingSink

X = H100.array((8, 128))


class Other(Toy):
    op_id = "other"


@kernel(op_id="toy", configs=[1, 2], heuristic=1)
def function(x, *, cfg):
    return x


WRONG = [
    (Toy(), call(), "an invocation comes first and its kernel second: they are in the wrong order"),
    (function, call(), "they are in the wrong order"),
    (X, Toy(), r"a FakeArray is not an invocation; write Invocation\('toy', args, kwargs\)"),
    (jnp.ones(3), Toy(), "an? .*Array.* is not an invocation"),
    ((X,), Toy(), "a tuple is not an invocation"),
    (call(), Other(), "this invocation is of 'toy', and the kernel is 'other'"),
    (call(), Toy, "a class Toy is not a kernel"),
    (call(), lambda x: x, "a function is not a kernel"),
    (Invocation("toy", X, {}), Toy(), r"args of an invocation are a tuple, not a FakeArray; write .*'toy', \(x,\)"),
    (Invocation("toy", jnp.ones(3), {}), Toy(), "args of an invocation are a tuple, not an Array"),
    (Invocation("toy", (X,), None), Toy(), "kwargs of an invocation are a dict, not a NoneType"),
]


@pytest.mark.anyio
@pytest.mark.parametrize(("inv", "of", "message"), WRONG)
@pytest.mark.parametrize("method", ["choose", "select", "explain", "retune", "choose_nowait"])
async def test_an_invalid_call_or_kernel_is_named(method, inv, of, message):
    """Every method raises an error of asel's, not an AttributeError."""
    bench = Bench()
    async with bench.chain as chain:
        with pytest.raises(InvalidRequestError, match=message):
            answer = getattr(chain, method)(inv, of)
            if method != "choose_nowait":
                await answer
    assert bench.tunes == 0


WRONG_OPTIONS = [
    ({"cache": {}}, r"cache=\{\} is not an asel.ConfigCache"),
    ({"policy": "background"}, "policy='background' is not an AutotunePolicy"),
    ({"persist_autotune": "no"}, "persist_autotune='no' must be True or False"),
    ({"forbid_reautotune": 1}, "forbid_reautotune=1 must be True or False"),
    ({"close_grace_s": -1}, "close_grace_s=-1 must be seconds"),
    ({"store_timeout_s": "5"}, "store_timeout_s='5' must be seconds"),
    ({"on_event": []}, r"on_event=\[\] is not a function of an event"),
    ({"sinks": RecordingSink()}, r"is not a list; write sinks=\[...\]"),
    ({"sinks": [RecordingSink]}, r"is a class; write RecordingSink\(\)"),
    ({"sinks": [print]}, r"print> among the sinks has no emit\(event\)"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS)
def test_a_wrong_parameter_of_a_selector_is_named(options, message):
    """It is refused by the constructor, not by the first call that needs it."""
    with pytest.raises(InvalidRequestError, match=message):
        ConfigSelectorChain(**options)


@pytest.mark.anyio
async def test_withdraw_checks_its_request():
    """Without the check, a withdrawal for another kernel would silently do nothing."""
    async with Bench().chain as chain:
        with pytest.raises(InvalidRequestError, match="this invocation is of 'toy', and the kernel is 'other'"):
            await chain.withdraw(call(), Other(), BEST, MemoryError("too large"))


@pytest.mark.anyio
@pytest.mark.parametrize("method", ["__call__", "nowait"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((None, X), "a NoneType is not a kernel"),
        ((lambda x: x, X), "a function is not a kernel"),
        ((X, Toy()), "a FakeArray is not a kernel"),
        ((Toy, X), "a class Toy is not a kernel"),
        ((call(), Toy()), "an Invocation is not a kernel"),
    ],
)
async def test_an_invalid_call_of_an_executor_is_named(method, given, message):
    """An executor takes a kernel and its arguments."""
    async with Bench().chain as chain:
        with pytest.raises(InvalidRequestError, match=message):
            out = getattr(Executor(chain), method)(*given)
            if method == "__call__":
                await out


@pytest.mark.parametrize("selector", [None, Toy(), ConfigCache()])
def test_an_executor_needs_a_selector(selector):
    """Any other object is named in the constructor's error."""
    with pytest.raises(InvalidRequestError, match=f"a {type(selector).__name__} is not a ConfigSelectorChain"):
        Executor(selector)


@pytest.mark.anyio
async def test_an_invocation_of_another_op_is_refused_despite_a_memory_answer():
    """A signature does not contain the op, since the kernel implies it."""
    bench, toy = Bench(), Toy()
    async with bench.chain as chain:
        assert await chain.choose(call(), toy) == BEST
        assert await chain.choose(call(), toy) == BEST
        for ask in (chain.choose, chain.select):
            with pytest.raises(InvalidRequestError, match="this invocation is of 'tow'"):
                await ask(Invocation("tow", (X,), {}), toy)
        with pytest.raises(InvalidRequestError, match="this invocation is of 'tow'"):
            chain.choose_nowait(Invocation("tow", (X,), {}), toy)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("example", "message"),
    [
        ((Toy(), X), r"example 1, of 'toy', is a FakeArray; pass the arguments as a tuple, \(kernel, \(x,\)\)"),
        ((Toy(), [X]), "is a list; pass the arguments as a tuple"),
        ((X, Toy()), r"example 1 is \(FakeArray, Toy\), not a kernel and an example call of it"),
        (Toy(), "example 1 is .Toy."),
        ((Toy(), X, X), "FakeArray, FakeArray"),
        ((Toy, (X,)), "not a kernel"),
        ((Other(), call()), "this invocation is of 'toy', and the kernel is 'other'"),
    ],
)
async def test_a_wrong_example_ends_a_warm_up_before_it_begins(example, message):
    """The error names the example, and nothing has been tuned yet."""
    bench = Bench()
    async with bench.chain as chain:
        with pytest.raises(InvalidRequestError, match=message):
            await warm_up(chain, [(Toy(), call()), example])
    assert bench.tunes == 0


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([(Toy(), call())], Bench().chain), "a list is not a selector; pass a ConfigSelectorChain first"),
        ((Bench().chain, None), "a NoneType is not a list of"),
    ],
)
async def test_swapped_arguments_of_a_warm_up_are_named(arguments, message):
    """The selector comes first."""
    with pytest.raises(InvalidRequestError, match=message):
        await warm_up(*arguments)


def test_a_warm_up_prepares_its_examples_in_a_thread(real_backend):
    """A kernel's `prepare` may compile."""
    on_loop = []

    class Prepared(Toy):
        def prepare(self, x):
            on_loop.append(threading.current_thread() is threading.main_thread())
            return (x,), {}

    async def main():
        bench = Bench(costs=0.001)
        async with bench.chain as chain:
            assert (await warm_up(chain, [(Prepared(), (X,))])).failed == []

    anyio.run(main, backend=real_backend)
    assert on_loop == [False]


def test_an_attribute_error_of_a_kernel_is_raised_unchanged():
    """An error in a key builder is not mistaken for an invalid request."""

    class Broken(Toy):
        def key_builder(self, inv):
            return inv.args[0].no_such_thing

    with pytest.raises(AttributeError, match="no_such_thing"):
        call_key(call(), Broken())
    with pytest.raises(AttributeError, match="no_such_thing"):
        Bench().chain.choose_nowait(call(), Broken())


@pytest.mark.timeout(60)  # another process starts
def test_the_command_runs_as_a_module():
    """`python -m asel` where the script is not on the path."""
    ran = subprocess.run([sys.executable, "-m", "asel", "--version"], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout[:5]) == (0, "asel "), ran.stderr
