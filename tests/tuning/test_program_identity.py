"""Which programs count as equal."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from support.jax_candidates import chosen_among, spin

from asel.tuning.measure import Trial
from asel.tuning.program import Program, _fingerprint


def test_programs_that_call_the_host_are_never_aliases(real_backend):
    """A program's text does not contain the function of a callback, so equal texts may be different programs."""

    def run(x, *, cfg):
        return jax.pure_callback(lambda value: value + cfg, x, x)

    report, _ = chosen_among(real_backend, [1, 2], run)
    assert [o.alias_of for o in report.outcomes] == [None, None]


def lowered_with(fn, objective="forward", *, size=3) -> str:
    return Program(Trial("lowered", fn, (jnp.ones(size),), {}, objective=objective)).fingerprint


def test_names_of_functions_do_not_distinguish_programs():
    """Equal functions of different names make equal programs; in another order they do not."""

    def jitted(name, scale):
        def body(x):
            return jnp.sin(x) * scale

        body.__name__ = name
        return jax.jit(body)

    def composed(first, second):
        return lambda x: second(first(x))

    one = lowered_with(composed(jitted("some", 2.0), jitted("other", 3.0)))
    assert lowered_with(composed(jitted("any", 2.0), jitted("more", 3.0))) == one
    assert lowered_with(composed(jitted("other", 2.0), jitted("some", 3.0))) == one
    assert lowered_with(composed(jitted("some", 3.0), jitted("other", 2.0))) != one


def test_programs_that_differ_in_a_name_from_outside_are_two():
    """A custom call's target is not part of the program, so its name distinguishes two programs."""

    def calls(target):
        return lambda x: jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    assert lowered_with(calls("one")) == lowered_with(calls("one")) != lowered_with(calls("another"))


def test_programs_that_are_timed_in_different_ways_are_two():
    """The timing mode is part of the fingerprint, so that no program gets the other's samples."""
    lowered = jax.jit(spin(1)).lower(jnp.ones(3))
    assert _fingerprint("forward", lowered) == _fingerprint("forward", lowered)
    assert _fingerprint("forward", lowered) != _fingerprint("forward+backward", lowered)
    assert lowered_with(spin(1)) != lowered_with(spin(1), "forward+backward")


def test_large_constants_are_not_read_to_find_aliases():
    """They make megabytes of text, which takes longer to read than the program to compile."""

    def adding(values):
        return lambda x: x + values

    few, many = np.arange(8.0), np.arange(1e5)
    assert lowered_with(adding(few), size=8) == lowered_with(adding(few.copy()), size=8) is not None
    assert lowered_with(adding(few), size=8) != lowered_with(adding(few + 1), size=8)
    assert lowered_with(adding(many), size=100_000) is None
