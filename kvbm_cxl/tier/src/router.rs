// SPDX-License-Identifier: Apache-2.0
//! For programs with Dynamo's KV router (dynamo-kv-router) in them: the pool's index, and events in the router's format.
//!
//! [`PoolIndex`] answers for the pool itself. A block in it is as near to a worker that never computed it as to the one that did, and this
//! is what a `SharedKvCache` tells a router. [`RouterEvents`] are for a router elsewhere, which credits blocks to the worker that tells of
//! them, in its tier for external memory.

use crate::blocks::CxlBlocks;
use crate::counts::Outcome;
use crate::descriptions::{Descriptions, Tokens};
use crate::error::Result;
use crate::events::PoolEvents;
use async_trait::async_trait;
use dynamo_kv_hashing::compute_salt_hash;
use dynamo_kv_router::SharedKvCache;
use dynamo_kv_router::indexer::KvRouterError;
use dynamo_kv_router::protocols::{
    DpRank, ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData, KvCacheStoredBlockData,
    LocalBlockHash, RouterEvent, SharedCacheHits, StorageTier, WorkerId,
};
use dynamo_tokens::{TokenBlock, compute_block_hash_for_tokens};
use kvbm_engine::SequenceHash;
use kvbm_logical::events::KvCacheEvent as Told;
use std::collections::{HashMap, HashSet, VecDeque};

/// Positions that the encoding of keys has; its constructor panics beyond.
const MAX_BLOCKS: usize = 1 << 24;
/// Blocks whose tokens are remembered, about 100 bytes each.
const REMEMBERED: usize = 1 << 18;

/// The pool, as a router sees a cache that its workers share.
pub struct PoolIndex {
    blocks: CxlBlocks,
    lora_name: Option<String>,
}

impl PoolIndex {
    /// The index of the blocks of a model. Give the blocks of any rank: a block counts if every rank's part of it is there.
    pub fn new(blocks: &CxlBlocks) -> PoolIndex {
        PoolIndex { blocks: blocks.clone(), lora_name: None }
    }

    /// The same for prompts of a LoRA adapter, by the name that the workers hash into their blocks.
    pub fn with_lora(self, name: &str) -> PoolIndex {
        PoolIndex { lora_name: Some(name.to_owned()), ..self }
    }
}

#[async_trait]
impl SharedKvCache for PoolIndex {
    async fn check_blocks(
        &self,
        tokens: &[u32],
        block_size: u32,
        cache_namespace: Option<&str>,
    ) -> std::result::Result<SharedCacheHits, KvRouterError> {
        let refused = |reason: String| KvRouterError::Unsupported(reason);
        if usize::try_from(block_size) != Ok(self.blocks.block_tokens()) {
            let own = self.blocks.block_tokens();
            return Err(refused(format!("the router's blocks have {block_size} tokens, those in the pool {own}: configure both alike")));
        }
        let salt = compute_salt_hash(cache_namespace, self.lora_name.as_deref()).map_err(|error| refused(error.to_string()))?;
        let mut keys: Vec<SequenceHash> = Vec::new();
        for block in tokens.chunks_exact(self.blocks.block_tokens()).take(MAX_BLOCKS) {
            let hash = compute_block_hash_for_tokens(block, salt);
            keys.push(keys.last().map_or_else(|| SequenceHash::root(hash), |parent| parent.extend(hash)));
        }
        let found = self.blocks.find(keys).await;
        // The pool said nothing of these, and a router that took them for absent would send the request where it costs most.
        if let Some(failed) = found.iter().find(|outcome| !outcome.is_ok() && !matches!(outcome, Outcome::Absent | Outcome::Length)) {
            return Err(refused(format!("a lookup in the pool failed: {}", failed.name())));
        }
        Ok(SharedCacheHits::from_hits(&found.iter().map(|outcome| outcome.is_ok()).collect::<Vec<_>>()))
    }
}

/// What this process knows of a block, in the pool or not.
#[derive(Clone, Copy)]
struct Shown {
    tokens: Tokens,
    /// This process described it, with that block before it.
    described: Option<Described>,
}

#[derive(Clone, Copy)]
struct Described {
    parent: Option<SequenceHash>,
}

/// The blocks in the pool, as events of one worker.
///
/// A router finds blocks by the hash of their own tokens, and a key holds only that of all tokens up to the block. So the worker that
/// computes a block describes it ([`RouterEvents::describe`]), and all workers tell of it. Without small cells in the pool they tell
/// of blocks that were shown to this process ([`RouterEvents::know`]), and of others as soon as they are.
pub struct RouterEvents {
    events: PoolEvents,
    descriptions: Descriptions,
    worker_id: WorkerId,
    dp_rank: DpRank,
    known: HashMap<u64, Shown>,
    order: VecDeque<u64>,
    /// In the pool, and not told.
    silent: HashSet<SequenceHash>,
    /// In the pool, and told.
    told: HashSet<SequenceHash>,
    /// Not in the pool any more, and not told.
    gone: Vec<SequenceHash>,
    next_id: u64,
}

impl RouterEvents {
    /// Events of worker `worker_id`, which gets blocks from this pool.
    ///
    /// # Errors
    /// [`crate::Error::Pool`].
    pub fn new(blocks: &CxlBlocks, worker_id: WorkerId, dp_rank: DpRank) -> Result<RouterEvents> {
        let (known, order, silent, told) = (HashMap::new(), VecDeque::new(), HashSet::new(), HashSet::new());
        let descriptions = Descriptions::of(blocks);
        Ok(RouterEvents {
            events: PoolEvents::new(blocks)?,
            descriptions,
            worker_id,
            dp_rank,
            known,
            order,
            silent,
            told,
            gone: Vec::new(),
            next_id: 0,
        })
    }

    /// Shows the blocks of a sequence, whether they are in the pool or not. The oldest are forgotten when there are too many.
    pub fn know(&mut self, blocks: &[TokenBlock]) {
        blocks.iter().for_each(|block| self.remember(block.sequence_hash(), tokens_of(block), None));
    }

    /// As [`RouterEvents::know`], and stores the descriptions in the pool, for the events of every worker: for blocks that this worker puts
    /// there. The result is how many of them have a description in the pool now. A description leaves the pool with its block, or as blocks
    /// do; a look of this process stores it again when its block has come without it.
    ///
    /// # Errors
    /// [`crate::Error::NoSmallCells`] when the pool was not formatted for it; [`crate::Error::Pool`].
    pub fn describe(&mut self, blocks: &[TokenBlock]) -> Result<usize> {
        let (mut stored, mut parent) = (0, None);
        for block in blocks {
            let (hash, tokens) = (block.positional_lineage_hash(), tokens_of(block));
            self.remember(block.sequence_hash(), tokens, Some(Described { parent }));
            stored += usize::from(self.descriptions.store(hash, parent, tokens)?);
            parent = Some(hash);
        }
        Ok(stored)
    }

    fn remember(&mut self, sequence_hash: u64, tokens: Tokens, described: Option<Described>) {
        let before = self.known.get(&sequence_hash).and_then(|shown| shown.described);
        if self.known.insert(sequence_hash, Shown { tokens, described: described.or(before) }).is_none() {
            self.order.push_back(sequence_hash);
        }
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
        }
    }

    /// Stores the descriptions of blocks that have come: each may have left the pool with the block's last stay there, after the call that
    /// described it.
    fn describe_again(&self) -> Result<()> {
        for &hash in self.silent.iter().filter(|_| self.descriptions.is_possible()) {
            if let Some(Shown { tokens, described: Some(Described { parent }) }) = self.known.get(&hash.current_sequence_hash()) {
                self.descriptions.store(hash, *parent, *tokens)?;
            }
        }
        Ok(())
    }

    /// Reads the descriptions of blocks in the pool that this process was not shown.
    fn read_descriptions(&mut self) -> Result<()> {
        let is_unknown = |hash: &&SequenceHash| !self.known.contains_key(&hash.current_sequence_hash());
        let unknown: Vec<SequenceHash> = self.silent.iter().filter(is_unknown).copied().collect();
        if !unknown.is_empty() && self.descriptions.is_possible() {
            for (hash, tokens) in self.descriptions.load(&unknown)? {
                self.remember(hash.current_sequence_hash(), tokens, None);
            }
        }
        Ok(())
    }

    /// The events for the router since the last look: removed blocks, then new ones, parents first. It blocks the thread as
    /// [`PoolEvents::look`] does.
    ///
    /// # Errors
    /// [`crate::Error::Pool`]; then the next look tells what this one would have.
    pub fn look(&mut self) -> Result<Vec<RouterEvent>> {
        for event in self.events.look()? {
            match event {
                Told::Create(hash) => _ = self.silent.insert(hash),
                Told::Remove(hash) => {
                    self.silent.remove(&hash);
                    self.gone.push(hash);
                }
            }
        }
        self.gone.iter().try_for_each(|&hash| self.descriptions.forget(hash))?;
        self.describe_again()?;
        self.read_descriptions()?;
        let gone = std::mem::take(&mut self.gone).into_iter().filter(|hash| self.told.remove(hash));
        let gone: Vec<_> = gone.map(|hash| ExternalSequenceBlockHash(hash.current_sequence_hash())).collect();
        let mut events = Vec::new();
        if !gone.is_empty() {
            events.push(self.event(KvCacheEventData::Removed(KvCacheRemoveData { block_hashes: gone })));
        }
        let tokens = |hash: &SequenceHash| Some((*hash, self.known.get(&hash.current_sequence_hash())?.tokens));
        let mut come: Vec<(SequenceHash, Tokens)> = self.silent.iter().filter_map(tokens).collect();
        come.sort_by_key(|(hash, _)| hash.position());
        for (hash, tokens) in come {
            let block_hash = ExternalSequenceBlockHash(hash.current_sequence_hash());
            let block = KvCacheStoredBlockData { block_hash, tokens_hash: LocalBlockHash(tokens.own), mm_extra_info: None };
            let start_position = u32::try_from(hash.position()).ok();
            let parent_hash = tokens.parent.map(ExternalSequenceBlockHash);
            let stored = KvCacheStoreData { parent_hash, start_position, blocks: vec![block] };
            events.push(self.event(KvCacheEventData::Stored(stored)));
            self.silent.remove(&hash);
            self.told.insert(hash);
        }
        Ok(events)
    }

    fn event(&mut self, data: KvCacheEventData) -> RouterEvent {
        let event = KvCacheEvent { event_id: self.next_id, data, dp_rank: self.dp_rank };
        self.next_id += 1;
        RouterEvent::with_storage_tier(self.worker_id, event, StorageTier::External)
    }
}

fn tokens_of(block: &TokenBlock) -> Tokens {
    Tokens { own: block.block_hash(), parent: block.parent_sequence_hash() }
}
