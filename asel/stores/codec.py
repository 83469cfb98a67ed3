"""Converts configs to JSON values and back."""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import Enum
from typing import Annotated, Any, Generic, Required, Union, get_args, get_origin, get_type_hints

import numpy as np
import pydantic_core
from pydantic import AfterValidator, BaseModel, BeforeValidator, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from asel.errors import InvalidRequestError
from asel.kernels.kernel import Cfg
from asel.redaction import redact
from asel.stores import strict_json
from asel.stores.records import RecordError

__all__ = ["Codec"]


class Codec(Generic[Cfg]):
    """Writes configs as JSON values and reads them again.

    To write one: `dumper`, or else pydantic's form of a dataclass, model, enum member or plain JSON value. To read it:
    `loader`, or else `cfg_type`, or else the type of the kernel's configs; with no kernel it stays a JSON value.
    """

    def __init__(
        self,
        loader: Callable[[Any], Cfg] | None = None,
        dumper: Callable[[Cfg], Any] | None = None,
        cfg_type: Any = None,
    ) -> None:
        for name, function in (("loader", loader), ("dumper", dumper)):
            if function is not None and not callable(function):
                raise InvalidRequestError(f"PersistentCache: {name} must be a function, not {type(function).__name__}")
        self._loader = loader
        self._dumper = dumper
        self._cfg_type = cfg_type
        self._adapter: TypeAdapter[Any] | None = None
        if cfg_type is not None:
            self._adapter = _adapter(cfg_type)

    def dump(self, cfg: Cfg) -> Any:
        """Return the JSON value of a config.

        Raises:
            InvalidRequestError: it has none, or it would not be equal when it is read again.
        """
        try:
            value = strict_json.loads(strict_json.dumps(self._json_value(cfg)))
            back = cfg if self._adapter is None or self._loader is not None else self.load(value)
            fits = type(back) is type(cfg) and bool(back == cfg)
        except Exception as error:  # a user's dumper may raise anything
            raise self._cannot_be_stored(cfg, error) from error
        if not fits:
            raise self._cannot_be_stored(cfg, f"it would be read again as {_shown(back)}")
        return value

    def _cannot_be_stored(self, cfg: Any, why: object) -> InvalidRequestError:
        text = f"{_shown(cfg)} cannot be stored: {why}. "
        if self._cfg_type is not None and self._loader is None and type(cfg) is not self._cfg_type:
            name = getattr(self._cfg_type, "__name__", self._cfg_type)
            advice = f"This cache was made with cfg_type={name}; without it, each kernel's configs have their own type."
        else:
            advice = "Pass a dumper and a loader for such configs."
        return InvalidRequestError(text + advice)

    def reader(self, among: Iterable[Cfg] = ()) -> Callable[[Any], Cfg]:
        """Return `load`; if no type was given, a function that reads a value as one of `among`, or as their type.

        The returned function raises RecordError for a value that is neither, or that stands for several of `among`.
        Without `among` it returns values unchanged.
        """
        if self._adapter is not None or self._loader is not None:
            return self.load
        by_json: dict[str, list[Cfg]] = {}
        kinds: dict[type, None] = {}
        for cfg in among:
            kinds[type(cfg)] = None
            with suppress(InvalidRequestError):
                by_json.setdefault(strict_json.dumps(self.dump(cfg)), []).append(cfg)

        def read(value: Any) -> Cfg:
            found = by_json.get(strict_json.dumps(value), [])
            if len(found) > 1:
                one, other = map(_shown, found[:2])
                raise RecordError(
                    f"it may be {one} or {other}; a PersistentCache with a dumper and a loader can distinguish them"
                )
            return found[0] if found else self._as_one_of(tuple(kinds), value)

        return read

    def _as_one_of(self, kinds: tuple[type, ...], value: Any) -> Cfg:
        """Return a value as the first of some types that it fits; unchanged if pydantic cannot read one of them."""
        first: RecordError | None = None
        for kind in kinds:
            adapter = _adapter_of(kind)
            if adapter is None:
                return value  # type: ignore[no-any-return]
            try:
                return self._validated(adapter, value)  # type: ignore[no-any-return]
            except RecordError as error:
                first = first or error
        if first is not None:
            raise first
        return value  # type: ignore[no-any-return]

    def _json_value(self, cfg: Cfg) -> Any:
        if self._dumper is not None:
            return self._dumper(cfg)
        if self._adapter is None and not dataclasses.is_dataclass(cfg) and not isinstance(cfg, BaseModel | Enum):
            return cfg  # a plain JSON value; anything else is refused when it is dumped
        return _jsonable(cfg)

    def load(self, value: Any) -> Cfg:
        """Return the config of a JSON value.

        Raises:
            RecordError: it does not fit; the message names the field.
        """
        if self._loader is not None:
            try:
                return self._loader(value)
            except Exception as error:  # a user's loader may raise anything
                raise RecordError(f"the loader refused it: {type(error).__name__}: {redact(error)}") from error
        if self._adapter is None:
            return value  # type: ignore[no-any-return]
        return self._validated(self._adapter, value)  # type: ignore[no-any-return]

    def _validated(self, adapter: TypeAdapter[Any], value: Any) -> Any:
        try:
            cfg = adapter.validate_json(strict_json.dumps(value), strict=True)
            # pydantic drops unknown fields silently, but a field that the type no longer has may have mattered.
            lost = _lost(value, _jsonable(cfg)) if self._dumper is None else None
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise RecordError(f"{_path(first['loc'])}: {first['msg']}") from error
        except Exception as error:  # validators and __post_init__ may raise anything, too
            raise RecordError(f"the config type refused it: {type(error).__name__}: {redact(error)}") from error
        if lost is not None:
            raise RecordError(f"{_path(lost)}: the config type has no such field")
        return cfg


def _adapter(cfg_type: Any) -> TypeAdapter[Any]:
    if isinstance(cfg_type, str):
        raise InvalidRequestError(f"PersistentCache: cfg_type={cfg_type!r} is a string; pass the type itself")
    try:
        return TypeAdapter(_readable(cfg_type))
    except Exception as error:  # pydantic raises errors of many types for an argument that is not a type
        raise InvalidRequestError(f"PersistentCache: cfg_type={cfg_type!r} cannot be read: {error}") from error


@functools.lru_cache(maxsize=256)
def _adapter_of(kind: type) -> TypeAdapter[Any] | None:
    """Return an adapter for a kernel's own config type; None if pydantic has none."""
    try:
        return _adapter(kind)
    except InvalidRequestError:
        return None


def _shown(cfg: Any) -> str:
    try:
        return repr(cfg)
    except Exception:  # a huge int has no repr, and a config's own repr may raise
        return f"a {type(cfg).__name__}"


def _jsonable(cfg: Any) -> Any:
    return pydantic_core.to_jsonable_python(cfg, fallback=_dtype_name)


def _path(where: tuple[int | str, ...]) -> str:
    return ".".join(map(str, where)) or "the config"


def _lost(value: Any, kept: Any, where: tuple[int | str, ...] = ()) -> tuple[int | str, ...] | None:
    """Return the path of the first field of `value` that `kept` does not have."""
    if isinstance(value, dict) and isinstance(kept, dict):
        for name, inner in value.items():
            if name not in kept:
                return (*where, name)
            if (lost := _lost(inner, kept[name], (*where, name))) is not None:
                return lost
    if isinstance(value, list) and isinstance(kept, list):
        for index, (inner, other) in enumerate(zip(value, kept, strict=False)):
            if (lost := _lost(inner, other, (*where, index))) is not None:
                return lost
    return None


# dtypes are common in kernels' configs, and pydantic cannot read them.


def _dtype_name(value: Any) -> str:
    # np.dtype accepts anything with a dtype, and any class: the number np.int64(128) would become "int64".
    if isinstance(value, np.dtype | type):
        with suppress(TypeError):
            dtype: np.dtype[Any] = np.dtype(value)
            if dtype.kind != "O" and np.dtype(dtype.name) == dtype:
                return str(dtype.name)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _readable(hint: Any) -> Any:
    """Return a type that pydantic can read, in which dtypes are given by name."""
    return _with_dtypes(hint) if _mentions_dtype(hint) else hint


def _is_dtype(hint: Any) -> bool:
    return hint is np.dtype or get_origin(hint) is np.dtype


@functools.cache
def _fields(hint: Any) -> Mapping[str, Any]:
    if not (isinstance(hint, type) and dataclasses.is_dataclass(hint)):
        return {}
    hints = get_type_hints(hint, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(hint) if field.init}


def _mentions_dtype(hint: Any, seen: frozenset[Any] = frozenset()) -> bool:
    if _is_dtype(hint):
        return True
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return hint not in seen and any(_mentions_dtype(inner, seen | {hint}) for inner in _fields(hint).values())
    return any(_mentions_dtype(inner, seen) for inner in get_args(hint) if not isinstance(inner, str | int))


def _with_dtypes(hint: Any) -> Any:
    if _is_dtype(hint):
        return Annotated[Any, BeforeValidator(np.dtype)]
    if not _mentions_dtype(hint):
        return hint
    if isinstance(hint, type):
        defaults = {f.name for f in dataclasses.fields(hint) if f.default is not f.default_factory}
        fields = {
            name: _with_dtypes(inner) if name in defaults else Required[_with_dtypes(inner)]
            for name, inner in _fields(hint).items()
        }
        mirror = TypedDict(hint.__name__, fields, total=False)  # type: ignore[misc]
        return Annotated[mirror, AfterValidator(lambda facts: hint(**facts))]
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if any(map(_is_dtype, args)):  # as in DTypeLike, whose other types name dtypes: all are read as dtypes
            args = tuple(arg for arg in args if _is_dtype(arg) or arg is type(None))
        return functools.reduce(operator.or_, map(_with_dtypes, args))
    if origin is Annotated:
        return Annotated[(_with_dtypes(args[0]), *args[1:])]
    return origin[tuple(_with_dtypes(arg) if arg is not Ellipsis else arg for arg in args)]
