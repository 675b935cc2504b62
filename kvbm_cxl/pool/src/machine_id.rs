// SPDX-License-Identifier: Apache-2.0
//! The identity of a machine, which errors and the format name as well.

/// 128-bit identity of a machine: the owner of a manager seat, the holder of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
pub struct MachineId(pub [u8; 16]);

impl MachineId {
    /// True for the all-zero id, which no machine has.
    pub fn is_none(&self) -> bool {
        self.0 == [0; 16]
    }
}

impl std::fmt::Display for MachineId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl std::fmt::Debug for MachineId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}
