"""Changes that hold for the current task: context managers over one immutable stack."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Generic, NamedTuple, Self, TypeVar

__all__ = ["Frame", "Scope", "Stack"]

T = TypeVar("T")


class Frame(NamedTuple, Generic[T]):
    """One entry of a stack: the scope that made it, and what it says."""

    owner: object
    value: T


class Stack(Generic[T]):
    """The scopes that are open in the current task, outermost first.

    The stack is a tuple in a context variable: child tasks and worker threads start with a copy,
    and what they open or close is theirs alone.
    """

    def __init__(self, name: str) -> None:
        self._var: ContextVar[tuple[Frame[T], ...]] = ContextVar(name, default=())
        # Bound once: the fast lane asks on every call.
        self.frames = self._var.get

    def push(self, frame: Frame[T]) -> None:
        self._var.set((*self._var.get(), frame))

    def drop(self, owner: object) -> None:
        """Remove the innermost frame of `owner`, wherever it is in the stack.

        By owner and not by ContextVar token, so that scopes may close in any order, and closing in
        a task that never opened is harmless.
        """
        frames = self._var.get()
        for i in reversed(range(len(frames))):
            if frames[i].owner is owner:
                self._var.set(frames[:i] + frames[i + 1 :])
                return

    @contextmanager
    def cleared(self) -> Iterator[None]:
        """Hide every frame inside the block."""
        token = self._var.set(())
        try:
            yield
        finally:
            self._var.reset(token)


class Scope(Generic[T]):
    """A context manager that puts one value on a stack; may be entered again, also while open."""

    _stack: Stack[T]

    def _value(self) -> T:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._stack.push(Frame(self, self._value()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.drop(self)
