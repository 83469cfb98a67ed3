"""A TOML file of many tunes.

store = "redis://cache.example:6379"     # and the command's other options
budget = 30

[[tune]]
kernel = "serving.kernels:attention"     # or a path, relative to this file
shapes = ["q=bf16[8,1024,128], k=bf16[8,1024,128]"]
backward = true
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from asel.cli.tune.targets import Call, Target, kernel_at
from asel.errors import InvalidRequestError
from asel.kernels.call_parsing import parse_call
from asel.redaction import redact

__all__ = ["read_job_file"]

_OPTIONS: dict[str, tuple[type, ...]] = {
    "store": (str,),
    "budget": (int, float),
    "total": (int, float),
    "strategy": (str,),
    "isolation": (str,),
    "backward": (bool,),
    "check": (bool,),
}
_OF_A_TUNE: dict[str, tuple[type, ...]] = {"kernel": (str,), "shapes": (list,), "backward": (bool,)}


def read_job_file(path: Path) -> Target:
    """Return the calls and options of a job file.

    Raises:
        InvalidRequestError: it is not a valid job file. The message has the place and the fix.
    """
    try:
        facts = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequestError(f"cannot read {path}: {redact(error.strerror or error)}; check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{path} is not TOML: {redact(error)}") from error
    tunes = facts.pop("tune", None)
    if not isinstance(tunes, list) or not tunes or not all(isinstance(one, dict) for one in tunes):
        raise InvalidRequestError(f"{path} has no [[tune]] with a kernel and shapes")
    _check(facts, _OPTIONS, str(path))
    calls: list[Call] = []
    for number, one in enumerate(tunes, 1):
        place = f"{path}, [[tune]] {number}"
        _check(one, _OF_A_TUNE, place)
        shapes = one.get("shapes")
        if "kernel" not in one or not shapes or not all(isinstance(text, str) for text in shapes):
            raise InvalidRequestError(
                f'{place} needs kernel = "package.module:name" and shapes = ["x=f32[8,128]", ...]'
            )
        try:
            kernel = kernel_at(_from_here(one["kernel"], path.parent))
            calls += [Call(kernel, parse_call(text, kernel), backward=one.get("backward")) for text in shapes]
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{place}: {redact(error)}") from error
    return Target(tuple(calls), options=facts)


def _check(facts: dict[str, Any], allowed: dict[str, tuple[type, ...]], place: str) -> None:
    for name, value in facts.items():
        if name not in allowed:
            raise InvalidRequestError(f"{place}: {name!r} is not one of {', '.join(allowed)}")
        if not isinstance(value, allowed[name]) or (isinstance(value, bool) and bool not in allowed[name]):
            wanted = "a number" if float in allowed[name] else f"a {allowed[name][0].__name__}"
            raise InvalidRequestError(f"{place}: {name} is {value!r}, and should be {wanted}")


def _from_here(kernel: str, folder: Path) -> str:
    place = kernel.partition(":")[0]
    return str(folder / kernel) if place.endswith(".py") and not Path(place).is_absolute() else kernel
