// SPDX-License-Identifier: Apache-2.0
//! One answer for each key, in order: holes, duplicates, misses, pools without room, requests that cannot be met.

use crate::bench::*;
use cxl_pool::cache::{PublishRequest, Reserved};
use cxl_tier::counts::Operation;
use cxl_tier::memory::Lies;
use cxl_tier::{BlockShape, CxlBlocks, Error, Outcome, Ranks};
use kvbm_engine::SequenceHash;
use kvbm_engine::object::ObjectBlockOps;
use kvbm_engine::offload::PresenceChecker;
use kvbm_physical::layout::{KvBlockLayout, LayoutConfig, PhysicalLayout};
use std::sync::Arc;

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap()
}

#[test]
fn lists_of_any_length_go_from_one_host_to_another() {
    let bench = Bench::new(512);
    let (prefill, decode) = (bench.member(1), bench.member(2));
    let (prefill, decode) = (prefill.blocks(), decode.blocks());
    for (seed, len) in [(1, 0), (2, 1), (3, 63), (4, 64), (5, 65), (6, 200)] {
        let keys = if len == 0 { Vec::new() } else { chain(len, seed) };
        assert_eq!(decode.has(&keys), all(Outcome::Absent, len));
        assert_eq!(put(&prefill, &keys, seed), all(Outcome::Done, len));
        assert_eq!(decode.has(&keys), all(Outcome::Done, len));
        assert_eq!(get(&decode, &keys, seed), all(Outcome::Done, len));
        assert_eq!(put(&decode, &keys, seed), all(Outcome::Exists, len), "the pool has them");
    }
    assert_eq!(prefill.counts().of(Operation::Put, Outcome::Done), 393);
    assert_eq!(decode.counts().of(Operation::Get, Outcome::Done), 393);
}

#[test]
fn holes_misses_and_duplicates_keep_their_places() {
    let bench = Bench::new(128);
    let member = bench.member(1);
    let blocks = member.blocks();
    let keys = chain(9, 7);
    let stored: Vec<SequenceHash> = [0, 1, 3, 4, 7].iter().map(|&number: &usize| keys[number]).collect();
    let source = layout(9);
    (0..9).for_each(|number| fill(&source, number, 7, number));
    // SAFETY: this thread alone uses the layout.
    let outcomes = unsafe { blocks.put(&stored, &source, &[0, 1, 3, 4, 7]) };
    assert_eq!(outcomes, all(Outcome::Done, 5));
    let (done, absent) = (Outcome::Done, Outcome::Absent);
    let expected = [done, done, absent, done, done, absent, absent, done, absent];
    assert_eq!(blocks.has(&keys), expected);
    assert_eq!(get(&blocks, &keys, 7), expected);
    // The same key for two blocks of the layout, and two keys for one.
    let destination = layout(4);
    let asked = [keys[4], keys[0], keys[4], keys[3], keys[2], keys[1]];
    // SAFETY: as above.
    let outcomes = unsafe { blocks.get(&asked, &destination, &[0, 1, 2, 1, 3, 0]) };
    assert_eq!(outcomes, [done, done, done, Outcome::Twice, absent, Outcome::Twice]);
    assert!(holds(&destination, 0, 7, 4) && holds(&destination, 1, 7, 0) && holds(&destination, 2, 7, 4));
    // A key that comes twice is stored once, with the bytes of its first block.
    let twice = chain(2, 8);
    // SAFETY: as above.
    let outcomes = unsafe { blocks.put(&[twice[0], twice[1], twice[0]], &source, &[5, 6, 8]) };
    assert_eq!(outcomes, all(done, 3));
    // SAFETY: as above.
    assert_eq!(unsafe { blocks.get(&twice, &destination, &[3, 2]) }, all(done, 2));
    assert!(holds(&destination, 3, 7, 5) && holds(&destination, 2, 7, 6));
}

#[test]
fn a_pool_without_room_says_so_and_loses_nothing() {
    let bench = Bench::new(64);
    let member = bench.member(1);
    let blocks = member.blocks();
    let (first, second) = (chain(64, 1), chain(40, 2));
    assert_eq!(put(&blocks, &first, 1), all(Outcome::Done, 64));
    let names: Vec<_> = first.iter().map(|&hash| cxl_tier::keys::key_of(hash).unwrap()).collect();
    let pins = member.cache.pin_chain(blocks.namespace(), &names).unwrap();
    assert_eq!(pins.len(), 64);
    assert_eq!(put(&blocks, &second, 2), all(Outcome::NoRoom, 40));
    assert_eq!(blocks.counts().of(Operation::Put, Outcome::NoRoom), 40);
    assert_eq!(get(&blocks, &first, 1), all(Outcome::Done, 64));
    assert_eq!(get(&blocks, &second, 2), all(Outcome::Absent, 40));
    drop(pins);
    // Now room is made. More blocks than the pool holds: what is told to be there is there or a miss, never another block.
    let third = chain(150, 3);
    let stored = put(&blocks, &third, 3).iter().filter(|outcome| **outcome == Outcome::Done).count();
    assert!(stored >= 64, "{stored} of 150 stored");
    let found = get(&blocks, &third, 3).iter().filter(|outcome| **outcome == Outcome::Done).count();
    assert!((1..=64).contains(&found), "{found} found");
    member.assert_clean();
}

#[test]
fn a_block_that_another_process_is_writing_is_not_stored_yet() {
    let bench = Bench::new(128);
    let (member, other) = (bench.member(1), bench.member(2));
    let blocks = member.blocks();
    let keys = chain(3, 1);
    let request =
        PublishRequest { namespace: blocks.namespace(), key: cxl_tier::keys::key_of(keys[1]).unwrap(), parent: None, len_bytes: 3072 };
    let Reserved::Cell(reservation) = other.cache.reserve(&request).unwrap() else { panic!("no cell") };
    assert_eq!(put(&blocks, &keys, 1), [Outcome::Done, Outcome::Busy, Outcome::Done]);
    drop(reservation);
    assert_eq!(put(&blocks, &keys, 1), [Outcome::Exists, Outcome::Done, Outcome::Exists]);
    assert_eq!(get(&blocks, &keys, 1), all(Outcome::Done, 3));
}

#[test]
fn what_cannot_be_met_is_refused_with_its_reason() {
    let bench = Bench::new(64);
    let member = bench.member(1);
    let blocks = member.blocks();
    let keys = chain(3, 5);
    let own = layout(3);
    let put = |keys: &[SequenceHash], layout: &PhysicalLayout, ids: &[usize]| {
        // SAFETY: this thread alone uses the layouts.
        let (stored, got) = unsafe { (blocks.put(keys, layout, ids), blocks.get(keys, layout, ids)) };
        assert_eq!(stored, got);
        stored
    };
    assert_eq!(put(&keys, &own, &[0, 1]), all(Outcome::Request, 3));
    for change in [
        |config: &mut LayoutConfig| config.num_layers = 2,
        |config: &mut LayoutConfig| config.outer_dim = 1,
        |config: &mut LayoutConfig| config.page_size = 8,
        |config: &mut LayoutConfig| config.inner_dim = 32,
    ] {
        let mut config = small(3);
        change(&mut config);
        assert_eq!(put(&keys, &layout_of(&config, Lies::Contiguous), &[0, 1, 2]), all(Outcome::Layout, 3), "{config:?}");
    }
    // SAFETY: as above.
    let outcomes = unsafe { blocks.put(&keys, &own, &[2, 3, usize::MAX]) };
    assert_eq!(outcomes, [Outcome::Done, Outcome::BlockId, Outcome::BlockId]);
    assert_eq!(blocks.counts().of(Operation::Put, Outcome::BlockId), 2);
    assert_eq!(blocks.has(&keys), [Outcome::Done, Outcome::Absent, Outcome::Absent]);
    // 16 bytes that are no hash of this encoding, as a peer could send them.
    // SAFETY: the type is a u128 without invalid values, and of its size.
    let foreign: SequenceHash = unsafe { std::mem::transmute_copy(&u128::MAX) };
    assert_eq!(blocks.has(&[foreign, keys[0]]), [Outcome::Key, Outcome::Done]);
    assert_eq!(put(&[foreign], &own, &[0]), [Outcome::Key]);
}

#[test]
fn a_pool_for_smaller_blocks_is_refused_before_anything_moves() {
    let bench = Bench::of(2048, 128);
    let member = bench.member(1);
    match CxlBlocks::new(&member.cache, &model(), shape(), Ranks::ALONE).map(drop) {
        Err(Error::CellTooSmall { block_bytes: 3072, cell_bytes: 2048 }) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn another_model_or_shape_finds_nothing() {
    let bench = Bench::new(64);
    let member = bench.member(1);
    let keys = chain(4, 9);
    put(&member.blocks(), &keys, 9);
    let other = cxl_tier::Model { revision: "2".into(), ..model() };
    let named = BlockShape::new(&small(1), KvBlockLayout::OperationalNHD).unwrap();
    for blocks in [
        CxlBlocks::new(&member.cache, &other, shape(), Ranks::ALONE).unwrap(),
        CxlBlocks::new(&member.cache, &model(), named, Ranks::ALONE).unwrap(),
    ] {
        assert_eq!(blocks.has(&keys), all(Outcome::Absent, 4));
        assert_eq!(get(&blocks, &keys, 9), all(Outcome::Absent, 4));
    }
}

#[test]
fn kvbm_is_answered_key_by_key() {
    let bench = Bench::new(64);
    let member = bench.member(1);
    let blocks = member.blocks();
    let ops: Arc<dyn ObjectBlockOps> = Arc::new(blocks.clone());
    let keys = chain(5, 6);
    let source = layout(5);
    (0..5).for_each(|number| fill(&source, number, 6, number));
    runtime().block_on(async {
        let stored = ops.put_blocks_with_layout(keys[..4].to_vec(), source.clone(), vec![0, 1, 9, 3]).await;
        assert_eq!(stored, [Ok(keys[0]), Ok(keys[1]), Err(keys[2]), Ok(keys[3])]);
        let sizes = [Some(3072), Some(3072), None, Some(3072), None];
        assert_eq!(ops.has_blocks(keys.clone()).await, keys.iter().copied().zip(sizes).collect::<Vec<_>>());
        let present = blocks.check_presence(keys.clone()).await;
        assert_eq!(present, keys.iter().copied().zip([true, true, false, true, false]).collect::<Vec<_>>());
        let destination = layout(5);
        let got = ops.get_blocks_with_layout(keys.clone(), destination.clone(), vec![4, 3, 2, 1, 0]).await;
        assert_eq!(got, [Ok(keys[0]), Ok(keys[1]), Err(keys[2]), Ok(keys[3]), Err(keys[4])]);
        assert!(holds(&destination, 4, 6, 0) && holds(&destination, 3, 6, 1) && holds(&destination, 1, 6, 3));
        // Only a worker knows where the blocks of a logical layout lie.
        let g2 = kvbm_common::LogicalLayoutHandle::G2;
        assert_eq!(ops.put_blocks(keys[..1].to_vec(), g2, vec![0]).await, [Err(keys[0])]);
        assert_eq!(ops.get_blocks(keys[..1].to_vec(), g2, vec![0]).await, [Err(keys[0])]);
    });
    // Without a runtime there is an answer, too.
    let found = futures::executor::block_on(ops.has_blocks(keys.clone()));
    assert!(found.len() == 5 && found.iter().all(|(_, size)| size.is_none()));
}
