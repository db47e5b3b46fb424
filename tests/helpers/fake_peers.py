"""Engines that compute nothing, to drive the comparison: a driver for `peers/host.py`, and a stand-in for llama.cpp's server.

from helpers.fake_peers import contender, write_llama_server

contender(folder, "b", total=2.0, fail_on=512)     # notes what it is asked in folder/log
write_llama_server(folder)                          # folder/llama-server answers /health and /completion
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kvist.bench.session import Contender, own_python

DRIVER = r"""
import json, os, subprocess, time

def load(setup):
    log = setup["log"]

    def state(pid):
        try:
            return open(f"/proc/{pid}/stat").read().split()[2]
        except FileNotFoundError:
            return "gone"

    def others():
        own = (str(os.getpid()), str(child and child.pid))
        return sorted(state(pid) for pid in open(log + ".pids").read().split() if pid not in own)

    def note(**what):
        with open(log, "a") as file:
            file.write(json.dumps({"name": setup["name"], **what}) + "\n")

    if setup["fail"] == "load":
        raise ValueError("no such weights")
    if setup["fail"] == "load-exit":
        raise SystemExit("out of memory")
    note(event="load", context=setup["context"], max_seqs=setup["max_seqs"], cold=setup["cold"])
    child = subprocess.Popen(["sleep", "600"]) if setup["child"] else None
    with open(log + ".pids", "a") as file:
        file.write(f"{os.getpid()}\n" + (f"{child.pid}\n" if child else ""))
    print("a library's greeting")

    def generate(prompts, new_tokens):
        size = len(prompts[0])
        note(event="run", shape=[len(prompts), size, new_tokens], first=prompts[0][:3], others=others())
        if size == setup["fail_on"]:
            if setup["fail"] == "error":
                raise RuntimeError("cannot do this one")
            if setup["fail"] == "exit":
                os.write(2, b"first words\nlast words\n")
                os._exit(3)
            if setup["fail"] == "killed":
                os.kill(os.getpid(), 9)
            if setup["fail"] == "hang":
                time.sleep(60)
            if setup["fail"] == "short":
                return {"total": 1.0, "after_first": 0.5, "made": [1] * len(prompts)}
        total = setup["total"]
        after = None if setup["fail"] == "untimed" else total / 2
        return {"total": total, "after_first": after, "made": [new_tokens] * len(prompts)}

    return generate, {"version": "1.0"}
"""

SERVER = r"""
import http.server, json, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply({"status": "ok"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open(sys.argv[0] + ".log", "a") as file:
            file.write(json.dumps({"arguments": sys.argv[1:], "body": body}) + "\n")
        self.reply({"timings": {"predicted_n": body["n_predict"], "predicted_ms": 500.0}})

    def reply(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass

if "--version" in sys.argv:
    print("version: 7 (fake)")
else:
    port = int(sys.argv[sys.argv.index("--port") + 1])
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def contender(folder: Path, name: str, *, total: float = 1.0, fail: str = "", fail_on: int = -1, child: bool = False) -> Contender:
    """A fake engine whose every run takes `total` seconds by its own account; all of one folder share its log. `fail`: load,
    load-exit, untimed, or (on prompts of `fail_on` tokens) error, exit, killed, hang, short."""
    driver = folder / "fake_driver.py"
    driver.write_text(DRIVER.replace("\\\\", "\\"), encoding="utf-8")
    log = str(folder / "log")
    setup: dict[str, Any] = {"name": name, "log": log, "total": total, "fail": fail, "fail_on": fail_on, "child": child}
    return Contender(name, own_python(), driver, setup, "nothing")


def log_of(folder: Path) -> list[dict[str, Any]]:
    """What the folder's engines noted, in order."""
    return [json.loads(line) for line in (folder / "log").read_text(encoding="utf-8").splitlines()]


def pids_of(folder: Path) -> list[int]:
    """The processes of the folder's engines and of what they started."""
    return [int(line) for line in (folder / "log.pids").read_text(encoding="utf-8").splitlines()]


def write_llama_server(folder: Path) -> Path:
    """A program that answers as llama.cpp's server does; what it was asked goes to `llama-server.log`."""
    path = folder / "llama-server"
    path.write_text(f"#!{sys.executable}\n{SERVER}", encoding="utf-8")
    path.chmod(0o755)
    return path
