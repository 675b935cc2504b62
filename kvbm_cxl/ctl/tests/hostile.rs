// SPDX-License-Identifier: Apache-2.0
//! Every command that reads a pool, over damaged ones: an exit code of the documented ones, in time, never a crash and never a format.

use cxl_pool::line::crc_seed;
use cxl_pool::media::{Layout, Region, Superblock};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const LONGEST: Duration = Duration::from_secs(240);
const IMAGES: u64 = 12;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

/// Runs a command to its end and returns its exit code and what it printed.
fn run(folder: &Path, arguments: &[&str]) -> (i32, String) {
    let output = folder.join("output");
    let printed = std::fs::File::create(&output).unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_cxlctl"))
        .args(["--pool", folder.join("pool").to_str().unwrap()])
        .args(arguments)
        .env("CXL_MACHINE_ID", "a machine of the test")
        .env("CXL_STATE_DIR", folder.join("state"))
        .env_remove("CXL_COHERENCE")
        .stdin(Stdio::null())
        .stdout(printed.try_clone().unwrap())
        .stderr(printed)
        .spawn()
        .unwrap();
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            let text = String::from_utf8_lossy(&std::fs::read(&output).unwrap()).into_owned();
            return (status.code().unwrap_or_else(|| panic!("{arguments:?}: {status}: {text}")), text);
        }
        if start.elapsed() > LONGEST {
            child.kill().unwrap();
            panic!("{arguments:?} does not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Sets a field of any line to anything and seals the line, or leaves its checksum wrong.
fn damage(random: &mut Random, image: &mut [u8], layout: &Layout, seed: u32) {
    let region = Region::ALL[random.below(Region::ALL.len() as u64) as usize];
    let span = layout.span(region);
    let index = random.below(span.lines);
    let at = (span.offset + index * 64) as usize;
    let field = at + 4 + 4 * random.below(15) as usize;
    let value = [0, 1, 2, u32::MAX, 1 << 31, random.next() as u32][random.below(6) as usize];
    image[field..field + 4].copy_from_slice(&value.to_le_bytes());
    if random.below(4) != 0 {
        // The format's checksum: of region, line number and everything behind it, continued from the format's seed.
        let crc = crc32c::crc32c_append(seed, &(region as u32).to_le_bytes());
        let crc = crc32c::crc32c_append(crc, &index.to_le_bytes());
        let crc = crc32c::crc32c_append(crc, &image[at + 4..at + 64]);
        image[at..at + 4].copy_from_slice(&crc.to_le_bytes());
    }
}

#[test]
fn every_command_survives_a_damaged_pool() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let format = [
        "format", "--size", "6M", "--slots", "4", "--advanced", "seats=3", "--advanced", "locks=32", "--advanced", "objects=16",
        "--advanced", "chunk=64K",
    ];
    let format = [&format[..], &["--cells", "4K:1M", "--cells", "16K:512K"]].concat();
    assert_eq!(run(folder.path(), &format).0, 0);
    let device = folder.path().join("pool");
    let good = std::fs::read(&device).unwrap();
    let superblock = Superblock::decode("pool", &good).unwrap();
    for seed in 0..IMAGES {
        let mut random = Random(seed);
        let mut image = good.clone();
        for _ in 0..1 + random.below(40) {
            damage(&mut random, &mut image, superblock.layout(), crc_seed(superblock.uuid(), superblock.incarnation()));
        }
        match seed % 4 {
            // The file ends early, or the superblock is not what it was.
            0 => image.truncate(random.below(good.len() as u64) as usize),
            1 => image[random.below(1400) as usize] ^= 1 << random.below(8),
            _ => {}
        }
        std::fs::write(&device, &image).unwrap();
        let commands: [&[&str]; 17] = [
            &["info"],
            &["info", "--json"],
            &["hosts", "--watch-ms", "0"],
            &["inspect", "superblock"],
            &["inspect", "grant", "all", "--raw"],
            &["inspect", "record", "--json"],
            &["inspect", "chunk-head"],
            &["inspect", "free-box", "999999999"],
            &["inspect", "locks"],
            &["inspect", "objects"],
            &["inspect", "blocks"],
            &["inspect", "descriptor", "--json"],
            &["inspect", "pin", "all"],
            &["cache", "stat", "--hints"],
            &["cache", "ls", "--json"],
            &["why", "000102030405060708090a0b0c0d0e0f", "--namespace", "000102030405060708090a0b0c0d0e0f"],
            &["fsck", "--notes"],
        ];
        for command in commands {
            let (code, text) = run(folder.path(), command);
            assert!((0..=4).contains(&code) && !text.contains("panicked"), "seed {seed}, {command:?}: {code}: {text}");
        }
        assert!(std::fs::read(&device).unwrap() == image, "seed {seed}: a command that only looks has written");
        let (code, text) = run(folder.path(), &["format", "--size", "6M"]);
        assert!(code == 4 || code == 3 || code == 1, "seed {seed}: {code}: {text}");
        let after = std::fs::read(&device).unwrap();
        assert!(after.starts_with(&image) && after[image.len()..].iter().all(|&byte| byte == 0), "seed {seed}: it was formatted");
        let (code, text) = run(folder.path(), &["fsck", "--repair", "--accept-loss", "--watch-ms", "0"]);
        assert!((0..=4).contains(&code) && !text.contains("panicked"), "seed {seed}: {code}: {text}");
        assert_eq!(std::fs::read(&device).unwrap()[..image.len().min(4096)], image[..image.len().min(4096)], "seed {seed}");
    }
}
