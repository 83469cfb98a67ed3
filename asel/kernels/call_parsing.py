"""The inverse of `call_text`: makes an invocation from `q=bf16[8,1024,128], k=f32[4], causal=True`."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from asel.errors import InvalidRequestError
from asel.kernels.call_text import short_dtype_name
from asel.kernels.kernel import Invocation
from asel.kernels.kernel_methods import parameters_of, positional_names
from asel.runtime.lazy_module import LazyModule

if TYPE_CHECKING:
    import numpy as np
else:
    np = LazyModule("numpy", globals(), "np")

__all__ = ["parse_call", "parse_value"]

_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[^\W\d]\w*")
_DTYPE = re.compile(r"[^\W\d]\w*(<\w+>)?(?=\[)")
_MAX_SIZE = 2**56
_DIM = re.compile(r"(<=)?(\d+)")
_STRING = re.compile(r"[bB]?('(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\")")
_REAL = r"(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_NUMBER = re.compile(rf"[-+]?(?:0[xXoObB][\da-fA-F_]+|inf\b|nan\b|{_REAL}j?)")
_COMPLEX = re.compile(rf"\([-+]?(?:{_REAL}|inf|nan)[-+](?:{_REAL}|inf|nan)j\)")
_CONSTANTS = {"None": None, "True": True, "False": False, "nan": float("nan"), "inf": float("inf")}

_DTYPE_NAMES = (
    *("bool", "bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (4, 8, 16, 32, 64)),
    *("float8_e4m3", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2", "float8_e5m2fnuz"),
)
_LONG_NAMES = {short: name for name in _DTYPE_NAMES for short in (short_dtype_name(name), name)}
_KEY_IMPLEMENTATIONS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


def parse_call(text: str, kernel: Any) -> Invocation[Any, Any]:
    """Return the invocation of `kernel` that `call_text` shows as `text`.

    Arrays become `jax.ShapeDtypeStruct`s, and a bucketed dimension (`<=1024`) gets the size of its bound. Other values
    are Python literals and names of dtypes. `(1)` is a tuple, as `call_text` writes it, and a plain name as a dict key
    is a string. The invocation has no shardings and no weak types, because the text has none.

    Raises:
        InvalidRequestError: the text is not a call of this kernel. The message has the position.
    """
    parser = _Parser(text)
    return _bind(parser, parser.arguments(), kernel)


def parse_value(text: str) -> Any:
    """Return the value that a text stands for: an array, a dtype or a literal.

    Raises:
        InvalidRequestError: the text is not a value. The message has the position.
    """
    parser = _Parser(text)
    value = parser.value()
    parser.take(_SPACE)
    if parser.position < len(text):
        raise parser.error(f"expected the end, found {parser._rest()}")
    return value


class _Argument(NamedTuple):
    position: int
    name: str
    value: Any


class _Parser:
    """A recursive descent parser of one text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def error(self, problem: str, position: int | None = None) -> InvalidRequestError:
        at = self.position if position is None else position
        return InvalidRequestError(f"cannot parse the call {self.text!r}: at character {at + 1}, {problem}")

    def take(self, pattern: re.Pattern[str]) -> str:
        """Consume and return the text that matches here; empty if nothing does."""
        found = pattern.match(self.text, self.position)
        if found is None:
            return ""
        self.position = found.end()
        return found[0]

    def accept(self, symbol: str) -> bool:
        """Skip white space. If `symbol` comes next, consume it and return True."""
        self.take(_SPACE)
        if not self.text.startswith(symbol, self.position):
            return False
        self.position += len(symbol)
        return True

    def arguments(self) -> list[_Argument]:
        found: list[_Argument] = []
        self.take(_SPACE)
        while self.position < len(self.text):
            found.append(self._argument())
            if not self.accept(",") and self.position < len(self.text):
                raise self.error(f"expected a comma, found {self._rest()}")
            self.take(_SPACE)
        return found

    def _argument(self) -> _Argument:
        start = self.position
        name = self.take(_NAME)
        if name and self.accept("="):
            return _Argument(start, name, self.value())
        self.position = start
        return _Argument(start, "", self.value())

    def value(self) -> Any:
        self.take(_SPACE)
        start = self.position
        if self.text.startswith("...", start):
            raise self.error("the text was shortened; write all of the call")
        if complex_number := self.take(_COMPLEX):
            return complex(complex_number)  # Python's own grammar would lose the sign of a zero
        if string := self.take(_STRING):
            return self._literal(string, start)
        if number := self.take(_NUMBER):
            return float(number) if number.endswith(("inf", "nan")) else self._literal(number, start)
        if self.accept("("):
            return tuple(self._items(")", self.value))
        if self.accept("["):
            return self._items("]", self.value)
        if self.accept("{"):
            return dict(self._items("}", self._pair))
        if dtype := self.take(_DTYPE):
            return self._array(dtype, start)
        return self._named_value(start)

    def _literal(self, text: str, start: int) -> Any:
        try:
            return ast.literal_eval(text)
        except (SyntaxError, ValueError):
            raise self.error(f"{text} is not a Python literal", start) from None

    def _items(self, closing: str, item: Callable[[], Any]) -> list[Any]:
        items: list[Any] = []
        while not self.accept(closing):
            items.append(item())
            if not self.accept(","):
                if not self.accept(closing):
                    raise self.error(f"expected a comma or {closing!r}, found {self._rest()}")
                break
        return items

    def _pair(self) -> tuple[Any, Any]:
        self.take(_SPACE)
        start = self.position
        if (name := self.take(_NAME)) and self.accept(":"):
            return name, self.value()
        self.position = start
        key = self.value()
        if not self.accept(":"):
            raise self.error(f"expected ':' after the key {key!r}, found {self._rest()}")
        try:
            hash(key)
        except TypeError:
            raise self.error(f"{key!r} cannot be the key of a dict", start) from None
        return key, self.value()

    def _array(self, dtype: str, start: int) -> Any:
        import jax

        found = _dtype_of(dtype)
        if found is None:
            raise self.error(f"{dtype!r} is not a dtype; write one of {_listed_dtypes()}", start)
        assert self.accept("[")
        shape = tuple(self._items("]", self._dim))
        if prod(shape) >= _MAX_SIZE:  # XLA would abort the process
            raise self.error(f"{dtype}{list(shape)} has more elements than any memory", start)
        return jax.ShapeDtypeStruct(shape, found)  # type: ignore[no-untyped-call]

    def _dim(self) -> int:
        self.take(_SPACE)
        dim = self.take(_DIM)
        if not dim:
            raise self.error(f"expected the size of a dimension, found {self._rest()}")
        return int(dim.removeprefix("<="))

    def _named_value(self, start: int) -> Any:
        name = self.take(_NAME)
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        if name and not self.accept("(") and (dtype := _dtype_of(name)) is not None:
            return dtype
        if name:
            raise self.error(
                f"{name!r} is not a value. Write text in quotes ({name!r}) and arrays with a shape (f32[8,128]); "
                "functions, enums and other objects cannot be made from text, so build such an Invocation in Python",
                start,
            )
        raise self.error(f"expected a value, found {self._rest()}", start)

    def _rest(self) -> str:
        return repr(self.text[self.position : self.position + 20]) if self.position < len(self.text) else "the end"


@functools.cache
def _dtype_of(name: str) -> Any:
    """Return the dtype of a short or long name; None if there is none."""
    import jax

    if (implementation := _KEY_IMPLEMENTATIONS.get(name)) is not None:
        return jax.eval_shape(lambda: jax.random.key(0, impl=implementation)).dtype
    long_name = _LONG_NAMES.get(name)
    if long_name is None:
        return None
    try:
        return np.dtype(long_name)  # JAX has registered the names that NumPy does not have
    except TypeError:
        return None


def _listed_dtypes() -> str:
    return ", ".join(short_dtype_name(name) for name in _DTYPE_NAMES)


def _bind(parser: _Parser, given: list[_Argument], kernel: Any) -> Invocation[Any, Any]:
    """Return the invocation with each argument in its parameter's place."""
    names = [name for name, _ in positional_names(kernel)]
    signature = parameters_of(kernel)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for position, name, value in given:
        if not name and kwargs:
            raise parser.error("an argument without a name follows a keyword; name it, or write it first", position)
        if not name or (len(args) < len(names) and name == names[len(args)]):
            args.append(value)
            continue
        if name == "cfg":
            raise parser.error("cfg is not an argument of the call: asel chooses it", position)
        if name in kwargs or (name in names[: len(args)] and not _is_positional_only(kernel, name)):
            raise parser.error(f"{name!r} is given twice", position)
        if signature is not None and not _takes(signature, name):
            raise parser.error(f"{kernel.op_id!r} has no parameter {name!r}; {_listed_parameters(signature)}", position)
        kwargs[name] = value
    if signature is not None:
        _refuse_missing(parser, signature, args, kwargs, kernel)
    return Invocation(kernel.op_id, tuple(args), kwargs)


def _is_positional_only(kernel: Any, name: str) -> bool:
    return (name, True) in positional_names(kernel)


def _takes(signature: inspect.Signature, name: str) -> bool:
    parameters = signature.parameters
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    has_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return has_any or (name in parameters and parameters[name].kind in by_name)


def _listed_parameters(signature: inspect.Signature) -> str:
    names = [str(p).partition(":")[0] if p.kind is p.VAR_POSITIONAL else p.name for p in signature.parameters.values()]
    return f"its parameters are {', '.join(name for name in names if name != 'cfg')}"


def _refuse_missing(
    parser: _Parser, signature: inspect.Signature, args: list[Any], kwargs: dict[str, Any], kernel: Any
) -> None:
    try:
        bound = signature.bind_partial(*args, **kwargs).arguments
    except TypeError:
        message = f"too many positional arguments for {kernel.op_id!r}; {_listed_parameters(signature)}"
        raise parser.error(message, 0) from None
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p.name for p in signature.parameters.values() if p.default is p.empty and p.kind not in variadic]
    missing = [name for name in required if name not in bound and name != "cfg"]
    if missing:
        raise parser.error(
            f"{', '.join(missing)} of {kernel.op_id!r} is missing; add {missing[0]}=...", len(parser.text)
        )
