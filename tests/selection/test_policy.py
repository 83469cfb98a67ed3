"""Policies, and their overrides for a task."""

from __future__ import annotations

import contextvars
from dataclasses import FrozenInstanceError, fields

import anyio
import anyio.to_thread
import pytest
from support.kernels import Bench

from asel import AutotunePolicy, ConfigCache, InvalidRequestError, forward_autotune_only, overlay_cache, policy_override
from asel.selection.policy import objective_of

KEY = ("dev1", "op1", "key1")


def test_the_default_policy_is_the_documented_one():
    """The defaults are part of the API."""
    assert {f.name: f.default for f in fields(AutotunePolicy)} == {
        "allow_autotune": True,
        "allow_heuristics": True,
        "cache_miss_fallback": "autotune",
        "validate_backward": False,
        "on_pending": "wait",
        "wait_s": None,
        "tune_budget_s": 60.0,
        "candidate_timeout_s": 30.0,
        "retry_after_s": 300.0,
        "match_environment": "any",
    }


def test_a_policy_is_an_immutable_value():
    """A policy cannot be changed for others that share it."""
    policy = AutotunePolicy()
    with pytest.raises(FrozenInstanceError):
        policy.allow_autotune = False
    assert policy == AutotunePolicy()
    with pytest.raises(TypeError, match="allow_autotun"):
        AutotunePolicy(allow_autotun=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cache_miss_fallback", "autotun"),
        ("on_pending", "block"),
        ("match_environment", None),
        ("allow_autotune", "no"),
        ("wait_s", -1),
        ("wait_s", float("nan")),
        ("tune_budget_s", 0),
        ("tune_budget_s", None),
        ("candidate_timeout_s", "30"),
        ("retry_after_s", True),
    ],
)
def test_wrong_values_are_refused_with_the_value_in_the_message(name, value):
    """Arguments are checked where they enter."""
    with pytest.raises(InvalidRequestError, match=name) as caught:
        AutotunePolicy(**{name: value})
    assert repr(value) in str(caught.value)
    with pytest.raises(InvalidRequestError, match=name):
        policy_override(Bench().chain, **{name: value})


def test_an_unknown_field_is_refused_with_nothing_changed():
    """A misspelt field names the valid ones and leaves the others as they were (ejKernel's defect 7)."""
    chain = Bench().chain
    with pytest.raises(TypeError, match="allow_autotun") as caught:
        policy_override(chain, allow_heuristics=False, allow_autotun=False)
    for field in fields(AutotunePolicy):
        assert field.name in str(caught.value)
    assert chain.policy == AutotunePolicy()


def test_an_override_is_for_one_selector_and_ends_with_its_block():
    """Fields change inside the block, for the named selector, and nest."""
    chain, other = Bench().chain, Bench().chain
    with policy_override(chain, allow_autotune=False):
        with policy_override(chain, wait_s=1.0), policy_override(chain, wait_s=2.0):
            assert chain.policy == AutotunePolicy(allow_autotune=False, wait_s=2.0)
            assert other.policy == AutotunePolicy()
        assert chain.policy == AutotunePolicy(allow_autotune=False)
    assert chain.policy == AutotunePolicy()


def test_an_override_is_left_when_its_block_raises():
    """An exception restores the earlier policy."""
    chain = Bench().chain
    with pytest.raises(ZeroDivisionError), policy_override(chain, allow_autotune=False):
        raise ZeroDivisionError
    assert chain.policy == AutotunePolicy()


SCOPES = {
    "policy_override": lambda chain: policy_override(chain, validate_backward=True),
    "overlay_cache": lambda chain: overlay_cache({KEY: "overlaid"}),
    "forward_autotune_only": lambda chain: forward_autotune_only(),
}
ACTIVE = {
    "policy_override": lambda chain: chain.policy.validate_backward,
    "overlay_cache": lambda chain: ConfigCache().get(*KEY) == "overlaid",
    "forward_autotune_only": lambda chain: objective_of(AutotunePolicy(validate_backward=True)) == "forward",
}


@pytest.fixture(params=sorted(SCOPES))
def scope(request):
    chain = Bench().chain
    return lambda: SCOPES[request.param](chain), lambda: ACTIVE[request.param](chain)


def test_scopes_may_be_left_in_any_order(scope):
    """With overlapping scopes, an open one is in force and a closed one is not."""
    make, active = scope
    first, second, third = make(), make(), make()
    for each in (first, second, third):
        each.__enter__()
    for each in (second, first):
        each.__exit__(None, None, None)
        assert active()
    third.__exit__(None, None, None)
    assert not active()


def test_a_scope_may_be_entered_again(scope):
    """One object may open several blocks, one after the other or nested."""
    make, active = scope
    again = make()
    for _ in range(2):
        with again:
            with again:
                assert active()
            assert active()
        assert not active()


def test_leaving_in_another_context_is_harmless(scope):
    """A context that never entered the scope has nothing to undo."""
    make, active = scope
    entered = make()
    contextvars.copy_context().run(entered.__enter__)
    entered.__exit__(None, None, None)
    assert not active()


@pytest.mark.anyio
async def test_scopes_hold_for_a_task_and_its_children_only(scope):
    """A child task and a worker thread inherit open scopes; a sibling does not."""
    make, active = scope
    seen = {}
    inside, leave = anyio.Event(), anyio.Event()

    async def child():
        seen["child"] = active()
        with make():
            pass
        seen["child after its own"] = active()
        seen["thread"] = await anyio.to_thread.run_sync(active)

    async def opener():
        async with anyio.create_task_group() as children:
            with make():
                children.start_soon(child)
                inside.set()
                await leave.wait()
        seen["after"] = active()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(opener)
        await inside.wait()
        seen["sibling"] = active()
        leave.set()
    assert seen == {
        "child": True,
        "child after its own": True,
        "thread": True,
        "sibling": False,
        "after": False,
    }


@pytest.mark.anyio
async def test_overlapping_tasks_leave_the_policy_as_it_was():
    """Two tasks override at once and leave in the order they came (ejKernel's defect 7)."""
    chain = Bench().chain

    async def override(seconds, budget_s):
        with policy_override(chain, tune_budget_s=budget_s):
            await anyio.sleep(seconds)
            assert chain.policy.tune_budget_s == budget_s

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(override, 1, 10.0)
        tasks.start_soon(override, 2, 20.0)
    assert chain.policy == AutotunePolicy()


def test_the_objective_follows_policy_and_scope():
    """`validate_backward` asks for backward timing, and `forward_autotune_only` overrides it."""
    backward = AutotunePolicy(validate_backward=True)
    assert objective_of(AutotunePolicy()) == "forward"
    assert objective_of(backward) == "forward+backward"
    with forward_autotune_only():
        assert objective_of(backward) == "forward"
