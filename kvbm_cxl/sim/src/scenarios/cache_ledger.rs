// SPDX-License-Identifier: Apache-2.0
//! What the processes of a run published, pinned and filled, and the invariants over it (protocols/CACHE.md section 8).
//!
//! Every publication has bytes of its own, in every line of it, so that a reader of a mix of two, or the right bytes of another key, is
//! found out. The memory is looked at between two steps: the rules are about what it holds, not about what some host believes.

use crate::{Env, Random, SimHost, SimProcess, View};
use cxl_pool::cache::inspect::{Content, Look, Owned};
use cxl_pool::cache::{BlockKey, Namespace};
use cxl_pool::line::Lines;
use cxl_pool::media::{CHUNKS_PER_CELL_CLAIM, CellClaim, Descriptor, FenceLine, HintLine, Identity, MediaLine, PinLine, SLOTS_PER_FENCE};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;

/// What a scenario's threads share.
pub type Shared = Rc<RefCell<Ledger>>;

/// A block's name: namespace and key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Name(pub u8, pub u16);

impl Name {
    /// The namespace.
    pub fn namespace(self) -> Namespace {
        Namespace([self.0 + 1; 16])
    }

    /// The key.
    pub fn key(self) -> BlockKey {
        let mut key = [0x6b; 16];
        key[..2].copy_from_slice(&self.1.to_le_bytes());
        BlockKey(key)
    }

    fn of(found: &Descriptor) -> Self {
        Name::named(Namespace(found.namespace), BlockKey(found.key))
    }

    /// The name that has these as its namespace and key.
    pub fn named(namespace: Namespace, key: BlockKey) -> Self {
        Name(namespace.0[0].wrapping_sub(1), u16::from_le_bytes([key.0[0], key.0[1]]))
    }
}

/// One attempt to publish a block.
struct Publication {
    name: Name,
    bytes: Rc<[u8]>,
    /// Its commit was begun: from here on others may see it.
    committing: bool,
}

/// A process that may be writing the payload of a cell.
#[derive(Clone, Copy, Debug)]
struct Writer {
    cell: u64,
    process: SimProcess,
}

/// The store of all processes of a run below the pool: it outlives them, and returns the stored bytes or others.
#[derive(Default)]
pub struct SecondLevel {
    objects: BTreeMap<Name, (Vec<u8>, u64)>,
}

impl SecondLevel {
    fn sum(bytes: &[u8]) -> u64 {
        let mut hasher = DefaultHasher::new();
        bytes.hash(&mut hasher);
        hasher.finish()
    }

    /// Keeps a block, with its checksum: cut short where `damage` is 0, with one bit changed where it is 1, both as `place` says.
    pub fn put(&mut self, name: Name, mut bytes: Vec<u8>, damage: usize, place: usize) {
        let (sum, place) = (Self::sum(&bytes), place % bytes.len().max(1));
        match (damage, bytes.get_mut(place)) {
            (0, _) => bytes.truncate(place),
            (1, Some(byte)) => *byte ^= 1 << (place % 8),
            _ => {}
        }
        self.objects.insert(name, (bytes, sum));
    }

    /// One of its blocks, as `place` says, whose checksum is right; one that is not goes.
    pub fn get(&mut self, place: usize) -> Option<(Name, Vec<u8>)> {
        let (&name, (bytes, sum)) = self.objects.iter().nth(place % self.objects.len().max(1))?;
        if Self::sum(bytes) == *sum {
            return Some((name, bytes.clone()));
        }
        self.objects.remove(&name);
        None
    }
}

/// A confirmed pin.
struct Held {
    ticket: u64,
    cell: u64,
    offset: u64,
    bytes: Rc<[u8]>,
    process: SimProcess,
    slot: u16,
    incarnation: u32,
    /// The step in which it was confirmed.
    step: u64,
}

impl std::fmt::Debug for Held {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "by {:?} as {}/{} since step {}", self.process, self.slot, self.incarnation, self.step)
    }
}

/// Everything recorded so far.
#[derive(Default)]
pub struct Ledger {
    publications: Vec<Publication>,
    by_name: BTreeMap<Name, Vec<usize>>,
    writers: Vec<Writer>,
    pins: Vec<Held>,
    tickets: u64,
    looks: BTreeMap<SimProcess, Look>,
    /// The store below the pool.
    pub second_level: SecondLevel,
    /// Which of the processes are through: machine, and whether.
    pub done: BTreeMap<usize, (SimHost, bool)>,
    /// The last start of each process.
    pub starts: BTreeMap<usize, SimProcess>,
    /// Slot of each host, as it last joined.
    pub slots: BTreeMap<SimHost, u16>,
    /// The machine that does not come back once it is down.
    pub victim: Option<SimHost>,
    /// Rounds of upkeep that each process got through.
    pub rounds: BTreeMap<SimProcess, u64>,
    /// A process was started again.
    pub restarted: bool,
    /// A process closed its cache, or left the pool.
    pub moved: bool,
    /// All leftovers are adopted.
    pub settled: bool,
    /// Work that remains before that.
    pub waits: Option<String>,
    /// Blocks that were stored while nothing in the run ever takes one away.
    pub stored: BTreeSet<Name>,
    /// Blocks that were begun or stored, pulls that hit, and pins that were confirmed.
    pub counts: (u64, u64, u64),
}

/// Whether any seat's row fences (slot, incarnation) in the memory itself.
pub fn is_fenced(view: &View<'_>, slot: u16, incarnation: u32) -> bool {
    let geometry = *view.layout().geometry();
    (0..geometry.all_seats()).any(|seat| {
        let line = seat * geometry.fence_lines() + u64::from(slot) / SLOTS_PER_FENCE as u64;
        view.peek::<FenceLine>(line).fenced[usize::from(slot) % SLOTS_PER_FENCE] >= incarnation
    })
}

/// Whether an incarnation of a slot is no more: fenced, left, or followed by another.
fn is_over(view: &View<'_>, slot: u16, incarnation: u32) -> bool {
    let identity = view.peek::<Identity>(slot.into());
    is_fenced(view, slot, incarnation) || identity.incarnation > incarnation || identity.state == Identity::LEFT
}

/// The line of a cell, unless it is being written.
fn descriptor(view: &View<'_>, lines: &Lines, cell: u64) -> Option<Descriptor> {
    let offset = view.layout().line_offset(Descriptor::REGION, cell).ok()?;
    lines.open::<Descriptor>(cell, &view.line(offset)).ok()
}

/// What the memory holds in a range that begins with a line.
fn bytes_at(view: &View<'_>, offset: u64, len_bytes: usize) -> Vec<u8> {
    let lines = (0..len_bytes.div_ceil(64) as u64).flat_map(|line| view.line(offset + line * 64).0);
    lines.take(len_bytes).collect()
}

/// The payload of publication `number`: no line of it is like any of another publication.
fn payload(number: usize, name: Name, len_bytes: usize) -> Rc<[u8]> {
    let mut random = Random::new((number as u64) << 32 | u64::from(name.0) << 16 | u64::from(name.1));
    let words = (0..len_bytes.div_ceil(8)).flat_map(|_| random.next().to_le_bytes());
    words.take(len_bytes).collect::<Vec<u8>>().into()
}

impl Ledger {
    /// A publication of `len_bytes` is about to be tried; returns its number and bytes.
    pub fn publication(&mut self, name: Name, len_bytes: usize) -> (usize, Rc<[u8]>) {
        let number = self.publications.len();
        let bytes = payload(number, name, len_bytes);
        self.publications.push(Publication { name, bytes: bytes.clone(), committing: false });
        self.by_name.entry(name).or_default().push(number);
        (number, bytes)
    }

    /// Its commit begins.
    pub fn commits(&mut self, number: usize) {
        if let Some(publication) = self.publications.get_mut(number) {
            publication.committing = true;
        }
    }

    /// The publication of `name` that has these bytes and is visible.
    fn find(&self, name: Name, bytes: &[u8]) -> Option<&Publication> {
        let mut all = self.by_name.get(&name)?.iter().map(|&number| &self.publications[number]);
        all.find(|publication| publication.committing && *publication.bytes == *bytes)
    }

    /// What bytes are, for a message.
    fn explain(&self, bytes: &[u8]) -> String {
        let of_line = |(index, line): (usize, &[u8])| {
            let holds =
                |publication: &&Publication| publication.bytes.get(index * 64..index * 64 + line.len()).is_some_and(|of| of == line);
            match self.publications.iter().find(holds) {
                Some(found) => format!("line {index} of {:?} (committing: {})", found.name, found.committing),
                None => format!("line {index} of no publication"),
            }
        };
        bytes.chunks(64).enumerate().map(of_line).collect::<Vec<_>>().join(", ")
    }

    /// Bytes that were accepted for a block. Checks P1.
    pub fn accepted(&mut self, env: &Env, name: Name, bytes: &[u8], how: &str) {
        self.counts.1 += 1;
        if self.find(name, bytes).is_none() {
            env.fail(format!("P1: {how} of {name:?} gave {} bytes of no publication: {}", bytes.len(), self.explain(bytes)));
        }
    }

    /// A process has reserved a cell and may write to it from here on. Checks P3.
    pub fn writes(&mut self, env: &Env, cell: u64, name: Name) {
        self.counts.0 += 1;
        self.writers.retain(|writer| env.view(|view| view.is_alive(writer.process)));
        if let Some(other) = self.writers.iter().find(|writer| writer.cell == cell) {
            env.fail(format!("P3: {:?} may write cell {cell} for {name:?} while {other:?} may", env.process()));
        }
        self.writers.push(Writer { cell, process: env.process() });
    }

    /// It writes no more.
    pub fn wrote(&mut self, env: &Env, cell: u64) {
        self.writers.retain(|writer| writer.cell != cell || writer.process != env.process());
    }

    /// A pin was confirmed; the result names it. Checks P2 as of now.
    #[allow(clippy::too_many_arguments)]
    pub fn pinned(&mut self, env: &Env, name: Name, cell: u64, offset: u64, len_bytes: u64, slot: u16, incarnation: u32) -> u64 {
        self.counts.2 += 1;
        self.tickets += 1;
        let found = env.view(|view| (!is_fenced(view, slot, incarnation)).then(|| bytes_at(view, offset, len_bytes as usize)));
        if let Some(found) = found {
            match self.find(name, &found).map(|publication| publication.bytes.clone()) {
                Some(bytes) => {
                    let (process, step) = (env.process(), env.step());
                    self.pins.push(Held { ticket: self.tickets, cell, offset, bytes, process, slot, incarnation, step });
                }
                None => env.fail(format!("P2: cell {cell} was pinned for {name:?} and holds {}", self.explain(&found))),
            }
        }
        self.tickets
    }

    /// The pin of that ticket is about to be given back.
    pub fn unpins(&mut self, ticket: u64) {
        self.pins.retain(|held| held.ticket != ticket);
    }

    /// A process opened its cache.
    pub fn opened(&mut self, process: SimProcess, look: Look) {
        self.looks.insert(process, look);
    }

    /// P2: a pinned block is neither written nor freed while the reader's host is not fenced.
    pub fn pins_hold(&mut self, view: &View<'_>, lines: &Lines) -> Result<(), String> {
        self.pins.retain(|held| view.is_alive(held.process) && !is_fenced(view, held.slot, held.incarnation));
        for held in &self.pins {
            if bytes_at(view, held.offset, held.bytes.len()) != *held.bytes {
                return Err(format!("P2: cell {} was written, which is pinned {held:?}", held.cell));
            }
            let gone = |found: &Descriptor| {
                matches!(found.state, Descriptor::FREE | Descriptor::WRITING) && !is_fenced(view, found.owner, found.incarnation)
            };
            if let Some(found) = descriptor(view, lines, held.cell).filter(gone) {
                let (state, owner, incarnation) = (found.state_name(), found.owner, found.incarnation);
                return Err(format!("P2: cell {} is {state} by {owner}/{incarnation}, and pinned {held:?}", held.cell));
            }
        }
        Ok(())
    }

    /// INV: a cell that is READY by an owner that is not fenced holds one publication of its key, complete.
    pub fn ready_is_whole(&self, view: &View<'_>, lines: &Lines) -> Result<(), String> {
        for cell in 0..view.layout().geometry().cell_count() {
            let ready = |found: &Descriptor| {
                matches!(found.state, Descriptor::READY | Descriptor::EVICTING) && !is_fenced(view, found.owner, found.incarnation)
            };
            let Some(found) = descriptor(view, lines, cell).filter(ready) else { continue };
            let offset = view.layout().cell(cell).map_err(|error| error.to_string())?.0;
            let bytes = bytes_at(view, offset, found.len_bytes as usize);
            if self.find(Name::of(&found), &bytes).is_none() {
                let (name, owner, incarnation) = (Name::of(&found), found.owner, found.incarnation);
                return Err(format!("P1: cell {cell} is READY for {name:?} by {owner}/{incarnation} and holds {}", self.explain(&bytes)));
            }
        }
        Ok(())
    }

    /// What the living processes of hosts that are not fenced know of their cells.
    fn tables(&self, view: &View<'_>) -> Vec<(SimProcess, Owned)> {
        let living = self.looks.iter().filter(|(process, _)| view.is_alive(**process));
        let tables = living.filter_map(|(&process, look)| Some((process, look.owned()?)));
        tables.filter(|(_, owned)| !is_fenced(view, owned.slot, owned.incarnation)).collect()
    }

    /// P3: no cell is in the tables of two processes whose hosts are not fenced.
    pub fn one_owner(&self, view: &View<'_>) -> Result<(), String> {
        let mut owners: BTreeMap<u64, SimProcess> = BTreeMap::new();
        for (process, owned) in self.tables(view) {
            for (cell, _) in owned.cells {
                if let Some(other) = owners.insert(cell, process) {
                    return Err(format!("P3: cell {cell} is in the lists of {other:?} and of {process:?}"));
                }
            }
        }
        Ok(())
    }

    /// Whether up to now no host was fenced and nothing crashed.
    pub fn no_host_failed(&self, view: &View<'_>) -> bool {
        let geometry = *view.layout().geometry();
        let lines = geometry.all_seats() * geometry.fence_lines();
        !self.restarted
            && self.starts.values().all(|process| view.is_alive(*process))
            && (0..lines).all(|line| view.peek::<FenceLine>(line).fenced == [0; SLOTS_PER_FENCE])
    }

    /// The membership of the machine that is gone for good, by the identity line that it left.
    pub fn gone(&self, view: &View<'_>) -> Option<(u16, u32)> {
        let victim = self.victim.filter(|victim| !view.is_up(*victim))?;
        let slot = *self.slots.get(&victim)?;
        Some((slot, view.peek::<Identity>(slot.into()).incarnation))
    }

    /// Whether every process is through that is still there.
    pub fn all_done(&self, view: &View<'_>) -> bool {
        self.done.iter().all(|(index, (_, done))| *done || !self.starts.get(index).is_some_and(|process| view.is_alive(*process)))
    }

    /// Rounds of upkeep of each living process.
    pub fn rounds_of_living(&self, view: &View<'_>) -> BTreeMap<SimProcess, u64> {
        let living = self.starts.values().filter(|process| view.is_alive(**process));
        living.map(|&process| (process, self.rounds.get(&process).copied().unwrap_or(0))).collect()
    }

    /// P4: work that remains before every cell is in one list and no host has a pin; `None` if nothing remains.
    pub fn unsettled(&self, view: &View<'_>, lines: &Lines) -> Option<String> {
        let geometry = *view.layout().geometry();
        let living = self.looks.keys().filter(|process| view.is_alive(**process)).count();
        let tables = self.tables(view);
        if tables.len() < living {
            return Some(format!("{} processes of {living} follow an incarnation that is not fenced", tables.len()));
        }
        let mut owners: BTreeMap<u64, (SimProcess, u16)> = BTreeMap::new();
        for (process, owned) in &tables {
            if owned.pinned > 0 {
                return Some(format!("{process:?} has {} pins", owned.pinned));
            }
            for (cell, content) in &owned.cells {
                owners.insert(*cell, (*process, owned.slot));
                let found = descriptor(view, lines, *cell);
                // The late line of a fenced host may lie on that of the owner, who does not care.
                let foreign = found.is_none_or(|found| is_fenced(view, found.owner, found.incarnation));
                let fits = match content {
                    Content::Busy | Content::Quarantined => return Some(format!("cell {cell} of {process:?} is {content:?}")),
                    Content::Free => found.is_some_and(|found| found.state == Descriptor::FREE),
                    Content::Ready(known) => found.is_some_and(|found| Descriptor { crc: known.crc, ..found } == *known),
                };
                if !fits && !foreign {
                    return Some(format!("cell {cell} is {content:?} to {process:?}, but its line is {found:?}"));
                }
            }
        }
        self.claims_fit(view, lines, &owners).or_else(|| pins_left(view, geometry.slots.into()))
    }

    /// Every claimed chunk is in the table of a process, but for empty ones of hosts that are over; all chunks of the tables are claimed.
    fn claims_fit(&self, view: &View<'_>, lines: &Lines, owners: &BTreeMap<u64, (SimProcess, u16)>) -> Option<String> {
        let geometry = *view.layout().geometry();
        let per_chunk = u64::from(geometry.cells_per_chunk);
        for chunk in 0..geometry.cell_chunks() {
            let line = |slot: u64| view.peek::<CellClaim>(slot * geometry.cell_claim_lines() + chunk / CHUNKS_PER_CELL_CLAIM as u64);
            let is_claimed = |&slot: &u64| line(slot).has((chunk % CHUNKS_PER_CELL_CLAIM as u64) as usize);
            let claimants: Vec<u64> = (0..u64::from(geometry.slots)).filter(is_claimed).collect();
            let is_over = |&slot: &u64| is_over(view, slot as u16, line(slot).incarnation);
            let is_free = |cell| descriptor(view, lines, cell).is_some_and(|found| found.state == Descriptor::FREE);
            let may_wait = || claimants.iter().all(is_over) && (chunk * per_chunk..(chunk + 1) * per_chunk).all(is_free);
            match owners.get(&(chunk * per_chunk)) {
                Some((process, slot)) if !claimants.contains(&u64::from(*slot)) => {
                    return Some(format!("chunk {chunk} of {process:?} is claimed by {claimants:?}"));
                }
                None if !claimants.is_empty() && !may_wait() => {
                    return Some(format!("chunk {chunk} is claimed by {claimants:?} and in no table"));
                }
                _ => {}
            }
        }
        None
    }

    /// P5: as long as nothing fails every block is reachable through its hint, and no key is READY twice.
    pub fn hints_reach(&self, view: &View<'_>, lines: &Lines) -> Result<(), String> {
        let Some(look) = self.looks.values().find(|look| look.owned().is_some()) else { return Ok(()) };
        if !self.no_host_failed(view) {
            return Ok(());
        }
        let hints = |index| lines.open::<HintLine>(index, &view.line(view.layout().line_offset(HintLine::REGION, index)?));
        let mut names = BTreeMap::new();
        for (process, owned) in self.tables(view) {
            for (cell, content) in owned.cells {
                let Content::Ready(found) = content else { continue };
                let name = Name::of(&found);
                if let Some(other) = names.insert(name, cell) {
                    return Err(format!("P5: {name:?} is READY in cell {other} and in cell {cell} of {process:?}"));
                }
                // The owner knows it a little earlier than the memory.
                if descriptor(view, lines, cell).is_none_or(|line| line.state != Descriptor::READY) {
                    continue;
                }
                // A line that is just being written says nothing.
                let hinted = look.probe(hints, name.namespace(), name.key()).ok();
                if let Some(hinted) = hinted.filter(|hinted| !hinted.contains(&cell)) {
                    return Err(format!("P5: {name:?} is READY in cell {cell} of {process:?}, but a probe finds {hinted:?}"));
                }
            }
        }
        Ok(())
    }

    /// A chunk of a class that is not claimed.
    pub fn unclaimed(&self, view: &View<'_>, class: usize) -> Option<u64> {
        let geometry = *view.layout().geometry();
        let claimed = |chunk: u64, slot: u64| {
            let line = slot * geometry.cell_claim_lines() + chunk / CHUNKS_PER_CELL_CLAIM as u64;
            view.peek::<CellClaim>(line).has((chunk % CHUNKS_PER_CELL_CLAIM as u64) as usize)
        };
        let of_class = |&chunk: &u64| view.layout().cell_class(chunk) == Some(class);
        (0..geometry.cell_chunks()).filter(of_class).find(|&chunk| (0..u64::from(geometry.slots)).all(|slot| !claimed(chunk, slot)))
    }
}

/// A pin in the line of a host that is there.
fn pins_left(view: &View<'_>, slots: u64) -> Option<String> {
    let per_slot = view.layout().geometry().pin_lines();
    for slot in 0..slots {
        for row in 0..per_slot {
            let line: PinLine = view.peek(slot * per_slot + row);
            let identity: Identity = view.peek(slot);
            let over = identity.state == Identity::LEFT || identity.incarnation != line.incarnation;
            if line.incarnation == 0 || over || is_fenced(view, slot as u16, line.incarnation) {
                continue;
            }
            if let Some(place) = (0..cxl_pool::media::CELLS_PER_PIN).find(|&place| line.nibble(place) & PinLine::PINNED != 0) {
                return Some(format!("slot {slot} still pins cell {}", row * cxl_pool::media::CELLS_PER_PIN as u64 + place as u64));
            }
        }
    }
    None
}
