"""Slow modules, imported on first use, so that `import asel` does not wait for them."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

__all__ = ["LazyModule"]


class LazyModule(ModuleType):
    """A placeholder that imports its module, and is replaced by it, when an attribute is first read.

    `np = LazyModule("numpy", globals(), "np")` at the top of a file is `import numpy as np`, later.
    """

    def __init__(self, module: str, namespace: dict[str, Any], name: str) -> None:
        super().__init__(module)
        self._place = namespace, name

    def __getattr__(self, attribute: str) -> Any:
        namespace, name = self._place
        namespace[name] = importlib.import_module(self.__name__)
        return getattr(namespace[name], attribute)
