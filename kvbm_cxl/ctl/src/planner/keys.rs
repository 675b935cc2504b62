// SPDX-License-Identifier: Apache-2.0
//! The numbers that describe a rack: their names, ranges and meanings, once for the file, the options, the help and the documents.

#[derive(Debug)]
pub struct Key {
    /// Section and name, as `device.latency_ns`.
    pub name: &'static str,
    /// What it is when neither preset, file nor option says; none where it has to be said.
    pub default: Option<f64>,
    pub range: (f64, f64),
    /// What values it may have within the range.
    pub form: Form,
    pub meaning: &'static str,
}

/// What values a number may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Real,
    Whole,
    /// 0 and 1, `false` and `true` in a file.
    Flag,
}

macro_rules! keys {
    ($($field:ident = $name:literal, $default:expr, $least:literal to $most:literal, $form:ident, $meaning:literal;)*) => {
        /// All of them, in the order in which they are printed.
        pub const KEYS: &[Key] = &[$(
            Key { name: $name, default: $default, range: ($least, $most), form: Form::$form, meaning: $meaning },
        )*];

        /// A rack: every number of [`KEYS`].
        #[derive(Clone, Debug, PartialEq)]
        pub struct Rack {
            $(#[doc = $meaning] pub $field: f64,)*
        }

        impl Rack {
            /// Of one value for each of [`KEYS`], in their order; none where there are fewer.
            pub fn of(values: &[f64]) -> Option<Rack> {
                let mut values = values.iter().copied();
                Some(Rack { $($field: values.next()?,)* })
            }

            /// The values in the order of [`KEYS`].
            pub fn values(&self) -> Vec<f64> {
                vec![$(self.$field),*]
            }
        }
    };
}

keys! {
    instances = "rack.instances", Some(8.0), 1.0 to 256.0, Whole, "prefill instances, one request at a time each";
    hbm_gib = "rack.hbm_gib", Some(32.0), 0.0 to 1e6, Real, "an instance's accelerator memory for past KV blocks";
    dram_gib = "rack.dram_gib", Some(256.0), 0.0 to 1e6, Real, "own DRAM of an instance for KV blocks (own, pool+l2)";
    pool_gib = "rack.pool_gib", Some(0.0), 0.0 to 1e9, Real, "the pool (pool, pool+l2); 0: the sum of all own DRAM";
    disaggregated = "rack.disaggregated", Some(0.0), 0.0 to 1.0, Flag, "other instances decode: the KV of each prompt moves";
    owners = "cache.owners", Some(0.0), 0.0 to 1.0, Flag, "instances evict only cells of their own; else one order for all";
    chunk_cells = "cache.chunk_cells", Some(112.0), 1.0 to 65536.0, Whole, "cells that an instance takes at a time, until none are left";
    low_water_percent = "cache.low_water_percent", Some(0.0), 0.0 to 90.0, Real, "evict when fewer cells are free after a publish";
    high_water_percent = "cache.high_water_percent", Some(0.0), 0.0 to 90.0, Real, "stop evicting when this many are free";
    kv_kib_per_token = "model.kv_kib_per_token", Some(128.0), 0.001 to 1e5, Real, "KV of a token; 128: 32 layers, 8 heads of 128, 2 bytes";
    tokens_per_s = "model.prefill_tokens_per_s", Some(10_000.0), 0.001 to 1e9, Real, "tokens that an instance computes in a second";
    fixed_ms = "model.fixed_ms", Some(0.0), 0.0 to 1e6, Real, "fixed time of a prefill";
    overhead_ms = "model.overhead_ms", Some(0.0), 0.0 to 1e6, Real, "time outside the instances: frontend, decode's first step";
    attention_tokens = "model.attention_tokens", Some(0.0), 0.0 to 1e9, Real, "context length that doubles a token's time; 0: never";
    dram_read_gb_s = "dram.read_gb_s", Some(50.0), 0.001 to 1e5, Real, "own DRAM to accelerators";
    dram_write_gb_s = "dram.write_gb_s", Some(50.0), 0.001 to 1e5, Real, "accelerators to own DRAM";
    devices = "device.count", Some(1.0), 1.0 to 4096.0, Whole, "memory devices of the pool";
    latency_ns = "device.latency_ns", None, 0.0 to 1e9, Real, "time to fetch one line";
    read_gb_s = "device.read_gb_s", None, 0.001 to 1e5, Real, "an instance's reads from the pool at most";
    write_gb_s = "device.write_gb_s", None, 0.001 to 1e5, Real, "an instance's writes to the pool at most";
    device_gb_s = "device.device_gb_s", None, 0.001 to 1e5, Real, "one device at most, for all instances together";
    interleave = "device.interleave", Some(1.0), 0.0 to 1.0, Flag, "blocks lie on all devices; else cells fill one by one";
    block_latencies = "device.block_latencies", Some(1.0), 0.0 to 1000.0, Real, "sequential line fetches for a block";
    nand_cache_gib = "nand.cache_gib", Some(0.0), 0.0 to 1e6, Real, "DRAM of all devices before their NAND; 0: no NAND";
    nand_read_us = "nand.read_us", Some(40.0), 0.0 to 1e6, Real, "read of a page of NAND";
    nand_write_us = "nand.write_us", Some(200.0), 0.0 to 1e6, Real, "write of a page of NAND";
    nand_page_kib = "nand.page_kib", Some(4.0), 0.0625 to 1e5, Real, "a page of NAND";
    nand_read_ahead = "nand.read_ahead", Some(0.0), 0.0 to 4096.0, Whole, "further pages that a miss reads";
    nand_ways = "nand.ways", Some(64.0), 1.0 to 65536.0, Whole, "pages of a device read or written at a time";
    network_gb_s = "network.gb_s", Some(12.5), 0.001 to 1e5, Real, "network of an instance, for transfers (own)";
    network_latency_us = "network.latency_us", Some(5.0), 0.0 to 1e9, Real, "start of a transfer over the network";
}
