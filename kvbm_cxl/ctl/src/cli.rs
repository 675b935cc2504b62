// SPDX-License-Identifier: Apache-2.0
//! The commands and their options.

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use cxl_pool::device::{DevicePart, parse_size};
use cxl_pool::limits::*;
use cxl_pool::media::Region;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::LazyLock;

/// Text below the help.
const EXIT_CODES: &str = "\
Exit codes:
  0  done, nothing wrong
  1  findings, or the operation failed
  2  wrong usage
  3  the pool cannot be opened
  4  refused: something would be lost, or is in use

Environment:
  CXL_POOL        the pool, unless --pool names one
  CXL_MACHINE_ID  this machine's identity, if /etc/machine-id does not serve
  CXL_STATE_DIR   directory that this machine's processes share
  CXL_SUSPECT_MS  time without a heartbeat after which a host is fenced; the same on every host
  CXL_POLL_US     period of the polls for recalls of locks and fences
  CXL_COHERENCE   how the memory is accessed: native or emulated";

/// Format, inspect, check and repair pools of shared CXL memory
#[derive(Parser, Debug)]
#[command(name = "cxlctl", version = version(), after_help = EXIT_CODES, disable_help_subcommand = true)]
pub struct Cli {
    /// Use this pool: devices separated by commas, such as /dev/dax0.0,/dev/dax1.0 or /dev/shm/kv,size=1G; a part of each:
    /// /dev/dax0.0,offset=64G,size=64G; with the metadata on another device: /dev/dax0.0,metadata=/dev/dax1.0 [env: CXL_POOL]
    #[arg(long, global = true, value_name = "SPEC")]
    pub pool: Option<String>,
    /// Print JSON
    #[arg(long, global = true)]
    pub json: bool,
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// Options of `record`.
#[derive(Args, Debug)]
pub struct RecordArgs {
    /// Merge these files, or the *.trace.jsonl of these folders
    #[arg(required = true)]
    pub files: Vec<PathBuf>,
    /// Write the trace to this file
    #[arg(long, value_name = "FILE")]
    pub write: PathBuf,
}

/// What to do.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Make an empty pool on devices or files
    Format(FormatArgs),
    /// Show the size of a model's KV blocks, which is the size of cells for it
    ///
    /// Divides the layers into KV cache groups as vLLM 0.31 does, and prints the tokens and bytes of a block of each. Drafts of speculative
    /// decoding and --mamba-ssm-cache-dtype are not counted.
    Cells(CellsArgs),
    /// Erase a pool and free its device range
    Erase(EraseArgs),
    /// Show the devices, layout and usage of a pool
    Info,
    /// Hold this machine's slot while workers start and stop
    ///
    /// Joins the pool, sends heartbeats, serves as manager if this machine has a seat, runs the upkeep of the cache, and reports hosts
    /// whose processes have all ended under this machine's kernel. Workers with the same CXL_MACHINE_ID and CXL_STATE_DIR share its slot.
    /// Ends on SIGTERM, SIGINT or SIGHUP: it waits up to 4 times CXL_SUSPECT_MS for other hosts and workers of this machine to end, so that
    /// it can release those that were killed, and leaves. Notifies systemd when it is ready (Type=notify).
    ///
    /// Exit status: 0 = it was asked to end, and left; 1 = it could not join, or is no longer a member: start it again.
    Host(HostArgs),
    /// Show the hosts: slots, heartbeats, fences, locks, manager seats
    Hosts(HostsArgs),
    /// Show the manager seats, and release those of a machine that is gone
    ///
    /// A pool needs one running machine with a seat. Every slot has a seat, which belongs to the host of the slot. A machine that finds no
    /// manager when it joins claims one of the first seats and releases it once it has a slot. In pools of earlier versions slots have no
    /// seats: machines claim them, and a dead machine keeps its seat until it returns or its death is declared (`cxlctl hosts declare-dead`
    /// or `cxlctl seats release`, which needs no machine with a seat).
    Seats(SeatsArgs),
    /// Show metadata lines
    Inspect(InspectArgs),
    /// Free kept memory that no process uses any more
    ///
    /// Kept memory outlives its program, since other processes may know it by its name or offset. The pool cannot know whether they still
    /// run, so an operator decides. `cxlctl inspect blocks all` lists kept blocks with names, offsets and sizes. Blocks of the cache are
    /// not affected. Memory that a process still uses is overwritten by its next owner.
    Free(FreeArgs),
    /// Check all metadata, and repair it with --repair
    Fsck(FsckArgs),
    /// Show the prefix cache, evict blocks, or copy one to a file
    Cache(crate::cache::Args),
    /// Explain why a lookup of a block hits or misses now
    ///
    /// Exit status: 0 = it hits, 1 = it misses.
    Why(crate::cache::WhyArgs),
    /// Run two processes as two hosts on one pool: one publishes blocks, the other pulls them and verifies every byte
    ///
    /// Formats the pool that --pool names, which must be empty. Without --pool it uses 64 MiB of memory and frees it at the end.
    Demo,
    /// Run the second process of the demo
    #[command(hide = true)]
    DemoReader {
        /// Blocks to pull
        blocks: u64,
    },
    /// Check whether this machine and these devices are fit for a pool, and which instructions are best
    ///
    /// Checks the CPU, the limits of the system and the devices, measures the cost of each instruction, and runs visibility tests. One
    /// machine cannot show what a fabric without coherence does: run it on two hosts with --peer-role.
    ///
    /// Writes nothing that belongs to a pool. For a device that is a plain file it uses a temporary file next to it. On devdax, tests that
    /// write need --scratch-offset, which states that a region is free, or --force on a device that is not formatted. Without a pool it
    /// measures memory in /dev/shm.
    ///
    /// Exit status: 0 = usable, 1 = not usable.
    Doctor(crate::doctor::Args),
    /// Serve the metrics of the whole pool to Prometheus
    ///
    /// Opens the pool read-only and answers `GET /metrics`. One per pool is enough, on any machine that has it.
    Exporter(ExporterArgs),
    /// Watch the rates of every host
    Top(TopArgs),
    /// Show the transfers of the NIXL agents of every host
    ///
    /// The counters are those of docs/operating/metrics.md, since the machines started. `top` shows rates.
    Nixl,
    /// Merge the recorded requests of workers into one trace for cxl-plan
    ///
    /// Workers with the option `record_dir` write a file for each process, with salted ids of blocks and no prompts. Files with the same
    /// salt are merged by the clocks of their machines.
    Record(RecordArgs),
    /// Print a shell's completions
    Completions {
        /// Print completions for this shell
        shell: Shell,
    },
    /// Write the manual pages
    Man {
        /// Write to this directory; create it if it is missing
        directory: PathBuf,
    },
}

/// The version, with the commit that the program was built from.
fn version() -> &'static str {
    static VERSION: LazyLock<String> = LazyLock::new(|| match option_env!("GIT_COMMIT") {
        Some(commit) if !commit.is_empty() => format!("{} ({commit})", env!("CARGO_PKG_VERSION")),
        _ => env!("CARGO_PKG_VERSION").to_owned(),
    });
    &VERSION
}

/// A size in bytes.
fn size(text: &str) -> Result<u64, String> {
    parse_size(text).map_err(|error| error.to_string())
}

/// The number type of vLLM's KV cache.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum KvCacheDtype {
    /// 16 bits, or fp8 if the checkpoint says so
    #[value(aliases = ["bfloat16", "float16"])]
    Auto,
    /// 8 bits
    #[value(aliases = ["fp8_e4m3", "fp8_e5m2"])]
    Fp8,
}

/// vLLM's options that shape its blocks.
#[derive(Args, Debug)]
pub struct EngineArgs {
    /// Blocks of engines with this --tensor-parallel-size, or `stored_tp`
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1024), requires = "model")]
    pub tp: u64,
    /// Blocks of engines with this --block-size in tokens, or `stored_block_tokens`
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1 << 20), requires = "model")]
    pub block_size: Option<u64>,
    /// Blocks of engines with this --kv-cache-dtype
    #[arg(long, value_enum, default_value = "auto", requires = "model")]
    pub kv_cache_dtype: KvCacheDtype,
}

/// Options of `cells`.
#[derive(Args, Debug)]
pub struct CellsArgs {
    /// Read the model from this folder, or from its config.json
    #[arg(long, value_name = "DIR|CONFIG", requires = "block_size")]
    pub model: PathBuf,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// How hosts see each other's writes.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Coherence {
    /// Nothing is coherent between hosts
    Software,
    /// One host only, or a device with real coherence between hosts: flushes are left out
    Hardware,
}

/// Options of `free`.
#[derive(Args, Debug)]
pub struct FreeArgs {
    /// Free these blocks: a name, or the offset of a block without one, as `inspect blocks` shows them
    #[arg(required_unless_present = "unnamed", value_name = "NAME|OFFSET")]
    pub blocks: Vec<String>,
    /// Free every block without a name; no host may use the pool
    #[arg(long, conflicts_with = "blocks")]
    pub unnamed: bool,
    /// Wait this long for their owners, in milliseconds
    #[arg(long, default_value_t = 10_000)]
    pub timeout_ms: u64,
}

/// Options of `format`.
#[derive(Args, Debug)]
pub struct FormatArgs {
    /// Use so much of each device; create a file that does not exist with this size
    #[arg(long, value_parser = size)]
    pub size: Option<u64>,

    /// Put the metadata alone on this device, as metadata= in the pool's name does
    ///
    /// Every process then names it in the pool's name. It may be a part of a device, or a file that is created, as in a pool's name:
    /// /dev/dax1.0,offset=64G,size=1G or /dev/shm/metadata,size=64M. The rest of it stays free for others.
    #[arg(long, value_name = "DEVICE")]
    pub metadata: Option<DevicePart>,
    /// Make so many host slots: machines that can use the pool at a time
    #[arg(long, default_value_t = DEFAULT_SLOTS as u32)]
    pub slots: u32,
    /// Make cells of this size for the prefix cache, in this share of the pool (75% or 512G; default 75%)
    ///
    /// A block takes one cell of the smallest size that holds it, so a cell should be as large as a block. Up to 4 times for blocks of
    /// several sizes, each with its share; `none`: no cache. The rest of the pool belongs to the allocator. This cannot be changed later.
    ///
    /// Default: cells of 1M in 75% of the pool if at least 64 of them fit, else no cache.
    #[arg(long, value_name = "SIZE[:SHARE]", value_parser = crate::format::cells)]
    pub cells: Vec<crate::format::Cells>,
    /// Make cells for the KV blocks of the model in this folder, or of this config.json, in 75% of the pool
    ///
    /// `cxlctl cells` shows their size. --cells with a share makes further cells.
    #[arg(long, value_name = "DIR|CONFIG", requires = "block_size")]
    pub model: Option<PathBuf>,
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Choose how hosts see each other's writes
    #[arg(long, value_enum, default_value = "software")]
    pub coherence: Coherence,
    /// Overwrite the devices and lose their content. Refused while hosts use a pool on them, or if its hosts cannot be seen because a part
    /// of it is missing
    #[arg(long)]
    pub force: bool,
    /// As --force, also while hosts use the pool: invalidate it, wait until each host has stopped, then overwrite it
    #[arg(long)]
    pub evict_hosts: bool,
    /// Set what the format derives otherwise; may be given several times
    ///
    /// `chunk=SIZE`: what the allocator gives to a host at a time (2M). `locks=N` (256). `machine=ID`: reserve seat 0 for this machine (32
    /// hexadecimal digits). `objects=N`: cells of the table of named objects, four for each NIXL engine that lives at a time [one for each
    /// 256K of the pool, 256 to 8192]. `seat_machine=ID`: reserve the next seat, 1 and up, for this machine. `seats=N`: manager seats for
    /// machines that join where no manager serves; every slot has one as well (4). `stripe=SIZE`: stripe over several devices [2M, or more
    /// where that would take too many mappings].
    #[arg(long, value_name = "KEY=VALUE")]
    pub advanced: Vec<String>,
}

/// Options of `erase`.
#[derive(Args, Debug)]
pub struct EraseArgs {
    /// Erase it and lose its content. Refused while hosts use it
    #[arg(long)]
    pub force: bool,
    /// As --force, also while hosts use it: invalidate it and wait until each host has stopped
    #[arg(long)]
    pub evict_hosts: bool,
}

/// Options of `host`.
#[derive(Args, Debug)]
pub struct HostArgs {
    /// Request this slot; default: the one this machine had, else any
    #[arg(long)]
    pub slot: Option<u16>,
    /// Keep this file while it serves, for readiness probes
    #[arg(long, value_name = "FILE")]
    pub ready_file: Option<PathBuf>,
    /// Wait this long for a slot, in milliseconds; default: 3 times CXL_SUSPECT_MS and 5 s, at least 10 s
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=600_000))]
    pub timeout_ms: Option<u64>,
}

/// Options of `hosts`.
#[derive(Args, Debug)]
pub struct HostsArgs {
    /// Watch the heartbeats this long, in milliseconds
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u64).range(..=600_000))]
    pub watch_ms: u64,
    /// The subcommand
    #[command(subcommand)]
    pub command: Option<HostsCommand>,
}

/// Options of `seats`.
#[derive(Args, Debug)]
pub struct SeatsArgs {
    /// Watch the seats this long, in milliseconds
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u64).range(..=600_000))]
    pub watch_ms: u64,
    /// The subcommand
    #[command(subcommand)]
    pub command: Option<SeatsCommand>,
}

/// What to do about seats.
#[derive(Subcommand, Debug)]
pub enum SeatsCommand {
    /// Confirm that a machine is gone for good, so that any machine may claim its seat
    ///
    /// The pool never concludes from silence that a machine is gone: it may be paused, and write again later. The operator confirms that
    /// the machine is powered off or disconnected from the memory, or that its container and all of its processes are gone. IF THE MACHINE
    /// IS ONLY PAUSED AND RESUMES, TWO MACHINES WRITE THE SAME LINE: LOCKS FAIL AND DATA IS CORRUPTED. A machine that returns later is no
    /// problem: it finds its seat released and claims another.
    ///
    /// Runs on any machine, also without a manager.
    Release(ReleaseArgs),
}

/// Options of `seats release`.
#[derive(Args, Debug)]
#[command(group(clap::ArgGroup::new("meant").required(true).args(["seat", "machine"])))]
pub struct ReleaseArgs {
    /// Release this seat, as `cxlctl seats` shows it
    #[arg(long)]
    pub seat: Option<u16>,
    /// Release all seats of this machine, as `cxlctl seats` shows it
    #[arg(long, value_name = "ID")]
    pub machine: Option<String>,
    /// Confirm that the machine, or all of its processes, are gone. A wrong confirmation corrupts data
    #[arg(long)]
    pub i_know_it_is_gone: bool,
    /// Wait this long for other processes of this machine, in milliseconds
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..=600_000))]
    pub timeout_ms: u64,
}

/// What to do about hosts.
#[derive(Subcommand, Debug)]
pub enum HostsCommand {
    /// Confirm that a machine is off for good, so that others may take its locks and memory
    ///
    /// The pool never concludes from silence that a machine is dead: it may be paused, and write again later. The operator confirms that
    /// the machine is powered off, rebooted or disconnected from the memory, so that none of its writes can arrive any more. IF THE MACHINE
    /// IS ONLY PAUSED AND RESUMES, IT WRITES INTO MEMORY THAT BELONGS TO ANOTHER, AND DATA IS CORRUPTED.
    ///
    /// Crashed containers need no confirmation while another host, such as `cxlctl host`, runs under the same kernel: it asks the kernel
    /// and releases them. Run this on any machine that has a slot in the pool.
    DeclareDead(DeclareDeadArgs),
}

/// Options of `hosts declare-dead`.
#[derive(Args, Debug)]
pub struct DeclareDeadArgs {
    /// Declare the host of this slot dead, as `cxlctl hosts` shows it
    #[arg(required_unless_present = "all_fenced", conflicts_with = "all_fenced")]
    pub slot: Option<u16>,
    /// Declare this incarnation and earlier ones dead, as `cxlctl hosts` shows it
    #[arg(long, required_unless_present = "all_fenced", conflicts_with = "all_fenced")]
    pub incarnation: Option<u32>,
    /// Declare every fenced host without heartbeat dead; without --i-know-it-is-gone, only list them
    #[arg(long)]
    pub all_fenced: bool,
    /// Confirm that the machine is powered off or disconnected from the memory. A wrong confirmation corrupts data
    #[arg(long)]
    pub i_know_it_is_gone: bool,
    /// Wait this long for the manager to publish it, in milliseconds; default: 3 times CXL_SUSPECT_MS and 5 s, at least 10 s
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=600_000))]
    pub timeout_ms: Option<u64>,
}

/// What `inspect` shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The superblock of each device.
    Superblock,
    /// Locks, who holds them and who waits.
    Locks,
    /// Named objects.
    Objects,
    /// Chunks, their owners, and the kept blocks in them.
    Blocks,
    /// The lines of a region.
    Lines(Region),
}

impl What {
    /// Everything that can be shown, by name: a region has that of the format, as in `join-box`.
    fn all() -> impl Iterator<Item = (String, What)> {
        let kebab = |name: &str| {
            let parts = name.char_indices().map(|(at, c)| if at > 0 && c.is_uppercase() { format!("-{c}") } else { c.to_string() });
            parts.collect::<String>().to_lowercase()
        };
        let views = [("superblock", What::Superblock), ("locks", What::Locks), ("objects", What::Objects), ("blocks", What::Blocks)];
        let views = views.map(|(name, what)| (name.to_owned(), what));
        views.into_iter().chain(Region::ALL.into_iter().map(move |region| (kebab(region.name()), What::Lines(region))))
    }

    fn parse(text: &str) -> Result<What, String> {
        let known = || What::all().map(|(name, _)| name).collect::<Vec<_>>().join(", ");
        What::all().find(|(name, _)| name == text).map(|(_, what)| what).ok_or_else(|| format!("choose one of {}", known()))
    }
}

/// Options of `inspect`.
#[derive(Args, Debug)]
pub struct InspectArgs {
    /// Show `superblock`, `locks`, named `objects`, kept `blocks`, or the lines of a region of docs/reference/file-formats.md (`join-box`)
    #[arg(value_parser = What::parse)]
    pub what: What,
    /// Show this line, or `all`; default: the lines that are not empty, or do not verify
    pub index: Option<String>,
    /// Show the raw bytes as well
    #[arg(long)]
    pub raw: bool,
}

/// Options of `fsck`.
#[derive(Args, Debug)]
pub struct FsckArgs {
    /// Repair what can be repaired without loss. Stop every host before
    #[arg(long)]
    pub repair: bool,
    /// Repair also where the newest value may be lost, if no stopped host ever resumes
    #[arg(long, requires = "repair")]
    pub accept_loss: bool,
    /// Repair even if hosts seem to use the pool. Their data may be lost
    #[arg(long, requires = "repair")]
    pub force: bool,
    /// Require so long a time without heartbeats before a repair, in milliseconds
    #[arg(long, default_value_t = 2_000, value_parser = clap::value_parser!(u64).range(..=600_000))]
    pub watch_ms: u64,
    /// List the damaged lines of a pool in use, the effect of each, and whether its owner repairs it
    #[arg(long, conflicts_with = "repair")]
    pub online: bool,
    /// Show notes as well: leftovers of dead hosts that the next holder cleans up
    #[arg(long)]
    pub notes: bool,
}

/// Options of `exporter`.
#[derive(Args, Debug)]
pub struct ExporterArgs {
    /// Listen on this address. Every client that reaches it can read the metrics
    #[arg(long, default_value = "127.0.0.1")]
    pub address: IpAddr,
    /// Listen on this port; 0: any free one, which is printed
    #[arg(long, default_value_t = 9477)]
    pub port: u16,
    /// Reuse an answer for this long, in milliseconds
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u64).range(..=600_000))]
    pub max_age_ms: u64,
}

/// Options of `top`.
#[derive(Args, Debug)]
pub struct TopArgs {
    /// Take rates over this time, in milliseconds
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u64).range(50..=600_000))]
    pub interval_ms: u64,
    /// Print once and end
    #[arg(long)]
    pub once: bool,
}
