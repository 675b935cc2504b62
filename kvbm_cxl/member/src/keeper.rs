// SPDX-License-Identifier: Apache-2.0
//! The slot of this machine, held in etcd for as long as this process lives.

use crate::error::{Error, Result};
use crate::etcd::{Etcd, LeaseId, Leased};
use crate::holder::{Holder, Keys};
use cxl_pool::Pool;
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::platform::{Platform, ProcessId};
use std::sync::Arc;

/// How often a slot is tried again that another keeper took in between.
const ATTEMPTS: usize = 64;

/// A machine's slot, and what it is held by.
pub struct Keeper {
    etcd: Etcd,
    keys: Keys,
    ttl_s: i64,
    lease: LeaseId,
    slot: u16,
    holder: Holder,
    slots: u32,
    platform: Arc<dyn Platform>,
}

impl Keeper {
    /// Leases a slot: the one that this machine had, as far as etcd knows, else the lowest that is free.
    ///
    /// # Errors
    /// [`Error::NoSlot`], [`Error::KeptAlready`], and those of etcd.
    pub async fn take(mut etcd: Etcd, pool: &Pool, platform: Arc<dyn Platform>, prefix: &str, ttl_s: i64) -> Result<Keeper> {
        let process = platform.process();
        let holder = Holder { machine: platform.machine().to_string(), incarnation: 0, pid: process.pid, start: process.start };
        let keys = Keys::new(prefix, pool.superblock());
        let slots = pool.layout().geometry().slots;
        let lease = etcd.grant(ttl_s).await?;
        let mut keeper = Keeper { etcd, keys, ttl_s, lease, slot: 0, holder, slots, platform };
        match keeper.choose().await {
            Ok(slot) => keeper.slot = slot,
            Err(error) => return Err(keeper.give_up(error).await),
        }
        Ok(keeper)
    }

    async fn choose(&mut self) -> Result<u16> {
        for _ in 0..ATTEMPTS {
            let (leased, _) = self.etcd.leased(&self.keys).await?;
            let own = leased.iter().find(|(_, (holder, _))| holder.machine == self.holder.machine).map(|(slot, _)| *slot);
            let free = || (0..self.slots as u16).find(|slot| !leased.contains_key(slot));
            let slot = own.or_else(free).ok_or(Error::NoSlot { slots: self.slots })?;
            if self.claim(slot, &leased).await? {
                return Ok(slot);
            }
        }
        Err(Error::NoSlot { slots: self.slots })
    }

    /// Puts this holder at a slot that is free, or that a process of this machine had which is gone.
    async fn claim(&mut self, slot: u16, leased: &Leased) -> Result<bool> {
        let revision = match leased.get(&slot) {
            None => 0,
            Some((holder, _)) if holder.machine != self.holder.machine => {
                return Err(Error::Foreign { slot, machine: holder.machine.clone() });
            }
            Some((holder, revision)) => {
                let other = ProcessId { pid: holder.pid, start: holder.start };
                if other != self.platform.process() && self.platform.is_alive(other) {
                    return Err(Error::KeptAlready { slot, pid: holder.pid });
                }
                *revision
            }
        };
        self.etcd.lease_slot(&self.keys, slot, &self.holder, self.lease, revision).await
    }

    /// Joins the pool with the leased slot as its wish. The pool has the last word: where other processes of this machine are in it
    /// already, their slot is this one's as well, and the lease follows.
    ///
    /// # Errors
    /// [`Error::Foreign`] when etcd has leased that slot to another machine; those of the join and of etcd.
    pub async fn join(&mut self, pool: &Pool, config: HostConfig) -> Result<Host> {
        let config = HostConfig { slot: Some(self.slot), ..config };
        let joined = pool.join(config.clone()).or_else(|error| match error {
            cxl_pool::Error::SlotInUse { .. } => pool.join(HostConfig { slot: None, ..config }),
            other => Err(other),
        })?;
        match self.follow(&joined).await {
            Ok(()) => Ok(joined),
            Err(error) => {
                // The first error matters more than one of the clean-up.
                let _ = joined.leave();
                Err(error)
            }
        }
    }

    /// Brings etcd up to date with the slot and the incarnation that the host has now.
    pub async fn follow(&mut self, host: &Host) -> Result<()> {
        let (slot, incarnation) = (host.slot(), host.incarnation());
        if (slot, incarnation) == (self.slot, self.holder.incarnation) {
            return Ok(());
        }
        self.holder.incarnation = incarnation;
        for _ in 0..ATTEMPTS {
            let (leased, _) = self.etcd.leased(&self.keys).await?;
            if self.claim(slot, &leased).await? {
                let before = std::mem::replace(&mut self.slot, slot);
                if before != slot {
                    self.etcd.unlease_slot(&self.keys, before, self.lease).await?;
                }
                return Ok(());
            }
        }
        Err(Error::NoSlot { slots: self.slots })
    }

    /// A sign of life. A lease that ran out is replaced by a new one, and the slot claimed again: the hosts that saw it go have fenced this
    /// one, and it has joined again by itself.
    ///
    /// # Errors
    /// [`Error::Foreign`] when another machine has the slot by now; those of etcd.
    pub async fn renew(&mut self, host: &Host) -> Result<()> {
        if !self.etcd.renew(self.lease).await? {
            eprintln!("cxl-member: lease {:x} of slot {} ran out: taking a new one", self.lease, self.slot);
            self.lease = self.etcd.grant(self.ttl_s).await?;
            self.holder.incarnation = 0;
        }
        self.follow(host).await
    }

    /// Reconnects: an expired certificate or a changed password may be replaced by now. Returns the connection, for others.
    pub async fn reconnect(&mut self) -> Result<Etcd> {
        self.etcd.reconnect().await?;
        Ok(self.etcd.clone())
    }

    pub async fn leave(mut self) -> Result<()> {
        self.etcd.revoke(self.lease).await
    }

    /// As [`Keeper::leave`] on the way out with an error, which is worth more than another one.
    pub async fn give_up(self, error: Error) -> Error {
        let _ = self.leave().await;
        error
    }

    pub fn slot(&self) -> u16 {
        self.slot
    }

    /// The lease that holds it.
    pub fn lease(&self) -> LeaseId {
        self.lease
    }

    pub fn keys(&self) -> &Keys {
        &self.keys
    }
}
