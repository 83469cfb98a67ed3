"""Files of recorded calls: one call on each line, for people to edit and for another program to tune.

A line is JSON: `{"kernel": "package.module:name", "call": "q=bf16[8,1024,128], causal=True", "seen": 3}`. If the
text of a call leaves something out, the line also has `args` and `kwargs`, and `call` is only for the reader.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asel.errors import AselError, InvalidRequestError, UntunedWarning
from asel.kernels.call_parsing import parse_call
from asel.kernels.call_registry import RecordedCall, record_invocation, recorded_calls
from asel.kernels.call_settings import settings_form
from asel.kernels.call_text import call_text
from asel.kernels.kernel import Invocation
from asel.kernels.key_memo import KeyMemo
from asel.redaction import redact
from asel.runtime.jax_settings import current_settings, with_settings
from asel.serving.import_paths import imported_kernel, kernel_path
from asel.serving.value_codec import decoded, encoded

__all__ = ["CallsFile", "load_invocations", "read_calls", "save_invocations", "write_calls"]


# Strings may contain them, for instance from `os.fsdecode`, but UTF-8 cannot encode them.
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class CallsFile:
    """The calls written to a file or read from it, and those left out, with the reason."""

    path: Path
    calls: tuple[RecordedCall, ...]
    skipped: tuple[str, ...]


def save_invocations(path: str | os.PathLike[str], dev: str | None = None) -> CallsFile:
    """Write the recorded calls of one device, or of all, to a file that `load_invocations` reads.

    The file has kernels by import path, arrays by shape, and all other values. It has no devices, so another machine
    may tune the calls. Calls that cannot be written are left out, and an `UntunedWarning` names them.
    """
    written = write_calls(path, recorded_calls(dev))
    _warn_of(written, f"not written to {written.path}")
    return written


def load_invocations(path: str | os.PathLike[str]) -> CallsFile:
    """Record the calls of a file, for this machine's device and the JAX settings in force.

    Imports the modules of their kernels. A line that cannot be read is left out, and an `UntunedWarning` names it.

    Raises:
        OSError: the file cannot be read.
    """
    read = read_calls(path)
    for call in read.calls:
        inv = call.invocation
        record_invocation(*call.key, call.kernel, inv.args, inv.kwargs, seen=call.seen)
    _warn_of(read, f"not read from {read.path}")
    return read


def _warn_of(file: CallsFile, what: str) -> None:
    if file.skipped:
        listed = "\n  ".join(file.skipped)
        warnings.warn(f"{len(file.skipped)} recorded calls were {what}:\n  {listed}", UntunedWarning, stacklevel=3)


def write_calls(path: str | os.PathLike[str], calls: Iterable[RecordedCall]) -> CallsFile:
    """Write calls to a file atomically, so that a reader finds either the old calls or the new ones."""
    path, written, skipped, lines = Path(path), [], [], []
    for call in calls:
        try:
            lines.append(_LONE_SURROGATE.sub(_escaped, json.dumps(_line_of(call), ensure_ascii=False)))
            written.append(call)
        except AselError as error:
            skipped.append(f"{call.key.op_id}({call_text(call.invocation, call.kernel)}): {redact(error)}")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return CallsFile(path, tuple(written), tuple(skipped))


def read_calls(path: str | os.PathLike[str]) -> CallsFile:
    """Return the calls of a file without recording them; see `load_invocations`."""
    path, read, skipped, keys = Path(path), [], [], KeyMemo()
    # Not `splitlines`, which also splits at U+2028 and other characters that JSON strings may contain.
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
        if not line.strip():
            continue
        try:
            read.append(_call_of(line, keys))
        except AselError as error:
            skipped.append(f"line {number}: {redact(error)}")
        except Exception as error:  # raised by the kernel's class, or by the kernel
            skipped.append(f"line {number}: {type(error).__name__}: {redact(error)}")
    return CallsFile(path, tuple(read), tuple(skipped))


def _escaped(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]


def _line_of(call: RecordedCall) -> dict[str, Any]:
    """Return the line of a call, if it can be read back as the same call.

    Raises:
        InvalidRequestError: the call cannot be written.
    """
    inv, kernel = call.invocation, call.kernel
    if inv.method is not None:
        raise InvalidRequestError(f"it runs under {inv.method}, and a file cannot hold a mesh")
    if call.settings is not None and with_settings(call.settings, settings_form) != settings_form():
        raise InvalidRequestError("it was seen under other JAX settings or another mesh; save it under those")
    if (path := kernel_path(kernel)) is None:
        advice = "assign it to a variable of a module, or give its class defaults for all arguments"
        raise InvalidRequestError(f"its kernel, a {type(kernel).__name__}, has no import path; {advice}")
    text = call_text(inv, kernel)
    line = {"kernel": path, "call": text, "seen": call.seen}
    if _is_same_call(lambda: parse_call(text, kernel), call):
        return line
    args = [encoded(arg, f"args[{i}]") for i, arg in enumerate(inv.args)]
    line |= {"args": args, "kwargs": {name: encoded(value, name) for name, value in inv.kwargs.items()}}
    if not _is_same_call(lambda: _invocation(line, kernel), call):
        raise InvalidRequestError("it would read back as another call")
    return line


def _is_same_call(make: Any, call: RecordedCall) -> bool:
    keys = KeyMemo()
    try:
        return keys.resolve(make(), call.kernel).key == keys.resolve(call.invocation, call.kernel).key
    except AselError:
        return False


def _call_of(line: str, keys: KeyMemo) -> RecordedCall:
    try:
        facts = json.loads(line)
    except ValueError as error:
        raise InvalidRequestError(f"it is not JSON: {error}") from error
    if not isinstance(facts, dict) or not isinstance(facts.get("kernel"), str):
        raise InvalidRequestError('a line needs at least {"kernel": "package.module:name", "call": "x=f32[8,128]"}')
    seen = facts.get("seen", 1)
    if type(seen) is not int or seen < 1:
        raise InvalidRequestError(f'"seen" is {seen!r}; it must be the number of times that the call was seen')
    kernel = imported_kernel(facts["kernel"])
    inv = _invocation(facts, kernel)
    return RecordedCall(keys.resolve(inv, kernel).key, kernel, inv, seen, current_settings())


def _invocation(facts: dict[str, Any], kernel: Any) -> Invocation[Any, Any]:
    if "args" not in facts and "kwargs" not in facts:
        if not isinstance(text := facts.get("call"), str):
            raise InvalidRequestError('it has no arguments: neither "call" nor "args"')
        return parse_call(text, kernel)
    args, kwargs = facts.get("args", []), facts.get("kwargs", {})
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise InvalidRequestError('"args" must be a list and "kwargs" an object')
    return Invocation(
        kernel.op_id, tuple(decoded(arg) for arg in args), {name: decoded(value) for name, value in kwargs.items()}
    )
