"""The `asel` command."""

from asel.cli.app import app, main

__all__ = ["app", "main"]
