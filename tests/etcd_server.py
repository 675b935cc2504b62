# SPDX-License-Identifier: Apache-2.0
"""An etcd server of one test, from `make setup-etcd`, and what waits for it."""

import base64
import json
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "peers"))

from waiting import free_port, until  # noqa: E402

ETCD = ROOT / ".venv/etcd/etcd"
PATIENCE_S = 30


class Etcd:
    """A server of its own, with what the tests need of its JSON interface."""

    def __init__(self, folder, certificates=None):
        self.folder, self.port, self.process = folder, free_port(), None
        self.peer_port = free_port()
        self.tls, self.context, self.token = [], None, None
        self.url = f"http{'s' if certificates else ''}://127.0.0.1:{self.port}"
        if certificates:
            self.secure(certificates)
        self.start()

    def secure(self, certificates):
        """Shows a certificate of this authority from the next start on, and asks clients for one."""
        cert, key = certificates.issue("etcd", "etcd")
        self.tls = ["--cert-file", cert, "--key-file", key, "--client-cert-auth", "--trusted-ca-file", certificates.authority]
        self.context = ssl.create_default_context(cafile=certificates.authority)
        self.context.load_cert_chain(*certificates.issue("test", "the test"))

    def start(self):
        log = open(self.folder / "etcd.log", "ab")
        peer = f"http://127.0.0.1:{self.peer_port}"
        command = [ETCD, "--data-dir", self.folder / "etcd", "--listen-client-urls", self.url, "--advertise-client-urls", self.url]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
        command += self.tls
        self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            until(self.is_up, "etcd does not answer")
        except BaseException:
            self.stop()
            raise

    def is_up(self):
        try:
            return json.load(urllib.request.urlopen(f"{self.url}/health", timeout=1, context=self.context))["health"] == "true"
        except (OSError, ValueError):
            assert self.process.poll() is None, (self.folder / "etcd.log").read_text()
            return False

    def stop(self):
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def call(self, path, **body):
        headers = {"Content-Type": "application/json", **({"Authorization": self.token} if self.token else {})}
        request = urllib.request.Request(f"{self.url}/v3/{path}", json.dumps(body).encode(), headers)
        return json.load(urllib.request.urlopen(request, timeout=PATIENCE_S, context=self.context))

    @staticmethod
    def text(text):
        """As the JSON interface wants keys and values."""
        return base64.b64encode(text.encode()).decode()

    def keys(self):
        """Every key with its value and lease."""
        everything = base64.b64encode(b"\0").decode()
        found = self.call("kv/range", key=everything, range_end=everything).get("kvs", [])

        def text(pair, field):
            return base64.b64decode(pair[field]).decode()

        return {text(pair, "key"): (text(pair, "value"), int(pair.get("lease", 0))) for pair in found}

    def put(self, key, value):
        self.call("kv/put", key=base64.b64encode(key.encode()).decode(), value=base64.b64encode(value.encode()).decode())

    def revoke(self, lease):
        self.call("lease/revoke", ID=str(lease))

    def holders(self):
        """Slot -> holder."""
        return {int(key.rsplit("/", 1)[1]): json.loads(value) for key, (value, _) in self.keys().items()}

    def lease_of(self, slot):
        return next(lease for key, (_, lease) in self.keys().items() if key.endswith(f"/{slot}"))
