# SPDX-License-Identifier: Apache-2.0
"""Hosts whose slots are leased in etcd."""

import base64
import json
import signal

from etcd_server import PATIENCE_S
from waiting import until


def test_hosts_get_their_slots_by_lease_and_give_them_back(bench):
    one, two = bench.keep("a"), bench.keep("b")
    slots = {keeper.joined()["slot"]: keeper for keeper in (one, two)}
    assert sorted(slots) == [0, 1]
    until(lambda: all(holder["incarnation"] for holder in bench.etcd.holders().values()), "joined")
    holders = bench.etcd.holders()
    assert {slot: holder["pid"] for slot, holder in holders.items()} == {slot: keeper.process.pid for slot, keeper in slots.items()}
    assert len({holder["machine"] for holder in holders.values()}) == 2
    assert one.end() == 0
    # Given back, not expired; and in good order, so that no host was fenced.
    assert len(bench.etcd.holders()) == 1
    slot = next(slot for slot, keeper in slots.items() if keeper is one)
    assert bench.slot(slot)["state"].lower() == "left"
    assert two.end() == 0 and bench.etcd.keys() == {}


def test_a_lease_that_ends_fences_a_host_that_still_beats(bench):
    # The first to come is the manager, and a manager fences others.
    manager = bench.keep("a")
    manager.joined()
    other = bench.keep("b")
    told = other.joined()
    slot = told["slot"]
    bench.etcd.revoke(bench.etcd.lease_of(slot))
    # Its heart never stopped: only the lease can have led to the fence. It joins again by itself, and takes a new lease.
    until(lambda: bench.slot(slot)["incarnation"] > told["incarnation"], "no new incarnation")
    assert f"the lease of slot {slot}" in manager.log.read_text()
    renewed = until(lambda: bench.etcd.holders().get(slot), "no new lease")
    assert renewed["pid"] == other.process.pid

    def is_up_to_date():
        return bench.etcd.holders()[slot]["incarnation"] == bench.slot(slot)["incarnation"]

    until(is_up_to_date, "the incarnation in etcd is an old one")
    assert (other.process.poll(), manager.process.poll()) == (None, None)


def test_a_killed_host_is_fenced_when_its_lease_runs_out(bench):
    manager, other = bench.keep("a"), bench.keep("b")
    manager.joined()
    slot = other.joined()["slot"]
    assert other.end(signal.SIGKILL) == -signal.SIGKILL
    until(lambda: slot not in bench.etcd.holders(), "the lease of a dead process stands")
    until(lambda: f"the lease of slot {slot}" in manager.log.read_text(), "the manager did not notice")


def test_no_host_is_fenced_because_etcd_is_away(bench):
    keepers = [bench.keep("a"), bench.keep("b")]
    before = {told["slot"]: told["incarnation"] for told in (keeper.joined() for keeper in keepers)}
    until(lambda: all(holder["incarnation"] for holder in bench.etcd.holders().values()), "joined")
    bench.etcd.stop()
    for keeper in keepers:
        until(lambda keeper=keeper: "trying again" in keeper.log.read_text(), "did not notice")
    bench.etcd.start()
    # What a keeper says of a host that leaves shows that its watch is back.
    assert keepers[1].end() == 0
    gone = next(slot for slot in before if slot not in bench.etcd.holders())
    until(lambda: f"the lease of slot {gone}" in keepers[0].log.read_text(), "the watch was not resumed")
    for slot, incarnation in before.items():
        assert bench.slot(slot)["incarnation"] == incarnation


def test_a_keeper_that_starts_again_takes_over_at_once(bench):
    first = bench.keep("a")
    told = first.joined()
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    second = bench.keep("a")
    assert second.joined()["slot"] == told["slot"]
    assert bench.etcd.holders()[told["slot"]]["pid"] == second.process.pid


def test_a_second_keeper_on_a_machine_is_refused(bench):
    first = bench.keep("a")
    slot = first.joined()["slot"]
    second = bench.keep("a")
    assert second.process.wait(PATIENCE_S) == 1
    assert f"process {first.process.pid} keeps slot {slot}" in second.log.read_text()
    assert first.process.poll() is None and bench.etcd.holders()[slot]["pid"] == first.process.pid


def test_a_keeper_gives_up_a_slot_that_etcd_gave_to_another_machine(bench):
    first = bench.keep("a")
    slot = first.joined()["slot"]
    lease = bench.etcd.lease_of(slot)
    other = {"machine": "b" * 32, "incarnation": 1, "pid": 1, "start": 1}
    bench.etcd.put(next(iter(bench.etcd.keys())), json.dumps(other))
    bench.etcd.revoke(lease)
    assert first.process.wait(PATIENCE_S) == 1
    assert f"etcd has leased it to machine {other['machine']}" in first.log.read_text()
    assert bench.etcd.holders() == {slot: other}
    # It left the pool in good order.
    assert bench.slot(slot)["state"].lower() == "left"


def test_more_hosts_than_slots(bench):
    bench.cxlctl("format", "--force", "--slots", "2")
    for machine in "ab":
        bench.keep(machine).joined()
    third = bench.keep("c")
    assert third.process.wait(PATIENCE_S) == 1
    assert "all 2 slots of the pool are leased" in third.log.read_text()


def test_foreign_keys_and_values_are_named(bench):
    first = bench.keep("a")
    first.joined()
    key = next(iter(bench.etcd.keys()))
    for broken, value in ((key[:-1] + "3", "no holder"), (key[:-1] + "first", "{}")):
        bench.etcd.put(broken, value)
        second = bench.keep("b")
        assert second.process.wait(PATIENCE_S) == 1
        assert broken in second.log.read_text()
        assert first.process.poll() is None
        bench.etcd.call("kv/deleterange", key=base64.b64encode(broken.encode()).decode())


def test_no_etcd_is_a_clear_error(bench):
    bench.etcd.stop()
    keeper = bench.keep("a")
    assert keeper.process.wait(PATIENCE_S) == 1
    assert bench.etcd.url in keeper.log.read_text()
    bench.etcd.start()


def test_a_program_runs_as_long_as_the_slot_is_held(bench):
    ran = bench.folder / "ran"
    keeper = bench.keep("a", "--", "sh", "-c", f"touch {ran}; exit 7")
    keeper.joined()
    assert keeper.process.wait(PATIENCE_S) == 7
    assert ran.exists() and bench.etcd.keys() == {}
    # It is told to end when the keeper is.
    ready = bench.folder / "ready"
    keeper = bench.keep("a", "--", "sh", "-c", f"trap 'rm {ran}; exit 0' TERM; touch {ready}; while :; do sleep 0.05; done")
    until(ready.exists, "the program does not run")
    assert keeper.end() == 0
    until(lambda: not ran.exists(), "the program was not ended")
