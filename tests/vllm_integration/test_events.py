# SPDX-License-Identifier: Apache-2.0
"""Every engine tells routers of every block of its namespaces, of any publisher, and of none that cannot be had."""

import time
from types import SimpleNamespace

import kvbm_cxl
import msgspec
import pytest
import zmq
from kvbm_cxl.vllm_integration import engine_watch, pool_access
from kvbm_cxl.vllm_integration import events as events_module
from kvbm_cxl.vllm_integration.announcer import Announcer
from kvbm_cxl.vllm_integration.config import ConnectorConfig
from kvbm_cxl.vllm_integration.descriptions import Description, DescriptionError, decode, description_bytes, encode
from kvbm_cxl.vllm_integration.events import PoolEvents, removed_event, stored_event
from kvbm_cxl.vllm_integration.keys import block_key
from kvbm_cxl.vllm_integration.pool_access import PoolLost
from kvbm_cxl.vllm_integration.publisher import Outlet
from kvbm_cxl.vllm_integration.stats import Tally
from requests_of_vllm import BLOCK_TOKENS, request, tokens
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventPublisherFactory, KVEventBatch, ZmqEventPublisher
from vllm.lora.request import LoRARequest
from waiting import until

CELLS = "1K:20%,512K:50%"
PATIENCE_S = 20


@pytest.fixture(autouse=True)
def period(monkeypatch):
    """Rounds follow one another faster than those of an engine."""
    monkeypatch.setattr(events_module, "PERIOD_S", 0.02)


def namespace(rank: int = 0) -> kvbm_cxl.Namespace:
    return kvbm_cxl.Namespace(
        model="m", dtype="d", layer_count=1, kv_head_count=1, head_size=8, block_tokens=BLOCK_TOKENS, layout="l", tp_rank=rank, tp_size=2
    )


def chain(blocks: int, seed: int = 0) -> list[Description]:
    """Descriptions of a prompt's blocks."""
    asked = request(f"chain {seed}", tokens(blocks * BLOCK_TOKENS, seed))
    hashes = list(map(bytes, asked.block_hashes))
    pieces = [list(asked.all_token_ids[at : at + BLOCK_TOKENS]) for at in range(0, blocks * BLOCK_TOKENS, BLOCK_TOKENS)]
    parents = [None, *hashes[:-1]]
    return [Description(*each) for each in zip(range(blocks), hashes, parents, pieces, strict=True)]


def keys_of(descriptions: list[Description]) -> list[bytes]:
    return [block_key(description.block_hash) for description in descriptions]


def hashes(descriptions: list[Description]) -> list[bytes]:
    return [description.block_hash for description in descriptions]


class Host:
    """An engine as far as the pool is concerned."""

    def __init__(self, pool: str, number: int, ranks: int = 1, **options) -> None:
        # Other options are another pool of this process, and so another process as far as the pool can tell.
        self.config = ConnectorConfig.read({"pool": pool, "cache": {"lock_timeout_ms": 10_000 + number}, **options})
        self.access = pool_access.acquire(self.config)
        self.namespaces = [namespace(rank) for rank in range(ranks)]
        self.tally = Tally()
        self.announcer = self.new_announcer()

    def new_announcer(self, **options) -> Announcer:
        return Announcer(self.access, self.namespaces, BLOCK_TOKENS, self.tally, **options)

    def publish(self, descriptions: list[Description], ranks: int | None = None) -> None:
        """The blocks' bytes."""
        for space in self.namespaces[:ranks]:
            for key in keys_of(descriptions):
                assert self.access.call(lambda cache: cache.publish(space, key, key * 100)) == "stored"

    def evict(self, description: Description, rank: int = 0) -> None:
        [key] = keys_of([description])
        assert self.access.call(lambda cache: cache.evict(self.namespaces[rank], key))

    def described(self, descriptions: list[Description]) -> list[bool]:
        return self.access.call(lambda cache: cache.has(self.announcer.descriptions, keys_of(descriptions)))

    def counted(self) -> dict[str, int]:
        stats = self.tally.take()
        return stats.data["counters"] if stats else {}


@pytest.fixture
def hosts(make_pool):
    """A function that makes hosts on one pool."""
    made = []
    pool = make_pool(cells=CELLS)

    def make(number: int, **options) -> Host:
        made.append(Host(pool, number, **options))
        return made[-1]

    yield make
    for host in made:
        host.access.release()


# What is told of a block


def test_a_description_comes_back_as_it_was():
    [first, second] = chain(2)
    extra = ["adapter", ["image", 3], "salt", b"\x00\xff"]
    full = Description(3, second.block_hash, first.block_hash, second.token_ids, 7, "adapter", extra)
    for description in (first, second, full):
        data = encode(description, description_bytes(BLOCK_TOKENS))
        assert len(data) == description_bytes(BLOCK_TOKENS)
        [key] = keys_of([description])
        assert decode(data, key, BLOCK_TOKENS) == description


def test_bytes_that_are_no_description_of_the_block_are_refused():
    first, second = chain(2)
    len_bytes = description_bytes(BLOCK_TOKENS)
    data, [key, other] = encode(second, len_bytes), keys_of([second, first])
    used = len(data.rstrip(b"\0"))
    for at in range(used):
        with pytest.raises(DescriptionError):
            decode(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :], key, BLOCK_TOKENS)
    for wrong in (b"", data[:11], data[: used - 1], bytes(len_bytes)):
        with pytest.raises(DescriptionError):
            decode(wrong, key, BLOCK_TOKENS)
    with pytest.raises(DescriptionError):
        decode(data, other, BLOCK_TOKENS)
    with pytest.raises(DescriptionError):
        decode(data, key, BLOCK_TOKENS + 1)
    # A right checksum does not make it right.
    [root] = chain(1, seed=1)
    for position, parent in ((0, root.block_hash), (1, None)):
        wrong = Description(position, second.block_hash, parent, second.token_ids)
        with pytest.raises(DescriptionError):
            decode(encode(wrong, len_bytes), key, BLOCK_TOKENS)


def test_a_description_that_does_not_fit_is_none():
    [block] = chain(1)
    long = Description(0, block.block_hash, None, block.token_ids, extra_keys=["x" * 600])
    assert encode(long, description_bytes(BLOCK_TOKENS)) is None


def test_events_are_what_vllm_publishes_of_such_a_block(monkeypatch):
    first, second = chain(2)
    event = stored_event(second, "EXTERNAL")
    low = (1 << 64) - 1
    assert event.block_hashes == [int.from_bytes(second.block_hash) & low]
    assert event.parent_block_hash == int.from_bytes(first.block_hash) & low
    assert (event.token_ids, event.block_size, event.medium) == (second.token_ids, BLOCK_TOKENS, "EXTERNAL")
    assert event.locality is None and event.ownership is None, "Dynamo drops what is not its worker's own"
    gone = removed_event(hashes([first, second]), "EXTERNAL")
    assert gone.block_hashes == [stored_event(block, "x").block_hashes[0] for block in (first, second)] and gone.medium == "EXTERNAL"
    # They survive the wire.
    batch = KVEventBatch(ts=0.0, events=[event, gone])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch).events == [event, gone]


# What is found out


def test_blocks_are_told_by_engines_that_did_not_publish_them_and_in_order(hosts):
    one, other = hosts(1), hosts(2)
    blocks = chain(40)
    one.publish(blocks)
    assert one.announcer.round(reversed(blocks)).stored == blocks, "the publisher tells of its own as well"
    assert other.announcer.round([]).stored == blocks
    assert other.announcer.round([]) == one.announcer.round(blocks), "what was told is not told again"
    assert one.counted() == {"descriptions/stored": 40, "descriptions/exists": 40, "announced_blocks/stored": 40}
    # A subscriber that comes later, as after a restart, finds everything.
    assert hosts(3).announcer.round([]).stored == blocks


def test_only_what_can_be_had_is_told(hosts):
    one, other = hosts(1, ranks=2), hosts(2, ranks=2)
    whole, half, nothing = chain(3)
    undescribed = chain(1, seed=1)
    one.publish([whole, *undescribed])
    one.publish([half], ranks=1)
    one.announcer.round([whole, half, nothing])
    news = other.announcer.round([])
    assert news.stored == [whole] and news.removed == []
    other_rank = one.namespaces[1]
    [key] = keys_of([half])
    one.access.call(lambda cache: cache.publish(other_rank, key, b"late"))
    assert other.announcer.round([]).stored == [half]


def test_a_block_that_goes_is_taken_back_by_all_and_its_description_goes_after_it(hosts):
    one, other = hosts(1), hosts(2)
    blocks = chain(4)
    one.publish(blocks)
    one.announcer.round(blocks)
    other.announcer.round([])
    one.evict(blocks[2])
    for host in (other, one):
        news = host.announcer.round([])
        assert news.removed == [blocks[2].block_hash] and news.stored == []
    assert one.described(blocks)[2], "it may be published again at once"
    one.announcer.round([])
    assert one.described(blocks) == [True, True, False, True]
    # Published again, it is told again.
    other.publish([blocks[2]])
    assert other.announcer.round([blocks[2]]).stored == [blocks[2]]
    assert one.announcer.round([]).stored == [blocks[2]]
    assert other.counted()["announced_blocks/removed"] == 1


def test_what_is_told_twice_is_taken_back_twice(hosts):
    one = hosts(1)
    blocks = chain(2)
    one.publish(blocks)
    one.announcer.round(blocks)
    one.announcer.again()
    assert one.announcer.round([]).stored == blocks
    one.evict(blocks[0])
    assert one.announcer.round([]).removed == [blocks[0].block_hash] * 2


def test_many_blocks_are_read_a_few_at_a_time(hosts):
    one = hosts(1)
    blocks = chain(10)
    one.publish(blocks)
    announcer = one.new_announcer(at_once=4)
    rounds = [announcer.round(blocks if number == 0 else []) for number in range(3)]
    assert [(len(news.stored), news.is_all) for news in rounds] == [(4, False), (4, False), (2, True)]
    assert {block.position for news in rounds for block in news.stored} == set(range(10))


def test_a_damaged_description_is_not_told(hosts):
    one = hosts(1)
    [block] = chain(1)
    one.publish([block])
    [key] = keys_of([block])
    one.access.call(lambda cache: cache.publish(one.announcer.descriptions, key, b"KVD\x01".ljust(one.announcer.len_bytes, b"\x01")))
    assert one.announcer.round([]).stored == []
    assert one.counted() == {"descriptions/damaged": 1}


def test_a_full_pool_has_blocks_that_are_not_told(make_pool):
    host = Host(make_pool(cells="1K:1%,512K:50%", size="24M"), 1)
    try:
        blocks = chain(2000)
        with pytest.raises(kvbm_cxl.FullError):  # The pins keep what is there from being evicted.
            pins = []
            for block in blocks:
                host.access.call(lambda cache: cache.publish(host.announcer.descriptions, *keys_of([block]), b"x" * 600))
                pins.append(host.access.call(lambda cache: cache.pin_chain(host.announcer.descriptions, keys_of([block]))))
        last = chain(1, seed=2)
        host.publish(last)
        assert host.announcer.round(last).stored == []
        assert host.counted()["descriptions/no_cell"] == 1
    finally:
        del pins
        host.access.release()


def test_a_lost_pool_has_nothing_and_one_that_is_back_everything(hosts):
    one = hosts(1)
    blocks = chain(3)
    one.publish(blocks)
    lost = False
    real = one.access

    def call(operation):
        if lost:
            raise PoolLost("gone")
        return real.call(operation)

    one.access = SimpleNamespace(call=call, failures=one.access.failures)
    announcer = one.new_announcer()
    assert announcer.round(blocks).stored == blocks
    lost = True
    assert sorted(announcer.round([]).removed) == sorted(hashes(blocks))
    assert announcer.round([]).removed == []
    lost = False
    assert announcer.round([]).stored == blocks
    one.access = real


def test_all_blocks_are_announced_again_over_a_time_and_few_at_once(hosts, monkeypatch):
    one = hosts(1)
    blocks = chain(40)
    one.publish(blocks)
    announcer = one.announcer
    assert announcer.round(blocks).stored == blocks
    counts, again = [], []
    for _ in range(60):
        announcer.refresh(1 / 60)
        news = announcer.round([])
        counts.append(len(news.stored))
        again += news.stored
    assert len(again) in (39, 40) and len({block.position for block in again}) == len(again) and max(counts) == 1
    monkeypatch.setattr("kvbm_cxl.vllm_integration.announcer._REFRESHED", 7)
    announcer.refresh(1000.0)
    assert len(announcer.round([]).stored) == 7, "a long pause is not made up for at once"
    one.evict(blocks[3])
    gone = announcer.round([]).removed
    assert set(gone) == {blocks[3].block_hash} and len(gone) >= 2
    announcer.refresh(0.0)
    assert announcer.round([]).stored == []


# How events leave


def taken(events: PoolEvents, count: int) -> list:
    """Events that a scheduler takes, once there are so many."""
    found = []
    until(lambda: found.extend(events.take()) or len(found) >= count, f"{count} events, not {found}")
    return found


@pytest.fixture
def begun():
    """A function that begins an engine's events."""
    made = []

    def begin(host: Host, outlet=None) -> PoolEvents:
        events = PoolEvents(host.config, host.access, outlet or Outlet(), host.tally)
        made.append(events)
        events.begin(host.namespaces, 512 << 10, BLOCK_TOKENS)
        return events

    yield begin
    for events in made:
        events.close()
        assert events._thread is None or not events._thread.is_alive()


def test_a_schedulers_blocks_become_events_of_all_engines(hosts, begun):
    one, other = hosts(1, ranks=2), hosts(2, ranks=2, events_medium="DISK")
    told, elsewhere = begun(one), begun(other)
    asked = request("asked", tokens(3 * BLOCK_TOKENS + 5), lora_request=LoRARequest("adapter", 4, "/nowhere"), cache_salt="salt")
    blocks = list(map(bytes, asked.block_hashes))
    told.note_order(asked, 0, 3, BLOCK_TOKENS)
    one.publish([SimpleNamespace(block_hash=block) for block in blocks])
    keys = [block_key(block) for block in blocks]
    # A rank is missing.
    told.note_stored({keys[0]: 2, keys[1]: 1, keys[2]: 2}, 2)
    first = taken(told, 2)
    told.note_stored({keys[1]: 1}, 2)
    assert [event.block_hashes for event in first + taken(told, 1)] == [[int.from_bytes(blocks[at][-8:])] for at in (0, 2, 1)]
    found = {event.block_hashes[0]: event for event in taken(elsewhere, 3)}
    assert all(isinstance(event, BlockStored) and event.medium == "DISK" for event in found.values())
    middle = found[int.from_bytes(blocks[1][-8:])]
    assert middle.token_ids == list(asked.all_token_ids[BLOCK_TOKENS : 2 * BLOCK_TOKENS])
    assert middle.parent_block_hash == int.from_bytes(blocks[0][-8:])
    assert (middle.lora_id, middle.lora_name, middle.extra_keys) == (4, "adapter", [["adapter"]])
    assert found[int.from_bytes(blocks[0][-8:])].extra_keys == [["adapter", "salt"]], "the salt is part of the first block"
    one.access.call(lambda cache: cache.evict(one.namespaces[0], keys[2]))
    [gone] = taken(elsewhere, 1)
    assert isinstance(gone, BlockRemoved) and set(gone.block_hashes) == {int.from_bytes(blocks[2][-8:])} and gone.medium == "DISK"


class Clearing:
    """vLLM's KV cache manager, as far as events are concerned."""

    def __init__(self) -> None:
        self.events: list | None = None

    def take_events(self):
        events, self.events = self.events, None
        return events


@pytest.mark.parametrize("other", ([], [BlockRemoved(block_hashes=[1], medium="GPU")]))
def test_blocks_are_announced_again_after_vllm_cleared_its_own(hosts, begun, monkeypatch, other):
    monkeypatch.setattr(events_module, "_AGAIN_S", (0.1,))
    one = hosts(1)
    blocks = chain(5)
    one.publish(blocks)
    one.announcer.round(blocks)
    announced, manager = begun(one), Clearing()
    engine_watch.watch_cleared(manager, announced.note_cleared)
    taken(announced, 10)
    manager.events = [*other]
    assert manager.take_events() == other and manager.take_events() is None
    # Nothing is cleared, and an hour has not passed.
    time.sleep(0.5)
    assert announced.take() == []
    for _ in range(2):
        manager.events = [*other, AllBlocksCleared()]
        assert len(manager.take_events()) == len(other) + 1
        again = taken(announced, 5)
        assert sorted(event.block_hashes[0] for event in again) == sorted(int.from_bytes(block.block_hash[-8:]) for block in blocks)


def test_blocks_of_other_weights_are_taken_back_until_those_are_back(hosts, begun):
    one = hosts(1)
    blocks = chain(3)
    one.publish(blocks)
    one.announcer.round(blocks)
    announced = begun(one)
    taken(announced, 3)
    announced.are_readable = False
    assert {type(event) for event in taken(announced, 1)} == {BlockRemoved}
    announced.are_readable = True
    assert all(isinstance(event, BlockStored) for event in taken(announced, 3))


def test_a_router_that_starts_late_learns_all(hosts, begun, monkeypatch):
    monkeypatch.setattr(events_module, "_AGAIN_S", ())
    monkeypatch.setattr(events_module, "_REFRESH_S", 0.5)
    one = hosts(1)
    blocks = chain(30)
    one.publish(blocks)
    one.announcer.round(blocks)
    announced = begun(one)
    taken(announced, 30)
    late = set()
    until(lambda: late.update(event.block_hashes[0] for event in announced.take()) or len(late) == 30, "all blocks")


def test_without_small_cells_nothing_is_told(make_pool, begun, caplog_vllm):
    host = Host(make_pool(), 1)
    events = begun(host)
    assert events._thread is None and len(caplog_vllm) == 1 and "cells" in caplog_vllm[0]
    events.note_order(request("asked", tokens(64)), 0, 4, BLOCK_TOKENS)
    assert events.take() == [] and not events._ordered
    host.access.release()


@pytest.fixture
def caplog_vllm(monkeypatch):
    """Warnings of the connector."""
    said = []
    from kvbm_cxl.vllm_integration import events

    monkeypatch.setattr(events.logger, "warning", lambda text, *values: said.append(text % values))
    return said


def test_events_leave_while_the_engine_is_idle(hosts, begun, tmp_path):
    """Through vLLM's own publisher, as the scheduler makes it after its connector; no connector takes events at the end of a step."""
    one, other = hosts(1), hosts(2)
    outlet = Outlet()
    outlet.expect()
    config = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=f"ipc://{tmp_path}/events")
    publisher = EventPublisherFactory.create(config)
    assert type(publisher) is ZmqEventPublisher and EventPublisherFactory._registry["zmq"] is ZmqEventPublisher
    listener = zmq.Context.instance().socket(zmq.SUB)
    try:
        listener.connect(config.endpoint)
        listener.subscribe(b"")
        idle = begun(one, outlet)
        blocks = chain(60)
        other.publish(blocks)
        other.announcer.round(blocks)
        events, deadline = [], time.monotonic() + PATIENCE_S
        while len({event.block_hashes[0] for event in events}) < 60:
            assert listener.poll(max(0, (deadline - time.monotonic()) * 1000)), f"{len(events)} events came"
            batch = msgspec.msgpack.decode(listener.recv_multipart()[2], type=KVEventBatch)
            assert batch.data_parallel_rank == 0
            events += batch.events
        assert {event.medium for event in events} == {"EXTERNAL"} and idle.take() == []
    finally:
        publisher.shutdown()
        listener.close(0)
    # Without a publisher they wait for a step.
    other.evict(blocks[7])
    assert taken(idle, 1)[0].block_hashes[0] == int.from_bytes(blocks[7].block_hash[-8:])


def test_another_publisher_of_vllm_is_left_alone(monkeypatch):
    def another(**_):
        return None

    monkeypatch.setattr(EventPublisherFactory, "_registry", {**EventPublisherFactory._registry, "zmq": another})
    outlet = Outlet()
    outlet.expect()
    assert EventPublisherFactory._registry["zmq"] is another and not outlet.publish([])
