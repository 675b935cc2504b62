// SPDX-License-Identifier: Apache-2.0
//! Hosts whose end the kernel of this machine certifies (LOCKS.md 12.19).
//!
//! A container that crashed comes back under another identity, or not at all, so the machine that J1 waits for never asks again. But every
//! process of a joined host is marked with its kernel, and any other process under that kernel may ask whether a mark is left. Where there
//! is none, all processes of the host have ended, and what they left in the caches is in this very machine's caches, where it is brought
//! out before the end is stated.

use super::hooks::Work;
use super::local_mutex::Asker;
use super::segment::state;
use super::{Host, Inner, fence};
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::line::{Lines, if_whole};
use crate::media::{Identity, RequestLine};
use crate::platform::{MachineId, Platform};
use std::sync::atomic::Ordering;

/// Looks at the hosts within the time after which a silent one is suspected.
const LOOKS_PER_SUSPICION: u64 = 4;

/// Whether every process of the incarnation that `identity`, the line of `slot`, tells of has ended, by the word of the kernel that this
/// process runs under. `identity` has to be fetched before the call: a mark that is asked for earlier may be of a former life of that
/// machine.
pub(crate) fn has_ended_here(lines: &Lines, platform: &dyn Platform, slot: u64, identity: &Identity) -> Result<bool> {
    if identity.state != Identity::LIVE || !is_witnessed_here(lines, platform, slot, identity)? {
        return Ok(false);
    }
    if platform.is_marked(MachineId(identity.machine))? {
        return Ok(false);
    }
    // Again: a process that reaches the pool by another file retires the witness while a sibling's mark stands, and runs without it.
    is_witnessed_here(lines, platform, slot, identity)
}

/// Whether all processes of that incarnation are marked with this kernel, on the file that this process asks about.
fn is_witnessed_here(lines: &Lines, platform: &dyn Platform, slot: u64, identity: &Identity) -> Result<bool> {
    let per_slot = lines.layout().geometry().request_lines();
    let Some(line) = if_whole(lines.fetch::<RequestLine>(slot * per_slot))? else { return Ok(false) };
    let is_ours = line.witness != 0 && line.witness == platform.witness();
    Ok(line.incarnation == identity.incarnation && (is_ours || mutant!("witness.kernel_not_compared")))
}
impl Host {
    /// Looks once for hosts of this machine's kernel that have ended, brings out what they left in the caches, and states their end
    /// for the service to publish. Returns after how many nanoseconds the next look is wanted.
    ///
    /// It may take as long as a flush of everything that such a host claimed, so it has a thread of its own ([`Host::serve`]).
    ///
    /// # Errors
    /// Those of the memory and of the system; nothing is stated then.
    pub fn witness_round(&self) -> Result<u64> {
        if self.inner.closed.load(Ordering::Acquire) {
            return Err(Error::Closed);
        }
        self.inner.witness()?;
        Ok(self.inner.config.suspect_ms * 1_000_000 / LOOKS_PER_SUSPICION)
    }

    /// Waits until the other processes of this host have ended, and every other host under this machine's kernel has left or its end is
    /// stated in the pool; for `patience_ms` at most. A process that keeps a node's slot calls this before it leaves: if the node is
    /// shut down, no other process can prove these ends. The service must run during the call.
    ///
    /// # Errors
    /// Those of the memory and of the system.
    pub fn outlive_others(&self, patience_ms: u64) -> Result<()> {
        let deadline_ns = self.inner.platform.now_ns() + patience_ms * 1_000_000;
        while self.inner.has_others_here()? && self.inner.platform.now_ns() < deadline_ns {
            self.inner.platform.sleep_ns(self.inner.config.heartbeat_ms * 1_000_000);
        }
        Ok(())
    }
}

impl Inner {
    /// Whether another process of this host runs, or a host under this machine's kernel is a member that no row tells to be dead.
    fn has_others_here(&self) -> Result<bool> {
        if mutant!("keeper_leaves_first") {
            return Ok(false);
        }
        if self.segment.has_another(self.index, |process| self.platform.is_alive(process)) {
            return Ok(true);
        }
        for (slot, (standing, _)) in (0..).zip(self.standings()?) {
            let Some(identity) = if_whole(self.lines.fetch::<Identity>(slot))? else { continue };
            let is_member = identity.state == Identity::LIVE && identity.incarnation > standing.dead;
            if is_member && slot != self.slot().into() && is_witnessed_here(&self.lines, &*self.platform, slot, &identity)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Flushes from this machine's caches whatever processes of `slot` that have ended may have left there: metadata lines that they stored
    /// without a flush, and everything in the memory that the slot claims, kept blocks included.
    pub(super) fn flush_all_residue(&self, slot: u16) -> Result<()> {
        if mutant!("witness.unflushed") {
            return Ok(());
        }
        self.lines.flush_regions()?;
        self.flush_residue(slot, Work::Claimed)
    }

    /// This process reaches the pool by another file than its siblings, a device node of its own container for one, so one kernel's answer
    /// does not tell of both: from here on none is asked about this incarnation.
    ///
    /// # Errors
    /// [`Error::Timeout`] where no sibling lives once that is published: the end of the incarnation may have been stated before.
    pub(super) fn retire_witness(&self) -> Result<()> {
        self.segment.header().witness.store(0, Ordering::SeqCst);
        self.publish_request_line(0)?;
        if self.segment.has_another(self.index, |process| self.platform.is_alive(process)) {
            return Ok(());
        }
        let what = "the previous incarnation of this machine, which ended as this process came, to be over (join again)".into();
        Err(Error::Timeout { what, timeout_ms: self.config.join_timeout_ms() })
    }

    fn witness(&self) -> Result<()> {
        if self.platform.witness() == 0 || !matches!(self.state(), state::LIVE | state::FENCED) {
            return Ok(());
        }
        let is_alive = |tag| self.is_tag_alive(tag);
        let mutex = &self.segment.header().upkeep.witness;
        if mutex.try_lock_or_inherit(&Asker { tag: self.tag, platform: &*self.platform, is_alive: &is_alive }).is_none() {
            return Ok(());
        }
        let looked = self.look_for_the_ended();
        mutex.unlock(&*self.platform);
        looked
    }

    fn look_for_the_ended(&self) -> Result<()> {
        let standings = self.standings()?;
        if mutant!("witness.waits_for_all_rows") && if_whole(fence::standings(&self.lines))?.is_none() {
            return Ok(());
        }
        let stated = &self.segment.header().declared_dead;
        // A death that a row hides may be known for long: by now the memory can be another host's, over which nothing may come out.
        let known_of = standings.into_iter().enumerate().filter(|(_, (_, is_whole))| *is_whole);
        for (slot, (standing, _)) in known_of.filter(|(slot, _)| *slot != self.slot() as usize) {
            let known = standing.dead.max(stated[slot].load(Ordering::Acquire));
            let Some(identity) = if_whole(self.lines.fetch::<Identity>(slot as u64))? else { continue };
            // No fence is waited for: that its processes have ended is known and not suspected.
            if identity.incarnation <= known || mutant!("witness.waits_for_fence") && identity.incarnation > standing.fenced {
                continue;
            }
            if has_ended_here(&self.lines, &*self.platform, slot as u64, &identity)? {
                point!("witness.seen");
                self.flush_all_residue(slot as u16)?;
                point!("witness.brought_out");
                stated[slot].fetch_max(identity.incarnation, Ordering::AcqRel);
            }
        }
        Ok(())
    }
}
