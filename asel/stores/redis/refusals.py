"""Explains Redis's refusals, and what to do about each."""

from __future__ import annotations

import re

from anyio import BrokenResourceError, ClosedResourceError, EndOfStream
from coredis.exceptions import (
    AuthenticationFailureError,
    AuthenticationRequiredError,
    AuthorizationError,
    BusyLoadingError,
    ReadOnlyError,
    RedisClusterError,
    UnknownCommandError,
)

from asel.redaction import redact
from asel.stores.redis.url import Target

__all__ = ["CHANNEL_RIGHTS", "RIGHTS", "explain"]

# New users have all channels in Redis 6 and none in Redis 7. Redis 6 rejects a pattern beside "all", hence the reset.
CHANNEL_RIGHTS = "resetchannels &{prefix}:* +@pubsub"
RIGHTS = "~{prefix}:* +@connection +@scripting +@read +@write " + CHANNEL_RIGHTS

# coredis's class for the error, the words at the beginning of Redis's message (a script's error has them inside), and
# asel's explanation.
_MEANINGS: list[tuple[type[Exception] | None, str, str]] = [
    (AuthenticationRequiredError, "NOAUTH", "wants a password: put it into the URL, redis://:password@host"),
    (AuthenticationFailureError, "WRONGPASS", "refused the user or the password in the URL: correct them"),
    (
        AuthorizationError,
        "NOPERM|The user executing the script can't|ACL failure in script:",
        f"does not allow this user what asel needs: grant {RIGHTS}",
    ),
    (None, "OOM", "is full: raise its maxmemory, let it evict, or have records expire with expire_s= in the URL"),
    (ReadOnlyError, "READONLY", "is a read-only replica: give the address of the primary"),
    (None, "MISCONF", "cannot save to its disk and refuses writes: see its log"),
    (None, "NOREPLICAS", "lacks replicas and refuses writes: see its min-replicas-to-write"),
    (BusyLoadingError, "LOADING", "is still loading its data: it will answer soon"),
    (None, "BUSY", "is busy with another client's script: it will answer when that ends"),
    (None, "max number of clients", "has no room for another connection: raise its maxclients"),
    (RedisClusterError, "MOVED", "is part of a cluster, which asel does not speak to: give a single Redis"),
    (UnknownCommandError, "NOPROTO", "is too old: asel needs Redis 6 or later, with scripts"),
]


def explain(error: Exception, target: Target, *, is_greeting: bool = False) -> str:
    """Return an explanation to follow "Redis at ...", without the password.

    The password is sent with the greeting, and the server may echo it in any encoding, so no word of its answer to the
    greeting is repeated.
    """
    text = _words(error)
    for kind, words, meaning in _MEANINGS:
        if (kind is not None and isinstance(error, kind)) or re.search(rf"(^|-|\s)({words})\s", text):
            return meaning.format(prefix=target.prefix)
    if "DB index is out of range" in text:
        return f"has no database {target.db}: give a lower one after the host in the URL"
    if isinstance(error, OSError):
        return f"cannot be reached ({text}): start it, or correct the URL"
    if is_greeting and _is_lost_connection(error):
        return (
            "closed the connection during the greeting: it may be restarting, have no room for more clients"
            " (maxclients), or want TLS (rediss://)"
        )
    if is_greeting:
        return f"did not answer as a Redis of version 6 or later does ({type(error).__name__}): is it one?"
    return f"failed: {text}"


def _is_lost_connection(error: BaseException | None) -> bool:
    # coredis raises the same error for a lost connection and for a greeting it cannot parse.
    while error is not None and not isinstance(error, EndOfStream | BrokenResourceError | ClosedResourceError):
        error = error.__cause__
    return error is not None


def _words(error: BaseException) -> str:
    # anyio's own message is that all attempts failed; the reasons are in the cause.
    cause = error.__cause__
    if isinstance(error, OSError) and isinstance(cause, BaseExceptionGroup):
        return "; ".join(dict.fromkeys(_words(one) for one in cause.exceptions))
    if isinstance(error, OSError) and isinstance(cause, OSError):
        return _words(cause)
    return " ".join(redact(error).split())[:300] or type(error).__name__
