// SPDX-License-Identifier: Apache-2.0
//! Racks with published or measured costs, as far as they are known. What no source gives is said to be assumed.

#[derive(Debug)]
pub struct Preset {
    pub name: &'static str,
    /// Where the numbers are from, and which of them are assumed.
    pub source: &'static str,
    /// By the names of [`crate::planner::keys::KEYS`].
    pub values: &'static [(&'static str, f64)],
}

/// The one that counts where none is named.
pub const DEFAULT: &str = "beluga";

pub const PRESETS: &[Preset] = &[
    Preset {
        name: "tract",
        source: "TraCT: one CXL device of 64 GB, 640 ns and 10.1 GB/s measured from a host, with a network of 100 Gbit/s. Assumed: \
                 all hosts together get no more from the device than one host does, and writes are as fast as reads",
        values: &[
            ("rack.pool_gib", 64.0),
            ("device.latency_ns", 640.0),
            ("device.read_gb_s", 10.1),
            ("device.write_gb_s", 10.1),
            ("device.device_gb_s", 10.1),
            ("network.gb_s", 12.5),
        ],
    },
    Preset {
        name: "beluga",
        source: "Beluga: 32 devices of 256 GB on a CXL 2.0 switch, 750 ns; accelerators reach the pool at 26 GB/s, a device gives \
                 22.5 GB/s; blocks are interleaved. Assumed: accelerators write as fast as they read, and each instance has 26 GB/s of \
                 its own",
        values: BELUGA,
    },
    Preset {
        name: "beluga-cpu",
        source: "Beluga, copies by processors: 46.2 GB/s reads and 33 GB/s writes of an adapter, else as beluga. Assumed: an adapter an \
                 instance, and the way from host memory to the accelerator costs nothing more",
        values: &[
            ("device.count", 32.0),
            ("device.latency_ns", 750.0),
            ("device.read_gb_s", 46.2),
            ("device.write_gb_s", 33.0),
            ("device.device_gb_s", 22.5),
        ],
    },
    Preset {
        name: "beluga-one-by-one",
        source: "beluga without interleaving: cells fill one device after the other",
        values: &[
            ("device.count", 32.0),
            ("device.latency_ns", 750.0),
            ("device.read_gb_s", 26.0),
            ("device.write_gb_s", 26.0),
            ("device.device_gb_s", 22.5),
            ("device.interleave", 0.0),
        ],
    },
    Preset {
        name: "cxl-ssd",
        source: "CXL-SSD as emulated for LMCache: 4.8 GB DRAM cache, 96 GB NAND, pages of 4 KiB read in 40 us and written in 200 us, 6 \
                 GB/s on hits, next-N read-ahead (here 8, the largest that was measured). Assumed: 600 ns a line on hits, 64 pages of \
                 NAND at a time",
        values: &[
            ("rack.pool_gib", 89.4),
            ("device.latency_ns", 600.0),
            ("device.read_gb_s", 6.0),
            ("device.write_gb_s", 6.0),
            ("device.device_gb_s", 6.0),
            ("nand.cache_gib", 4.47),
            ("nand.read_us", 40.0),
            ("nand.write_us", 200.0),
            ("nand.page_kib", 4.0),
            ("nand.read_ahead", 8.0),
            ("nand.ways", 64.0),
        ],
    },
    Preset {
        name: "this-machine",
        source: "measured: give --measured with records of `make perf-line` and `make perf-pool`, or what `cxl-bench line --json` and \
                 `cxl-bench pool --json` print. Assumed: a device gives all instances together what one thread gets, unless --set says \
                 more",
        values: &[],
    },
];

const BELUGA: &[(&str, f64)] = &[
    ("device.count", 32.0),
    ("device.latency_ns", 750.0),
    ("device.read_gb_s", 26.0),
    ("device.write_gb_s", 26.0),
    ("device.device_gb_s", 22.5),
];
