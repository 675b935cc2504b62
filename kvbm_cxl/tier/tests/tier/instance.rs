// SPDX-License-Identifier: Apache-2.0
//! An instance as KVBM makes it: workers, a G2, a leader, and the engine that offloads.

use crate::bench::*;
use cxl_pool::cache::Namespace;
use cxl_tier::memory::Lies;
use cxl_tier::names::namespaces;
use cxl_tier::worker::HostWorker;
use cxl_tier::{CxlBlocks, Ranks, Tier};
use kvbm_engine::leader::{FindMatchesOptions, InstanceLeader, Leader, StagingMode};
use kvbm_engine::object::ObjectBlockOps;
use kvbm_engine::offload::{ObjectPipelineBuilder, OffloadEngine, SourceBlocks};
use kvbm_engine::testing::{
    TestManagerBuilder, TestRegistryBuilder, create_messenger_tcp, create_token_sequence, generate_sequence_hashes,
    populate_manager_with_blocks,
};
use kvbm_engine::worker::Worker;
use kvbm_engine::{G2, SequenceHash};
use kvbm_logical::{BlockManager, BlockRegistry};
use kvbm_physical::layout::{BlockDimension, PhysicalLayout};
use std::sync::Arc;

/// Tokens of a block, as the layout's page.
const PAGE: usize = 4;
const FIRST_TOKEN: u32 = 1000;
/// Seed of the words of rank 0; the others follow.
const SEED: u64 = 500;

pub fn hashes(len: usize) -> Vec<SequenceHash> {
    generate_sequence_hashes(&create_token_sequence(len, PAGE, FIRST_TOKEN))
}

pub fn namespace_of(rank: u32, count: u32) -> Namespace {
    namespaces(&model(), &shape(), Ranks::new(rank, count).unwrap()).unwrap()[rank as usize]
}

pub fn namespace() -> Namespace {
    namespace_of(0, 1)
}

struct Instance {
    leader: InstanceLeader,
    registry: BlockRegistry,
    g2: Arc<BlockManager<G2>>,
    /// Of each rank.
    layouts: Vec<PhysicalLayout>,
}

impl Instance {
    async fn new(tier: &Tier, num_blocks: usize, lies: u64, ranks: u32) -> Instance {
        let lies = if lies == 0 { Lies::Contiguous } else { Lies::LayerSeparate(BlockDimension::BlockIsFirstDim) };
        let layouts: Vec<PhysicalLayout> = (0..ranks).map(|_| layout_of(&small(num_blocks), lies)).collect();
        let blocks: Vec<CxlBlocks> =
            (0..ranks).map(|rank| tier.blocks(&model(), shape(), Ranks::new(rank, ranks).unwrap()).unwrap()).collect();
        let worker = |(rank, (layout, blocks)): (u64, (&PhysicalLayout, &CxlBlocks))| -> Arc<dyn Worker> {
            Arc::new(HostWorker::new(rank, layout.clone(), blocks.clone()))
        };
        let registry = TestRegistryBuilder::new().build();
        let g2 = Arc::new(TestManagerBuilder::<G2>::new().block_count(num_blocks).block_size(PAGE).registry(registry.clone()).build());
        let leader = InstanceLeader::builder()
            .messenger(create_messenger_tcp().await.unwrap())
            .registry(registry.clone())
            .g2_manager(g2.clone())
            .workers((0..).zip(layouts.iter().zip(&blocks)).map(worker).collect())
            .object_client(Arc::new(blocks[0].clone()))
            .build()
            .unwrap();
        leader.register_handlers().unwrap();
        Instance { leader, registry, g2, layouts }
    }
}

fn run<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap().block_on(work)
}

/// Fills a G2 with the blocks of a prompt, and offloads it.
pub fn prefill(tier: &Tier, len: usize, lies: u64, ranks: u32) -> String {
    run(async {
        let instance = Instance::new(tier, 2 * len, lies, ranks).await;
        let sequence = create_token_sequence(len, PAGE, FIRST_TOKEN);
        let hashes = populate_manager_with_blocks(&instance.g2, sequence.blocks()).unwrap();
        let blocks = instance.g2.match_blocks(&hashes);
        for (number, block) in blocks.iter().enumerate() {
            for (seed, layout) in (SEED..).zip(&instance.layouts) {
                fill(layout, block.block_id(), seed, number);
            }
        }
        let leader = Arc::new(instance.leader.clone());
        let workers: Arc<dyn ObjectBlockOps> = leader.parallel_worker().unwrap();
        let pipeline = ObjectPipelineBuilder::<G2>::new().batch_size(7).min_batch_size(1).build();
        let engine = OffloadEngine::builder(leader)
            .with_registry(Arc::new(instance.registry.clone()))
            .with_g2_manager(instance.g2.clone())
            .with_object_ops(workers)
            .with_g2_to_g4_pipeline(pipeline)
            .build()
            .unwrap();
        let mut transfer = engine.enqueue_g2_to_g4(SourceBlocks::Strong(blocks)).unwrap();
        let result = transfer.wait().await.unwrap();
        format!("completed {} failed {}", result.completed_blocks.len(), transfer.failed_blocks().len())
    })
}

/// Asks for the blocks of the prompt, as a leader does before it computes them.
pub fn decode(tier: &Tier, len: usize, lies: u64, ranks: u32) -> String {
    run(async {
        let instance = Instance::new(tier, 2 * len, lies, ranks).await;
        let hashes = hashes(len);
        let options = FindMatchesOptions { search_remote: true, staging_mode: StagingMode::Full };
        let matches = instance.leader.find_matches_with_options(&hashes, options).unwrap();
        matches.wait_for_completion().await.unwrap();
        let found = instance.g2.match_blocks(&hashes);
        let right = found.iter().enumerate().map(|(number, block)| {
            (SEED..).zip(&instance.layouts).filter(|(seed, layout)| holds(layout, block.block_id(), *seed, number)).count()
        });
        format!("found {} right {}", found.len(), right.sum::<usize>())
    })
}
