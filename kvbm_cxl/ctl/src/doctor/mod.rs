// SPDX-License-Identifier: Apache-2.0
//! `cxlctl doctor`: is this machine, and are these devices, fit for a pool, and which instructions serve it best?
//!
//! Nothing that belongs to a pool is written, see [`crate::scratch`].

mod costs;
mod gpu;
mod litmus;
mod report;
mod system;

use crate::output::{Exit, Failure, Out};
use crate::scratch::{Scratch, header_of};
use crate::text::bytes;
use cxl_pool::coherence::{CoherenceOptions, Instructions};
use cxl_pool::copy::Dma;
use cxl_pool::cpus::CpuBinding;
use cxl_pool::device::{Access, DeviceInfo, DeviceKind, DevicePart, PoolSpec, Sysfs, bytes_in_huge_pages, mapping_limit, parse_size};
use cxl_pool::limits::DEFAULT_STRIPE_BYTES;
use cxl_pool::media::{Stripes, uuid_text};
use cxl_pool::pool::{PoolOnDevice, pools_on};
use cxl_pool::{Error, Result};
use gpu::GpuReport;
use litmus::{Litmus, Party, Role, Trial};
use report::{DeviceReport, FoundPool, Level, NO_GPU, ONE_HOST, Report, TWO_ROLES, Verdict};
use std::path::{Path, PathBuf};
use std::time::Duration;
use system::{Cpu, System, dax_devices};

/// Free /dev/shm below which a host's local segment may not find room, in bytes.
const LEAST_SHM_BYTES: u64 = 64 << 20;

/// Options of `doctor`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Let tests write on the device from this offset (in the part that --pool gives), like 4G. You state that the region is free; its
    /// content is lost
    #[arg(long, value_parser = parse_size, value_name = "SIZE")]
    scratch_offset: Option<u64>,
    /// Let the tests write this many bytes
    #[arg(long, value_parser = parse_size, value_name = "SIZE", default_value = "16M")]
    scratch_bytes: u64,
    /// Let tests write after the header of a devdax device that is not formatted
    #[arg(long)]
    force: bool,
    /// Write and measure nothing
    #[arg(long)]
    look: bool,
    /// Rounds of each visibility test
    #[arg(long, hide = true, default_value_t = 4096)]
    rounds: u64,
    /// Wait this long for the other side, in milliseconds
    #[arg(long, default_value_t = 60_000)]
    timeout_ms: u64,
    /// Run the visibility tests with another host: role `a` on one, `b` on the other, both with the same device and --scratch-offset. With
    /// --gpu for `a`, the GPU of each side that has --gpu copies payload as well: whether CXL_CUDA_DMA is right there
    #[arg(long, requires = "scratch_offset")]
    peer_role: Option<Role>,
    /// Examine the GPU of this number: its driver, registration, and which way is fastest for pieces of each length
    #[arg(long, value_name = "NUMBER", num_args = 0..=1, default_missing_value = "0")]
    gpu: Option<u32>,
    /// Where sysfs is.
    #[arg(long, hide = true, default_value = "/sys")]
    sysfs: PathBuf,
}

pub fn run(pool: Option<&str>, args: &Args, out: &mut Out) -> std::result::Result<Exit, Failure> {
    let options = CoherenceOptions::from_env()?;
    let chosen = match options.instructions {
        Some(chosen) => chosen,
        None => Instructions::best()?,
    };
    let memory = match &options.emulator {
        Some(emulator) => format!("emulated:{emulator}"),
        None => format!("native:{chosen}"),
    };
    let mut doctor = Doctor {
        pool,
        args,
        options,
        chosen,
        report: Report {
            verdict: Verdict::Ok,
            findings: Vec::new(),
            cpu: Cpu::detect(),
            memory,
            system: System::look(),
            devices: Vec::new(),
            gpu: None,
            cannot_tell: match (args.peer_role, args.gpu) {
                (None, _) => ONE_HOST.to_vec(),
                (Some(_), None) => [&TWO_ROLES[..], &NO_GPU].concat(),
                (Some(_), Some(_)) => TWO_ROLES.to_vec(),
            },
        },
    };
    doctor.examine()?;
    let Doctor { mut report, .. } = doctor;
    report.conclude();
    let json = serde_json::to_value(&report).map_err(|error| Error::Invalid(format!("writing JSON: {error}")))?;
    out.answer(|| json, || report.text())?;
    Ok(if report.verdict == Verdict::NotUsable { Exit::Failed } else { Exit::Done })
}

struct Doctor<'a> {
    pool: Option<&'a str>,
    args: &'a Args,
    options: CoherenceOptions,
    chosen: Instructions,
    report: Report,
}

impl Doctor<'_> {
    fn examine(&mut self) -> std::result::Result<(), Failure> {
        let sysfs = Sysfs::at(&self.args.sysfs);
        let spec = match self.pool {
            Some(text) => Some(PoolSpec::parse(text)?),
            None if std::env::var_os(PoolSpec::ENV_POOL).is_some() => Some(PoolSpec::from_env()?),
            None => None,
        };
        if self.args.scratch_offset.is_some() && spec.as_ref().is_none_or(|spec| spec.parts().count() != 1) {
            return Err(Failure::usage("--scratch-offset is a place on one device: name exactly one with --pool"));
        }
        self.judge_cpu_and_system();
        let Some(spec) = spec else {
            self.report.find(Level::Note, "no pool was named, so ordinary memory in /dev/shm was measured: name the devices with --pool");
            let scratch = Scratch::file(Path::new("/dev/shm"), self.args.scratch_bytes)?;
            let mut report = DeviceReport { name: "/dev/shm (no pool named: ordinary memory)".into(), ..DeviceReport::default() };
            self.measure(&mut report, &scratch)?;
            self.report.devices.push(report);
            self.examine_gpu(Some(&scratch).filter(|_| !self.args.look));
            return Ok(());
        };
        let mut infos = Vec::new();
        for part in spec.parts() {
            let (device, info) = self.examine_device(&part, &sysfs)?;
            self.report.devices.push(device);
            infos.extend(info);
        }
        // Where nothing may be written.
        self.examine_gpu(None);
        if infos.len() == spec.parts().count() {
            // How much of its device the metadata takes, only a format knows; blocks do not wait for it.
            let metadata_bytes = spec.metadata().map_or(0, |_| infos.remove(0).unit_bytes());
            self.judge_together(&infos, spec.size_bytes(), metadata_bytes);
        }
        Ok(())
    }

    /// What there is to say of a GPU, on scratch memory if there is some.
    fn examine_gpu(&mut self, scratch: Option<&Scratch>) {
        let Some(device) = self.args.gpu.filter(|_| self.report.gpu.is_none()) else { return };
        let report = match GpuReport::of(device, scratch.map(|scratch| (scratch, &self.options))) {
            Ok(report) => report,
            Err(error) => {
                let advice =
                    "install NVIDIA's driver for this kernel, let a container see it (--gpus all), or name it with CXL_CUDA_LIBRARY";
                let advice = if matches!(error, Error::NotFound(_)) { format!(": {advice}") } else { String::new() };
                return self.report.find(Level::Error, format!("GPU {device}: {error}{advice}"));
            }
        };
        if let Some(refusal) = &report.refusal {
            self.report.find(Level::Warning, format!("{refusal}; until then blocks go through pinned buffers and a CPU"));
        }
        if let Some(reason) = &report.no_kernels {
            let text = format!("GPU {device}: no kernels, so blocks with checksums go through pinned buffers and a CPU: {reason}");
            self.report.find(Level::Warning, text);
        }
        if report.dma != Dma::Cached.text() && self.args.peer_role.is_none() {
            self.report.find(
                Level::Warning,
                "CXL_CUDA_DMA=uncached is right only where the pool's memory is uncacheable on this host and DDIO is off, which one \
                 host cannot show: run `cxlctl doctor --gpu --peer-role a` here and `--peer-role b` on another host \
                 (docs/internals/gpu.md)",
            );
        }
        self.report.gpu = Some(report);
    }

    fn judge_cpu_and_system(&mut self) {
        let report = &mut self.report;
        if !report.cpu.movdir64b && !report.cpu.avx512 {
            report.find(
                Level::Warning,
                "this CPU has no 64-byte store (MOVDIR64B, AVX-512): lines are written by stores and a flush, and may be \
                 seen half written; \
                 the checksum shows it and they are fetched again",
            );
        }
        if cfg!(target_arch = "x86_64") && !report.cpu.clflushopt {
            report.find(Level::Warning, "this CPU has no CLFLUSHOPT: flushes of payload do not overlap, reads of blocks are slow");
        }
        if let Some((_, free)) = report.system.shm_bytes.filter(|&(_, free)| free < LEAST_SHM_BYTES) {
            let free = bytes(free);
            report.find(Level::Warning, format!("only {free} are free in /dev/shm, where a host keeps its local state: make it larger"));
        }
        if report.system.shm_bytes.is_none() {
            report.find(Level::Warning, "/dev/shm is not there: mount a tmpfs on it, or set CXL_STATE_DIR to a directory in memory");
        }
        for (name, binding) in dax_devices(&self.args.sysfs) {
            if let Some(advice) = binding.advice(&name) {
                self.report.find(Level::Note, advice);
            }
        }
    }

    fn examine_device(&mut self, part: &DevicePart, sysfs: &Sysfs) -> Result<(DeviceReport, Option<DeviceInfo>)> {
        let (path, mut report) = (&part.path, DeviceReport { name: part.to_string(), ..DeviceReport::default() });
        let node = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let bindings = dax_devices(&self.args.sysfs);
        report.dax_binding = bindings.into_iter().find(|(name, _)| *name == node && path.starts_with("/dev")).map(|(_, binding)| binding);
        let device = match part.open(Access::Read, sysfs) {
            Ok(device) => device,
            Err(error) => {
                let advice = report.dax_binding.as_ref().and_then(|binding| binding.advice(&node));
                self.report.find(Level::Error, advice.map_or(error.to_string(), |advice| format!("{error} ({advice})")));
                return Ok((report, None));
            }
        };
        let info = device.info().clone();
        report.kind = Some(format!("{:?}", info.kind));
        report.len_bytes = Some(info.len_bytes);
        report.align_bytes = Some(info.align_bytes);
        report.numa_node = info.numa_node;
        report.node_cpus = info.numa_node.and_then(|node| sysfs.node_cpus(node).ok()).map(|cpus| cpus.to_string());
        report.cpu_node = info.numa_node.and_then(|node| sysfs.nearest_with_cpus(node));
        match CpuBinding::from_env().and_then(|binding| sysfs.resolve(&binding, info.numa_node)) {
            Ok(binding) => report.threads = Some(binding.to_string()),
            Err(error) => self.report.find(Level::Error, error.to_string()),
        }
        report.offset_bytes = info.offset_bytes;
        match header_of(&device) {
            Ok(found) => report.holds = Some(found.to_string()),
            Err(error) => self.report.find(Level::Error, error.to_string()),
        }
        match pools_on(&device) {
            Ok(pools) => self.judge_neighbours(&mut report, &info, pools),
            Err(error) => self.report.find(Level::Error, error.to_string()),
        }
        if let Err(error) = part.open(Access::Write, sysfs) {
            self.report.find(Level::Error, format!("this user may only read it: {error}"));
            return Ok((report, Some(info)));
        }
        if info.kind == DeviceKind::Hugetlb && self.report.system.huge_pages.is_some_and(|(_, total, _)| total == 0) {
            self.report.find(Level::Error, "a device is on hugetlbfs, but there are no huge pages: raise vm.nr_hugepages");
        }
        if let Some(huge) = bytes_in_huge_pages(&device).filter(|&huge| huge < info.len_bytes / 2) {
            let (huge, all) = (bytes(huge), bytes(info.len_bytes));
            self.report.find(
                Level::Note,
                format!(
                    "{}: {huge} of {all} lie in huge pages, so that small blocks take longer than they need: a file that format makes has \
                     such pages where the system gives them (Linux 6.1, shmem_enabled not deny)",
                    info.name
                ),
            );
        }
        if !self.args.look {
            match Scratch::beside(part, self.args.scratch_offset, self.args.scratch_bytes, self.args.force, sysfs) {
                Ok(Ok(scratch)) => {
                    self.measure(&mut report, &scratch)?;
                    // Another host may use the memory.
                    self.examine_gpu(Some(&scratch).filter(|_| self.args.peer_role.is_none()));
                }
                Ok(Err(reason)) => self.report.find(Level::Note, format!("{}: not measured: {reason}", info.name)),
                Err(error) => self.report.find(Level::Error, error.to_string()),
            }
        }
        Ok((report, Some(info)))
    }

    /// The pools that lie on the device of a part, and whether one of them is in its way.
    fn judge_neighbours(&mut self, report: &mut DeviceReport, info: &DeviceInfo, pools: Vec<PoolOnDevice>) {
        let in_the_way = |pool: &&PoolOnDevice| pool.offset_bytes < info.offset_bytes && info.offset_bytes < pool.end();
        if let Some(pool) = pools.iter().find(in_the_way) {
            self.report.find(
                Level::Error,
                format!(
                    "{}: offset={} lies within the pool {}, which begins at offset={} and has {} bytes: a format is refused there",
                    info.name,
                    info.offset_bytes,
                    uuid_text(&pool.uuid),
                    pool.offset_bytes,
                    pool.len_bytes
                ),
            );
        }
        report.pools = pools.iter().map(FoundPool::of).collect();
    }

    /// What concerns all devices of the pool's payload at once; `metadata_bytes` of another one, or none.
    fn judge_together(&mut self, infos: &[DeviceInfo], size_bytes: Option<u64>, metadata_bytes: u64) {
        let sizes: Vec<u64> = infos.iter().map(|info| size_bytes.map_or(info.len_bytes, |size| size.min(info.len_bytes))).collect();
        let (limit, most) = (mapping_limit(), self.report.system.max_map_count);
        if let (Ok(stripes), true) = (Stripes::fit_behind(metadata_bytes, &sizes, DEFAULT_STRIPE_BYTES), infos.len() > 1) {
            let wanted = stripes.pieces_len();
            let text = format!("{wanted} mappings with stripes of {} bytes; half of vm.max_map_count is {limit}", stripes.stripe_bytes());
            match stripes.stripe_within(limit) {
                _ if wanted <= limit => self.report.find(Level::Note, format!("the pool takes {text}")),
                Some(fits) => {
                    self.report.find(Level::Note, format!("the pool would take {text}, so a format takes stripes of {fits} bytes"))
                }
                None => self.report.find(Level::Error, format!("the pool would take {text} ({most:?}): raise it")),
            }
        }
        let total: u64 = sizes.iter().sum();
        if let Some(limit) = self.report.system.memlock_bytes.filter(|&limit| limit < total) {
            self.report.find(
                Level::Note,
                format!(
                    "the memlock limit of {} is below the pool's {}: registering it with a NIC or GPU needs more (ulimit -l unlimited)",
                    bytes(limit),
                    bytes(total)
                ),
            );
        }
        let nodes: Vec<u32> = infos.iter().filter_map(|info| info.numa_node).collect();
        if nodes.windows(2).any(|pair| pair[0] != pair[1]) {
            self.report.find(
                Level::Note,
                format!("the devices are near different NUMA nodes ({nodes:?}): stripes make every block pay the farther one"),
            );
        }
    }

    /// Costs and visibility tests on memory that may be overwritten.
    fn measure(&mut self, report: &mut DeviceReport, scratch: &Scratch) -> Result<()> {
        if self.args.look {
            return Ok(());
        }
        report.scratch = Some((scratch.part().to_string(), scratch.offset(), scratch.len_bytes()));
        if self.args.peer_role.is_none() && self.options.emulator.is_none() {
            match costs::measure(scratch, self.args.rounds.div_ceil(100).clamp(1, 1000)) {
                Ok(costs) => report.costs = costs,
                Err(error) => self.report.find(Level::Error, format!("{}: {error}", report.name)),
            }
        }
        report.litmus = match self.args.peer_role {
            Some(role) => self.litmus(scratch, role),
            None => self.both_sides(scratch),
        };
        let name = report.name.clone();
        self.report.judge(&name, &report.litmus);
        Ok(())
    }

    /// One side of the visibility tests.
    fn litmus(&self, scratch: &Scratch, role: Role) -> Litmus {
        let timeout = Duration::from_millis(self.args.timeout_ms.max(1));
        let region = Scratch::region(scratch.part(), scratch.offset(), scratch.len_bytes(), &Sysfs::at(&self.args.sysfs));
        let met = region.and_then(|region| Party::meet(region, role, self.options, timeout));
        match met.map(|party| party.with_gpu(self.args.gpu)) {
            Err(error) => Litmus { error: Some(error.to_string()), ..Litmus::default() },
            Ok(mut party) if role == Role::B => Litmus::follow(&mut party, self.chosen),
            Ok(mut party) => {
                // The emulator has one way to do each step.
                let all = self.options.emulator.is_none();
                // On one host the caches are coherent with its own I/O: it would show nothing.
                let has_gpu = self.args.gpu.is_some() && self.args.peer_role.is_some();
                Litmus::lead(&mut party, &Trial::plan(self.chosen, all, has_gpu), self.args.rounds, self.chosen)
            }
        }
    }

    /// Both sides, each with a mapping of its own.
    fn both_sides(&self, scratch: &Scratch) -> Litmus {
        std::thread::scope(|scope| {
            // The checks of the other side come over with the result lines.
            scope.spawn(|| self.litmus(scratch, Role::B));
            self.litmus(scratch, Role::A)
        })
    }
}
