// SPDX-License-Identifier: Apache-2.0
#![no_main]

// One harness serves several targets and the tests; each uses a part of it.
#[allow(dead_code)]
#[path = "../../pool/tests/hostile/harness/mod.rs"]
mod harness;

libfuzzer_sys::fuzz_target!(|data: &[u8]| harness::fsck(&mut harness::Choices::of_bytes(data)));
