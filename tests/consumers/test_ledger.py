# SPDX-License-Identifier: Apache-2.0
"""The ledger of stored blocks against a real pool: it holds what the pool has, whatever was evicted, and each change is told once."""

import kvbm_cxl
import pytest
from kvbm_cxl.consumers.ledger import Entry, Ledger
from kvbm_cxl.consumers.names import key_of, namespace_of
from kvbm_cxl.options import ThreadOptions
from kvbm_cxl.vllm_integration import pool_access
from peers import payload, until

SPACE = namespace_of("test", model="tiny")
NAMES = [f"block {number}" for number in range(20)]
PLACES = [(SPACE, key_of(name)) for name in NAMES]


@pytest.fixture
def access(pool):
    access = pool_access.acquire(ThreadOptions(pool))
    yield access
    access.release()


class Consumer:
    """Keeps the balance of what it is told."""

    def __init__(self, access):
        self.access, self.balance, self.fails = access, [], 0
        self.ledger = Ledger(access, self.gone)

    def gone(self, entries):
        if self.fails:
            self.fails -= 1
            raise RuntimeError("a consumer with a fault")
        for entry in entries:
            self.balance.remove(entry.what)

    def store(self, names):
        entries = {(SPACE, key_of(name)): Entry(name, 1000) for name in names}
        keys, data = [key for _, key in entries], [payload(name, 1000) for name in names]

        def publish():
            return self.access.call(lambda cache: cache.publish_all(SPACE, keys, data))

        return self.ledger.store(entries, publish, lambda stored: self.balance.extend(entry.what for entry in stored))

    def there(self):
        found = self.access.call(lambda cache: cache.has(SPACE, [key for _, key in PLACES]))
        return [name for name, is_there in zip(NAMES, found) if is_there]

    def holds(self, names):
        return sorted(self.balance) == sorted(entry.what for entry in self.ledger.entries()) == sorted(names)


@pytest.fixture
def consumer(access):
    consumer = Consumer(access)
    yield consumer
    consumer.ledger.close()


def test_evictions_are_told_once(consumer):
    assert consumer.store(NAMES) == ["stored"] * 20 and consumer.holds(NAMES)
    assert consumer.store(NAMES) == ["exists"] * 20 and consumer.holds(NAMES)
    consumer.access.call(lambda cache: cache.evict_all(SPACE, [key for _, key in PLACES[:7]]))
    until(lambda: consumer.holds(NAMES[7:]), "the evictions to be told")
    consumer.access.call(lambda cache: cache.clear(SPACE))
    until(lambda: consumer.holds([]), "the end of all of them to be told")


def test_what_is_stored_again_is_counted_once(consumer):
    """Before the ledger has heard of the eviction, and after it."""
    for _ in range(30):
        consumer.store(NAMES)
        consumer.access.call(lambda cache: cache.evict_all(SPACE, [key for _, key in PLACES]))
        consumer.store(NAMES[:10])
    assert len(consumer.balance) == len(set(consumer.balance)) and set(NAMES[:10]) >= set(consumer.there())
    consumer.access.call(lambda cache: cache.evict_all(SPACE, [key for _, key in PLACES]))
    until(lambda: consumer.holds([]), "the evictions to be told")


def test_a_fault_of_the_consumer_does_not_end_the_ledger(consumer):
    assert consumer.store(NAMES) == ["stored"] * 20
    consumer.fails = 1
    consumer.access.call(lambda cache: cache.evict_all(SPACE, [PLACES[0][1]]))
    until(lambda: consumer.access.failures.last_error, "the fault to be reported")
    assert "a consumer with a fault" in consumer.access.failures.last_error.message
    consumer.access.call(lambda cache: cache.evict_all(SPACE, [PLACES[1][1]]))
    until(lambda: NAMES[1] not in consumer.balance, "the next eviction to be told")


def test_names_tell_everything_apart():
    namespaces = [namespace_of("test", a=1), namespace_of("test", a="1"), namespace_of("test", a=[1])]
    namespaces += [namespace_of("test", b=1), namespace_of("other", a=1)]
    assert len({bytes(one) for one in namespaces}) == 5 and namespace_of("test", a=1, b=2) == namespace_of("test", b=2, a=1)
    assert len(key_of("a chunk")) == 16 and key_of("a chunk") == key_of(b"a chunk") != key_of(b"another")


@pytest.mark.parametrize(
    "options, said",
    {
        "unknown": ({"pool": "/dev/shm/none", "poll": 1}, "no option 'poll'; it has cache, checksums, namespace, pool, threads"),
        "of another type": ({"pool": "/dev/shm/none", "threads": "2"}, "threads is '2'; it takes an integer"),
        "number for a truth": ({"pool": "/dev/shm/none", "checksums": 1}, "checksums is 1; it takes true or false"),
        "too many": ({"pool": "/dev/shm/none", "threads": 65}, "threads is 65; it takes 1 to 64"),
        "none": ({}, 'has no pool: name it with option "pool"'),
        "of the cache": ({"pool": "/dev/shm/none", "cache": {"colour": 1}}, "cache has no option 'colour'"),
    }.values(),
)
def test_options_are_checked(options, said):
    with pytest.raises(ValueError) as refused:
        ThreadOptions.read(options, {})
    assert said in str(refused.value) and str(refused.value).startswith("an adapter")


def test_a_pool_that_cannot_be_used_says_what_to_do(tmp_path):
    with pytest.raises(ValueError) as refused:
        pool_access.acquire(ThreadOptions(f"{tmp_path}/none"))
    assert "an adapter cannot use pool" in str(refused.value) and "cxlctl format" in str(refused.value)
    assert isinstance(refused.value.__cause__, kvbm_cxl.CxlError)
