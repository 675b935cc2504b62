// SPDX-License-Identifier: Apache-2.0
//! Deterministic simulator of many hosts over one non-coherent memory.
