// SPDX-License-Identifier: Apache-2.0
//! Dynamo's KV router in this process, over the index of a pool that other hosts filled.

use crate::bench::*;
use cxl_tier::Outcome;
use cxl_tier::keys::key_of;
use cxl_tier::router::{PoolIndex, RouterEvents};
use dynamo_kv_router::SharedKvCache;
use dynamo_kv_router::indexer::{
    KvIndexer, KvIndexerInterface, KvIndexerMetrics, LowerTierIndexers, LowerTierQueryOptions, MatchDetails, TieredMatchDetails,
    query_lower_tiers_with_options,
};
use dynamo_kv_router::protocols::{
    BlockHashOptions, ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheStoreData, KvCacheStoredBlockData, LocalBlockHash,
    RouterEvent, SharedCacheHits, StorageTier, WorkerWithDpRank, compute_block_hash_for_seq,
};
use dynamo_kv_router::scheduling::overlap::build_overlap_scores_response;
use dynamo_tokens::{TokenBlock, TokenBlockSequence};
use kvbm_engine::SequenceHash;
use kvbm_engine::testing::{create_token_sequence, generate_sequence_hashes};
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

const PAGE: u32 = 4;
const BLOCKS: usize = 12;

fn run<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap().block_on(work)
}

/// A prompt as KVBM's workers cut and hash it.
fn prompt(first_token: u32) -> (TokenBlockSequence, Vec<SequenceHash>, Vec<u32>) {
    let sequence = create_token_sequence(BLOCKS, PAGE as usize, first_token);
    let hashes = generate_sequence_hashes(&sequence);
    (sequence, hashes, (first_token..first_token + BLOCKS as u32 * PAGE).collect())
}

fn ranges(hits: &SharedCacheHits) -> Vec<(u32, u32)> {
    hits.ranges.iter().map(|range| (range.start, range.end)).collect()
}

/// An event of a worker that computed these blocks.
fn computed(worker: u64, blocks: &[TokenBlock]) -> RouterEvent {
    let block = |block: &TokenBlock| KvCacheStoredBlockData {
        block_hash: ExternalSequenceBlockHash(block.sequence_hash()),
        tokens_hash: LocalBlockHash(block.block_hash()),
        mm_extra_info: None,
    };
    let stored = KvCacheStoreData { parent_hash: None, start_position: Some(0), blocks: blocks.iter().map(block).collect() };
    RouterEvent::new(worker, KvCacheEvent { event_id: 0, data: KvCacheEventData::Stored(stored), dp_rank: 0 })
}

#[test]
fn a_router_finds_the_overlap_for_a_worker_that_never_computed_the_prefix() {
    let bench = Bench::new(512);
    let (prefill, host) = (bench.member(1), bench.member_over(2, EMULATED));
    let (sequence, keys, tokens) = prompt(70);
    // Worker 7 has computed four blocks, all are in the pool but the tenth, and worker 8 is new.
    assert_eq!(put(&prefill.blocks(), &keys, 5), all(Outcome::Done, BLOCKS));
    assert!(prefill.cache.evict(prefill.blocks().namespace(), key_of(keys[9]).unwrap()).unwrap());
    let index = PoolIndex::new(&host.blocks());
    run(async {
        let indexer = KvIndexer::new(CancellationToken::new(), PAGE, Arc::new(KvIndexerMetrics::new_unregistered()));
        indexer.apply_event(computed(7, &sequence.blocks()[..4])).await;
        indexer.flush().await;
        let overlap_scores = indexer.find_matches_for_request(&tokens, None, None, None).await.unwrap();
        let hits = index.check_blocks(&tokens, PAGE, None).await.unwrap();
        assert_eq!(ranges(&hits), [(0, 9), (10, 12)]);
        let tiered = TieredMatchDetails { device: MatchDetails { overlap_scores, ..MatchDetails::default() }, ..Default::default() };
        let workers = [7, 8].map(|worker| WorkerWithDpRank::new(worker, 0));
        let scores = build_overlap_scores_response(&tiered, PAGE, BLOCKS, workers, true, Some(&hits), None);
        let found: Vec<_> =
            scores.workers.iter().map(|worker| (worker.worker_id, worker.device_blocks, worker.shared_beyond_device_blocks)).collect();
        assert_eq!(found, [(7, 4, Some(7)), (8, 0, Some(11))]);
    });
}

#[test]
fn a_pool_that_is_gone_is_an_error_and_no_miss() {
    let bench = Bench::new(128);
    let member = bench.member(1);
    let (_, keys, tokens) = prompt(5000);
    put(&member.blocks(), &keys, 9);
    let index = PoolIndex::new(&member.blocks());
    let device = bench.spec.devices().next().unwrap();
    std::fs::OpenOptions::new().write(true).open(device).unwrap().set_len(0).unwrap();
    let told = run(index.check_blocks(&tokens, PAGE, None)).unwrap_err().to_string();
    assert!(told.contains("device"), "{told}");
}

#[test]
fn an_index_answers_for_its_own_tokens_alone() {
    let bench = Bench::new(512);
    let (prefill, host) = (bench.member(1), bench.member(2));
    let (_, keys, tokens) = prompt(900);
    put(&prefill.blocks(), &keys, 6);
    let index = PoolIndex::new(&host.blocks());
    run(async {
        let found = |hits: SharedCacheHits| hits.total_hits;
        assert_eq!(found(index.check_blocks(&tokens, PAGE, None).await.unwrap()), BLOCKS as u32);
        assert_eq!(found(index.check_blocks(&tokens, PAGE, Some("tenant")).await.unwrap()), 0, "another cache namespace");
        // A block that is not full has no key; the chain begins at the first token.
        assert_eq!(found(index.check_blocks(&tokens[..4 * PAGE as usize + 1], PAGE, None).await.unwrap()), 4);
        assert_eq!(found(index.check_blocks(&tokens[PAGE as usize..], PAGE, None).await.unwrap()), 0);
        assert_eq!(found(index.check_blocks(&[], PAGE, None).await.unwrap()), 0);
        let told = index.check_blocks(&tokens, 16, None).await.unwrap_err().to_string();
        assert!(told.contains("16 tokens") && told.contains("pool 4"), "{told}");
        let adapted = PoolIndex::new(&host.blocks()).with_lora("poet");
        assert_eq!(found(adapted.check_blocks(&tokens, PAGE, None).await.unwrap()), 0, "an adapter");
    });
}

#[test]
fn events_reach_a_router_and_take_blocks_back() {
    let bench = Bench::new(512);
    let (prefill, host) = (bench.member(1), bench.member(2));
    let (sequence, keys, tokens) = prompt(33);
    let mut events = RouterEvents::new(&host.blocks(), 8, 0).unwrap();
    put(&prefill.blocks(), &keys, 8);
    assert!(events.look().unwrap().is_empty(), "of blocks whose tokens are not known");
    events.know(&sequence.blocks()[..10]);
    let stored = events.look().unwrap();
    assert_eq!(stored.iter().map(|event| event.event.event_id).collect::<Vec<_>>(), (0..10).collect::<Vec<_>>());
    assert!(stored.iter().all(|event| event.storage_tier == StorageTier::External && event.worker_id == 8));
    events.know(sequence.blocks());
    let rest = events.look().unwrap();
    assert_eq!(rest.len(), 2);
    assert!(prefill.cache.evict(prefill.blocks().namespace(), key_of(keys[5]).unwrap()).unwrap());
    let gone = events.look().unwrap();
    assert_eq!(gone.len(), 1);
    assert!(events.look().unwrap().is_empty());
    run(async {
        let indexers = LowerTierIndexers::new(1, PAGE);
        let external = indexers.get_or_create(StorageTier::External);
        let sequence = compute_block_hash_for_seq(&tokens, PAGE, BlockHashOptions::default());
        let (mut found, worker) = (Vec::new(), WorkerWithDpRank::new(8, 0));
        for step in [stored, rest, gone] {
            for event in step {
                external.apply_event(event).await;
            }
            // Dumps come behind the events that were applied before.
            external.dump_events().await.unwrap();
            let matches = query_lower_tiers_with_options(&indexers, &sequence, &MatchDetails::default(), LowerTierQueryOptions::default());
            found.push(matches[&StorageTier::External].hits.get(&worker).copied().unwrap_or(0));
        }
        assert_eq!(found, [10, 12, 5]);
    });
}

#[test]
fn what_one_worker_described_every_worker_tells() {
    let bench = Bench::with_small_cells(256, 1024);
    let (prefill, host) = (bench.member(1), bench.member_over(2, EMULATED));
    let (sequence, keys, _) = prompt(4200);
    let mut own = RouterEvents::new(&prefill.blocks(), 7, 0).unwrap();
    let mut others = RouterEvents::new(&host.blocks(), 8, 0).unwrap();
    assert_eq!(own.describe(&sequence.blocks()[..10]).unwrap(), 10);
    assert!(others.look().unwrap().is_empty(), "a description is no block");
    put(&prefill.blocks(), &keys, 8);
    let stored = |event: &RouterEvent| match &event.event.data {
        KvCacheEventData::Stored(stored) => (stored.blocks[0].block_hash, stored.blocks[0].tokens_hash, stored.parent_hash),
        other => panic!("{other:?}"),
    };
    let told = others.look().unwrap();
    let block = |block: &TokenBlock| {
        let parent = block.parent_sequence_hash().map(ExternalSequenceBlockHash);
        (ExternalSequenceBlockHash(block.sequence_hash()), LocalBlockHash(block.block_hash()), parent)
    };
    assert_eq!(told.iter().map(stored).collect::<Vec<_>>(), sequence.blocks()[..10].iter().map(block).collect::<Vec<_>>());
    assert!(told.iter().all(|event| event.storage_tier == StorageTier::External && event.worker_id == 8));
    assert_eq!(own.look().unwrap().len(), 10);
    // Descriptions that come later are read when they are there.
    assert_eq!(own.describe(sequence.blocks()).unwrap(), BLOCKS);
    assert_eq!(others.look().unwrap().len(), 2);
    // A description goes with its block.
    let before = prefill.cache.usage().ready;
    assert!(prefill.cache.evict(prefill.blocks().namespace(), key_of(keys[5]).unwrap()).unwrap());
    assert_eq!(own.look().unwrap().iter().filter(|event| matches!(event.event.data, KvCacheEventData::Removed(_))).count(), 1);
    assert_eq!(prefill.cache.usage().ready, before - 2, "the block and its description");
    assert_eq!(others.look().unwrap().len(), 1);
}

#[test]
fn a_block_that_comes_back_has_its_description_again() {
    let bench = Bench::with_small_cells(256, 1024);
    let (prefill, host) = (bench.member(1), bench.member_over(2, EMULATED));
    let (sequence, keys, _) = prompt(5100);
    let mut own = RouterEvents::new(&prefill.blocks(), 7, 0).unwrap();
    put(&prefill.blocks(), &keys, 9);
    assert_eq!(own.describe(sequence.blocks()).unwrap(), BLOCKS);
    assert_eq!(own.look().unwrap().len(), BLOCKS);
    // The worker describes a block that it computes again. Then a look learns that the block had left, and its description leaves.
    assert!(prefill.cache.evict(prefill.blocks().namespace(), key_of(keys[5]).unwrap()).unwrap());
    assert_eq!(own.describe(&sequence.blocks()[5..6]).unwrap(), 1);
    assert_eq!(own.look().unwrap().len(), 1);
    put(&prefill.blocks(), &keys, 9);
    assert_eq!(own.look().unwrap().len(), 1);
    assert_eq!(RouterEvents::new(&host.blocks(), 8, 0).unwrap().look().unwrap().len(), BLOCKS);
}

#[test]
fn a_pool_without_small_cells_takes_no_descriptions() {
    let bench = Bench::new(64);
    let member = bench.member(1);
    let (sequence, ..) = prompt(6000);
    let told = RouterEvents::new(&member.blocks(), 7, 0).unwrap().describe(sequence.blocks()).unwrap_err().to_string();
    assert!(told.contains("--cells 4096:75% --cells 64:1%"), "{told}");
    assert_eq!(member.cache.usage().ready, 0);
}
