// SPDX-License-Identifier: Apache-2.0
//! etcd as this program uses it: every call with a deadline and an error that names the call.

use crate::error::{Error, Result};
use crate::holder::{Holder, Keys};
use crate::security::Security;
use etcd_client::{
    Client, Compare, CompareOp, ConnectOptions, EventType, GetOptions, PutOptions, Txn, TxnOp, WatchOptions, WatchResponse, WatchStream,
};
use std::collections::BTreeMap;
use std::future::Future;
use std::time::Duration;

pub type LeaseId = i64;

/// The slots that are leased, with the revision of each key.
pub type Leased = BTreeMap<u16, (Holder, i64)>;

#[derive(Clone)]
pub struct Etcd {
    client: Client,
    endpoints: Vec<String>,
    security: Security,
    timeout_ms: u64,
}

/// A change of a slot's key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// It is leased, or its holder has joined again.
    Held(u16, Holder),
    /// The lease has run out or was given back.
    Gone(u16),
}

impl Etcd {
    /// Connects.
    ///
    /// # Errors
    /// [`Error::Etcd`] and [`Error::Timeout`], as of every call here.
    pub async fn connect(endpoints: &[String], security: &Security, timeout_ms: u64) -> Result<Etcd> {
        let timeout = Duration::from_millis(timeout_ms);
        let options = ConnectOptions::new().with_connect_timeout(timeout).with_keep_alive(timeout, timeout);
        let options = security.apply(endpoints, options)?;
        let what = || format!("connecting to etcd at {} {}", endpoints.join(", "), security.shown(endpoints));
        let mut client = within(timeout_ms, what, Client::connect(endpoints, Some(options))).await?;
        // The connection is made by the first call: this one's error says where to. With a user it was made to ask for a token.
        if !security.has_user() {
            within(timeout_ms, what, client.status()).await?;
        }
        Ok(Etcd { client, endpoints: endpoints.to_vec(), security: security.clone(), timeout_ms })
    }

    /// Reconnects, and reads the files of the certificates and the password again.
    ///
    /// # Errors
    /// Those of [`Etcd::connect`]; the connection before is kept then.
    pub async fn reconnect(&mut self) -> Result<()> {
        *self = Etcd::connect(&self.endpoints, &self.security, self.timeout_ms).await?;
        Ok(())
    }

    pub async fn grant(&mut self, ttl_s: i64) -> Result<LeaseId> {
        let granted = within(self.timeout_ms, || format!("a lease of {ttl_s} s"), self.client.lease_grant(ttl_s, None)).await?;
        Ok(granted.id())
    }

    /// A sign of life. False when the lease is gone.
    pub async fn renew(&mut self, lease: LeaseId) -> Result<bool> {
        let what = || format!("renewing lease {lease:x}");
        let renewed = async {
            let (mut keeper, mut answers) = self.client.lease_keep_alive(lease).await?;
            keeper.keep_alive().await?;
            answers.message().await
        };
        match within(self.timeout_ms, what, renewed).await {
            Ok(answer) => Ok(answer.is_some_and(|answer| answer.ttl() > 0)),
            // The client finds a lease that is gone while it opens the stream.
            Err(Error::Etcd { source: etcd_client::Error::LeaseKeepAliveError(_), .. }) => Ok(false),
            Err(other) => Err(other),
        }
    }

    /// Gives a lease back; its keys go at once.
    pub async fn revoke(&mut self, lease: LeaseId) -> Result<()> {
        within(self.timeout_ms, || format!("giving back lease {lease:x}"), self.client.lease_revoke(lease)).await?;
        Ok(())
    }

    /// Who has which slot, and the revision as of which that is so. Keys that are no slot's, or hold no holder, are an error: guessing who
    /// is alive is useless.
    pub async fn leased(&mut self, keys: &Keys) -> Result<(Leased, i64)> {
        let what = || format!("reading {}", keys.folder());
        let options = Some(GetOptions::new().with_prefix());
        let found = within(self.timeout_ms, what, self.client.get(keys.folder(), options)).await?;
        let mut leased = Leased::new();
        for pair in found.kvs() {
            let key = String::from_utf8_lossy(pair.key());
            let slot = keys.slot(&key).ok_or_else(|| Error::Value { key: key.to_string(), reason: "not named by a slot".into() })?;
            leased.insert(slot, (Holder::from_json(&key, pair.value())?, pair.mod_revision()));
        }
        Ok((leased, found.header().map_or(0, |header| header.revision())))
    }

    /// Leases a slot to `holder` if its key is still as it was at `revision` (0: not there). False when another keeper was faster.
    pub async fn lease_slot(&mut self, keys: &Keys, slot: u16, holder: &Holder, lease: LeaseId, revision: i64) -> Result<bool> {
        let key = keys.of(slot);
        let what = || format!("leasing slot {slot} at {key}");
        let unchanged = Compare::mod_revision(key.clone(), CompareOp::Equal, revision);
        let put = TxnOp::put(key.clone(), holder.to_json()?, Some(PutOptions::new().with_lease(lease)));
        let transaction = Txn::new().when([unchanged]).and_then([put]);
        Ok(within(self.timeout_ms, what, self.client.txn(transaction)).await?.succeeded())
    }

    pub async fn unlease_slot(&mut self, keys: &Keys, slot: u16, lease: LeaseId) -> Result<()> {
        let key = keys.of(slot);
        let what = || format!("giving back slot {slot} at {key}");
        let ours = Compare::lease(key.clone(), CompareOp::Equal, lease);
        let transaction = Txn::new().when([ours]).and_then([TxnOp::delete(key.clone(), None)]);
        within(self.timeout_ms, what, self.client.txn(transaction)).await?;
        Ok(())
    }

    /// Changes of slots after `revision`.
    pub async fn watch(&mut self, keys: &Keys, revision: i64) -> Result<WatchStream> {
        let options = WatchOptions::new().with_prefix().with_start_revision(revision + 1);
        within(self.timeout_ms, || format!("watching {}", keys.folder()), self.client.watch(keys.folder(), Some(options))).await
    }
}

/// What an answer of a watch says of slots. Values that are no holder's say nothing: the key stands, and that is what counts.
pub fn changes(keys: &Keys, answer: &WatchResponse) -> Vec<Change> {
    let read = |event: &etcd_client::Event| {
        let pair = event.kv()?;
        let key = String::from_utf8_lossy(pair.key());
        let slot = keys.slot(&key)?;
        match event.event_type() {
            EventType::Put => Holder::from_json(&key, pair.value()).ok().map(|holder| Change::Held(slot, holder)),
            EventType::Delete => Some(Change::Gone(slot)),
        }
    };
    answer.events().iter().filter_map(read).collect()
}

async fn within<T>(
    timeout_ms: u64,
    what: impl Fn() -> String,
    call: impl Future<Output = std::result::Result<T, etcd_client::Error>>,
) -> Result<T> {
    match tokio::time::timeout(Duration::from_millis(timeout_ms), call).await {
        Ok(answer) => answer.map_err(|source| Error::Etcd { what: what(), source }),
        Err(_) => Err(Error::Timeout { what: what(), timeout_ms }),
    }
}
