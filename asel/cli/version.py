"""`asel --version`: the versions of asel and JAX, and the device."""

from __future__ import annotations

from importlib import metadata

import typer

__all__ = ["show_version"]


def show_version(wanted: bool) -> None:
    if not wanted:
        return
    from asel.kernels.devices import device_fingerprint
    from asel.redaction import redact

    typer.echo(f"asel {metadata.version('asel')}")
    typer.echo(f"jax {metadata.version('jax')}, jaxlib {metadata.version('jaxlib')}")
    try:
        device = device_fingerprint()
    except Exception as error:  # a backend that does not start must not hide the versions
        device = f"none: {type(error).__name__}: {redact(error)}"
    typer.echo(f"device {device}")
    raise typer.Exit
