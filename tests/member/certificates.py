# SPDX-License-Identifier: Apache-2.0
"""Certificates for an etcd and its clients, made with openssl for one test."""

import subprocess


class Certificates:
    """An authority, and what it has signed."""

    def __init__(self, folder, name="authority"):
        self.folder, self.name = folder, name
        self.authority = folder / f"{name}.pem"
        self._openssl("req", "-x509", *self._key(name), "-days", "2", "-subj", f"/CN={name}", "-out", self.authority)

    def _key(self, name):
        return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", self.folder / f"{name}.key"]

    def _openssl(self, *arguments):
        done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def issue(self, name, common_name):
        """Paths of a certificate for 127.0.0.1 and of its key."""
        request, signed, extensions = (self.folder / f"{name}.{end}" for end in ("csr", "pem", "ext"))
        extensions.write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
        self._openssl("req", *self._key(name), "-subj", f"/CN={common_name}", "-out", request)
        by = ["-CA", self.authority, "-CAkey", self.folder / f"{self.name}.key", "-CAcreateserial"]
        self._openssl("x509", "-req", "-in", request, *by, "-days", "2", "-extfile", extensions, "-out", signed)
        return signed, self.folder / f"{name}.key"
