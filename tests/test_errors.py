"""Errors can be caught, copied, pickled and read."""

from __future__ import annotations

import copy
import pickle

import pytest

import asel
from asel import errors
from asel.kernels.keys import CacheKey

KEY = CacheKey("dev", "op@v1", "key")
EXAMPLES = [
    (errors.AselError("x"), Exception, {}),
    (errors.InvalidRequestError("x"), ValueError, {}),
    (errors.UnstableKeyError("x", argument="args[0]"), ValueError, {"argument": "args[0]"}),
    (errors.NoConfigError("x", key=KEY, declined={"a": "b"}), RuntimeError, {"key": KEY, "declined": {"a": "b"}}),
    (errors.TuningError("x", key=KEY, outcomes=[1]), RuntimeError, {"key": KEY, "outcomes": (1,)}),
    (errors.StoreError("x", location="/cache"), OSError, {"location": "/cache"}),
    (errors.SelectorClosedError("x"), RuntimeError, {}),
]


@pytest.mark.parametrize(("error", "base", "facts"), EXAMPLES, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("again", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))], ids=["copy", "pickle"])
def test_errors_copy_and_pickle_with_their_facts(error, base, facts, again):
    """Waiters raise copies and worker processes send errors, and neither loses a fact."""
    other = again(error)
    assert other is not error
    assert type(other) is type(error)
    assert isinstance(other, base)
    assert isinstance(other, errors.AselError)
    assert str(other) == "x"
    assert {name: getattr(other, name) for name in facts} == facts


def test_every_error_is_in_the_tree_of_the_docstring_and_importable_from_asel():
    """The drawn tree matches the classes."""
    for name in errors.__all__:
        assert name in errors.__doc__
        assert getattr(asel, name) is getattr(errors, name)
