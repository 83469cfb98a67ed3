"""A call as people read it, and the one key of its positional and keyword forms."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asel import ConfigCache, ConfigSelectorChain, Invocation, Kernel, PersistentCache, Tuner, kernel
from asel.events import Event
from asel.kernels.call_text import MAX_CALL_CHARS, call_text
from asel.kernels.key_memo import KeyMemo
from asel.kernels.keys import call_key
from asel.testing import ScriptedMeasure

Q = jnp.zeros((8, 1024, 128), jnp.bfloat16)
READABLE = "q=bf16[8,1024,128], k=bf16[8,1024,128], causal=True"


@kernel(op_id="attention", configs=[1, 2, 3], heuristic=1)
def attention(q: Any, k: Any, *, causal: bool = False, scale: float = 1.0, cfg: int) -> Any:
    return q


def inv(*args: Any, **kwargs: Any) -> Invocation[Any, Any]:
    return Invocation("attention", args, kwargs)


def text(*args: Any, **kwargs: Any) -> str:
    return call_text(inv(*args, **kwargs), attention)


def test_positional_and_keyword_calls_share_a_key() -> None:
    """Arguments count by parameter, whether positional or keyword."""
    keys = {
        call_key(inv(Q, Q, causal=True), attention),
        call_key(inv(Q, k=Q, causal=True), attention),
        call_key(inv(k=Q, q=Q, causal=True), attention),
    }
    assert len(keys) == 1
    assert call_key(inv(Q[:4], Q), attention) != call_key(inv(Q, Q[:4]), attention)
    assert call_key(inv(q=Q[:4], k=Q), attention) != call_key(inv(k=Q[:4], q=Q), attention)


def test_methods_and_wrapped_functions_have_parameter_names_too() -> None:
    """`self` is not a parameter of the call, and a wrapper has the parameters of the function it wraps."""

    class Method(Kernel[int, Any]):
        op_id = "method"

        def run(self, q, k, *, cfg):
            return q

    class Jitted(Kernel[int, Any]):
        op_id = "jitted"
        run = staticmethod(jax.jit(lambda q, k, cfg: q, static_argnames="cfg"))

    for one in (Method(), Jitted()):
        assert call_key(inv(Q, Q), one) == call_key(inv(Q, k=Q), one)
        assert call_text(inv(Q, k=1), one) == "q=bf16[8,1024,128], k=1"


def test_a_keyword_named_like_a_positional_only_parameter_is_another_argument() -> None:
    """`f(1, a=2)` and `f(2, a=1)` of `def f(a, /, **more)` are two calls."""

    @kernel(op_id="odd", configs=[1], heuristic=1)
    def odd(a: Any, /, *, cfg: int, **more: Any) -> Any:
        return a

    assert call_key(inv(1, a=2), odd) != call_key(inv(2, a=1), odd)


def test_arguments_beyond_the_named_ones_count_by_position() -> None:
    """`*args` has no names."""

    @kernel(op_id="many", configs=[1], heuristic=1)
    def many(first: Any, *rest: Any, cfg: int) -> Any:
        return first

    assert call_key(inv(1, 2, 3), many) != call_key(inv(1, 3, 2), many)
    assert call_text(inv(1, 2, 3), many) == "first=1, 2, 3"


@pytest.mark.anyio
async def test_one_tune_serves_positional_and_keyword_callers() -> None:
    """One key is one tune."""
    measure = ScriptedMeasure(0.0)
    async with ConfigSelectorChain(tuner=Tuner(measure=measure), sinks=()) as selector:
        await selector.choose(inv(Q, Q), attention)
        found = await selector.select(inv(k=Q, q=Q), attention)
    assert found.tier == "memory"
    assert len(measure.compiled) == 3


def test_a_call_reads_like_python() -> None:
    """Arrays by dtype and shape, in the order of the parameters; everything else by a short value."""
    assert text(Q, Q, causal=True) == READABLE
    assert text(causal=True, k=Q, q=Q) == READABLE
    assert text(np.zeros(3, np.int32), jax.ShapeDtypeStruct((), jnp.bool_)) == "q=i32[3], k=bool[]"
    assert text({"w": Q, "b": [1, None]}, (Q,)) == "q={w: bf16[8,1024,128], b: [1, None]}, k=(bf16[8,1024,128])"
    assert text(jnp.float32, np.dtype("float32"), scale=jnp.dtype("bfloat16")) == "q=float32, k=f32, scale=bf16"
    assert text(jnp.sin, "relu", scale=0.5) == "q=sin, k='relu', scale=0.5"


def test_a_tracer_reads_like_its_array() -> None:
    """A traced call has the key and the text of a concrete one."""
    seen = []
    jax.jit(lambda q: seen.append(text(q, q, causal=True)))(Q)
    assert seen == [READABLE]


def test_bucketed_dimensions_are_shown_by_their_bound() -> None:
    """Calls of one bucket share a key, so they share its text."""

    @kernel(op_id="b", configs=[1], heuristic=1, buckets={"q.shape[0]": [8, 64]})
    def bucketed(q: Any, *, cfg: int) -> Any:
        return q

    first, second = (KeyMemo().resolve(inv(jnp.zeros((n, 3))), bucketed) for n in (9, 60))
    assert first.key == second.key
    assert first.call == second.call == "q=f32[<=64,3]"


@pytest.mark.parametrize(
    "long",
    [inv(*range(5000)), inv([Q] * 5000), inv("x" * 5000), inv({str(i): Q for i in range(5000)}), inv(**{"n" * 999: 1})],
)
def test_a_readable_call_has_a_bounded_length(long: Invocation[Any, Any]) -> None:
    """The text is part of every log line, span and record."""
    assert 0 < len(call_text(long, attention)) <= MAX_CALL_CHARS


def test_secrets_in_text_are_hidden() -> None:
    """A static argument may be a URL, and logs are read by many."""
    assert "hunter2" not in text("https://me:hunter2@host/x", 1)


def test_a_key_carries_its_call_and_is_equal_without_it() -> None:
    """The text takes no part in equality, and survives copies and pickles."""
    key = KeyMemo().resolve(inv(Q, Q, causal=True), attention).key
    assert key == tuple(key)
    assert hash(key) == hash(tuple(key))
    assert copy.copy(key).call == pickle.loads(pickle.dumps(key)).call == READABLE


def test_events_records_reports_and_explanations_show_the_call(tmp_path, real_backend) -> None:
    """Each decision shows its call."""
    events: list[Event] = []
    call = inv(Q, Q, causal=True)

    async def scene() -> None:
        store: PersistentCache[int] = PersistentCache("attention", tmp_path, cfg_type=int)
        tuner = Tuner(measure=ScriptedMeasure(0.0))
        async with ConfigSelectorChain(tuner=tuner, persistent=store, sinks=(), on_event=events.append) as selector:
            tuned = await selector.select(call, attention)
            await selector.choose(call, attention)
            await selector.choose(call, attention)  # by the fast lane
            explained = await selector.explain(call, attention)
        assert tuned.call == explained.call == READABLE
        assert f"attention@v0({READABLE}) on" in str(explained)
        assert tuned.report is not None
        assert tuned.report.call == READABLE
        async with ConfigSelectorChain(ConfigCache(), persistent=store, sinks=(), preload=False) as other:
            stored = await other.select(call, attention)
        assert stored.tier == "persistent"
        assert stored.report is not None
        assert stored.report.call == READABLE

    anyio.run(scene, backend=real_backend)
    keyed = [event for event in events if event.key is not None]
    assert {event.name for event in keyed} >= {"autotune_start", "candidate_measured", "persisted", "cache_hit"}
    assert {event.call for event in keyed} == {event.fields()["call"] for event in keyed} == {READABLE}
