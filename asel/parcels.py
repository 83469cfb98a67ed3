"""A trial as frames of bytes: what a worker process needs to make it again, its arrays as they lie in memory."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asel.errors import InvalidRequestError
from asel.measure import Trial

__all__ = ["Frame", "packed", "unpacked"]

Frame = bytes | bytearray | memoryview


class _Array(NamedTuple):
    values: np.ndarray[Any, Any]
    sharding: Any
    """Where it is committed to; None: wherever JAX puts it."""
    key_impl: Any
    """What its random keys are for; None: it has numbers."""
    weak: bool


def packed(trial: Trial[Any]) -> Sequence[Frame]:
    """Return a trial as frames.

    Raises:
        InvalidRequestError: the kernel cannot be imported by another process, or the device not shared.
    """
    if getattr(trial.device, "platform", None) == "tpu":
        raise InvalidRequestError('isolation="process": one process owns a TPU; use isolation="thread" there')
    args, kwargs = jax.tree_util.tree_map(_portable, (trial.args, dict(trial.kwargs)))
    what = (trial.cfg, trial.fn, args, kwargs, trial.device, trial.objective, trial.settings)
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    try:
        _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(what)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise _not_importable(error) from error
    if b"__main__" in (first := stream.getvalue()):
        raise _not_importable("it is defined in __main__, which a worker does not run")
    return [first, *(buffer.raw() for buffer in buffers)]


def unpacked(frames: Sequence[Frame]) -> Trial[Any]:
    """Return the trial, on this process' devices."""
    what = _Unpickler(io.BytesIO(frames[0]), buffers=frames[1:]).load()
    cfg, fn, args, kwargs, device, objective, settings = what
    args, kwargs = jax.tree_util.tree_map(_placed, (args, kwargs), is_leaf=lambda one: isinstance(one, _Array))
    return Trial(cfg, fn, args, kwargs, device, objective, settings)


class _Pickler(pickle.Pickler):
    def persistent_id(self, one: object) -> Any:
        """Name a device, wherever it occurs: a mesh and a sharding have theirs."""
        return (one.platform, one.id) if isinstance(one, jax.Device) else None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, name: Any) -> Any:
        platform, number = name
        devices = jax.devices(platform)
        if (found := next((device for device in devices if device.id == number), None)) is None:
            raise InvalidRequestError(
                f'isolation="process": a worker has no device {platform}:{number}, only {len(devices)} of that kind; '
                "what makes more of them (XLA_FLAGS, JAX_NUM_CPU_DEVICES) must be set in the environment"
            )
        return found


def _portable(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return leaf
    sharding = leaf.sharding if leaf.committed else None
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return _Array(np.asarray(jax.random.key_data(leaf)), sharding, jax.random.key_impl(leaf), weak=False)
    return _Array(np.asarray(leaf), sharding, None, weak=leaf.weak_type and leaf.ndim == 0)


def _placed(leaf: Any) -> Any:
    if not isinstance(leaf, _Array):
        return leaf
    values: Any = leaf.values
    if leaf.key_impl is not None:
        values = jax.random.wrap_key_data(jnp.asarray(values), impl=leaf.key_impl)
    elif leaf.weak:
        values = jnp.asarray(values.item())  # as only Python's own numbers are
    return jax.device_put(values, leaf.sharding)


def _not_importable(why: object) -> InvalidRequestError:
    return InvalidRequestError(
        f'isolation="process" needs a kernel and configs that another process can import: {why}. '
        'Define them at the top level of a module, or use isolation="thread".'
    )
