"""Repeated calls get the same answer without a walk as with one."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack

import anyio
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import Blocks, Listed, Toy, call

from asel import AutotunePolicy, ConfigCache, ConfigSelectorChain, forward_autotune_only, overlay_cache, policy_override
from asel.kernels.key_memo import KeyMemo
from asel.selection.cache_entries import Done, Match, Provenance
from asel.testing import RecordingSink

SIZES = (8, 16)
KERNEL = Toy()
KEYS = {size: Listed(KeyMemo().resolve(call(size), KERNEL), call(size), KERNEL) for size in SIZES}

actions = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from(SIZES)),
    st.tuples(st.just("ask"), st.sampled_from(SIZES)),
    st.tuples(st.just("override"), st.sampled_from(SIZES)),
    st.tuples(st.just("put"), st.sampled_from(SIZES), st.integers(1, 5)),
    st.tuples(st.just("tuned"), st.sampled_from(SIZES), st.sampled_from(["forward", "forward+backward"])),
    st.tuples(st.just("load"), st.sampled_from(SIZES), st.sampled_from(["forward", "forward+backward", "other"])),
    st.tuples(st.just("clear")),
    st.tuples(st.just("overlay"), st.sampled_from(SIZES), st.integers(6, 9)),
    st.tuples(st.just("backward"), st.booleans()),
    st.tuples(st.just("forward only")),
    st.tuples(st.just("set policy"), st.booleans()),
    st.tuples(st.just("leave scopes")),
)


@given(plan=st.lists(actions, min_size=5, max_size=40), bound=st.sampled_from([None, 1, 2]))
@settings(max_examples=300, deadline=None)
def test_repeated_calls_and_the_walk_always_agree(plan, bound):
    """After any change between two calls, the second gets the walk's answer and emits the same event."""

    async def main():
        # One chain answers without a walk if it can; the other forgets its last answers before every call.
        cache = ConfigCache(max_entries=bound)
        sinks = RecordingSink(), RecordingSink()
        policy = AutotunePolicy(allow_autotune=False)
        quick, thorough = (ConfigSelectorChain(cache, policy, sinks=[sink]) for sink in sinks)
        scopes = ExitStack()
        for action, *facts in plan:
            match action:
                case "ask" | "override":
                    inv = call(facts[0], override_cfg=Blocks(10) if action == "override" else None)
                    thorough._keys = KeyMemo()
                    assert await quick.choose(inv, KERNEL) == await thorough.choose(inv, KERNEL)
                    assert quick.choose_nowait(inv, KERNEL) == thorough.choose_nowait(inv, KERNEL)
                    last, expected = (sink.events[-1] for sink in sinks)
                    assert dataclasses.replace(last, start=0, end=0) == dataclasses.replace(expected, start=0, end=0)
                case "put":
                    cache.put(*KEYS[facts[0]].key, Blocks(facts[1]))
                case "tuned":
                    key, checksum = KEYS[facts[0]].key, KEYS[facts[0]].checksum(facts[1])
                    tune = cache.begin(key, checksum, object())
                    cache.finish(key, checksum, tune, Done(Blocks(3), Match(), Provenance("autotune")))
                case "load":
                    checksum = "other" if facts[1] == "other" else KEYS[facts[0]].checksum(facts[1])
                    cache.load(KEYS[facts[0]].key, checksum, Blocks(4))
                case "clear":
                    cache.clear()
                case "overlay":
                    scopes.enter_context(overlay_cache({KEYS[facts[0]].key: Blocks(facts[1])}))
                case "backward":
                    for chain in (quick, thorough):
                        scopes.enter_context(policy_override(chain, validate_backward=facts[0]))
                case "forward only":
                    scopes.enter_context(forward_autotune_only())
                case "set policy":
                    policy = AutotunePolicy(allow_autotune=False, validate_backward=facts[0])
                    quick.policy = thorough.policy = policy
                case "leave scopes":
                    scopes.close()
        scopes.close()

    anyio.run(main)


def test_the_second_hit_of_a_signature_is_answered_without_a_walk():
    """The fast lane that makes hits cost microseconds is in use."""

    async def main():
        chain = ConfigSelectorChain(ConfigCache(), AutotunePolicy(allow_autotune=False), sinks=())
        chain.cache.put(*KEYS[8].key, Blocks(5))
        await chain.choose(call(8), KERNEL)
        chain._tiers = chain._call = None  # a walk would fail now
        assert await chain.choose(call(8), KERNEL) == Blocks(5)
        assert chain.choose_nowait(call(8), KERNEL) == Blocks(5)

    anyio.run(main)
