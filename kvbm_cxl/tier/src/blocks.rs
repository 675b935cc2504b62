// SPDX-License-Identifier: Apache-2.0
//! Has, put and get: KVBM's [`ObjectBlockOps`] over the cache of a pool.
//!
//! Every call answers each key once, in the order of the list, whatever its length. What an answer means, and how a call ends that its
//! caller drops, is the pool's ([`cxl_pool::cache::tier`]); this module turns hashes into keys and blocks of layouts into pieces.

use crate::config::RecordConfig;
use crate::counts::{Counts, Operation, Outcome};
use crate::error::{Error, Result};
use crate::keys::{Lineage, key_of};
use crate::names::{BlockShape, Model, Ranks, namespaces};
use crate::pieces::Source;
use cxl_pool::cache::tier::{Answer, TierBlock, TierBlocks, Turns};
use cxl_pool::cache::trace::{TraceConfig, TraceCounts, TraceRecorder};
use cxl_pool::cache::{BlockKey, Cache, Changes, Namespace, Watch};
use futures::future::BoxFuture;
use kvbm_common::LogicalLayoutHandle;
use kvbm_engine::object::ObjectBlockOps;
use kvbm_engine::{BlockId, SequenceHash};
use kvbm_physical::layout::PhysicalLayout;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// The answers for KVBM: each key, as `Ok` or as `Err`.
pub type Answers = Vec<std::result::Result<SequenceHash, SequenceHash>>;

/// The blocks of one worker in the pool. Cheap to clone; every clone is the same.
#[derive(Clone)]
pub struct CxlBlocks {
    inner: Arc<Inner>,
}

struct Inner {
    blocks: TierBlocks,
    shape: BlockShape,
    /// Of every rank.
    namespaces: Vec<Namespace>,
    /// Of this one.
    own: Namespace,
    /// Where this process maps the pool.
    pool: Range<usize>,
    counts: Counts,
    lineage: Mutex<Lineage>,
    recorder: Option<TraceRecorder>,
}

impl CxlBlocks {
    /// The blocks of worker `ranks` of a model. Upkeep of the cache is the caller's ([`Cache::serve`]); [`crate::Tier`] does it.
    ///
    /// # Errors
    /// [`Error::CellTooSmall`] when the pool was not formatted for such blocks; [`Error::Field`] for a model that says too little.
    pub fn new(cache: &Cache, model: &Model, shape: BlockShape, ranks: Ranks) -> Result<CxlBlocks> {
        Self::recorded(cache, model, shape, ranks, None)
    }

    /// As [`CxlBlocks::new`], with a record of the keys that [`CxlBlocks::has`] asks for and of those stored. Only the worker of rank 0
    /// writes one: the others are asked the same. Where there can be no file, the blocks are there without one, and the log says why.
    ///
    /// # Errors
    /// As [`CxlBlocks::new`].
    pub fn recorded(cache: &Cache, model: &Model, shape: BlockShape, ranks: Ranks, record: Option<&RecordConfig>) -> Result<CxlBlocks> {
        let block_bytes = shape.block_bytes() as u64;
        let cells = cache.host().lines().layout().geometry().cells.iter().filter(|class| class.chunks > 0);
        let cell_bytes = cells.map(|class| class.cell_bytes).max().unwrap_or(0);
        if block_bytes > cell_bytes {
            return Err(Error::CellTooSmall { block_bytes, cell_bytes });
        }
        let namespaces = namespaces(model, &shape, ranks)?;
        let own = namespaces[ranks.rank() as usize];
        let pool = mapping(cache);
        let blocks = TierBlocks::new(cache, namespaces.clone(), own, block_bytes);
        let recorder = record.filter(|_| ranks.rank() == 0).and_then(|record| recorder(record, shape.block_tokens() as u64));
        let inner = Inner { blocks, shape, namespaces, own, pool, counts: Counts::default(), lineage: Mutex::default(), recorder };
        Ok(CxlBlocks { inner: Arc::new(inner) })
    }

    /// What became of all blocks so far.
    pub fn counts(&self) -> &Counts {
        &self.inner.counts
    }

    /// What became of the entries of this worker's record; `None` without one.
    pub fn recorded_entries(&self) -> Option<TraceCounts> {
        self.inner.recorder.as_ref().map(TraceRecorder::counts)
    }

    /// Namespace of this worker's blocks.
    pub fn namespace(&self) -> Namespace {
        self.inner.own
    }

    pub(crate) fn watch(&self) -> Result<Watch> {
        let others = self.inner.namespaces.iter().copied().filter(|namespace| *namespace != self.inner.own);
        Ok(self.inner.blocks.cache().watch(self.inner.own, self.inner.shape.block_bytes() as u64, &others.collect::<Vec<_>>())?)
    }

    /// The blocks that came and went since the last look.
    pub(crate) fn look(&self, watch: &mut Watch) -> Result<Changes> {
        Ok(watch.look(self.inner.blocks.cache())?)
    }

    #[cfg(feature = "router")]
    pub(crate) fn cache(&self) -> &Cache {
        self.inner.blocks.cache()
    }

    #[cfg(feature = "router")]
    pub(crate) fn block_bytes(&self) -> usize {
        self.inner.shape.block_bytes()
    }

    /// Namespace of rank 0's blocks, which is the same for every rank.
    #[cfg(feature = "router")]
    pub(crate) fn first_namespace(&self) -> Namespace {
        self.inner.namespaces[0]
    }

    #[cfg(feature = "router")]
    pub(crate) fn block_tokens(&self) -> usize {
        self.inner.shape.block_tokens()
    }

    /// As [`CxlBlocks::has`], on a thread that may block.
    #[cfg(feature = "router")]
    pub(crate) async fn find(&self, keys: Vec<SequenceHash>) -> Vec<Outcome> {
        self.clone().run(Operation::Has, keys, |inner, keys, _| inner.look_for(keys), |_, outcome| outcome).await
    }

    /// Whether each block is there for every rank. Advice: it may go right afterwards, and a get says so.
    pub fn has(&self, keys: &[SequenceHash]) -> Vec<Outcome> {
        let outcomes = self.inner.has(keys);
        self.inner.tell(Operation::Has, &outcomes);
        outcomes
    }

    /// Stores blocks `ids` of `layout` under `keys`; one outcome for each key, in order. Without a runtime, on this thread.
    ///
    /// # Safety
    /// Until this returns no other thread writes to these blocks, and their memory stays mapped.
    pub unsafe fn put(&self, keys: &[SequenceHash], layout: &PhysicalLayout, ids: &[BlockId]) -> Vec<Outcome> {
        let outcomes = self.inner.put(keys, layout, ids, &self.inner.blocks.call().turns());
        self.inner.tell(Operation::Put, &outcomes);
        outcomes
    }

    /// Copies blocks into blocks `ids` of `layout`; one outcome for each key, in order. What a block holds whose outcome is not
    /// [`Outcome::Done`] is not defined. Without a runtime, on this thread.
    ///
    /// # Safety
    /// Until this returns no other thread uses these blocks, and their memory stays mapped.
    pub unsafe fn get(&self, keys: &[SequenceHash], layout: &PhysicalLayout, ids: &[BlockId]) -> Vec<Outcome> {
        let outcomes = self.inner.get(keys, layout, ids, &self.inner.blocks.call().turns());
        self.inner.tell(Operation::Get, &outcomes);
        outcomes
    }

    /// Runs `work` on a thread that may block. Whatever becomes of that thread, each key has an outcome.
    async fn run<T: Send + 'static>(
        self,
        operation: Operation,
        keys: Vec<SequenceHash>,
        work: impl FnOnce(&Inner, &[SequenceHash], &Turns) -> Vec<Outcome> + Send + 'static,
        answer: impl Fn(SequenceHash, Outcome) -> T,
    ) -> Vec<T> {
        let keys = Arc::new(keys);
        let call = self.inner.blocks.call();
        let outcomes = match tokio::runtime::Handle::try_current() {
            Err(_) => {
                let outcomes = vec![Outcome::Request; keys.len()];
                self.inner.tell(operation, &outcomes);
                outcomes
            }
            Ok(runtime) => {
                let (inner, turns, list) = (self.inner.clone(), call.turns(), keys.clone());
                let working = runtime.spawn_blocking(move || {
                    let outcomes = work(&inner, &list, &turns);
                    // Here, so that a call that was dropped is counted too.
                    inner.tell(operation, &outcomes);
                    outcomes
                });
                working.await.unwrap_or_else(|error| {
                    tracing::error!(operation = operation.name(), %error, "the thread of a call to the CXL tier ended before its work");
                    let outcomes = vec![Outcome::Dropped; keys.len()];
                    self.inner.counts.count(operation, &outcomes);
                    outcomes
                })
            }
        };
        drop(call);
        keys.iter().zip(outcomes).map(|(&key, outcome)| answer(key, outcome)).collect()
    }
}

fn recorder(record: &RecordConfig, block_tokens: u64) -> Option<TraceRecorder> {
    let RecordConfig { directory, salt, most_bytes } = record.clone();
    let started = TraceRecorder::start(&TraceConfig { directory, salt, block_tokens, most_bytes });
    started.inspect_err(|error| tracing::warn!(%error, "requests to the CXL tier are not recorded")).ok()
}

/// Where a process maps the pool of a cache; empty where it does not.
fn mapping(cache: &Cache) -> Range<usize> {
    let memory = cache.host().lines().memory();
    let len_bytes = memory.len_bytes();
    let start = memory.address(0, len_bytes).map_or(0, |start| start.as_ptr().addr());
    if start == 0 { 0..0 } else { start..start + len_bytes as usize }
}

fn answer(key: SequenceHash, outcome: Outcome) -> std::result::Result<SequenceHash, SequenceHash> {
    if outcome.is_ok() { Ok(key) } else { Err(key) }
}

impl Inner {
    fn tell(&self, operation: Operation, outcomes: &[Outcome]) {
        self.counts.count(operation, outcomes);
        let is_news = |outcome: &Outcome| !outcome.is_ok() && *outcome != Outcome::Absent;
        let failed = outcomes.iter().filter(|outcome| is_news(outcome)).count();
        if let Some(first) = outcomes.iter().copied().find(is_news) {
            tracing::warn!(operation = operation.name(), failed, of = outcomes.len(), first = first.name(), "blocks of the CXL tier");
        }
    }

    /// The pool's answers, in the places of the list that are named.
    fn note(&self, operation: Operation, places: Vec<usize>, answers: Vec<Answer>, outcomes: &mut [Outcome]) {
        let mut last = None;
        for (place, answer) in places.into_iter().zip(answers) {
            outcomes[place] = Outcome::of(&answer);
            // Blocks of a turn share their error.
            if let Answer::Failed(error) = answer
                && !last.as_ref().is_some_and(|last| Arc::ptr_eq(last, &error))
            {
                tracing::warn!(operation = operation.name(), %error, "the CXL tier's pool");
                last = Some(error);
            }
        }
    }

    fn learn(&self, keys: &[SequenceHash]) {
        self.lineage.lock().unwrap_or_else(PoisonError::into_inner).learn(keys);
    }

    /// As a worker asks for the blocks of a request.
    fn has(&self, keys: &[SequenceHash]) -> Vec<Outcome> {
        let outcomes = self.look_for(keys);
        if let Some(recorder) = &self.recorder {
            let tokens = self.shape.block_tokens() as u64;
            let found = outcomes.iter().take_while(|outcome| outcome.is_ok()).count() as u64;
            let names: Vec<BlockKey> = keys.iter().filter_map(|&key| key_of(key)).collect();
            recorder.asked(self.namespaces[0], &names, names.len() as u64 * tokens, found * tokens);
        }
        outcomes
    }

    fn look_for(&self, keys: &[SequenceHash]) -> Vec<Outcome> {
        self.learn(keys);
        let mut outcomes = vec![Outcome::Key; keys.len()];
        let known = keys.iter().enumerate().filter_map(|(place, &key)| Some((place, key_of(key)?)));
        let (places, names): (Vec<usize>, Vec<BlockKey>) = known.unzip();
        self.note(Operation::Has, places, self.blocks.has(&names), &mut outcomes);
        outcomes
    }

    /// Blocks that can be moved, with their places in the list; the others have their outcome.
    fn blocks(
        &self,
        keys: &[SequenceHash],
        layout: &PhysicalLayout,
        ids: &[BlockId],
        outcomes: &mut [Outcome],
    ) -> (Vec<usize>, Vec<TierBlock>) {
        let (mut places, mut blocks) = (Vec::with_capacity(keys.len()), Vec::with_capacity(keys.len()));
        if keys.len() != ids.len() {
            outcomes.fill(Outcome::Request);
            return (places, blocks);
        }
        let source = match Source::of(layout, &self.shape, &self.pool) {
            Ok(source) => source,
            Err(refused) => {
                outcomes.fill(refused);
                return (places, blocks);
            }
        };
        let lineage = self.lineage.lock().unwrap_or_else(PoisonError::into_inner);
        for (place, (&hash, &id)) in keys.iter().zip(ids).enumerate() {
            match key_of(hash).ok_or(Outcome::Key).and_then(|key| Ok((key, source.block(id)?))) {
                Ok((key, pieces)) => {
                    places.push(place);
                    blocks.push(TierBlock { key, parent: lineage.parent_of(&hash), pieces });
                }
                Err(refused) => outcomes[place] = refused,
            }
        }
        (places, blocks)
    }

    fn put(&self, keys: &[SequenceHash], layout: &PhysicalLayout, ids: &[BlockId], turns: &Turns) -> Vec<Outcome> {
        self.learn(keys);
        let mut outcomes = vec![Outcome::Dropped; keys.len()];
        let (places, blocks) = self.blocks(keys, layout, ids, &mut outcomes);
        // A key that comes again gets the answer of its first block.
        let mut first: HashMap<BlockKey, usize> = HashMap::new();
        let (mut own, mut stored, mut again) = (Vec::new(), Vec::new(), Vec::new());
        for (place, block) in places.into_iter().zip(blocks) {
            if let Some(&first) = first.get(&block.key) {
                again.push((place, first));
            } else {
                first.insert(block.key, place);
                own.push(place);
                stored.push(block);
            }
        }
        // SAFETY: the caller leaves these blocks alone until the call returns, or until its future is dropped, which drops the call of the
        // turns; they lie in memory of the host that is not the pool's.
        let answers = unsafe { self.blocks.put(&stored, turns) };
        self.note(Operation::Put, own, answers, &mut outcomes);
        again.into_iter().for_each(|(place, first)| outcomes[place] = outcomes[first]);
        if let Some(recorder) = &self.recorder {
            let stored = keys.iter().zip(&outcomes).filter(|(_, outcome)| **outcome == Outcome::Done);
            let names: Vec<BlockKey> = stored.filter_map(|(&key, _)| key_of(key)).collect();
            recorder.published(self.namespaces[0], &names);
        }
        outcomes
    }

    fn get(&self, keys: &[SequenceHash], layout: &PhysicalLayout, ids: &[BlockId], turns: &Turns) -> Vec<Outcome> {
        let mut outcomes = vec![Outcome::Dropped; keys.len()];
        let (places, blocks) = self.blocks(keys, layout, ids, &mut outcomes);
        // SAFETY: as for a put.
        let answers = unsafe { self.blocks.get(&blocks, turns) };
        self.note(Operation::Get, places, answers, &mut outcomes);
        outcomes
    }
}

impl ObjectBlockOps for CxlBlocks {
    fn has_blocks(&self, keys: Vec<SequenceHash>) -> BoxFuture<'static, Vec<(SequenceHash, Option<usize>)>> {
        let len_bytes = self.inner.shape.block_bytes();
        let size = move |key, outcome: Outcome| (key, outcome.is_ok().then_some(len_bytes));
        Box::pin(self.clone().run(Operation::Has, keys, |inner, keys, _| inner.has(keys), size))
    }

    /// Refused: only a worker knows where the blocks of a logical layout lie. KVBM's workers call
    /// [`ObjectBlockOps::put_blocks_with_layout`].
    fn put_blocks(&self, keys: Vec<SequenceHash>, _: LogicalLayoutHandle, _: Vec<BlockId>) -> BoxFuture<'static, Answers> {
        let refused = |_: &Inner, keys: &[SequenceHash], _: &Turns| vec![Outcome::Layout; keys.len()];
        Box::pin(self.clone().run(Operation::Put, keys, refused, answer))
    }

    /// Refused, as [`CxlBlocks::put_blocks`].
    fn get_blocks(&self, keys: Vec<SequenceHash>, _: LogicalLayoutHandle, _: Vec<BlockId>) -> BoxFuture<'static, Answers> {
        let refused = |_: &Inner, keys: &[SequenceHash], _: &Turns| vec![Outcome::Layout; keys.len()];
        Box::pin(self.clone().run(Operation::Get, keys, refused, answer))
    }

    fn put_blocks_with_layout(&self, keys: Vec<SequenceHash>, layout: PhysicalLayout, ids: Vec<BlockId>) -> BoxFuture<'static, Answers> {
        let work = move |inner: &Inner, keys: &[SequenceHash], turns: &Turns| inner.put(keys, &layout, &ids, turns);
        Box::pin(self.clone().run(Operation::Put, keys, work, answer))
    }

    fn get_blocks_with_layout(&self, keys: Vec<SequenceHash>, layout: PhysicalLayout, ids: Vec<BlockId>) -> BoxFuture<'static, Answers> {
        let work = move |inner: &Inner, keys: &[SequenceHash], turns: &Turns| inner.get(keys, &layout, &ids, turns);
        Box::pin(self.clone().run(Operation::Get, keys, work, answer))
    }
}
