"""The other end of `asel.processes`: compiles and times what it is sent, until its input ends.

Run as a file (see `asel.worker_startup`). Until the parent has said where its modules are, only the standard
library is imported.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
import threading
import time
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from typing import Any, BinaryIO
from weakref import WeakValueDictionary

_HEADER = struct.Struct("!Q")


def main() -> None:
    """Answer requests one by one. The parent's import state comes with the first.

    A kernel has neither of our pipes: what it prints goes to the error stream, and it reads nothing.
    """
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    if (request := _read(requests)) is None:
        return
    _import_as_the_parent(*json.loads(request[1]))
    from asel.outcomes import text_of

    worker = _Worker()
    while request is not None:
        try:
            message = pickle.dumps(("ok", worker.answer(pickle.loads(request[0]), request[1:])))
        except Exception as error:  # a candidate's failure is an answer like any other
            message = pickle.dumps(("error", (type(error).__name__, text_of(error), worker.building)))
        answers.write(_HEADER.pack(len(message)) + message)
        request = _read(requests)


def _import_as_the_parent(
    path: list[str],
    files: dict[str, tuple[str | None, list[str] | None]],
    customized: list[str],
    python_path: str,
) -> None:
    sys.meta_path.insert(0, _ParentModules(files))
    sys.path[:] = path
    if python_path:
        os.environ["PYTHONPATH"] = python_path  # for this process's own children
    for name in customized:
        module = sys.modules.get(name)
        if module is not None and name in files and module.__file__ != files[name][0]:
            del sys.modules[name]  # found without the parent's PYTHONPATH, which hid it there
        import_module(name)


class _ParentModules:
    """Finds a top-level module where the parent has it from, whatever lies on the path by now."""

    def __init__(self, files: dict[str, tuple[str | None, list[str] | None]]) -> None:
        self._files = files

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in self._files:
            return None
        file, folders = self._files[name]
        if file is not None:
            return spec_from_file_location(name, file, submodule_search_locations=folders)
        namespace = ModuleSpec(name, None, is_package=True)
        namespace.submodule_search_locations = folders
        return namespace


def _end_with(program: int) -> None:
    """End when the program has, also in the middle of a step: nobody reads the end of the input then."""
    while os.getppid() == program:
        time.sleep(0.5)
    os._exit(1)


class _Worker:
    """The candidates that were sent, and the arguments they share."""

    def __init__(self) -> None:
        self._lowered: _Candidate | None = None
        self._candidates: dict[int, _Candidate] = {}
        self._parcels: WeakValueDictionary[int, Any] = WeakValueDictionary()

    def answer(self, request: tuple[str, int, int, int, list[int]], payload: list[bytearray]) -> Any:
        command, candidate, parcel, frames, forgotten = request
        self._lowered = None
        for old in forgotten:
            self._candidates.pop(old, None)
        if command == "hello":
            return _warm_up()
        if command == "lower":
            arguments = self._arguments(parcel, payload[frames:])
            self._lowered = self._candidates[candidate] = _Candidate(arguments)
            return self._lowered.lower(payload[:frames])
        timing = self._candidates[candidate].timing
        match command:
            case "compile":
                return timing.program.compile()
            case "sample":
                return timing.sample()
            case "outputs":
                return timing.program.outputs()
        raise ValueError(f"unknown command {command!r}")

    @property
    def building(self) -> bool:
        """Whether what was asked last came no further than building the candidate."""
        return self._lowered is not None and self._lowered.stage == "build"

    def _arguments(self, parcel: int, sent: list[bytearray]) -> Any:
        """Return what is kept for as long as one of its candidates is, or has just been sent."""
        if not sent:
            return self._parcels[parcel]
        from asel.parcels import unpack_arguments

        arguments = self._parcels[parcel] = unpack_arguments(sent)
        return arguments


class _Candidate:
    """Keeps the arguments for as long as it is kept, whatever became of it."""

    def __init__(self, arguments: Any) -> None:
        self._arguments = arguments
        self._trial: Any = None
        self.timing: Any = None

    @property
    def stage(self) -> str | None:
        return None if self._trial is None else self._trial.stage

    def lower(self, frames: list[bytearray]) -> tuple[str, str | None]:
        from asel.benchmark import LEAST_SAMPLE_S, Program, Timing
        from asel.parcels import unpack_candidate

        self._trial = unpack_candidate(frames, self._arguments)
        program = Program(self._trial)
        self.timing = Timing(program, time.perf_counter, LEAST_SAMPLE_S)
        return program.how, program.fingerprint


def _warm_up() -> None:
    """Have JAX and its devices there, which is no candidate's time."""
    import jax

    import asel.benchmark
    import asel.parcels  # noqa: F401

    jax.devices()


def _read(stream: BinaryIO) -> list[bytearray] | None:
    """Return the frames of a request, or None where the input ends."""
    try:
        (count,) = _HEADER.unpack(_exactly(stream, _HEADER.size))
        sizes = [_HEADER.unpack(_exactly(stream, _HEADER.size))[0] for _ in range(count)]
        return [_exactly(stream, size) for size in sizes]
    except EOFError:
        return None


def _exactly(stream: BinaryIO, count: int) -> bytearray:
    data = bytearray()
    while len(data) < count:
        chunk = stream.read(count - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return data


if __name__ == "__main__":
    main()
