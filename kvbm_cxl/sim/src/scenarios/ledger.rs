// SPDX-License-Identifier: Apache-2.0
//! The history of one class A record: who read and committed what, and the invariants V4 to V6 over it.
//!
//! Every value is the number of the commit that wrote it, and every commit knows the value it replaced, so that one value can be asked
//! whether it descends from another.

use crate::Env;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// What a scenario's threads share.
pub type Shared = Rc<RefCell<Ledger>>;

/// How something came to be known for final.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Known {
    /// Read by a holder that was not fenced afterwards.
    Read,
    /// Committed, and confirmed.
    Committed,
    /// Accepted by a reader without a lock.
    Accepted,
}

/// A value that is final for every holder after grant `grant`.
#[derive(Clone, Copy, Debug)]
struct Final {
    grant: u32,
    value: u64,
    known: Known,
}

/// Everything recorded so far.
#[derive(Default)]
pub struct Ledger {
    /// By commit: the value that it replaced, and its grant. Value 0 = nothing was ever written.
    commits: BTreeMap<u64, (u64, u32)>,
    finals: Vec<Final>,
    versions: BTreeMap<u32, u64>,
    /// Commits whose outcome stayed unknown.
    pub unknown: u64,
}

impl Ledger {
    /// Number of a new commit over `before` under `grant`.
    pub fn begin(&mut self, before: u64, grant: u32) -> u64 {
        let value = self.commits.len() as u64 + 1;
        self.commits.insert(value, (before, grant));
        value
    }

    /// Things known for final.
    pub fn known(&self) -> usize {
        self.finals.len()
    }

    /// Whether `value` is the earlier final value, or derives from it under no lower a grant. A value that was written earlier and is only
    /// seen now was absent at a look.
    fn descends(&self, mut value: u64, from: &Final) -> bool {
        while value != from.value {
            match self.commits.get(&value) {
                Some(&(parent, grant)) if grant >= from.grant => value = parent,
                _ => return false,
            }
        }
        true
    }

    /// A commit of this version was confirmed. Checks V4.
    pub fn committed(&mut self, env: &Env, grant: u32, version: u32, value: u64) {
        let first = *self.versions.entry(version).or_insert(value);
        if first != value {
            env.fail(format!("V4: version {version} confirmed for commit {first} and for commit {value}"));
        }
        self.is_final(env, grant, value, Known::Committed);
    }

    /// `value` is final as of `grant`: a holder under a higher grant finds it or a value derived from it. Checks V4, V5 and V6.
    pub fn is_final(&mut self, env: &Env, grant: u32, value: u64, known: Known) {
        let new = Final { grant, value, known };
        let holds = |of: &Final| of.known != Known::Accepted;
        for &old in &self.finals {
            let (earlier, later) = if old.grant <= grant { (old, new) } else { (new, old) };
            // Who accepts without the lock holds no grant, so nothing follows from what it did not see.
            if earlier.grant == later.grant || !holds(&later) || self.descends(later.value, &earlier) {
                continue;
            }
            let rule = match earlier.known {
                Known::Committed => "V4",
                Known::Read => "V5",
                Known::Accepted => "V6",
            };
            env.fail(format!("{rule}: {later:?} does not descend from {earlier:?}"));
        }
        self.finals.push(new);
    }
}
