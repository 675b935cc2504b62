# SPDX-License-Identifier: Apache-2.0
"""Stands in for a worker or for the frontend where only the launcher is tested: fake_child.py frontend PORT, or fake_child.py worker.

A worker has a child of its own, a segment of shared memory, a semaphore, and metrics; the frontend answers, and counts what it answered in
a file that the workers' metrics are made from. FAKE tells how a worker misbehaves: crash, stubborn (does not end when asked to), late
(never gets known).
"""

import http.server
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

FOLDER = Path(os.environ["TMPDIR"])
COUNTER, KNOWN = FOLDER / "answered", "known-"


def answered():
    return COUNTER.stat().st_size if COUNTER.exists() else 0


class Handler(http.server.BaseHTTPRequestHandler):
    def _say(self, text, kind="application/json"):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        if self.path == "/health":
            ports = [file.name.removeprefix(KNOWN) for file in FOLDER.glob(f"{KNOWN}*")]
            instances = [{"endpoint": "generate", "transport": {"tcp": f"127.0.0.1:{port}/x/serve"}} for port in ports]
            self._say(json.dumps({"instances": instances}))
        else:
            sources = {"local_compute": 100, "external_kv_transfer": 0, "local_cache_hit": 0}
            lines = [f'vllm:request_success_total{{finished_reason="stop"}} {answered()}']
            lines += [f'vllm:prompt_tokens_by_source_total{{source="{name}"}} {count * answered()}' for name, count in sources.items()]
            self._say("\n".join(lines) + "\n", "text/plain")

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        with COUNTER.open("ab") as counter:
            counter.write(b".")
        chunks = [{"choices": [{"text": "fake", "finish_reason": "stop"}]}, {"choices": [], "usage": {"prompt_tokens": 100}}]
        self._say("".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n", "text/event-stream")

    def log_message(self, *_):
        pass


def main(role, port):
    misbehaves = os.environ.get("FAKE", "")
    if role == "worker":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        segment = shared_memory.SharedMemory(create=True, size=4096)
        semaphore = multiprocessing.get_context("spawn").Semaphore()
        # As where a process is killed: no other process removes them.
        resource_tracker.unregister(segment._name, "shared_memory")
        resource_tracker.unregister(semaphore._semlock.name, "semaphore")
        if misbehaves == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if misbehaves == "crash":
            time.sleep(1)
            print("the fake worker has had enough", flush=True)
            os._exit(7)
        if misbehaves != "late":
            (FOLDER / f"{KNOWN}{os.environ['DYN_TCP_RPC_PORT']}").touch()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
