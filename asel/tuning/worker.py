"""A worker process of `asel.tuning.process_measure`: compiles and times candidates until its input ends.

Run as a file (see `asel.tuning.worker_startup`). It imports only the standard library until the parent has sent the
places of its modules.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import struct
import sys
import threading
import time
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from typing import Any, BinaryIO

_HEADER = struct.Struct("!Q")


def main() -> None:
    """Answer requests one by one. The first has the parent's import state.

    Kernels cannot touch the pipes: their output goes to stderr, and their standard input is empty.
    """
    # Ctrl-C in a terminal reaches the workers too, but it is for the parent to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    if (request := _read(requests)) is None:
        return
    _import_as_the_parent(*json.loads(request[1]))
    from asel.tuning.outcomes import text_of

    handler = _RequestHandler()
    while request is not None:
        try:
            message = pickle.dumps(("ok", handler.answer(pickle.loads(request[0]), request[1:])))
        except Exception as error:  # a candidate's failure is an ordinary answer
            message = pickle.dumps(("error", (type(error).__name__, text_of(error), handler.building)))
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
            del sys.modules[name]  # another module than the parent's, found because PYTHONPATH was not set here
        import_module(name)


class _ParentModules:
    """Finds top-level modules in the parent's files, whatever is on the path now."""

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


def _end_with(parent: int) -> None:
    """End this process when the parent ends, even during a step, when the input is not read."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


class _RequestHandler:
    """Answers the parent's requests. Holds the arguments and candidates of each tune."""

    def __init__(self) -> None:
        self._lowered: _Candidate | None = None
        self._candidates: dict[int, _Candidate] = {}
        self._arguments: dict[int, Any] = {}

    def answer(self, request: tuple[str, int, int, list[int], list[int]], payload: list[bytearray]) -> Any:
        command, number, arguments, forgotten, ended = request
        self._lowered = None
        self._forget(forgotten, ended)
        match command:
            case "hello":
                return _warm_up()
            case "arguments":
                from asel.tuning.worker_messages import unpack_arguments

                self._arguments[number] = unpack_arguments(payload)
                return None
            case "lower":
                self._lowered = self._candidates[number] = _Candidate(arguments)
                return self._lowered.lower(payload, self._arguments[arguments])
        timing = self._candidates[number].timing
        match command:
            case "compile":
                return timing.program.compile()
            case "sample":
                return timing.sample(), timing.program.nan_outputs
            case "outputs":
                outputs = timing.program.outputs()
                return list(outputs), outputs.structure, outputs.types
        raise ValueError(f"unknown command {command!r}")

    def _forget(self, candidates: list[int], tunes: list[int]) -> None:
        for number in candidates:
            self._candidates.pop(number, None)
        for tune in tunes:
            self._arguments.pop(tune, None)
            self._candidates = {number: one for number, one in self._candidates.items() if one.tune != tune}

    @property
    def building(self) -> bool:
        """Whether the last request failed while the candidate was being built."""
        return self._lowered is not None and self._lowered.stage == "build"


class _Candidate:
    """A candidate of a tune, lowered or compiled."""

    def __init__(self, tune: int) -> None:
        self.tune = tune
        self._trial: Any = None
        self.timing: Any = None

    @property
    def stage(self) -> str | None:
        return None if self._trial is None else self._trial.stage

    def lower(self, frames: list[bytearray], arguments: Any) -> tuple[str, str | None]:
        from asel.tuning.program import Program
        from asel.tuning.timing import MIN_SAMPLE_S, Timing
        from asel.tuning.worker_messages import unpack_candidate

        self._trial = unpack_candidate(frames, arguments)
        program = Program(self._trial)
        self.timing = Timing(program, time.perf_counter, MIN_SAMPLE_S)
        return program.how, program.fingerprint


def _warm_up() -> None:
    """Import JAX and find its devices, so that no candidate is charged for it."""
    import jax

    import asel.tuning.jax_measure
    import asel.tuning.worker_messages  # noqa: F401

    jax.devices()


def _read(stream: BinaryIO) -> list[bytearray] | None:
    """Return the frames of a request, or None at the end of the input."""
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
