"""The server that the soak talks to, as a program: all of `kvist serve` around a tiny random model and a pool that is too small.

Says its address on standard output; everything else is as in `cli/serve.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.tiny_engine import ISAS, tiny_engine
from kvist.engine.async_engine import AsyncEngine
from kvist.server.app import create_app
from kvist.server.life import Life
from kvist.server.options import ServerOptions
from kvist.server.run import address_of, bind, serve_app

NUM_BLOCKS = 48
KEYS = ("soak-key-one", "soak-key-two")


def main() -> int:
    listener = bind("127.0.0.1", 0)
    engine = AsyncEngine(tiny_engine(ISAS[-1], num_kv_blocks=NUM_BLOCKS, max_num_seqs=16))
    options, life = ServerOptions(api_keys=KEYS), Life()
    app = create_app(engine, options, life)
    return serve_app(
        app,
        listener,
        options,
        life,
        on_ready=lambda: print(address_of(listener), flush=True),
        stop_engine=engine.shutdown,
        log_level="error",
    )


if __name__ == "__main__":
    sys.exit(main())
