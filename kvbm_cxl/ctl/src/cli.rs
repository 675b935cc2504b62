// SPDX-License-Identifier: Apache-2.0
//! The commands and their options.

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use cxl_pool::device::{DevicePart, parse_size};
use cxl_pool::limits::*;
use cxl_pool::media::Region;
use std::net::IpAddr;
use std::path::PathBuf;

/// What is printed below the help.
const EXIT_CODES: &str = "\
Exit codes:
  0  done, nothing wrong
  1  findings, or the operation failed
  2  wrong usage
  3  the pool cannot be opened
  4  refused: something would be lost, or is in use

Environment:
  CXL_POOL        the pool, where --pool is not given
  CXL_POOL_SIZE   the size of its devices, where CXL_POOL does not carry one
  CXL_MACHINE_ID  this machine's identity, where /etc/machine-id does not serve
  CXL_STATE_DIR   where this machine's processes meet
  CXL_SUSPECT_MS  silence after which a host is taken for dead, the same on every host
  CXL_POLL_US     how often recalls of locks and fences are looked for
  CXL_COHERENCE   how the memory is used: native or emulated";

/// Formats, inspects, checks and tries out pools of shared CXL memory.
#[derive(Parser, Debug)]
#[command(name = "cxlctl", version, after_help = EXIT_CODES, disable_help_subcommand = true)]
pub struct Cli {
    /// The pool: its devices, separated by commas, such as /dev/dax0.0,/dev/dax1.0 or /dev/shm/kv,size=1G, or a part of each, such as
    /// /dev/dax0.0,offset=64G,size=64G; with its metadata on another device: /dev/dax0.0,metadata=/dev/dax1.0 [env: CXL_POOL]
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
    /// Files of recorders, or folders with *.trace.jsonl
    #[arg(required = true)]
    pub files: Vec<PathBuf>,
    /// The trace to write
    #[arg(long, value_name = "FILE")]
    pub write: PathBuf,
}

/// What to do.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Make an empty pool on devices or files
    Format(FormatArgs),
    /// Make a pool none any more, so that its part of the devices is free for other pools
    Erase(EraseArgs),
    /// Tell what a pool is made of and how much of it is used
    Info,
    /// Hold this machine's slot while workers come and go
    ///
    /// Joins the pool, keeps the heartbeat, serves as manager where this machine has a seat, keeps the cache up, and states the end of
    /// hosts whose processes have all ended under this machine's kernel. Workers with the same CXL_MACHINE_ID and CXL_STATE_DIR share its
    /// slot. Ends on SIGTERM, SIGINT or SIGHUP, after leaving; tells systemd when it is ready (Type=notify). Before it leaves, it waits up to
    /// 4 times CXL_SUSPECT_MS for other hosts and workers of this machine to end, so that it can release those that were killed.
    ///
    /// Exit status: 0 = asked to end, and left; 1 = it could not join, or is no member any more: start it again.
    Host(HostArgs),
    /// Tell who uses the pool: slots, heartbeats, fences, locks, manager seats
    Hosts(HostsArgs),
    /// Tell which machines have the manager seats, and release those of a machine that is gone
    ///
    /// A pool needs one machine with a seat that runs. Every slot has a seat, which its host has for as long as it has the slot. A machine
    /// that finds no manager when it joins claims one of the first seats and gives it back once it has its slot. In pools of earlier
    /// versions, slots have none: machines claim the seats, and one that died keeps its seat until it comes back, or until its death is
    /// proven: `cxlctl hosts declare-dead`, or `cxlctl seats release`, which needs no machine with a seat.
    Seats(SeatsArgs),
    /// Show metadata lines
    Inspect(InspectArgs),
    /// Give kept memory back that no process uses any more
    ///
    /// Memory that a program keeps outlives it: other processes may know it by its name or offset. Where they are gone too, nothing in the
    /// pool tells, so a person decides. `cxlctl inspect blocks all` lists kept blocks with names, offsets and sizes. The cache and its
    /// blocks are not concerned. Memory that a process still uses is overwritten by its next owner.
    Free(FreeArgs),
    /// Check all metadata, and repair it when asked to
    Fsck(FsckArgs),
    /// Look into the prefix cache, take blocks out of it, or copy one to a file
    Cache(crate::cache::Args),
    /// Tell why a lookup of a block hits or misses now
    ///
    /// Exit status: 0 = it hits, 1 = it misses.
    Why(crate::cache::WhyArgs),
    /// Run two hosts on one pool: one publishes data blocks, the other finds and verifies every byte
    Demo(DemoArgs),
    /// One host of the demo
    #[command(hide = true)]
    DemoHost(DemoHostArgs),
    /// Tell whether this machine and these devices are fit for a pool, and which instructions serve best
    ///
    /// Looks at the CPU, the limits of the system and the devices, measures what each instruction costs, and lets two processes test
    /// what they see of each other's writes. On one machine that cannot show what a fabric without coherence does: run it on two hosts
    /// with --peer-role.
    ///
    /// Nothing that belongs to a pool is written. Beside a device that is a plain file, a scratch file is made and removed. On devdax,
    /// tests that write need --scratch-offset, which states that a region is free, or --force on a device that is not formatted.
    /// Without any pool, ordinary memory in /dev/shm is measured.
    ///
    /// Exit status: 0 = usable, 1 = not usable.
    Doctor(crate::doctor::Args),
    /// Serve the metrics of the whole pool to Prometheus
    ///
    /// Opens the pool read-only and answers `GET /metrics` until it is stopped. One per pool is enough, on any machine that has it.
    Exporter(ExporterArgs),
    /// Watch what every host does with the pool
    Top(TopArgs),
    /// Tell what the NIXL agents of every host have transferred, and how
    ///
    /// Counters since the machines started, as docs/operating/metrics.md explains them. Rates are in `top`.
    Nixl,
    /// Merge what workers recorded of their requests into one trace for cxl-plan
    ///
    /// Workers record where their option `record_dir` says so: a file for each process, with salted ids of blocks and no prompts. Files
    /// with one salt are merged by time, as the clocks of their machines had it.
    Record(RecordArgs),
    /// Print a shell's completions
    Completions(CompletionsArgs),
    /// Write the manual pages
    Man(ManArgs),
}

/// A size in bytes.
fn size(text: &str) -> Result<u64, String> {
    parse_size(text).map_err(|error| error.to_string())
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
    /// Blocks: a name, or the offset of a block that has none, as `inspect blocks` shows them
    #[arg(required_unless_present = "unnamed", value_name = "NAME|OFFSET")]
    pub blocks: Vec<String>,
    /// Every block without a name; no host may use the pool meanwhile
    #[arg(long, conflicts_with = "blocks")]
    pub unnamed: bool,
    /// How long their owners may take to give them back, in milliseconds
    #[arg(long, default_value_t = 10_000)]
    pub timeout_ms: u64,
}

/// Options of `format`.
#[derive(Args, Debug)]
pub struct FormatArgs {
    /// How much of each device to use; a file that does not exist is made this long
    #[arg(long, value_parser = size)]
    pub size: Option<u64>,

    /// Keep the metadata on this device and nothing else of the pool, as metadata= in the pool's name does
    ///
    /// Every process names it in the pool's name from then on. A part of a device, or a file that is to be made, as in a pool's name:
    /// /dev/dax1.0,offset=64G,size=1G or /dev/shm/metadata,size=64M. What the metadata does not need of it stays free for others.
    #[arg(long, value_name = "DEVICE")]
    pub metadata: Option<DevicePart>,
    /// Host slots: how many machines can use the pool at a time
    #[arg(long, default_value_t = DEFAULT_SLOTS as u32)]
    pub slots: u32,
    /// Manager seats for machines that join where no manager serves; every slot has one as well
    #[arg(long, default_value_t = DEFAULT_SEATS as u32)]
    pub seats: u32,
    /// Reserve seat 0 for this machine (32 hexadecimal digits); default: the first machine that comes claims it
    #[arg(long, value_name = "ID")]
    pub machine: Option<String>,
    /// Reserve the next seat, 1 and up, for this machine; machines that join claim the seats that are not reserved
    #[arg(long, value_name = "ID")]
    pub seat_machine: Vec<String>,
    /// Locks
    #[arg(long, default_value_t = DEFAULT_LOCKS as u32)]
    pub locks: u32,
    /// Cells of the table of named objects; default: one for each 256K of the pool, 256 to 8192
    ///
    /// Every NIXL engine has a name there for as long as it lives. Up to a quarter of the cells can be used for certain: 8192 are enough
    /// for 2048 engines.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=MAX_OBJECTS as i64))]
    pub objects: Option<u32>,
    /// Chunk: what the allocator hands to a host at a time
    #[arg(long, value_parser = size, default_value = "2M")]
    pub chunk: u64,
    /// Cells of the prefix cache: their size, and how much of the pool they take (75% or 512G; default 75%)
    ///
    /// A block takes one cell of the smallest size that holds it, so a cell should be as large as a block. Give it up to 4 times for
    /// blocks of several sizes, each then with its share, or `none` for a pool without a cache. What is left of the pool belongs to the
    /// allocator. None of this can be changed afterwards.
    ///
    /// Without it: cells of 1M in 75% of the pool if at least 64 of them fit, else no cache.
    #[arg(long, value_name = "SIZE[:SHARE]", value_parser = crate::format::cells)]
    pub cells: Vec<crate::format::Cells>,
    /// Stripe over several devices; default: 2M, or more where that would take too many mappings
    #[arg(long, value_parser = size)]
    pub stripe: Option<u64>,
    /// How hosts see each other's writes
    #[arg(long, value_enum, default_value = "software")]
    pub coherence: Coherence,
    /// Overwrite whatever is on the devices. It is lost. Refused while hosts use a pool that is there, or cannot be seen, as a part of it
    /// lies elsewhere
    #[arg(long)]
    pub force: bool,
    /// As --force, also while hosts use the pool: make it void, wait until each of them has stopped, then overwrite it
    #[arg(long)]
    pub evict_hosts: bool,
}

/// Options of `erase`.
#[derive(Args, Debug)]
pub struct EraseArgs {
    /// Erase it. Everything in it is lost. Refused while hosts use it
    #[arg(long)]
    pub force: bool,
    /// As --force, also while hosts use it: make it void and wait until each of them has stopped
    #[arg(long)]
    pub evict_hosts: bool,
}

/// Options of `host`.
#[derive(Args, Debug)]
pub struct HostArgs {
    /// The slot to ask for; default: the one this machine had, else any
    #[arg(long)]
    pub slot: Option<u16>,
    /// A file that is there as long as this serves, for readiness probes
    #[arg(long, value_name = "FILE")]
    pub ready_file: Option<PathBuf>,
    /// How long to wait for a slot, in milliseconds; not given = 3 times CXL_SUSPECT_MS and 5 s, at least 10 s
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=600_000))]
    pub timeout_ms: Option<u64>,
}

/// Options of `hosts`.
#[derive(Args, Debug)]
pub struct HostsArgs {
    /// How long to watch the heartbeats, in milliseconds
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u64).range(..=600_000))]
    pub watch_ms: u64,
    /// What to do about them
    #[command(subcommand)]
    pub command: Option<HostsCommand>,
}

/// Options of `seats`.
#[derive(Args, Debug)]
pub struct SeatsArgs {
    /// How long to watch the seats, in milliseconds
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u64).range(..=600_000))]
    pub watch_ms: u64,
    /// What to do about them
    #[command(subcommand)]
    pub command: Option<SeatsCommand>,
}

/// What to do about seats.
#[derive(Subcommand, Debug)]
pub enum SeatsCommand {
    /// State that a machine is gone for good, so that any machine may claim its seat
    ///
    /// The pool never concludes from silence that a machine is gone: it may only be paused, and then go on writing. This command states
    /// what no program can know: that the machine is powered off or cut off from the memory, or that its container and all of its
    /// processes are gone. IF THE MACHINE IS ONLY PAUSED AND GOES ON, TWO MACHINES WRITE ONE LINE: LOCKS FAIL AND DATA IS CORRUPTED. A
    /// machine that comes back later is no problem: it finds that its seat is gone and claims another.
    ///
    /// It can be run on any machine, also where no manager serves.
    Release(ReleaseArgs),
}

/// Options of `seats release`.
#[derive(Args, Debug)]
#[command(group(clap::ArgGroup::new("meant").required(true).args(["seat", "machine"])))]
pub struct ReleaseArgs {
    /// The seat, as `cxlctl seats` shows it
    #[arg(long)]
    pub seat: Option<u16>,
    /// All seats of this machine, as `cxlctl seats` shows it
    #[arg(long, value_name = "ID")]
    pub machine: Option<String>,
    /// Confirm that the machine, or all of its processes, are gone. Saying so wrongly corrupts data
    #[arg(long)]
    pub i_know_it_is_gone: bool,
    /// How long to wait for other processes of this machine, in milliseconds
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..=600_000))]
    pub timeout_ms: u64,
}

/// What to do about hosts.
#[derive(Subcommand, Debug)]
pub enum HostsCommand {
    /// State that a machine is off for good, so that others may take over what it held
    ///
    /// The pool never concludes from silence that a machine is dead: it may only be paused, and then go on writing. This command
    /// states what no program can know: that the machine is powered off, rebooted, or cut off from the memory, so that none of its
    /// writes can arrive any more. Its locks and its memory are then given to others. IF THE MACHINE IS ONLY PAUSED AND GOES ON, IT
    /// WILL WRITE INTO MEMORY THAT BELONGS TO ANOTHER, AND DATA IS CORRUPTED.
    ///
    /// Containers that crashed need no statement as long as another host runs under the same kernel, `cxlctl host` for one: it asks the
    /// kernel, and releases them. Run this on any machine that has a slot in the pool.
    DeclareDead(DeclareDeadArgs),
}

/// Options of `hosts declare-dead`.
#[derive(Args, Debug)]
pub struct DeclareDeadArgs {
    /// The slot, as `cxlctl hosts` shows it
    #[arg(required_unless_present = "all_fenced", conflicts_with = "all_fenced")]
    pub slot: Option<u16>,
    /// The incarnation that is dead, as `cxlctl hosts` shows it; a later one of the same slot is not meant
    #[arg(long, required_unless_present = "all_fenced", conflicts_with = "all_fenced")]
    pub incarnation: Option<u32>,
    /// Every fenced host whose heartbeat stands still. Without --i-know-it-is-powered-off they are listed only
    #[arg(long)]
    pub all_fenced: bool,
    /// Confirm that the machine is powered off or cut off from the memory. Saying so wrongly corrupts data
    #[arg(long)]
    pub i_know_it_is_powered_off: bool,
    /// How long to wait for the manager to publish it, in milliseconds; not given = 3 times CXL_SUSPECT_MS and 5 s, at least 10 s
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=600_000))]
    pub timeout_ms: Option<u64>,
}

/// What `inspect` shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum What {
    /// The superblock of each device
    Superblock,
    /// Epoch claimed by each manager seat
    Seat,
    /// Lock grants, one copy per seat
    Grant,
    /// Slot bindings, one copy per seat
    Binding,
    /// Fenced incarnations, one row per seat
    Fence,
    /// Proven deaths, one row per seat
    Death,
    /// Hints of machines that ask for a slot
    JoinBox,
    /// Who holds a slot
    Identity,
    /// Heartbeats and request versions
    Summary,
    /// Lock requests
    Request,
    /// Lines that a commit is about to write
    Intent,
    /// Protected records: lock table and objects, one copy per slot
    Record,
    /// Chunks claimed by a host
    Claim,
    /// Blocks sent to another host to be freed
    FreeBox,
    /// What the receiver has taken out of a free box
    FreeAck,
    /// What a chunk is cut into
    ChunkHead,
    /// Blocks that outlive their host
    KeepMap,
    /// What each host counted
    Stats,
    /// What is in a cell of the prefix cache
    Descriptor,
    /// Hash table of the prefix cache
    Hint,
    /// Cells that a host pins
    Pin,
    /// Cell chunks claimed by a host
    CellClaim,
    /// What a host asks the owners of cells to do
    Ask,
    /// Where a machine without a place gets one, to claim manager seats from
    Splitter,
    /// Newest ballot of each place
    Claimant,
    /// Which session has each manager seat, one copy per place
    SeatClaim,
    /// View: locks, who holds them and who waits
    Locks,
    /// View: named objects
    Objects,
    /// View: chunks, who owns them, and the kept blocks in them
    Blocks,
}

impl What {
    /// The region of lines that this is, if it is one.
    pub fn region(self) -> Option<Region> {
        Some(match self {
            What::Superblock | What::Locks | What::Objects | What::Blocks => return None,
            What::Seat => Region::Seat,
            What::Grant => Region::Grant,
            What::Binding => Region::Binding,
            What::Fence => Region::Fence,
            What::Death => Region::Death,
            What::JoinBox => Region::JoinBox,
            What::Identity => Region::Identity,
            What::Summary => Region::Summary,
            What::Request => Region::Request,
            What::Intent => Region::Intent,
            What::Record => Region::Record,
            What::Claim => Region::Claim,
            What::FreeBox => Region::FreeBox,
            What::FreeAck => Region::FreeAck,
            What::ChunkHead => Region::ChunkHead,
            What::KeepMap => Region::KeepMap,
            What::Stats => Region::Stats,
            What::Descriptor => Region::Descriptor,
            What::Hint => Region::Hint,
            What::Pin => Region::Pin,
            What::CellClaim => Region::CellClaim,
            What::Ask => Region::Ask,
            What::Splitter => Region::Splitter,
            What::Claimant => Region::Claimant,
            What::SeatClaim => Region::SeatClaim,
        })
    }
}

/// Options of `inspect`.
#[derive(Args, Debug)]
pub struct InspectArgs {
    /// What to show
    #[arg(value_enum)]
    pub what: What,
    /// Line number, or `all`; default: the lines that are not empty, or do not verify
    pub index: Option<String>,
    /// Show the raw bytes as well
    #[arg(long)]
    pub raw: bool,
}

/// Options of `fsck`.
#[derive(Args, Debug)]
pub struct FsckArgs {
    /// Repair what can be repaired without losing anything. Every host has to be stopped
    #[arg(long)]
    pub repair: bool,
    /// Repair also where the newest value may be lost, assuming that no stopped host ever goes on
    #[arg(long, requires = "repair")]
    pub accept_loss: bool,
    /// Repair even though hosts seem to use the pool. Their data may be lost
    #[arg(long, requires = "repair")]
    pub force: bool,
    /// How long heartbeats must have stood still before a repair, in milliseconds
    #[arg(long, default_value_t = 2_000, value_parser = clap::value_parser!(u64).range(..=600_000))]
    pub watch_ms: u64,
    /// Of a pool that hosts are using: list the damaged lines, what each costs now, and whether its owner writes it again by itself
    #[arg(long, conflicts_with = "repair")]
    pub online: bool,
    /// Show notes as well: leftovers of dead hosts that the next holder deals with
    #[arg(long)]
    pub notes: bool,
}

/// Options of `demo`.
#[derive(Args, Debug, Clone)]
pub struct DemoArgs {
    /// Run one round and end (also with ONCE=1 in the environment)
    #[arg(long)]
    pub once: bool,
    /// Blocks per round
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub blocks: u32,
    /// Size of a block
    #[arg(long, value_parser = size, default_value = "1M")]
    pub block: u64,
    /// Lock hand-overs to count per host and round
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub turns: u32,
    /// Format the pool given with --pool even if there is something on it. It is lost
    #[arg(long)]
    pub force: bool,
}

/// Options of one host of the demo.
#[derive(Args, Debug)]
pub struct DemoHostArgs {
    /// Blocks per round
    #[arg(long)]
    pub blocks: u32,
    /// Size of a block
    #[arg(long)]
    pub block: u64,
}

/// Options of `exporter`.
#[derive(Args, Debug)]
pub struct ExporterArgs {
    /// The address to listen on. Every client that reaches it can read the metrics
    #[arg(long, default_value = "127.0.0.1")]
    pub address: IpAddr,
    /// The port; 0 = any free one, which is printed
    #[arg(long, default_value_t = 9477)]
    pub port: u16,
    /// An answer may be this old, in milliseconds, so that many readers do not read the pool more often
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u64).range(..=600_000))]
    pub max_age_ms: u64,
}

/// Options of `top`.
#[derive(Args, Debug)]
pub struct TopArgs {
    /// Time between two looks, over which rates are taken, in milliseconds
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u64).range(50..=600_000))]
    pub interval_ms: u64,
    /// Look twice, print once and end
    #[arg(long)]
    pub once: bool,
}

/// Options of `completions`.
#[derive(Args, Debug)]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub shell: Shell,
}

/// Options of `man`.
#[derive(Args, Debug)]
pub struct ManArgs {
    /// The directory to write to; made when missing
    pub directory: PathBuf,
}
