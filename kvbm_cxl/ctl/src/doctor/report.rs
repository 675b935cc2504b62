// SPDX-License-Identifier: Apache-2.0
//! What the doctor says: findings, verdict, and the text for people.

use super::costs::Cost;
use super::gpu::GpuReport;
use super::litmus::{Litmus, Test, TrialReport};
use super::system::{Cpu, DaxBinding, System};
use crate::stats::{columns, time_text};
use crate::text::bytes;
use cxl_pool::media::uuid_text;
use cxl_pool::pool::PoolOnDevice;
use serde::Serialize;
use std::fmt::Write;

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    Note,
    /// It works, but something should be changed.
    Warning,
    /// It cannot be used like this.
    Error,
}

/// Something that was noticed, and what to do about it.
#[derive(Debug, Serialize)]
pub struct Finding {
    pub level: Level,
    pub text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    Ok,
    /// Usable, with warnings.
    WorksBut,
    /// Not usable until the errors are gone.
    NotUsable,
}

/// A pool on a device.
#[derive(Debug, Serialize)]
pub struct FoundPool {
    pub uuid: String,
    pub offset_bytes: u64,
    pub len_bytes: u64,
    pub is_readable: bool,
}

impl FoundPool {
    pub fn of(pool: &PoolOnDevice) -> FoundPool {
        let PoolOnDevice { offset_bytes, len_bytes, is_readable, .. } = *pool;
        FoundPool { uuid: uuid_text(&pool.uuid), offset_bytes, len_bytes, is_readable }
    }
}

/// A device, or the scratch memory in its place.
#[derive(Debug, Default, Serialize)]
pub struct DeviceReport {
    pub name: String,
    /// `Devdax`, `Hugetlb`, `File`; none when it could not be opened.
    pub kind: Option<String>,
    pub len_bytes: Option<u64>,
    /// What mappings are multiples of, in bytes.
    pub align_bytes: Option<u64>,
    pub numa_node: Option<u32>,
    /// The CPUs of that node; empty for one that has memory alone.
    pub node_cpus: Option<String>,
    /// The nearest node that has CPUs.
    pub cpu_node: Option<u32>,
    /// Where CXL_CPUS has the threads of each kind run, for a pool that begins with this device: `any`, or a list of CPUs.
    pub threads: Option<String>,
    /// The driver of a devdax node.
    pub dax_binding: Option<DaxBinding>,
    /// What its header holds.
    pub holds: Option<String>,
    /// Where on the device the part begins that was named, in bytes.
    pub offset_bytes: u64,
    /// The pools that lie side by side on the device.
    pub pools: Vec<FoundPool>,
    /// Where was measured: path, offset, bytes. None where nothing was written.
    pub scratch: Option<(String, u64, u64)>,
    /// Costs of the instructions; empty when they were not measured.
    pub costs: Vec<Cost>,
    pub litmus: Litmus,
}

/// Everything.
#[derive(Debug, Serialize)]
pub struct Report {
    pub verdict: Verdict,
    /// What leads to it.
    pub findings: Vec<Finding>,
    pub cpu: Cpu,
    pub memory: String,
    pub system: System,
    pub devices: Vec<DeviceReport>,
    /// A GPU; none when it was not asked for, or could not be examined.
    pub gpu: Option<GpuReport>,
    /// What these tests cannot say.
    pub cannot_tell: Vec<&'static str>,
}

/// What a run on one machine leaves open.
pub const ONE_HOST: [&str; 3] = [
    "Both sides ran on this machine, whose caches are coherent: a flush or fence that does too little does not show here.",
    "Whether a published line is at the device before a following fetch is answered (the store-buffering test) is a property of the path \
     from each host to the device: only two hosts can show it.",
    "Run the same tests on two hosts that share the device: `cxlctl doctor --pool /dev/daxX.Y --scratch-offset OFFSET --peer-role a` \
     on one, \
     `--peer-role b` on the other, with an OFFSET that neither uses for anything else.",
];

/// What a run on two hosts leaves open.
pub const TWO_ROLES: [&str; 2] = [
    "The two roles tell nothing about caches unless they ran on two hosts: this program cannot see where the other one ran.",
    "No violation in these rounds bounds how often one occurs; it is no proof that none can. Faults of the fabric and power loss were not \
     tested.",
];

/// What a run on two hosts leaves open where no GPU had a part.
pub const NO_GPU: [&str; 1] = ["DMA of a GPU was not tested: give `--gpu` to the side with role a, and to each other one that has a GPU."];

impl Report {
    /// Notes something.
    pub fn find(&mut self, level: Level, text: impl Into<String>) {
        self.findings.push(Finding { level, text: text.into() });
    }

    /// Derives the verdict from the findings.
    pub fn conclude(&mut self) {
        self.findings.sort_by_key(|finding| std::cmp::Reverse(finding.level));
        self.verdict = match self.findings.first().map(|finding| finding.level) {
            Some(Level::Error) => Verdict::NotUsable,
            Some(Level::Warning) => Verdict::WorksBut,
            _ => Verdict::Ok,
        };
    }

    /// What the visibility tests of a device mean.
    pub fn judge(&mut self, name: &str, litmus: &Litmus) {
        if let Some(error) = &litmus.error {
            self.find(Level::Error, format!("{name}: the visibility tests stopped: {error}"));
        }
        let failed = |trial: &&TrialReport| trial.outcome.violations > 0;
        for trial in litmus.trials.iter().filter(failed) {
            let what = trial.outcome.first.map_or("a check failed", |violation| violation.name());
            let (failures, checks, test) = (trial.outcome.violations, trial.outcome.checks, trial.test.name());
            let text = format!("{name}: {test} with {}: {what} ({failures} failures in {checks} checks)", trial.instructions);
            if !trial.is_chosen {
                self.find(Level::Warning, format!("{text}: never choose these instructions here"));
                continue;
            }
            let other = litmus.trials.iter().find(|other| other.test == trial.test && other.outcome.violations == 0);
            let reads_back = litmus.trials.iter().any(|other| other.test == Test::BufferingReadBack && other.outcome.violations == 0);
            let advice = match other {
                Some(other) => format!("set CXL_COHERENCE=native:{}, which passed", other.instructions),
                None if trial.test == Test::Buffering && reads_back => {
                    "it passes where each side reads its own line back in between, which the pool does not do: do not use this platform"
                        .into()
                }
                None if trial.test == Test::GpuPayload => {
                    "I/O of a GPU goes through caches that were taken for none: set CXL_CUDA_DMA=cached on \
                                                           both hosts; where it fails with that, keep GPUs away from this memory \
                                                           (CXL_CUDA_LIBRARY=none)"
                        .into()
                }
                None => "no choice of instructions passed: do not use this memory for a pool".into(),
            };
            self.find(Level::Error, format!("{text}: {advice}"));
        }
        let torn =
            litmus.trials.iter().filter(|trial| trial.is_chosen && trial.outcome.torn > 0).map(|trial| trial.outcome.torn).sum::<u64>();
        if torn > 0 {
            let text = "lines were seen half written: their checksum shows it and they are fetched again, which costs time";
            self.find(Level::Warning, format!("{name}: {torn} {text}; prefer write=movdir64b or write=avx512 where the CPU has it"));
        }
        let blunt = |trial: &&TrialReport| {
            trial.test == Test::Buffering && trial.is_chosen && trial.outcome.checks > 0 && trial.outcome.overlapping == 0
        };
        if litmus.trials.iter().any(|trial| blunt(&trial)) {
            self.find(
                Level::Note,
                format!("{name}: the two sides never published at the same moment, so the store-buffering test says little: run it again"),
            );
        }
    }

    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a String does not fail.
        let _ = self.write_text(&mut text);
        text
    }

    fn write_text(&self, text: &mut String) -> std::fmt::Result {
        let Cpu { model, is_virtual, movdir64b, avx512, avx2, clflushopt, clwb, line_bytes, .. } = &self.cpu;
        writeln!(text, "CPU      {model}{}", if *is_virtual { " (virtual machine)" } else { "" })?;
        let features = [("MOVDIR64B", movdir64b), ("AVX-512", avx512), ("AVX2", avx2), ("CLFLUSHOPT", clflushopt), ("CLWB", clwb)];
        let features = features.map(|(name, has)| format!("{name} {}", if *has { "yes" } else { "no" }));
        writeln!(text, "         line {line_bytes} B, {}", features.join(", "))?;
        writeln!(text, "memory   {}", self.memory)?;
        let System { kernel, huge_pages, memlock_bytes, max_map_count, shm_bytes } = &self.system;
        writeln!(text, "kernel   {}", kernel.as_deref().unwrap_or("unknown"))?;
        if let Some((size, total, free)) = huge_pages {
            writeln!(text, "         huge pages of {}: {total}, {free} free", bytes(*size))?;
        }
        writeln!(text, "         memlock limit {}", memlock_bytes.map_or("none".into(), bytes))?;
        writeln!(text, "         vm.max_map_count {}", max_map_count.map_or("unknown".into(), |count| count.to_string()))?;
        if let Some((size, free)) = shm_bytes {
            writeln!(text, "         /dev/shm {}, {} free", bytes(*size), bytes(*free))?;
        }
        for device in &self.devices {
            device.write_text(text)?;
        }
        if let Some(gpu) = &self.gpu {
            gpu.write_text(text)?;
        }
        writeln!(text, "\nWhat this run cannot tell")?;
        self.cannot_tell.iter().try_for_each(|line| writeln!(text, "  - {line}"))?;
        writeln!(text, "\nFindings")?;
        if self.findings.is_empty() {
            writeln!(text, "  none")?;
        }
        for finding in &self.findings {
            let level = match finding.level {
                Level::Error => "ERROR  ",
                Level::Warning => "warning",
                Level::Note => "note   ",
            };
            writeln!(text, "  {level} {}", finding.text)?;
        }
        let verdict = match self.verdict {
            Verdict::Ok => "ok",
            Verdict::WorksBut => "works, but see the warnings",
            Verdict::NotUsable => "not usable: see the errors",
        };
        writeln!(text, "\nVerdict  {verdict}")
    }
}

impl DeviceReport {
    fn write_text(&self, text: &mut String) -> std::fmt::Result {
        writeln!(text, "\n{}", self.name)?;
        let mut facts = Vec::new();
        facts.extend(self.kind.clone());
        facts.extend(self.len_bytes.map(bytes));
        facts.extend(self.align_bytes.map(|align| format!("aligned to {}", bytes(align))));
        facts.extend(self.numa_node.map(|node| match (&self.node_cpus, self.cpu_node) {
            (Some(cpus), _) if !cpus.is_empty() => format!("NUMA node {node} (CPUs {cpus})"),
            (_, Some(near)) => format!("NUMA node {node} (memory alone; the nearest with CPUs is node {near})"),
            _ => format!("NUMA node {node}"),
        }));
        facts.extend(self.dax_binding.as_ref().map(|binding| format!("{binding:?}")));
        facts.extend(self.holds.as_ref().map(|holds| format!("holds {holds}")));
        if !facts.is_empty() {
            writeln!(text, "  {}", facts.join(", "))?;
        }
        for pool in self.pools.iter().filter(|pool| self.pools.len() > 1 || pool.offset_bytes != self.offset_bytes) {
            let state = if pool.is_readable { bytes(pool.len_bytes) } else { "cannot be read".into() };
            writeln!(text, "  at offset={} the pool {}, {state}", pool.offset_bytes, pool.uuid)?;
        }
        if let Some(threads) = &self.threads {
            writeln!(text, "  threads of the pool run on {threads}")?;
        }
        if let Some((path, offset, len_bytes)) = &self.scratch {
            writeln!(text, "  measured on {path}, {} from {offset:#x}", bytes(*len_bytes))?;
        }
        if !self.costs.is_empty() {
            let mut rows = vec![["cost of", "instruction", "time"].map(String::from).to_vec()];
            rows.extend(self.costs.iter().map(|cost| vec![cost.step.into(), cost.instruction.into(), time_text(cost.ns)]));
            text.push_str(&columns(&rows));
        }
        if !self.litmus.trials.is_empty() {
            let header = ["visibility test", "checks", "overlapping", "torn", "violations", "instructions"];
            let mut rows = vec![header.map(String::from).to_vec()];
            rows.extend(self.litmus.trials.iter().map(|trial| {
                let outcome = &trial.outcome;
                let numbers = [outcome.checks, outcome.overlapping, outcome.torn, outcome.violations].map(|number| number.to_string());
                let chosen = if trial.is_chosen { "* " } else { "" };
                std::iter::once(trial.test.name().into()).chain(numbers).chain([format!("{chosen}{}", trial.instructions)]).collect()
            }));
            text.push_str(&columns(&rows));
            writeln!(text, "  (* = the instructions in force)")?;
        }
        Ok(())
    }
}
