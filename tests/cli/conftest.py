"""Kernels in a module, and tuners whose times are scripted."""

from __future__ import annotations

import sys

import pytest
from support.tunable import COSTS, KERNELS

import asel.cli.tune.run as tune_run
from asel import Tuner
from asel.testing import ScriptedMeasure


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """A module with two kernels in a directory of its own, and an empty cache directory."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("ASEL_CACHE_DIR", str(tmp_path / "caches"))
    monkeypatch.delenv("ASEL_STORE", raising=False)
    path = tmp_path / "tune_example.py"
    path.write_text(KERNELS)
    yield path
    sys.modules.pop("tune_example", None)


@pytest.fixture
def script(monkeypatch):
    """Call it to script the times of all tunes from then on; it returns the options that tuners are made with."""

    def apply(costs=COSTS, measure=ScriptedMeasure, **more):
        given = []

        def tuner(**options):
            given.append(options)
            return Tuner(warmup=1, iters=1, strategy="exhaustive", measure=measure(costs, **more))

        monkeypatch.setattr(tune_run, "Tuner", tuner)
        return given

    return apply
