// SPDX-License-Identifier: Apache-2.0
#![no_main]

// One file serves every target; each uses a part of it.
#[allow(dead_code)]
#[path = "../../pool/tests/parsers/targets.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::superblock(data));
