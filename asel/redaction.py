"""Removes the secrets of URLs from text in messages and logs."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

__all__ = ["SecretFilter", "redact"]

_HIDDEN = "***"
# Text without characters that cannot be part of a URL. Each token is inspected once, in linear time.
_TOKEN = re.compile(r"[^\s\"<>]+")
_DELIMITER = re.compile(r"([?&;#])")
_IN_QUERY = re.compile(r"([?&;#,])")
_WORD = re.compile(r"[^a-z0-9]+")
# Names of secret parameters: whole words, and parts of longer names (`accessToken`, `client_secret`).
_SECRET_WORDS = frozenset(
    {"auth", "authorization", "bearer", "code", "jwt", "key", "pass", "pw", "pwd", "session", "sessionid", "sid", "sig"}
)
_SECRET_PARTS = ("passw", "passphrase", "secret", "credential", "signature")
_SECRET_ENDS = ("token", "apikey", "accesskey", "privatekey", "authkey")
_CLOSING = "')],."
_MAX_INNER_ERRORS = 3


def redact(text: object) -> str:
    """Return the text with the user, the password and any token-like query value of each URL replaced by `***`.

    The text of an `ExceptionGroup` includes its first inner errors: its own message only has their number.
    """
    if isinstance(text, BaseExceptionGroup):
        return _group_text(text)
    shown = str(text)
    if (":/" in shown and "@" in shown) or ("=" in shown and _DELIMITER.search(shown)):
        return _TOKEN.sub(_clean_token, shown)
    return shown


def _group_text(group: BaseExceptionGroup[BaseException]) -> str:
    shown = [_inner_text(error) for error in group.exceptions[:_MAX_INNER_ERRORS]]
    if (more := len(group.exceptions) - len(shown)) > 0:
        shown.append(f"and {more} more")
    return f"{redact(str(group))}: {'; '.join(shown)}"


def _inner_text(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {redact(error)}"
    except Exception as why:  # of a user's `__str__`
        return f"{type(error).__name__} (its message raised {type(why).__name__})"


def _clean_token(found: re.Match[str]) -> str:
    token = found[0]
    if ":/" in token and "@" in token:
        token = _without_user_info(token)
    return _without_parameters(token) if "=" in token else token


def _without_user_info(token: str) -> str:
    """Hide everything up to the last @: a password that was not percent-encoded may contain / ? # or @."""
    end, colon = token.rfind("@"), token.find(":/")
    while 0 <= colon < end:
        if not _is_path(token[max(0, colon - 5) : colon]):
            # One slash or three: pathlib joins two slashes into one, and people mistype.
            start = colon + 1
            while start < colon + 4 and token[start] == "/":
                start += 1
            return f"{token[:start]}{_HIDDEN}{token[end:]}" if start <= end else token
        colon = token.find(":/", colon + 1)
    return token


def _is_path(before: str) -> bool:
    """Return whether a path follows the colon: after `file`, or after a single letter, which is a drive."""
    scheme = _WORD.split(before.lower())[-1]
    return len(scheme) < 2 or scheme == "file"


def _without_parameters(token: str) -> str:
    pieces = (_IN_QUERY if "?" in token else _DELIMITER).split(token)
    is_hidden = False
    for index in range(2, len(pieces), 2):
        name, equals, value = pieces[index].partition("=")
        if not equals:
            if is_hidden and name and pieces[index - 1] in ";,":  # the rest of a value
                pieces[index - 1] = pieces[index] = ""
            continue
        is_hidden = bool(value) and _is_secret(name)
        if is_hidden:
            kept = value[len(value.rstrip(_CLOSING)) :]
            pieces[index] = f"{name}={_HIDDEN}{kept}"
    return "".join(pieces)


def _is_secret(name: str) -> bool:
    name = name[-64:].lower()  # longer text is not a parameter's name
    if any(part in name for part in _SECRET_PARTS):
        return True
    return any(word in _SECRET_WORDS or word.endswith(_SECRET_ENDS) for word in _WORD.split(name))


class SecretFilter(logging.Filter):
    """Removes known secrets from what another library logs, tracebacks included."""

    def __init__(self, secrets: Iterable[str]) -> None:
        super().__init__()
        # Longest first, since one may contain another. Very short ones would match parts of ordinary words.
        ordered = sorted((secret for secret in set(secrets) if len(secret) > 3), key=len, reverse=True)
        self._secrets = re.compile("|".join(map(re.escape, ordered)), re.IGNORECASE) if ordered else None

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = record.getMessage()
        except Exception:  # a format string that does not fit must not raise here
            message = f"{record.msg} {record.args}"
        record.msg, record.args = self._clean(message), None
        if record.exc_info:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
            record.exc_info = None
        if record.exc_text:
            record.exc_text = self._clean(record.exc_text)
        return True

    def _clean(self, text: str) -> str:
        return redact(text if self._secrets is None else self._secrets.sub(_HIDDEN, text))
