"""Trials as frames of bytes for a worker process: a tune's arguments, sent once, and each candidate."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asel.errors import InvalidRequestError
from asel.runtime.jax_settings import with_settings
from asel.tuning.arrays import abstract, place_of_shapes, random_inputs, weak_zeros
from asel.tuning.measure import Trial

__all__ = ["Arguments", "Frame", "pack_arguments", "pack_candidate", "unpack_arguments", "unpack_candidate"]

Frame = bytes | bytearray | memoryview


class Arguments:
    """A call's arguments on the devices of this process, and the objects made from them once for all candidates."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs
        self.shared: dict[str, Any] = {}


def pack_arguments(trial: Trial[Any]) -> list[Frame]:
    """Return a trial's arguments as frames: one for each array's memory, and one for everything else."""
    with jax.transfer_guard("allow"):  # guards are for the caller's own transfers
        given = (trial.args, dict(trial.kwargs))
        if trial.shared.get("checked"):  # an argument may have been donated by now
            given = random_inputs(*given, place_of_shapes(trial.device, trial.settings))
        args, kwargs = jax.tree_util.tree_map(_portable, given)
    return _packed((args, kwargs, trial.settings))


def unpack_arguments(frames: Sequence[Frame]) -> Arguments:
    args, kwargs, settings = _unpacked(frames)
    with jax.enable_x64(bool(settings and settings.x64)):
        args, kwargs = jax.tree_util.tree_map(_placed, (args, kwargs), is_leaf=lambda one: isinstance(one, _Array))
    return Arguments(args, kwargs)


def pack_candidate(trial: Trial[Any]) -> list[Frame]:
    """Return the rest of a trial as frames: the factory of its function, if that can be pickled, or the function.

    Raises:
        InvalidRequestError: another process cannot import the kernel, or cannot share the device.
    """
    if getattr(trial.device, "platform", None) == "tpu":
        raise InvalidRequestError('isolation="process": one process owns a TPU; use isolation="thread" there')
    rest = (trial.device, trial.objective, trial.settings)
    if trial.portable_make is not None:
        with suppress(InvalidRequestError):  # such as a lambda; the function that it makes may still be picklable
            return _packed((trial.cfg, None, trial.portable_make, *rest))
    return _packed((trial.cfg, with_settings(trial.settings, trial.build), None, *rest))


def unpack_candidate(frames: Sequence[Frame], arguments: Arguments) -> Trial[Any]:
    """Return the trial of a packed candidate, with arguments that were unpacked before."""
    cfg, fn, make_fn, device, objective, settings = _unpacked(frames)
    shared = arguments.shared
    return Trial(cfg, fn, arguments.args, arguments.kwargs, device, objective, settings, make_fn=make_fn, shared=shared)


def _packed(value: Any) -> list[Frame]:
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    try:
        _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise _not_importable(error) from error
    return [stream.getvalue(), *(buffer.raw() for buffer in buffers)]


def _unpacked(frames: Sequence[Frame]) -> Any:
    return _Unpickler(io.BytesIO(frames[0]), buffers=frames[1:]).load()


class _Pickler(pickle.Pickler):
    def persistent_id(self, one: object) -> Any:
        """Replace each device, also inside meshes and shardings, by its platform and id."""
        return (one.platform, one.id) if isinstance(one, jax.Device) else None

    def reducer_override(self, one: object) -> Any:
        """Refuse functions and classes that are defined in the program's `__main__`, and objects of such classes."""
        if getattr(one, "__module__", None) == "__main__":
            raise pickle.PicklingError("it is defined in __main__, which a worker does not run")
        return NotImplemented


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


class _Array(NamedTuple):
    values: np.ndarray[Any, Any]
    sharding: Any
    committed: bool
    weak: bool = False
    key_impl: Any = None
    """The implementation of random keys; None for numbers."""


def _portable(leaf: Any) -> Any:
    try:
        return _as_numbers(abstract(leaf))
    except Exception:
        shape = abstract(leaf)  # it may just have been donated
        if isinstance(shape, jax.Array):
            raise
        return shape


def _as_numbers(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    place = (leaf.sharding, leaf.committed)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return _Array(np.asarray(jax.random.key_data(leaf)), *place, key_impl=jax.random.key_impl(leaf))
    return _Array(np.asarray(leaf), *place, weak=leaf.weak_type)


def _placed(leaf: Any) -> Any:
    if not isinstance(leaf, _Array):
        return leaf
    with jax.default_device(min(leaf.sharding.device_set, key=lambda device: device.id)):
        values: Any = leaf.values
        if leaf.key_impl is not None:
            values = jax.random.wrap_key_data(jnp.asarray(values), impl=leaf.key_impl)
        elif leaf.weak:
            values = weak_zeros(values.shape, values.dtype).at[...].set(values)
        return jax.device_put(values, leaf.sharding if leaf.committed else None)


def _not_importable(why: object) -> InvalidRequestError:
    return InvalidRequestError(
        f'isolation="process" needs a kernel and configs that another process can import: {why}. '
        'Define them at the top level of a module, or use isolation="thread".'
    )
