// SPDX-License-Identifier: Apache-2.0
//! Two processes as two hosts on one pool: prefill offloads the blocks of a prompt from its G2, and decode, which has never seen them, gets
//! them into its own. Nothing else connects the two.
//!
//!     scripts/tier run --example handover

use cxl_pool::device::PoolSpec;
use cxl_pool::platform::MachineId;
use cxl_pool::pool::{CellArea, FormatOptions, Pool, Share};
use cxl_tier::memory::{Lies, host_layout};
use cxl_tier::worker::HostWorker;
use cxl_tier::{BlockShape, CxlBlocks, Model, Ranks, Tier, TierConfig};
use dynamo_memory::nixl::NixlAgent;
use kvbm_engine::leader::{FindMatchesOptions, InstanceLeader, Leader, StagingMode};
use kvbm_engine::object::ObjectBlockOps;
use kvbm_engine::offload::{ObjectPipelineBuilder, OffloadEngine, SourceBlocks};
use kvbm_engine::testing::{
    TestManagerBuilder, TestRegistryBuilder, create_messenger_tcp, create_token_sequence, generate_sequence_hashes,
    populate_manager_with_blocks,
};
use kvbm_engine::{G2, SequenceHash};
use kvbm_logical::{BlockManager, BlockRegistry};
use kvbm_physical::layout::{KvBlockLayout, LayoutConfig, PhysicalLayout};
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const BLOCKS: usize = 32;
const TOKENS: usize = 16;
const FIRST_TOKEN: u32 = 42;

/// What both sides have to agree on.
fn model() -> Model {
    Model { name: "example".into(), dtype: "bfloat16".into(), ..Model::default() }
}

/// 32 layers of K and V, 16 tokens of 1,024 numbers: 2 MiB a block.
fn config() -> Result<LayoutConfig> {
    let config = LayoutConfig::builder().num_blocks(2 * BLOCKS).num_layers(32).outer_dim(2).page_size(TOKENS).inner_dim(1024).build();
    Ok(config?)
}

struct Instance {
    leader: InstanceLeader,
    registry: BlockRegistry,
    g2: Arc<BlockManager<G2>>,
    layout: PhysicalLayout,
    blocks: CxlBlocks,
}

impl Instance {
    /// A KVBM instance without a GPU: a G2 in host memory, and the pool as its object tier.
    async fn new(tier: &Tier, name: &str) -> Result<Instance> {
        let config = config()?;
        let layout = host_layout(NixlAgent::new(name)?, &config, Lies::Contiguous)?;
        let blocks = tier.blocks(&model(), BlockShape::new(&config, KvBlockLayout::OperationalNHD)?, Ranks::ALONE)?;
        let registry = TestRegistryBuilder::new().build();
        let manager = TestManagerBuilder::<G2>::new().block_count(config.num_blocks).block_size(TOKENS).registry(registry.clone());
        let g2 = Arc::new(manager.build());
        let leader = InstanceLeader::builder()
            .messenger(create_messenger_tcp().await?)
            .registry(registry.clone())
            .g2_manager(g2.clone())
            .worker(Arc::new(HostWorker::new(0, layout.clone(), blocks.clone())))
            .object_client(Arc::new(blocks.clone()))
            .build()?;
        leader.register_handlers()?;
        Ok(Instance { leader, registry, g2, layout, blocks })
    }

    /// The words of a block, with the number of the block in the prompt; no two of them are equal.
    fn words(&self, id: usize, number: usize) -> Result<Vec<(&'static mut u64, u64)>> {
        let inner = self.layout.layout();
        let mut words = Vec::new();
        for layer in 0..inner.num_layers() {
            for outer in 0..inner.outer_dim() {
                let region = self.layout.memory_region(id, layer, outer)?;
                // SAFETY: memory of the layout, which lives until the process ends; this thread alone uses the block, and once at a time.
                let piece = unsafe { std::slice::from_raw_parts_mut(region.addr() as *mut u64, region.size() / 8) };
                words.extend(piece.iter_mut());
            }
        }
        Ok(words.into_iter().zip((number as u64) << 32..).collect())
    }
}

async fn prefill(tier: &Tier) -> Result<String> {
    let instance = Instance::new(tier, "prefill").await?;
    let hashes = populate_manager_with_blocks(&instance.g2, create_token_sequence(BLOCKS, TOKENS, FIRST_TOKEN).blocks())?;
    let blocks = instance.g2.match_blocks(&hashes);
    for (number, block) in blocks.iter().enumerate() {
        instance.words(block.block_id(), number)?.into_iter().for_each(|(place, word)| *place = word);
    }
    let leader = Arc::new(instance.leader.clone());
    let workers: Arc<dyn ObjectBlockOps> = leader.parallel_worker().ok_or("the leader has no workers")?;
    let engine = OffloadEngine::builder(leader)
        .with_registry(Arc::new(instance.registry.clone()))
        .with_g2_manager(instance.g2.clone())
        .with_object_ops(workers)
        .with_g2_to_g4_pipeline(ObjectPipelineBuilder::<G2>::new().min_batch_size(1).build())
        .build()?;
    let begun = Instant::now();
    let mut transfer = engine.enqueue_g2_to_g4(SourceBlocks::Strong(blocks))?;
    let stored = transfer.wait().await?.completed_blocks.len();
    Ok(format!("{stored} of {BLOCKS} blocks of 2 MiB from G2 to the pool in {:.1?}", begun.elapsed()))
}

async fn decode(tier: &Tier) -> Result<String> {
    let instance = Instance::new(tier, "decode").await?;
    let hashes: Vec<SequenceHash> = generate_sequence_hashes(&create_token_sequence(BLOCKS, TOKENS, FIRST_TOKEN));
    let begun = Instant::now();
    let options = FindMatchesOptions { search_remote: true, staging_mode: StagingMode::Full };
    instance.leader.find_matches_with_options(&hashes, options)?.wait_for_completion().await?;
    let took = begun.elapsed();
    let found = instance.g2.match_blocks(&hashes);
    for (number, block) in found.iter().enumerate() {
        let wrong = instance.words(block.block_id(), number)?.into_iter().position(|(found, word)| *found != word);
        if let Some(at) = wrong {
            return Err(format!("block {number} is wrong at word {at}").into());
        }
    }
    let counts = instance.blocks.counts().render();
    counts.lines().filter(|line| !line.starts_with('#')).for_each(|line| println!("  {line}"));
    match found.len() {
        BLOCKS => Ok(format!("{BLOCKS} of {BLOCKS} blocks from the pool to G2 in {took:.1?}; every word is right")),
        found => Err(format!("{found} of {BLOCKS} blocks found").into()),
    }
}

/// What a process does that was started as one of the two hosts: it works, says so, and serves the pool until its standard input ends.
fn host(role: &str) -> Result<()> {
    let tier = Tier::open(&TierConfig::from_env()?)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let done = match role {
        "prefill" => runtime.block_on(prefill(&tier))?,
        _ => runtime.block_on(decode(&tier))?,
    };
    println!("{role} (slot {}): {done}", tier.host().slot());
    std::io::stdin().read_to_end(&mut Vec::new())?;
    // KVBM's background tasks hold the cache.
    std::process::exit(0)
}

/// Both processes run on this machine; the pool takes them for two.
fn machine(role: &str) -> MachineId {
    MachineId([if role == "prefill" { 1 } else { 2 }; 16])
}

fn start(role: &str, directory: &std::path::Path, pool: &str) -> Result<Child> {
    let mut child = Command::new(std::env::current_exe()?)
        .arg(role)
        .env("DYN_KVBM_CXL_POOL", pool)
        .env("CXL_STATE_DIR", directory.join(role))
        .env("CXL_MACHINE_ID", machine(role).to_string())
        .env("CXL_SUSPECT_MS", "10000")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let output = child.stdout.take().ok_or("no output of the process")?;
    for line in BufReader::new(output).lines() {
        let line = line?;
        println!("{line}");
        if line.starts_with(role) {
            return Ok(child);
        }
    }
    Err(format!("{role} ended with {}", child.wait()?).into())
}

fn main() -> Result<()> {
    if let Some(role) = std::env::args().nth(1) {
        return host(&role);
    }
    let directory = tempfile::Builder::new().prefix("kvbm-cxl-tier-").tempdir_in("/dev/shm")?;
    let pool = format!("{},size=256M", directory.path().join("pool").display());
    // The first host formats. Cells of 2 MiB, in 80 percent of the pool.
    let cells = vec![CellArea { cell_bytes: 2 << 20, share: Share::Percent(80) }];
    let options = FormatOptions { cells, machine: Some(machine("prefill")), ..FormatOptions::default() };
    Pool::format(&PoolSpec::parse(&pool)?, &options)?;
    let mut prefill = start("prefill", directory.path(), &pool)?;
    let mut decode = start("decode", directory.path(), &pool)?;
    for child in [&mut decode, &mut prefill] {
        child.kill()?;
        child.wait()?;
    }
    Ok(())
}
