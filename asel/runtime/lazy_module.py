"""Modules that take long to import, imported when they are first used: `import asel` does not wait for them."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

__all__ = ["LazyModule"]


class LazyModule(ModuleType):
    """Stands for a module until one of its attributes is read, then puts the module into its own place.

    `np = LazyModule("numpy", globals(), "np")` at the top of a file is `import numpy as np`, later.
    """

    def __init__(self, module: str, namespace: dict[str, Any], name: str) -> None:
        super().__init__(module)
        self._place = namespace, name

    def __getattr__(self, attribute: str) -> Any:
        namespace, name = self._place
        namespace[name] = importlib.import_module(self.__name__)
        return getattr(namespace[name], attribute)
