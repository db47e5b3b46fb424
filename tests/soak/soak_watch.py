"""Asks a server for its health ten times a second until it is told to stop, and prints how long each answer took, in seconds.

A process of its own: among the soak's clients it would measure them.
"""

from __future__ import annotations

import http.client
import sys
import time


def main(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    while True:
        start = time.perf_counter()
        connection.request("GET", "/health")
        response = connection.getresponse()
        assert (response.status, response.read()) == (200, b'{"status":"ok"}')
        print(time.perf_counter() - start, flush=True)
        time.sleep(0.1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
