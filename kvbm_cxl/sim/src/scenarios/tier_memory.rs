// SPDX-License-Identifier: Apache-2.0
//! Memory of a simulated process by address, as callers of a storage tier name it.

use super::cache_ledger::Name;
use cxl_pool::cache::tier::TierBlock;
use cxl_pool::copy::LocalRange;
use std::cell::Cell;
use std::ptr::NonNull;
use std::rc::Rc;

/// What memory holds that was given to another use.
const OTHER: u8 = 0xee;

/// Memory of one block. While a rule is dropped that keeps calls out of it, a copy may read or write it under its next user's hands.
#[derive(Clone)]
pub struct Memory(Rc<[Cell<u8>]>);

impl Memory {
    /// Memory of zeros.
    pub fn new(len_bytes: usize) -> Self {
        Memory((0..len_bytes).map(|_| Cell::new(0)).collect())
    }

    /// Memory that holds a block.
    pub fn holding(bytes: &[u8]) -> Self {
        Memory(bytes.iter().copied().map(Cell::new).collect())
    }

    /// As a tier's caller names it: in two pieces.
    pub fn block(&self, name: Name, parent: Option<Name>) -> TierBlock {
        let (head, tail) = self.0.split_at(self.0.len() / 3);
        let range = |piece: &[Cell<u8>]| LocalRange { address: NonNull::from(piece).cast(), len_bytes: piece.len() };
        TierBlock { key: name.key(), parent: parent.map(Name::key), pieces: vec![range(head), range(tail)] }
    }

    /// What it holds.
    pub fn bytes(&self) -> Vec<u8> {
        self.0.iter().map(Cell::get).collect()
    }

    /// Gives it to another use.
    pub fn reuse(&self) {
        self.0.iter().for_each(|byte| byte.set(OTHER));
    }

    /// Whether it holds what it was last used for, and nothing else.
    pub fn is_as_reused(&self) -> bool {
        self.0.iter().all(|byte| byte.get() == OTHER)
    }
}
