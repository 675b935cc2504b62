// SPDX-License-Identifier: Apache-2.0

use super::*;
use crate::cache::tests::alone;
use crate::cache::{BlockKey, CacheConfig, Namespace};

#[test]
fn only_a_line_of_the_host_itself_says_that_a_cell_is_settled() {
    let line = |owner, state| Descriptor { owner, state, ..Descriptor::default() };
    let states = [Descriptor::FREE, Descriptor::WRITING, Descriptor::READY, Descriptor::EVICTING, Descriptor::RETIRING];
    for state in states {
        assert_eq!(is_settled(&line(2, state), 2), state != Descriptor::WRITING, "{state}");
        assert!(!is_settled(&line(1, state), 2), "{state}: a line of another host");
    }
}

/// A process that ended in good order may have been filling a cell of a chunk that it gave up.
#[test]
fn a_chunk_without_an_owner_is_brought_out_as_well() {
    let (cache, _service, pool, _directory) = alone(64, 224, 8 << 20, Vec::new(), CacheConfig::default());
    let stored = cache.publish(Namespace([1; 16]), BlockKey([2; 16]), None, &[5; 40]).unwrap();
    assert_eq!(stored, crate::cache::Published::Stored);
    let (host, local) = (cache.host(), &cache.inner.store.local);
    let chunk = (0..pool.layout().geometry().cell_chunks()).find(|&chunk| local.owner(chunk) == host.inner.tag).unwrap();
    local.begin_filling(chunk);
    local.disown(chunk, host.inner.tag);
    assert!(local.owner(chunk) == 0 && local.chunk(chunk).is_filled());
    let flush_stores =
        |is_gone: &dyn Fn(u32) -> bool| flush_stores(pool.lines(), host.local_part(&HOOKS).unwrap(), host.slot(), is_gone).unwrap();
    flush_stores(&|tag| tag == host.inner.tag);
    assert!(local.chunk(chunk).is_filled(), "of another process");
    flush_stores(&|tag| tag == 0);
    assert!(!local.chunk(chunk).is_filled());
}
