"""The modules that `import asel` imports; a time would depend on the machine (`benchmarks/startup.py`)."""

from __future__ import annotations

import json
import subprocess
import sys

# Modules that are imported only when they are used. Of OpenTelemetry, only the API is imported at once.
SLOW = ("jax", "jaxlib", "numpy", "opentelemetry.sdk", "pydantic", "filelock", "coredis", "rich", "typer", "structlog")
ROOMS_OF_THEIR_OWN = ("asel.cli", "asel.integrations", "asel.web", "asel.testing")

SCRIPT = """
import json, sys
def loaded():
    return sorted(name for name in sys.modules if name.split(".")[0] not in before)
before = {name.split(".")[0] for name in sys.modules}
import asel
at_import = loaded()
from asel import AutotunePolicy, ConfigCache, ConfigSelectorChain, Executor, Invocation, Kernel, Tuner, overlay_cache
ConfigSelectorChain()
print(json.dumps([at_import, loaded()]))
"""


def test_importing_asel_imports_nothing_slow():
    """Even making a selector does not: its default telemetry and its tuner import modules on first use."""
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    at_import, with_a_selector = json.loads(result.stdout)
    assert [name for name in at_import if name.startswith("asel")] == ["asel", "asel.errors", "asel.redaction"]
    for loaded in (at_import, with_a_selector):
        assert not {name for name in (*SLOW, *ROOMS_OF_THEIR_OWN) if name in loaded}
