// SPDX-License-Identifier: Apache-2.0
//! On which CPUs the threads of the pool run: sets of CPUs, and how a configuration chooses them (TraCT section 4.4).
//!
//! `CXL_CPUS` says it for all threads, or for each kind, separated by semicolons; a kind that is not named keeps what the process has:
//!
//! ```text
//! CXL_CPUS=node:1
//! CXL_CPUS=copy=device;upkeep=0-1,16;workers=node:0
//! ```

use crate::error::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// The environment variable that [`CpuBinding::from_env`] reads.
pub const ENV_CPUS: &str = "CXL_CPUS";
/// The most CPU numbers a list may name; larger than any kernel's limit, so that a strange text cannot make us allocate.
const MAX_CPUS: usize = 1 << 16;

/// Some CPUs, by their numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuSet(Vec<u64>);

impl CpuSet {
    /// Reads the kernel's form of a list, such as `0-3,8,10-11`; none of anything else. An empty text is an empty set.
    pub fn parse(text: &str) -> Option<CpuSet> {
        let mut set = CpuSet::default();
        let mut next = 0;
        for part in text.trim().split(',').filter(|part| !part.is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last): (usize, usize) = (number(first)?, number(last)?);
            if first > last || last >= MAX_CPUS || first < next {
                return None;
            }
            next = last + 1;
            (first..=last).for_each(|cpu| set.insert(cpu));
        }
        Some(set)
    }

    fn insert(&mut self, cpu: usize) {
        let word = cpu / 64;
        if self.0.len() <= word {
            self.0.resize(word + 1, 0);
        }
        if let Some(bits) = self.0.get_mut(word) {
            *bits |= 1 << (cpu % 64);
        }
    }

    /// The numbers, rising.
    pub fn numbers(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.0.len() * 64).filter(|cpu| self.0.get(cpu / 64).is_some_and(|bits| bits >> (cpu % 64) & 1 == 1))
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|&bits| bits == 0)
    }

    /// The CPUs on which the calling thread may run.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn of_current_thread() -> Result<CpuSet> {
        let mut mask = vec![0u64; MAX_CPUS / 64];
        // SAFETY: the kernel writes at most the length given into `mask`.
        let len = unsafe { libc::syscall(libc::SYS_sched_getaffinity, 0, mask.len() * 8, mask.as_mut_ptr()) };
        let len = usize::try_from(len).map_err(|_| Error::last_os("asking for the CPUs of the thread"))?;
        mask.truncate(len / 8);
        Ok(CpuSet(mask))
    }

    /// Lets the calling thread run only on these CPUs.
    ///
    /// # Errors
    /// [`Error::Invalid`] for none, and where none of them is there and allowed to this process.
    pub fn bind_current_thread(&self) -> Result<()> {
        // The kernel takes a mask of any length, so machines beyond the 1024 CPUs of cpu_set_t work too.
        // SAFETY: the pointer and the length describe the words of the mask, which outlives the call; the kernel only reads them.
        if !self.is_empty() && unsafe { libc::sched_setaffinity(0, self.0.len() * 8, self.0.as_ptr().cast()) } == 0 {
            return Ok(());
        }
        let error = std::io::Error::last_os_error();
        let why = if self.is_empty() { "there are none".into() } else { error.to_string() };
        Err(Error::Invalid(format!(
            "threads cannot be bound to the CPUs {self} ({why}): name such as this machine has and this process may use (cxlctl doctor)"
        )))
    }

    /// The same, tried by a thread that ends: nothing of this process is bound by it.
    ///
    /// # Errors
    /// Those of [`CpuSet::bind_current_thread`]; [`Error::Os`] when no thread can start.
    pub fn check(&self) -> Result<()> {
        std::thread::scope(|scope| {
            let tried = std::thread::Builder::new().spawn_scoped(scope, || self.bind_current_thread());
            let tried = tried.map_err(|source| Error::Os { what: "starting a thread to try CPUs".into(), source })?;
            tried.join().unwrap_or_else(|_| Err(Error::Invalid(format!("the CPUs {self} cannot be tried"))))
        })
    }
}

/// Digits alone: no sign, as the kernel writes them.
fn number(text: &str) -> Option<usize> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut runs: Vec<(usize, usize)> = Vec::new();
        for cpu in self.numbers() {
            match runs.last_mut() {
                Some((_, last)) if *last + 1 == cpu => *last = cpu,
                _ => runs.push((cpu, cpu)),
            }
        }
        let text = |&(first, last): &(usize, usize)| if first == last { format!("{first}") } else { format!("{first}-{last}") };
        f.write_str(&runs.iter().map(text).collect::<Vec<_>>().join(","))
    }
}

/// What the threads of the pool are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadKind {
    /// They help callers to copy blocks.
    Copy,
    /// Heartbeat, the manager's work, upkeep of cache and allocator, rings.
    Upkeep,
    /// Workers of programs above: NIXL transfers, the connector's publishes and pulls.
    Worker,
}

impl ThreadKind {
    /// All of them, with their names.
    pub const ALL: [(ThreadKind, &'static str); 3] = [(Self::Copy, "copy"), (Self::Upkeep, "upkeep"), (Self::Worker, "workers")];
}

/// Where threads of one kind run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum CpuChoice {
    /// Where the process does.
    #[default]
    Any,
    /// On the CPUs of the node that the pool's first device belongs to, or of the nearest that has any; anywhere when that is not known.
    Device,
    /// On those of this NUMA node.
    Node(u32),
    /// On these.
    Set(CpuSet),
}

impl FromStr for CpuChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = || {
            Error::Invalid(format!(
                "{ENV_CPUS}: {text:?} names no CPUs: want any, device, node:N, or a list in rising order such as 0-3,8; for each kind of \
                 threads copy=...;upkeep=...;workers=..."
            ))
        };
        match text.trim() {
            "any" => Ok(CpuChoice::Any),
            "device" => Ok(CpuChoice::Device),
            other => match other.strip_prefix("node:") {
                Some(node) => Ok(CpuChoice::Node(number(node).and_then(|node| node.try_into().ok()).ok_or_else(wrong)?)),
                None => CpuSet::parse(other).filter(|set| !set.is_empty()).map(CpuChoice::Set).ok_or_else(wrong),
            },
        }
    }
}

impl fmt::Display for CpuChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CpuChoice::Any => f.write_str("any"),
            CpuChoice::Device => f.write_str("device"),
            CpuChoice::Node(node) => write!(f, "node:{node}"),
            CpuChoice::Set(set) => set.fmt(f),
        }
    }
}

/// Where the threads of each kind run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuBinding([CpuChoice; ThreadKind::ALL.len()]);

impl CpuBinding {
    /// What `CXL_CPUS` says; without it, threads run where the process does.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the part that is wrong.
    pub fn from_env() -> Result<Self> {
        match std::env::var(ENV_CPUS) {
            Ok(text) => text.parse(),
            Err(std::env::VarError::NotPresent) => Ok(Self::default()),
            Err(error) => Err(Error::Invalid(format!("{ENV_CPUS}: {error}"))),
        }
    }

    /// Where threads of a kind run.
    pub fn of(&self, kind: ThreadKind) -> &CpuChoice {
        &self.0[kind as usize]
    }

    /// The same with every choice replaced.
    ///
    /// # Errors
    /// The first of `replace`.
    pub fn map(&self, mut replace: impl FnMut(&CpuChoice) -> Result<CpuChoice>) -> Result<CpuBinding> {
        let [copy, upkeep, workers] = &self.0;
        Ok(CpuBinding([replace(copy)?, replace(upkeep)?, replace(workers)?]))
    }

    /// The set that threads of a kind are bound to; none where they run anywhere, and before the choices were replaced by sets.
    pub fn set_of(&self, kind: ThreadKind) -> Option<&CpuSet> {
        match self.of(kind) {
            CpuChoice::Set(set) => Some(set),
            _ => None,
        }
    }

    /// Binds the calling thread as one of a kind.
    ///
    /// # Errors
    /// Those of [`CpuSet::bind_current_thread`].
    pub fn bind_current_thread(&self, kind: ThreadKind) -> Result<()> {
        self.set_of(kind).map_or(Ok(()), CpuSet::bind_current_thread)
    }
}

impl FromStr for CpuBinding {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if !text.contains('=') {
            let all: CpuChoice = text.parse()?;
            return Ok(CpuBinding([all.clone(), all.clone(), all]));
        }
        let mut binding = CpuBinding::default();
        let mut named = Vec::new();
        for pair in text.split(';').map(str::trim).filter(|pair| !pair.is_empty()) {
            let kind = pair
                .split_once('=')
                .and_then(|(kind, cpus)| ThreadKind::ALL.iter().find(|(_, name)| *name == kind.trim()).map(|(kind, _)| (*kind, cpus)));
            let Some((kind, cpus)) = kind else {
                return Err(Error::Invalid(format!("{ENV_CPUS}: {pair:?} names no kind of threads: want copy=, upkeep= or workers=")));
            };
            if named.contains(&kind) {
                return Err(Error::Invalid(format!("{ENV_CPUS}: {text:?} names a kind of threads twice")));
            }
            named.push(kind);
            binding.0[kind as usize] = cpus.parse()?;
        }
        Ok(binding)
    }
}

impl fmt::Display for CpuBinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (kind, name)) in ThreadKind::ALL.into_iter().enumerate() {
            write!(f, "{}{name}={}", if index == 0 { "" } else { ";" }, self.of(kind))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
