"""Which configuration should this kernel run with, here and now?

`import asel` is quick: each name is imported from its home when it is first used.
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

from asel.errors import (
    AselError,
    InvalidRequestError,
    NoConfigError,
    SelectorClosedError,
    StoreError,
    TuningError,
    UnstableKeyError,
    UntunedWarning,
)

if TYPE_CHECKING:
    from asel.events import Event, Sink
    from asel.kernels.buckets import powers_of_two
    from asel.kernels.call_registry import clear_invocations, get_invocations, record_invocation
    from asel.kernels.devices import device_fingerprint, environment
    from asel.kernels.kernel import Invocation, Kernel, kernel
    from asel.kernels.keys import CacheKey
    from asel.selection.cache import ConfigCache
    from asel.selection.overlays import overlay_cache
    from asel.selection.policy import AutotunePolicy, forward_autotune_only, policy_override
    from asel.selection.results import Explanation, Selection
    from asel.selection.selector import ConfigSelectorChain
    from asel.serving.batch import autotune_recorded, warm_up
    from asel.serving.batch_summary import BatchItem, BatchProgress, BatchSummary
    from asel.serving.blocking import BlockingSelector
    from asel.serving.blocking_executor import BlockingExecutor
    from asel.serving.executor import Executor
    from asel.serving.recorded_calls import load_invocations, save_invocations
    from asel.stores.persistent_cache import PersistentCache
    from asel.telemetry import MetricsSink, OpenTelemetrySink, StructlogSink
    from asel.tuning.measure import BaseMeasure, BaseSampler, Measure
    from asel.tuning.outcomes import Failed, Measured, Skipped, TuneReport
    from asel.tuning.output_check import OutputCheck
    from asel.tuning.search.space import Space
    from asel.tuning.tuner import Tuner

__all__ = [
    "AselError",
    "AutotunePolicy",
    "BaseMeasure",
    "BaseSampler",
    "BatchItem",
    "BatchProgress",
    "BatchSummary",
    "BlockingExecutor",
    "BlockingSelector",
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
    "Space",
    "StoreError",
    "StructlogSink",
    "TuneReport",
    "Tuner",
    "TuningError",
    "UnstableKeyError",
    "UntunedWarning",
    "autotune_recorded",
    "clear_invocations",
    "device_fingerprint",
    "environment",
    "forward_autotune_only",
    "get_invocations",
    "kernel",
    "load_invocations",
    "overlay_cache",
    "policy_override",
    "powers_of_two",
    "record_invocation",
    "save_invocations",
    "warm_up",
]

_HOMES = {
    "asel.events": "Event Sink",
    "asel.kernels.buckets": "powers_of_two",
    "asel.kernels.call_registry": "clear_invocations get_invocations record_invocation",
    "asel.kernels.devices": "device_fingerprint environment",
    "asel.kernels.kernel": "Invocation Kernel kernel",
    "asel.kernels.keys": "CacheKey",
    "asel.selection.cache": "ConfigCache",
    "asel.selection.overlays": "overlay_cache",
    "asel.selection.policy": "AutotunePolicy forward_autotune_only policy_override",
    "asel.selection.results": "Explanation Selection",
    "asel.selection.selector": "ConfigSelectorChain",
    "asel.serving.batch": "autotune_recorded warm_up",
    "asel.serving.batch_summary": "BatchItem BatchProgress BatchSummary",
    "asel.serving.blocking": "BlockingSelector",
    "asel.serving.blocking_executor": "BlockingExecutor",
    "asel.serving.executor": "Executor",
    "asel.serving.recorded_calls": "load_invocations save_invocations",
    "asel.stores.persistent_cache": "PersistentCache",
    "asel.telemetry": "MetricsSink OpenTelemetrySink StructlogSink",
    "asel.tuning.measure": "BaseMeasure BaseSampler Measure",
    "asel.tuning.outcomes": "Failed Measured Skipped TuneReport",
    "asel.tuning.output_check": "OutputCheck",
    "asel.tuning.search.space": "Space",
    "asel.tuning.tuner": "Tuner",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
_PUBLIC_ROOMS = ("events", "stores", "telemetry", "testing")

# Silent until the application asks: without this, Python prints a library's warnings by itself.
logging.getLogger("asel").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        globals()[name] = getattr(importlib.import_module(_HOME_OF[name]), name)
        return globals()[name]
    if name in _PUBLIC_ROOMS:
        return importlib.import_module(f"asel.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PUBLIC_ROOMS})
