"""Which configuration should this kernel run with, here and now?"""

import logging

from asel.answers import Explanation, Selection
from asel.buckets import powers_of_two
from asel.cache import ConfigCache, overlay_cache
from asel.checks import OutputCheck
from asel.devices import device_fingerprint
from asel.errors import (
    AselError,
    InvalidRequestError,
    NoConfigError,
    SelectorClosedError,
    StoreError,
    TuningError,
    UnstableKeyError,
)
from asel.events import Event, Sink
from asel.executor import Executor
from asel.kernel import Invocation, Kernel, kernel
from asel.keys import CacheKey
from asel.measure import Measure
from asel.outcomes import Failed, Measured, Skipped, TuneReport
from asel.persistent import PersistentCache
from asel.policy import AutotunePolicy, forward_autotune_only, policy_override
from asel.registry import autotune_recorded, clear_invocations, get_invocations, record_invocation, warm_up
from asel.selection import ConfigSelectorChain
from asel.telemetry import MetricsSink, OpenTelemetrySink, StructlogSink
from asel.tuner import Tuner

__all__ = [
    "AselError",
    "AutotunePolicy",
    "CacheKey",
    "ConfigCache",
    "ConfigSelectorChain",
    "Event",
    "Executor",
    "Explanation",
    "Failed",
    "InvalidRequestError",
    "Invocation",
    "Kernel",
    "Measure",
    "Measured",
    "MetricsSink",
    "NoConfigError",
    "OpenTelemetrySink",
    "OutputCheck",
    "PersistentCache",
    "Selection",
    "SelectorClosedError",
    "Sink",
    "Skipped",
    "StoreError",
    "StructlogSink",
    "TuneReport",
    "Tuner",
    "TuningError",
    "UnstableKeyError",
    "autotune_recorded",
    "clear_invocations",
    "device_fingerprint",
    "forward_autotune_only",
    "get_invocations",
    "kernel",
    "overlay_cache",
    "policy_override",
    "powers_of_two",
    "record_invocation",
    "warm_up",
]

# Silent until the application asks: without this, Python prints a library's warnings by itself.
logging.getLogger("asel").addHandler(logging.NullHandler())
