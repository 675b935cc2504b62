// SPDX-License-Identifier: Apache-2.0
//! Joining and leaving (LOCKS.md section 4, J1 to J4).

use super::local_mutex::Asker;
use super::segment::{Segment, state};
use super::{Host, HostConfig, Inner};
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::limits::{DEVICE_HEADER_BYTES, INTENTS, JOINBOXES, MAX_NUMBER};
use crate::line::{Line, Lines};
use crate::lock::manager::Manager;
use crate::lock::seat;
use crate::media::{Binding, Identity, Intent, JoinBox};
use crate::metrics::stats::StatsBoard;
use crate::platform::{MachineLock, MachineLockGuard, Platform};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Polls of a binding before the join box is written again: it may have been overwritten by another machine.
const POLLS_PER_BOX: u32 = 100;

/// Takes a machine-wide lock, waiting until `deadline_ns`.
fn machine_lock(platform: &dyn Platform, lock: MachineLock, config: &HostConfig, deadline_ns: u64) -> Result<MachineLockGuard> {
    let mut round = 0;
    loop {
        if let Some(guard) = platform.try_lock(lock, true)? {
            return Ok(guard);
        }
        if platform.now_ns() >= deadline_ns {
            return Err(Error::Timeout {
                what: format!("machine-wide lock {lock:?} (another process of this machine is joining)"),
                timeout_ms: config.join_timeout_ms,
            });
        }
        platform.relax(round);
        round += 1;
    }
}

/// [`Host::join`].
pub(super) fn join(lines: Lines, platform: Arc<dyn Platform>, config: HostConfig) -> Result<Host> {
    config.check()?;
    let deadline_ns = platform.now_ns() + config.join_timeout_ms * 1_000_000;
    let geometry = *lines.layout().geometry();
    let above_bytes = crate::cache::local_end_bytes(lines.layout()) + StatsBoard::LEN_BYTES;
    let segment = Segment::over(platform.local_memory(Segment::len_bytes(&geometry) + above_bytes)?, &geometry)?;
    // J1. The exclusive hold on Members proves that no process of this machine's previous incarnation is left.
    let joining =
        if mutant!("join.no_local_lock") { None } else { Some(machine_lock(&*platform, MachineLock::Join, &config, deadline_ns)?) };
    let mut round = 0;
    let (members, first) = loop {
        if joining.is_none() {
            break (None, true);
        }
        if let Some(exclusive) = platform.try_lock(MachineLock::Members, true)? {
            break (Some(exclusive), true);
        }
        let running = segment.header().state.load(Ordering::SeqCst);
        if matches!(running, state::LIVE | state::FENCED)
            && let Some(shared) = platform.try_lock(MachineLock::Members, false)?
        {
            break (Some(shared), false);
        }
        if platform.now_ns() >= deadline_ns {
            let what = "the previous incarnation of this machine to end".into();
            return Err(Error::Timeout { what, timeout_ms: config.join_timeout_ms });
        }
        platform.relax(round);
        round += 1;
    };
    point!("join.local");
    if first {
        start_over(&lines, &segment)?;
    } else {
        segment.check_membership(&geometry)?;
    }
    let superblocks = superblock_lines(&lines)?;
    let index = segment.attach(platform.process())?;
    let tag = segment.tag_of(index);
    let inner = Arc::new(Inner {
        lines,
        platform,
        config,
        segment,
        index,
        tag,
        members: Mutex::new(members),
        manager: Mutex::new(Manager::default()),
        closed: AtomicBool::new(false),
        has_door: AtomicBool::new(false),
        superblocks,
    });
    if first {
        inner.take_slot(inner.config.slot.map(u32::from), true, deadline_ns)?;
        share_members(&inner, deadline_ns)?;
    }
    drop(joining);
    Ok(Host { inner })
}

/// The first line of every device's superblock as it is now.
pub(super) fn superblock_lines(lines: &Lines) -> Result<Vec<Line>> {
    let devices = u64::from(lines.layout().geometry().devices);
    (0..devices).map(|device| lines.fetch_raw(device * DEVICE_HEADER_BYTES)).collect()
}

/// Empties a segment whose processes are all gone.
fn start_over(lines: &Lines, segment: &Segment) -> Result<()> {
    let header = segment.header();
    let slot = header.slot.load(Ordering::Acquire) as u16;
    // What is said of the incarnation before is that it has ended: nothing of it may come out of this machine's caches later.
    if !mutant!("cache.joined_unflushed") {
        crate::cache::bring_out(lines, segment.behind(), slot, |_| true)?;
    }
    let has_left = !matches!(header.state.load(Ordering::SeqCst), state::LIVE | state::FENCED);
    if !has_left && !mutant!("alloc.joined_unflushed") {
        crate::alloc::bring_out(lines, slot)?;
    }
    header.state.store(state::NONE, Ordering::SeqCst);
    segment.forget_processes();
    segment.reset_locks();
    Ok(())
}

/// Turns the exclusive hold on Members into a shared one. Not atomic, which the Join lock covers.
fn share_members(inner: &Inner, deadline_ns: u64) -> Result<()> {
    let Ok(mut members) = inner.members.try_lock() else { return Err(Error::Closed) };
    if members.take().is_none() {
        return Ok(());
    }
    let mut round = 0;
    loop {
        *members = inner.platform.try_lock(MachineLock::Members, false)?;
        if members.is_some() {
            return Ok(());
        }
        if inner.platform.now_ns() >= deadline_ns {
            return Err(Error::Timeout {
                what: "the shared hold on this machine's membership".into(),
                timeout_ms: inner.config.join_timeout_ms,
            });
        }
        inner.platform.relax(round);
        round += 1;
    }
}

impl Inner {
    /// J2 to J4: has a slot bound to this machine under a fresh nonce and publishes the slot's lines.
    ///
    /// `fresh`: no process of an earlier incarnation of this machine is left, so its payload is at rest too.
    pub(super) fn take_slot(&self, wish: Option<u32>, fresh: bool, deadline_ns: u64) -> Result<()> {
        let mut nonce = [0; 16];
        nonce[..8].copy_from_slice(&self.platform.random().to_le_bytes());
        nonce[8..].copy_from_slice(&self.platform.random().to_le_bytes());
        let mut problem = None;
        let mut round = 0;
        loop {
            // The first host of a fresh pool is its own manager, so the role has to run while we wait for the binding.
            self.manage_leniently()?;
            if self.platform.now_ns() >= deadline_ns {
                let what = "a manager to bind a slot (does a machine with a seat run?)".into();
                return Err(problem.unwrap_or(Error::Timeout { what, timeout_ms: self.config.join_timeout_ms }));
            }
            self.platform.relax(round);
            round += 1;
            match self.ask_for_slot(wish, &nonce, deadline_ns) {
                Ok(Some((slot, binding))) => return self.open_slot(slot, &binding, fresh),
                Ok(None) => {}
                // Slots come free, and a damaged line may only have a writer that is stopped in the middle of it.
                Err(error @ (Error::SlotInUse { .. } | Error::Full { .. } | Error::BadLine { .. })) => problem = Some(error),
                Err(other) => return Err(other),
            }
        }
    }

    /// One attempt at J2 to J4: the slot that is ours, for every later manager too, or `None` when nobody answered in time.
    fn ask_for_slot(&self, wish: Option<u32>, nonce: &[u8; 16], deadline_ns: u64) -> Result<Option<(u32, Binding)>> {
        // J2
        let Some(newest) = seat::newest(&self.lines)? else { return Ok(None) };
        let bindings = self.bindings_of(newest.seat)?;
        let slot = match (0..bindings.len()).find(|&slot| self.is_mine(&bindings[slot], nonce)) {
            Some(slot) => slot,
            None => {
                let slot = self.choose_slot(&bindings, wish)?;
                let (machine, previous) = (self.platform.machine().0, bindings[slot].nonce);
                let ask = JoinBox { slot: slot as u32, machine, nonce: *nonce, previous, ..JoinBox::default() };
                // J3
                self.lines.publish(self.platform.random() % JOINBOXES as u64, ask)?;
                point!("join.asked");
                slot
            }
        };
        let Some(binding) = self.await_binding(newest.seat, slot, nonce, deadline_ns)? else { return Ok(None) };
        self.lines.settle::<Binding>(newest.seat * self.geometry().bindings() + slot as u64)?;
        Ok(self.accept_binding(&binding)?.then_some((slot as u32, binding)))
    }

    fn bindings_of(&self, seat: u64) -> Result<Vec<Binding>> {
        let geometry = self.geometry();
        let first = seat * geometry.bindings();
        let indexes: Vec<u64> = (first..first + u64::from(geometry.slots)).collect();
        let mut fetched: Vec<Result<Binding>> = Vec::with_capacity(indexes.len());
        self.lines.fetch_many(&indexes, &mut fetched)?;
        fetched.into_iter().collect()
    }

    fn is_mine(&self, binding: &Binding, nonce: &[u8; 16]) -> bool {
        binding.tag != 0
            && binding.incarnation != 0
            && binding.machine == self.platform.machine().0
            && (binding.nonce == *nonce || mutant!("join.bind_to_machine_only"))
    }

    /// The slot to ask for.
    fn choose_slot(&self, bindings: &[Binding], wish: Option<u32>) -> Result<usize> {
        let machine = self.platform.machine().0;
        let free = |slot: usize| -> Result<bool> {
            let binding = &bindings[slot];
            if binding.incarnation == 0 || binding.machine == machine {
                return Ok(true);
            }
            let identity: Identity = self.lines.fetch(slot as u64)?;
            let left = identity.state == Identity::LEFT && identity.incarnation == binding.incarnation;
            if mutant!("join.suspicion_is_proof") && super::fence::fenced_up_to(&self.lines, slot as u32)? >= binding.incarnation {
                return Ok(true);
            }
            Ok(left || super::fence::dead_up_to(&self.lines, slot as u32)? >= binding.incarnation)
        };
        if let Some(wish) = wish {
            let slot = wish as usize;
            if slot >= bindings.len() {
                return Err(Error::Invalid(format!("slot {wish} does not exist: the pool has {} slots", bindings.len())));
            }
            return if free(slot)? { Ok(slot) } else { Err(Error::SlotInUse { slot: wish as u16 }) };
        }
        if let Some(slot) = bindings.iter().position(|binding| binding.machine == machine && binding.incarnation != 0) {
            return Ok(slot);
        }
        if let Some(slot) = bindings.iter().position(|binding| binding.incarnation == 0) {
            return Ok(slot);
        }
        for slot in 0..bindings.len() {
            if free(slot)? {
                return Ok(slot);
            }
        }
        let advice = "let a host leave, or state the death of one that is powered off";
        Err(Error::Full { what: "host slots", limit: bindings.len() as u64, advice })
    }

    fn await_binding(&self, seat: u64, slot: usize, nonce: &[u8; 16], deadline_ns: u64) -> Result<Option<Binding>> {
        for round in 0..POLLS_PER_BOX {
            let binding: Binding = self.lines.fetch(seat * self.geometry().bindings() + slot as u64)?;
            if self.is_mine(&binding, nonce) {
                return Ok(Some(binding));
            }
            // A round of the manager's work may take long on a pool in a bad state.
            if self.platform.now_ns() >= deadline_ns {
                return Ok(None);
            }
            self.manage_leniently()?;
            self.platform.relax(round);
        }
        Ok(None)
    }

    /// The manager's work, when a damaged line is no reason to give the join up.
    fn manage_leniently(&self) -> Result<()> {
        match self.manage() {
            Err(Error::BadLine { .. }) | Ok(_) => Ok(()),
            Err(other) => Err(other),
        }
    }

    /// J4, in the form of H3: no later manager may have claimed before we saw the binding.
    fn accept_binding(&self, binding: &Binding) -> Result<bool> {
        point!("join.seen");
        if mutant!("join.accept_without_check") {
            return Ok(true);
        }
        Ok(seat::newest(&self.lines)?.is_none_or(|newest| newest.epoch <= binding.tag))
    }

    /// Publishes the lines of a slot that is now ours.
    fn open_slot(&self, slot: u32, binding: &Binding, fresh: bool) -> Result<()> {
        if binding.incarnation >= MAX_NUMBER {
            return Err(Error::Full { what: "incarnations of this slot", limit: MAX_NUMBER.into(), advice: "format the pool anew" });
        }
        point!("join.accepted");
        let header = self.segment.header();
        header.slot.store(slot, Ordering::Release);
        header.incarnation.store(binding.incarnation, Ordering::Release);
        for (half, bytes) in header.nonce.iter().zip(binding.nonce.chunks_exact(8)) {
            half.store(bytes.try_into().map_or(0, u64::from_le_bytes), Ordering::Release);
        }
        if fresh {
            header.upkeep.drained.store(binding.incarnation - 1, Ordering::Release);
        }
        for intent in 0..INTENTS as u64 {
            let empty = Intent { incarnation: binding.incarnation, ..Intent::default() };
            self.lines.publish(u64::from(slot) * INTENTS as u64 + intent, empty)?;
        }
        for line in 0..self.geometry().request_lines() {
            self.publish_request_line(line)?;
        }
        for line in 0..self.geometry().summary_lines() {
            self.publish_summary(line)?;
        }
        self.publish_identity(Identity::LIVE, binding.incarnation - 1)?;
        point!("join.live");
        header.state.store(state::LIVE, Ordering::SeqCst);
        Ok(())
    }

    /// Publishes the identity line from the segment.
    pub(super) fn publish_identity(&self, state: u32, acknowledged: u32) -> Result<()> {
        let header = self.segment.header();
        let identity = Identity {
            incarnation: self.incarnation(),
            state,
            acknowledged,
            machine: self.platform.machine().0,
            nonce: self.nonce(),
            drained: header.upkeep.drained.load(Ordering::Acquire),
            ..Identity::default()
        };
        self.lines.publish(self.slot().into(), identity)
    }

    pub(super) fn nonce(&self) -> [u8; 16] {
        let mut nonce = [0; 16];
        for (half, bytes) in self.segment.header().nonce.iter().zip(nonce.chunks_exact_mut(8)) {
            bytes.copy_from_slice(&half.load(Ordering::Acquire).to_le_bytes());
        }
        nonce
    }
}

/// [`Host::leave`].
pub(super) fn leave(inner: &Inner) -> Result<()> {
    // From here on this process begins nothing; what it has begun has to end before anybody else may count it out.
    if inner.closed.swap(true, Ordering::SeqCst) {
        return Err(Error::Closed);
    }
    let deadline_ns = inner.platform.now_ns() + inner.config.join_timeout_ms * 1_000_000;
    let result = detach(inner, deadline_ns);
    if result.is_err() {
        inner.closed.store(false, Ordering::SeqCst);
        return result;
    }
    inner.resign()
}

fn detach(inner: &Inner, deadline_ns: u64) -> Result<()> {
    let own = &inner.segment.header().processes[inner.index].operations;
    wait_until(inner, deadline_ns, || own.load(Ordering::SeqCst) == 0)?;
    let _joining = machine_lock(&*inner.platform, MachineLock::Join, &inner.config, deadline_ns)?;
    // A service round of this host, of whichever process, must not publish a slot line after the slot is given up.
    let is_alive = |tag| inner.is_tag_alive(tag);
    let service = &inner.segment.header().upkeep.service;
    let asker = Asker { tag: inner.tag, platform: &*inner.platform, is_alive: &is_alive };
    if service.lock(&asker, deadline_ns).is_none() {
        return Err(Error::Timeout { what: "a service round of this host to end".into(), timeout_ms: inner.config.join_timeout_ms });
    }
    let result = give_slot_up(inner);
    service.unlock(&*inner.platform);
    result
}

/// Drops this process's hold on the membership; the last one marks the slot LEFT.
fn give_slot_up(inner: &Inner) -> Result<()> {
    let Ok(mut members) = inner.members.try_lock() else { return Err(Error::Closed) };
    drop(members.take());
    let Some(last) = inner.platform.try_lock(MachineLock::Members, true)? else { return Ok(()) };
    let header = inner.segment.header();
    let before = header.state.swap(state::LEFT, Ordering::SeqCst);
    let result = match before {
        state::LIVE => inner.give_all_back(),
        state::FENCED => Ok(()),
        // Not ours to say: another machine writes these lines, or the slot was never opened.
        _ => return Ok(()),
    };
    let result = result.and_then(|()| {
        // A fenced host leaves as well: nothing of it runs any more, and saying so is the proof that others may be waiting for.
        let incarnation = inner.incarnation();
        if !mutant!("cache.left_unflushed") {
            crate::cache::bring_out(&inner.lines, inner.segment.behind(), inner.slot() as u16, |_| true)?;
        }
        if !mutant!("alloc.left_unflushed") {
            crate::alloc::bring_out(&inner.lines, inner.slot() as u16)?;
        }
        header.upkeep.drained.store(incarnation, Ordering::Release);
        point!("leave.released");
        inner.publish_identity(Identity::LEFT, incarnation)
    });
    if result.is_err() {
        // Nobody was told, so the membership goes on and may be left another time.
        header.state.store(before, Ordering::SeqCst);
        drop(last);
        *members = inner.platform.try_lock(MachineLock::Members, false)?;
    }
    result
}

fn wait_until(inner: &Inner, deadline_ns: u64, is_done: impl Fn() -> bool) -> Result<()> {
    let mut round = 0;
    while !is_done() {
        if inner.platform.now_ns() >= deadline_ns {
            let what = "this process's running work to end before it leaves".into();
            return Err(Error::Timeout { what, timeout_ms: inner.config.join_timeout_ms });
        }
        inner.platform.relax(round);
        round += 1;
    }
    Ok(())
}
