# SPDX-License-Identifier: Apache-2.0
"""Hosts whose slots are leased in an etcd with TLS, client certificates, users and passwords."""

import shutil
import subprocess

import pytest
from certificates import Certificates
from conftest import served
from etcd_server import PATIENCE_S
from waiting import until

@pytest.fixture
def authority(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not there, which makes the certificates")
    return Certificates(tmp_path)


@pytest.fixture
def secured(authority):
    """A bench whose etcd asks every client for a certificate."""
    yield from served(authority)


def options(authority, name, common_name="a host"):
    cert, key = authority.issue(name, common_name)
    return ["--cacert", authority.authority, "--cert", cert, "--key", key]


def refusal(bench, *more):
    keeper = bench.keep("a", *more)
    assert keeper.process.wait(PATIENCE_S) == 1
    return keeper.log.read_text()


def test_a_host_shows_its_certificate_and_is_leased_its_slot(secured, authority):
    keeper = secured.keep("a", *options(authority, "host"))
    slot = keeper.joined()["slot"]
    until(lambda: secured.etcd.holders()[slot]["incarnation"], "joined")
    assert keeper.end() == 0 and secured.etcd.keys() == {}


def test_what_is_wrong_with_a_connection_is_said(secured, authority, tmp_path):
    asked_for = options(authority, "host")
    # Without a certificate of its own; with one that a stranger signed; with a stranger as the authority; without TLS.
    told = refusal(secured, "--cacert", authority.authority)
    assert f"{secured.etcd.url} with no certificate" in told and "--cert" in told, told
    (tmp_path / "other").mkdir()
    stranger = Certificates(tmp_path / "other", "stranger")
    told = refusal(secured, "--cacert", authority.authority, *options(stranger, "theirs")[2:])
    assert secured.etcd.url in told, told
    told = refusal(secured, "--cacert", stranger.authority, *asked_for[2:])
    assert "UnknownIssuer" in told or "certificate" in told, told
    plain = secured.etcd.url.replace("https", "http")
    told = refusal(secured, *asked_for, "--endpoints", plain)
    assert "https://" in told and plain in told, told
    told = refusal(secured, "--cacert", tmp_path / "not-there.pem")
    assert "not-there.pem" in told and "No such file" in told, told


def test_a_certificate_that_was_replaced_is_used(secured, authority, tmp_path):
    asked_for = options(authority, "host")
    keeper = secured.keep("a", *asked_for)
    keeper.joined()
    secured.etcd.stop()
    until(lambda: "trying again" in keeper.log.read_text(), "did not notice")
    # etcd comes back under another authority: nothing of before is accepted, on either side.
    (tmp_path / "new").mkdir()
    new = Certificates(tmp_path / "new", "new")
    cert, key = new.issue("host", "a host")
    for made, used in ((new.authority, asked_for[1]), (cert, asked_for[3]), (key, asked_for[5])):
        shutil.copy(made, used)
    secured.etcd.secure(new)
    secured.etcd.start()
    slot = until(secured.etcd.holders, "no lease with the new certificate")
    assert keeper.process.poll() is None and len(slot) == 1
    assert keeper.end() == 0


def test_a_host_names_its_user_and_its_password(bench, tmp_path):
    call = bench.etcd.call
    for name, password in (("root", "of root"), ("cxl", "of the hosts")):
        call("auth/user/add", name=name, password=password)
    call("auth/user/grant", user="root", role="root")
    call("auth/role/add", name="hosts")
    begin, end = (bench.etcd.text(text) for text in ("kvbm-cxl/", "kvbm-cxl0"))
    call("auth/role/grant", name="hosts", perm={"permType": "READWRITE", "key": begin, "range_end": end})
    call("auth/user/grant", user="cxl", role="hosts")
    call("auth/enable")
    bench.etcd.token = call("auth/authenticate", name="root", password="of root")["token"]
    told = refusal(bench)
    assert "reading" in told or "user name" in told or "permission" in told, told
    password = tmp_path / "password"
    password.write_text("wrong\n")
    user = ["--user", "cxl", "--password-file", password]
    told = refusal(bench, *user)
    assert "authentication failed" in told and "wrong" not in told, told
    password.write_text("of the hosts\n")
    keeper = bench.keep("a", *user)
    slot = keeper.joined()["slot"]
    until(lambda: bench.etcd.holders()[slot]["incarnation"], "joined")
    assert keeper.end() == 0 and bench.etcd.keys() == {}


def test_a_password_does_not_stand_on_the_command_line(bench):
    shown = subprocess.run([bench.keeper(), "--help"], capture_output=True, text=True, check=True).stdout
    assert "--password-file" in shown and "--password <" not in shown
