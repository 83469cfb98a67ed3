"""The paths of the tests and of the checkout."""

from pathlib import Path

__all__ = ["ROOT", "TESTS"]

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
