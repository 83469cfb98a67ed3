"""Warnings about keys that could be tuned and never are: each once, with a remedy."""

from __future__ import annotations

import logging
import threading
import warnings

import jax
import jax.numpy as jnp
import pytest
from support.kernels import BEST, GUESS, Bench, Blocks, Toy, call

from asel import Invocation, NoConfigError, TuningError
from asel.errors import UntunedWarning

TOY = Toy()
ALL_FAIL = {"run_errors": {Blocks(n): ValueError("no tile fits") for n in (1, 2, 3)}}


def texts(caught) -> list[str]:
    return [str(one.message) for one in caught if one.category is UntunedWarning]


def test_choose_nowait_on_a_chain_that_is_not_open_warns_once_for_each_key():
    """Without a background tune, it would answer with the heuristic forever."""
    chain = Bench().chain
    with pytest.warns(UntunedWarning) as caught:
        assert [chain.choose_nowait(call(size), TOY) for size in (8, 8, 16)] == [GUESS] * 3
    first, second = texts(caught)
    assert first.startswith("toy@v1(x=f32[8,128]) on NVIDIA H100 is not tuned: ")
    assert second.startswith("toy@v1(x=f32[16,128]) on ")
    for way_out in ("async with selector", "warm_up", "autotune_recorded", 'cache_miss_fallback="heuristics"'):
        assert way_out in first
    assert {one.filename for one in caught} == {__file__}, "it points at the code that asked"
    with pytest.warns(UntunedWarning):  # another chain may have another owner
        Bench().chain.choose_nowait(call(), TOY)


def test_a_call_that_is_traced_without_a_loop_warns():
    """Most users call `choose_nowait` this way."""
    chain = Bench().chain
    with pytest.warns(UntunedWarning, match="autotune_recorded"):
        jax.make_jaxpr(lambda x: x * chain.choose_nowait(Invocation("toy", (x,), {}), TOY).m)(jnp.zeros(3))


@pytest.mark.anyio
@pytest.mark.parametrize("ask", ["choose", "choose_nowait"])
async def test_background_tuning_on_a_chain_that_is_not_open_warns_once(ask):
    """The policy asks for background tunes, which need a task group. `explain` gives the reason without a warning."""
    bench = Bench(allow={"cache_miss_fallback": "background"})
    with warnings.catch_warnings(record=True) as early:
        warnings.simplefilter("always")
        await bench.chain.explain(call(), TOY)
    assert texts(early) == []
    with pytest.warns(UntunedWarning) as caught:
        for _ in range(3):
            answer = getattr(bench.chain, ask)(call(), TOY)
            assert (answer if ask == "choose_nowait" else await answer) == GUESS
    [text] = texts(caught)
    assert 'cache_miss_fallback="background"' in text
    assert "async with selector" in text


@pytest.mark.anyio
@pytest.mark.parametrize("fallback", ["autotune", "background"])
async def test_a_tune_in_which_every_candidate_fails_warns_once(fallback):
    """The heuristic answers, so the failure would go unnoticed."""
    bench = Bench(script=ALL_FAIL, allow={"cache_miss_fallback": fallback, "retry_after_s": 0.0})
    with pytest.warns(UntunedWarning) as caught:
        async with bench.chain as chain:
            for _ in range(2):
                assert await chain.choose(call(), TOY) == GUESS
                await chain.settled()
    assert bench.tunes == 2
    [text] = texts(caught)
    assert text.startswith("toy@v1(x=f32[8,128]) on NVIDIA H100 is not tuned: ")
    assert "3 of them: ValueError in the measure stage: no tile fits" in text
    assert "retune" in text


class Raises(Toy):
    def candidate_cfgs(self, inv):
        raise KeyError("no such table")


class Misranks(Toy):
    def candidate_priority(self, cfg, inv):
        return "high"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        (Raises(), "candidate_cfgs raised KeyError: 'no such table'"),
        (Misranks(), "candidate_priority raised TypeError"),
    ],
)
@pytest.mark.parametrize("fallback", ["autotune", "background", "nowait"])
async def test_a_kernel_whose_candidates_cannot_be_listed_warns_once(kernel, why, fallback):
    """The heuristic answers, so the failure would go unnoticed."""
    bench = Bench(allow={} if fallback == "nowait" else {"cache_miss_fallback": fallback})
    with pytest.warns(UntunedWarning) as caught:
        async with bench.chain as chain:
            for _ in range(3):
                answer = chain.choose_nowait(call(), kernel) if fallback == "nowait" else chain.choose(call(), kernel)
                assert (answer if fallback == "nowait" else await answer) == GUESS
    [text] = texts(caught)
    assert f"is not tuned: {why}" in text
    assert "asked for its candidates again" in text


@pytest.mark.anyio
async def test_expected_outcomes_do_not_warn():
    """No warning is given for an error that is raised, a policy that declines to tune, or an open chain."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async with Bench().chain as chain:
            assert chain.choose_nowait(call(), TOY) == GUESS
            await chain.settled()
            assert chain.choose_nowait(call(), TOY) == BEST
        for allow in ({"allow_autotune": False}, {"cache_miss_fallback": "heuristics"}):
            assert Bench(allow=allow).chain.choose_nowait(call(), TOY) == GUESS
        async with Bench(script=ALL_FAIL, allow={"allow_heuristics": False}).chain as chain:
            with pytest.raises(TuningError):
                await chain.choose(call(), TOY)
        async with Bench(script=ALL_FAIL).chain as chain:
            with pytest.raises(TuningError):
                await chain.retune(call(), TOY)
        async with Bench(allow={"allow_heuristics": False}).chain as chain:
            with pytest.raises(NoConfigError):
                await chain.choose(call(), Raises())
        async with Bench(allow={"cache_miss_fallback": "heuristics"}).chain as chain:
            assert await chain.choose(call(), Raises()) == GUESS
    assert texts(caught) == []


def test_a_program_that_turns_warnings_into_errors_gets_its_answer(caplog):
    """The warning fails neither the call nor the tune; the standard logger has its text."""
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING, logger="asel"):
        warnings.simplefilter("error")
        assert Bench().chain.choose_nowait(call(), TOY) == GUESS
    [record] = caplog.records
    assert record.getMessage().startswith("toy@v1(x=f32[8,128]) on NVIDIA H100 is not tuned: ")


def test_concurrent_threads_get_one_warning():
    """The warning is given once over all threads."""
    chain, start = Bench().chain, threading.Barrier(8)

    def ask() -> None:
        start.wait()
        chain.choose_nowait(call(), TOY)

    with pytest.warns(UntunedWarning) as caught:
        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(texts(caught)) == 1
