"""`asel doctor`: its checks, its problems and its exit code."""

from __future__ import annotations

import itertools
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from support.command_line import asel, fill
from support.otlp_receiver import receiving

import asel.cli.doctor.machine as machine
from asel.cli.doctor.variables import variables


@pytest.fixture(autouse=True)
def _calm_machine(monkeypatch, tmp_path):
    """Every program takes the same time, and nothing is set up."""
    monkeypatch.setattr(machine, "_work", lambda: lambda: 1e-3)
    monkeypatch.setenv("ASEL_CACHE_DIR", str(tmp_path / "caches"))
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_HEADERS", "JAX_DISABLE_JIT"):
        monkeypatch.delenv(name, raising=False)


def findings(*arguments, code=0):
    ran = asel("doctor", *arguments, "--json")
    assert ran.code == code, ran
    found = ran.json["findings"]
    assert ran.json["problems"] == sum(one["state"] == "problem" for one in found)
    return found


def about(topic, found, state=None):
    return [one for one in found if one["topic"] == topic and state in (None, one["state"])]


def test_a_healthy_machine_has_no_problem(tmp_path):
    """Every topic is checked; a check that was not requested is a note with advice."""
    found = findings("--store", fill(tmp_path / "cache"))
    topics = {one["topic"] for one in found}
    assert {"versions", "asel[redis]", "device", "timer noise", "cache", "redis", "otlp", "environment"} <= topics
    assert "2 good records" in about("cache", found)[-1]["text"]
    assert all(one["fix"] for one in found if one["state"] != "ok")
    lines = asel("doctor").out.splitlines()
    assert lines[-1] == "No problems found."
    assert any(line.startswith("note     cache: nothing is stored there yet") for line in lines)


def test_timer_noise_is_the_difference_of_equal_programs(monkeypatch):
    """Above the largest tie of a tune, it is a problem."""
    assert "differ by up to 0.0%" in about("timer noise", findings())[0]["text"]
    times = itertools.count()
    monkeypatch.setattr(machine, "_work", lambda: lambda: 1e-3 * (1 + next(times) // 2 % 8))
    (noisy,) = about("timer noise", findings(code=1), "problem")
    assert "taskset" in noisy["fix"]


def test_real_programs_can_be_timed(monkeypatch):
    """On this machine's device."""
    monkeypatch.undo()
    spread, seconds = machine.spread_of_equals(machine._work())
    assert spread > 0
    assert 0 < seconds < 1


def test_a_device_that_jax_does_not_use_is_a_problem():
    """A machine with a GPU, and JAX for CPUs."""
    (missed,) = [one for one in machine.devices(lambda path: path == Path("/dev/nvidia0")) if one.state == "problem"]
    assert "NVIDIA" in missed.text
    assert "jax[cuda" in missed.fix


def test_bad_records_and_a_full_or_unwritable_disk_are_problems(tmp_path, monkeypatch):
    """Each has its fix, and the exit code is 1."""
    store = fill(tmp_path / "cache")
    bad = min((tmp_path / "cache").glob("schema-*/*/*.json"))
    bad.write_text("{")
    (reported,) = about("cache", findings("--store", store, code=1), "problem")
    assert str(bad) in reported["text"]
    bad.unlink()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(1000))
    (reported,) = about("cache", findings("--store", store, code=1), "problem")
    assert "only 1 kB free" in reported["text"]
    monkeypatch.setenv("ASEL_CACHE_DIR", "/dev/null/caches")
    assert "cannot be written" in about("cache", findings(code=1), "problem")[0]["text"]


def test_a_redis_that_does_not_answer_is_a_problem():
    """Its password is not shown."""
    (reported,) = about("redis", findings("--store", "redis://u:hunter2@127.0.0.1:1?timeout_s=0.1", code=1), "problem")
    assert "hunter2" not in str(reported)
    assert "start the server" in reported["fix"]


def test_a_wrong_store_is_refused_before_the_checks():
    """Exit code 2 and one sentence."""
    ran = asel("doctor", "--store", "/no/such/place")
    assert (ran.code, ran.out) == (2, "")
    assert "check the path" in ran.err


def test_each_signal_is_sent_to_the_collector(monkeypatch):
    """With the configured headers; for a refusal there is advice."""
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20hunter2")
        found = findings("--otlp", receiver.endpoint)
        assert [one["state"] for one in about("otlp", found)] == ["ok"] * 3
        assert {headers.get("authorization") for headers in receiver.headers} == {"Bearer hunter2"}
        assert "hunter2" not in str(found)
        receiver.status = 404
        refused = about("otlp", findings("--otlp", receiver.endpoint, code=1), "problem")
        assert len(refused) == 3
        assert "pipeline" in refused[0]["fix"]
    assert "does not answer" in about("otlp", findings("--otlp", receiver.endpoint, code=1))[0]["text"]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    assert "http/protobuf" in about("otlp", findings("--otlp", receiver.endpoint, code=1), "problem")[0]["text"]


def test_each_variable_is_shown_with_its_effect():
    """Secrets are hidden, and variables that slow down or prevent tuning are explained."""
    environment = {
        "ASEL_AUTOTUNE": "off",
        "ASEL_STORE": "redis://u:hunter2@host",
        "JAX_DISABLE_JIT": "true",
        "JAX_DEBUG_NANS": "1",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=hunter2",
        "HOME": "/root",
    }
    found = list(variables(environment))
    assert {one.text.partition("=")[0]: one.state for one in found} == {
        "ASEL_AUTOTUNE": "note",
        "ASEL_STORE": "ok",
        "JAX_DEBUG_NANS": "note",
        "JAX_DISABLE_JIT": "problem",
        "OTEL_EXPORTER_OTLP_HEADERS": "ok",
    }
    assert "hunter2" not in str(found)
    assert [one.state for one in variables({})] == ["ok"]


def test_an_endpoint_that_is_not_a_url_is_wrong_use():
    """It is refused before the checks, and is not a problem of this machine."""
    ran = asel("doctor", "--otlp", "nonsense")
    assert (ran.code, ran.out, len(ran.err.splitlines())) == (2, "", 1)
    assert "http://localhost:4318" in ran.err
