"""The other end of `asel.processes`: compiles and times what it is sent, until its input ends."""

from __future__ import annotations

import os
import pickle
import struct
import sys
import time
from typing import Any, BinaryIO

_HEADER = struct.Struct("!Q")


def main() -> None:
    """Answer requests one by one. What a kernel prints goes to the error stream, not between our answers."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    requests = os.fdopen(0, "rb", buffering=0)
    sys.path[:] = [*sys.argv[1:], *(path for path in sys.path if path not in sys.argv[1:])]
    candidates: dict[int, Any] = {}
    while (request := _read(requests)) is not None:
        command, candidate, forgotten = pickle.loads(request[0])
        for old in forgotten:
            candidates.pop(old, None)
        try:
            answer = ("ok", _answer(candidates, command, candidate, request[1:]))
        except Exception as error:  # a candidate's failure is an answer like any other
            answer = ("error", (type(error).__name__, str(error)))
        message = pickle.dumps(answer)
        answers.write(_HEADER.pack(len(message)) + message)


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


def _answer(candidates: dict[int, Any], command: str, candidate: int, payload: list[bytearray]) -> Any:
    from asel.benchmark import LEAST_SAMPLE_S, Program, Timing
    from asel.parcels import unpacked

    if command == "hello":
        return None
    if command == "lower":
        candidates[candidate] = Timing(Program(unpacked(payload)), time.perf_counter, LEAST_SAMPLE_S)
        program = candidates[candidate].program
        return program.how, program.fingerprint
    timing = candidates[candidate]
    match command:
        case "compile":
            return timing.program.compile()
        case "sample":
            return timing.sample()
        case "outputs":
            return timing.program.outputs()
    raise ValueError(f"unknown command {command!r}")


if __name__ == "__main__":
    main()
