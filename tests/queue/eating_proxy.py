"""A TCP proxy between a client and Redis that can swallow one reply and drop the connection."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class EatingProxy:
    """Forwards to `port`; listens on `self.port`.

    `eat(b"XADD")`: the next request holding these bytes is passed on, its reply is not.
    """

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._eat: bytes | None = None
        self.eaten = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> EatingProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def eat(self, command: bytes) -> None:
        """Arm it once."""
        self._eat = command

    def _accept(self) -> None:
        with suppress(OSError):  # closed: the test is over
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._upstream)) as server:
            eating = threading.Event()
            back = threading.Thread(target=self._reply, args=(server, client, eating), daemon=True)
            back.start()
            with suppress(OSError):
                while request := client.recv(1 << 16):
                    if self._eat is not None and self._eat in request:
                        self._eat = None
                        eating.set()
                    server.sendall(request)
                server.shutdown(socket.SHUT_WR)
            back.join()

    def _reply(self, server: socket.socket, client: socket.socket, eating: threading.Event) -> None:
        with suppress(OSError):
            while reply := server.recv(1 << 16):
                if eating.is_set():
                    self.eaten += 1
                    client.shutdown(socket.SHUT_RDWR)
                    return
                client.sendall(reply)
