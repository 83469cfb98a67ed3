"""The device that commands measure on."""

from __future__ import annotations

from asel.errors import InvalidRequestError
from asel.redaction import redact

__all__ = ["started_device"]


def started_device() -> str:
    """Return the device's fingerprint. The first call takes a second, so it must not run on the event loop.

    Raises:
        InvalidRequestError: JAX has no device.
    """
    from asel.kernels.devices import device_fingerprint

    try:
        return device_fingerprint()
    except Exception as error:
        reason = f"{type(error).__name__}: {redact(error)}".removesuffix(": ")
        raise InvalidRequestError(
            f"JAX has no device to tune on: {reason}. "
            "Install the JAX that fits this machine, or set JAX_PLATFORMS=cpu; `asel doctor` has details"
        ) from error
