"""The Lua scripts that Redis runs as one step each, and the names of its keys.

A script runs without interruption, so the keys that it reads cannot change before it acts. If a script fails half-way,
nothing is undone, so steps that Redis may refuse, such as for lack of memory, come before steps that depend on them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from asel.stores import records
from asel.stores.records import MAX_BYTES, Address

__all__ = [
    "ACQUIRE",
    "DELETE",
    "FORGET",
    "MEMBERS",
    "PUT",
    "READ",
    "RELEASE",
    "RENEW",
    "SET_ASIDE",
    "SIZES",
    "UNPUBLISHED",
    "Names",
    "Script",
    "tag",
]


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script and its SHA-1, by which Redis finds it."""

    text: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha", hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest())


class Names:
    """The names of the keys of one prefix, for this version of the schema."""

    def __init__(self, prefix: str) -> None:
        self._prefix = f"{prefix}:".encode()
        self._root = f"{prefix}:{records.SCHEMA}:"
        self.records = self._name("record", "")

    def _name(self, kind: str, of: str) -> bytes:
        return f"{self._root}{kind}:{of}".encode()

    def record(self, address: Address) -> bytes:
        return self.records + address.digest.encode()

    @property
    def everything(self) -> bytes:
        """The pattern of all keys of the prefix, of every version."""
        return self._prefix + b"*"

    def kind(self, name: bytes) -> str:
        """Return the kind of a key of the prefix: `record`, `lease`, `set-aside`, ..."""
        kind = name.removeprefix(self._root.encode())
        if kind != name:
            return kind.partition(b":")[0].decode()
        is_record = name.removeprefix(self._prefix).split(b":")[1:2] == [b"record"]
        return "another version's record" if is_record else ""

    def index(self, key_digest: str) -> bytes:
        """The set of the digests of a key's addresses."""
        return self._name("key", key_digest)

    def index_of(self, digest: bytes) -> bytes:
        return self._name("key", "") + digest.partition(b".")[0]

    def lease(self, address: Address) -> bytes:
        return self._name("lease", address.digest)

    def wake(self, address: Address) -> bytes:
        """The channel of wake-ups for waiters."""
        return self._name("wake", address.digest)

    def set_aside(self, digest: bytes) -> bytes:
        """The last bad value of an address. Only one is kept, so that bad values cannot fill the server."""
        return self._name("set-aside", "") + digest


def tag(found: Any) -> bytes:
    """Return the same tag as the scripts' `tag` function."""
    if isinstance(found, bytes):
        return hashlib.sha1(found, usedforsecurity=False).hexdigest().encode()
    kind, size = found
    return b"%b:%d" % (kind, size)


# Returned by a script that did its work but could not publish, because the user has no right to the channel.
UNPUBLISHED = 2

# Bad records are kept for people to examine: the last of each address, for a week.
_KEEP_ASIDE = f"""
local function set_aside(key, aside)
  redis.call('RENAME', key, aside)
  redis.call('PEXPIRE', aside, {7 * 24 * 3600 * 1000})
end
"""

_PUBLISH = f"""
local function publish(channel, text, published)
  local answer = redis.pcall('PUBLISH', channel, text)
  if type(answer) == 'table' and answer.err then return {UNPUBLISHED} end
  return published
end
"""

# `look` returns a record's text; for a value that cannot be a record only its type and size, so that it is never sent.
_LOOK = f"""
local function look(key)
  local kind = redis.call('TYPE', key).ok
  if kind == 'none' then return false end
  if kind ~= 'string' then return {{kind, 0}} end
  local size = redis.call('STRLEN', key)
  if size > {MAX_BYTES} then return {{kind, size}} end
  return redis.call('GET', key)
end
local function tag(found)
  if type(found) == 'table' then return found[1] .. ':' .. found[2] end
  return redis.sha1hex(found)
end
local function is(key, text)
  return redis.call('TYPE', key).ok == 'string' and redis.call('GET', key) == text
end
"""

READ = Script(
    _LOOK
    + """
local found = {}
for i, key in ipairs(KEYS) do found[i] = look(key) end
return found
"""
)

# Returns the existing record, if ours was not stored; otherwise nothing, or UNPUBLISHED.
PUT = Script(
    _LOOK
    + _KEEP_ASIDE
    + _PUBLISH
    + """
local record, index, lease, aside, index_aside = unpack(KEYS)
local text, digest, replace, token, expire_ms, bad, wake = unpack(ARGV)
local found, expire = look(record), tonumber(expire_ms)
local is_bad = found and bad ~= '' and tag(found) == bad
if found and not is_bad then
  if replace == '0' or (token ~= '' and not is(lease, token)) then return found end
end
local kind = redis.call('TYPE', index).ok
if kind ~= 'none' and kind ~= 'set' then set_aside(index, index_aside) end
local left = redis.call('PTTL', index)
redis.call('SADD', index, digest)
-- The index lasts as long as the last of its records.
if expire == 0 then redis.call('PERSIST', index)
elseif left == -2 or (left >= 0 and left < expire) then redis.call('PEXPIRE', index, expire) end
if is_bad then set_aside(record, aside) end
if expire == 0 then redis.call('SET', record, text)
else redis.call('SET', record, text, 'PX', expire) end
return publish(wake, 'stored', false)
"""
)

SET_ASIDE = Script(
    _LOOK
    + _KEEP_ASIDE
    + """
local found = look(KEYS[1])
if not found or tag(found) ~= ARGV[1] then return 0 end
set_aside(KEYS[1], KEYS[3])
if redis.call('TYPE', KEYS[2]).ok == 'set' then redis.call('SREM', KEYS[2], ARGV[2]) end
return 1
"""
)

DELETE = Script(
    _LOOK
    + """
local found = look(KEYS[1])
if not found or (ARGV[1] ~= '' and tag(found) ~= ARGV[1]) then return 0 end
redis.call('DEL', KEYS[1])
if redis.call('TYPE', KEYS[2]).ok == 'set' then redis.call('SREM', KEYS[2], ARGV[2]) end
return 1
"""
)

SIZES = Script("""
local size = 0
for _, key in ipairs(KEYS) do
  if redis.call('TYPE', key).ok == 'string' then size = size + redis.call('STRLEN', key) end
end
return size
""")

MEMBERS = Script("return redis.call('TYPE', KEYS[1]).ok == 'set' and redis.call('SMEMBERS', KEYS[1]) or {}")

# Removes the digests of expired records from an index.
FORGET = Script("""
if redis.call('TYPE', KEYS[1]).ok ~= 'set' then return 0 end
for i, digest in ipairs(ARGV) do
  if redis.call('EXISTS', KEYS[i + 1]) == 0 then redis.call('SREM', KEYS[1], digest) end
end
return 0
""")

# Returns 0 if the token has the lease now, otherwise the milliseconds until the other holder's lease ends. Repeating it
# with the same token is safe: the first answer may have been lost. A lease that never expires was not made by asel.
ACQUIRE = Script(
    _LOOK
    + """
local left = redis.call('PTTL', KEYS[1])
if left >= 0 and not is(KEYS[1], ARGV[1]) then return math.max(left, 1) end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 0
"""
)

# A lease that Redis lost in a restart, or that expired while Redis was unreachable, is taken again if it is free. This
# keeps others from tuning. It has another token, because a claim that was lost must not replace newer records.
_IS_OURS = """
local function is_ours(key, token) return is(key, token) or is(key, token .. ':again') end
"""

RENEW = Script(
    _LOOK
    + _IS_OURS
    + """
if is_ours(KEYS[1], ARGV[1]) then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('SET', KEYS[1], ARGV[1] .. ':again', 'PX', ARGV[2])
return 1
"""
)

RELEASE = Script(
    _LOOK
    + _IS_OURS
    + _PUBLISH
    + """
if not is_ours(KEYS[1], ARGV[1]) then return 0 end
redis.call('DEL', KEYS[1])
return publish(ARGV[2], 'released', 1)
"""
)
