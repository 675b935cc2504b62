// SPDX-License-Identifier: Apache-2.0
//! Simulations against closed forms, counts by hand, and laws that every run obeys.

use super::outcome::Times;
use super::*;
use crate::planner::arrivals::{self, Arrivals};
use crate::planner::keys::KEYS;
use crate::random::Random;

/// One instance that computes 1000 tokens a second, no caches, a pool with round costs: 100 ns a line, 8 GB/s for an instance and a device.
fn rack(change: impl FnOnce(&mut Rack)) -> Rack {
    let mut rack = Rack::of(&KEYS.iter().map(|key| key.default.unwrap_or(1.0)).collect::<Vec<_>>()).unwrap();
    (rack.instances, rack.hbm_gib, rack.tokens_per_s) = (1.0, 0.0, 1000.0);
    (rack.latency_ns, rack.read_gb_s, rack.write_gb_s, rack.device_gb_s) = (100.0, 8.0, 8.0, 8.0);
    change(&mut rack);
    rack
}

/// Requests of (ms, tokens, hashes), blocks of 16 tokens.
fn trace(requests: &[(u64, u64, &[u64])]) -> Trace {
    let line = |&(timestamp, input_length, hash_ids): &(u64, u64, &[u64])| {
        serde_json::json!({"timestamp": timestamp, "input_length": input_length, "hash_ids": hash_ids}).to_string()
    };
    let text: Vec<String> = requests.iter().map(line).collect();
    Trace::parse("t", text.join("\n").as_bytes(), usize::MAX, Some(16)).unwrap()
}

/// GiB of so many blocks.
fn blocks(count: f64) -> f64 {
    count * 16.0 * 128.0 / f64::from(1 << 20)
}

fn run(trace: &Trace, rack: &Rack, system: System, routing: Routing, gib: f64) -> Outcome {
    Setup { trace, rack, system, routing, eviction: PolicyKind::Lru, dram_gib: gib, pool_gib: gib }.run().unwrap()
}

/// Requests without a common block, with lengths as drawn.
fn strangers(count: u64, mut tokens: impl FnMut() -> u64) -> Trace {
    let mut next = 0;
    let mut requests = Vec::new();
    for _ in 0..count {
        let tokens = tokens();
        let ids: Vec<u64> = (0..tokens.div_ceil(16)).map(|index| next + index).collect();
        next += tokens;
        requests.push((0, tokens, ids));
    }
    trace(&requests.iter().map(|(ms, tokens, ids)| (*ms, *tokens, ids.as_slice())).collect::<Vec<_>>())
}

#[test]
fn one_instance_waits_as_a_queue_with_constant_service_does() {
    // M/D/1: the mean wait is S rho / (2 (1 - rho)).
    let mut trace = strangers(200_000, || 16);
    for load in [0.3, 0.6, 0.8] {
        arrivals::set(&mut trace, Arrivals::Poisson(load / 0.016), 3);
        let outcome = run(&trace, &rack(|_| {}), System::Own, Routing::LeastLoaded, 0.0);
        let expected = 0.016 * load / (2.0 * (1.0 - load));
        let found = outcome.breakdown.wait_s;
        assert!((found / expected - 1.0).abs() < 0.05, "load {load}: {found}, by the formula {expected}");
        assert!((outcome.instance_load / load - 1.0).abs() < 0.02 && outcome.breakdown.read_s == 0.0);
        assert!((outcome.ttft.mean_s - found - 0.016).abs() < 1e-6);
    }
}

#[test]
fn one_instance_serves_as_a_queue_with_random_service_does() {
    // M/M/1: times are exponential with mean S / (1 - rho); 99 of 100 take no longer than ln 100 times that.
    let mut random = Random::new(8);
    let mut trace = strangers(60_000, || (random.exponential(500.0).ceil() as u64).max(1));
    arrivals::set(&mut trace, Arrivals::Poisson(0.6 / 0.5), 4);
    let outcome = run(&trace, &rack(|_| {}), System::Own, Routing::RoundRobin, 0.0);
    let mean_s = 0.5 / 0.4;
    assert!((outcome.ttft.mean_s / mean_s - 1.0).abs() < 0.06, "{:?}, by the formula {mean_s}", outcome.ttft);
    assert!((outcome.ttft.p50_s / (mean_s * 2f64.ln()) - 1.0).abs() < 0.06, "{:?}", outcome.ttft);
    assert!((outcome.ttft.p99_s / (mean_s * 100f64.ln()) - 1.0).abs() < 0.12, "{:?}", outcome.ttft);
}

#[test]
fn more_instances_wait_less_than_one_each() {
    // Round robin over two instances gives each every second arrival, so they wait less than at half the rate at random, the mean of M/G/1;
    // least loaded is better still where requests differ, and the same where they do not.
    let two = rack(|rack| rack.instances = 2.0);
    let waits = |mut trace: Trace| {
        arrivals::set(&mut trace, Arrivals::Poisson(2.0 * 0.8 / 0.5), 5);
        [Routing::RoundRobin, Routing::LeastLoaded].map(|routing| run(&trace, &two, System::Own, routing, 0.0).breakdown.wait_s)
    };
    let mut random = Random::new(8);
    let [in_turn, least] = waits(strangers(20_000, || (random.exponential(500.0).ceil() as u64).max(1)));
    let at_random = 0.5 * 0.8 / 0.2;
    assert!(least < in_turn && in_turn < at_random, "{least} {in_turn} {at_random}");
    let [in_turn, least] = waits(strangers(5_000, || 500));
    assert_eq!(in_turn, least);
}

/// Far apart, so that each request is done and published before the next one comes.
const TINY: [(u64, u64, &[u64]); 5] =
    [(0, 48, &[1, 2, 3]), (10_000, 40, &[1, 2, 4]), (20_000, 32, &[5, 6]), (30_000, 48, &[1, 2, 3]), (40_000, 32, &[5, 6])];

#[test]
fn hits_of_a_tiny_trace_are_those_worked_out_by_hand() {
    let trace = trace(&TINY);
    let one = rack(|_| {});
    // With room for all: 0; blocks 1 and 2; 0; all of 48 but the last token; all of 32 but the last.
    let all = run(&trace, &one, System::Pool, Routing::LeastLoaded, blocks(8.0));
    assert_eq!((all.counts.hit_tokens(), all.counts.pool_tokens, all.counts.computed_tokens), (32 + 47 + 31, 110, 90));
    // Blocks read: 2, 3 and 2. Written: each of the six different ones once.
    let bytes = 16.0 * 128.0 * 1024.0;
    assert_eq!((all.counts.pool_read_bytes, all.counts.pool_written_bytes), (7.0 * bytes, 6.0 * bytes));
    assert!((trace.ceiling() - 110.0 / 200.0).abs() < 1e-12);
    // Room for four: 1 2 3 4 are there, used in the order 3 2 1 4, and 6 and 5 take the cells of 3 and 2. Then 1 is found, and 3 and 2 take
    // those of 4 and 6. At last 5 is there, and 6 is not.
    let four = run(&trace, &one, System::Own, Routing::LeastLoaded, blocks(4.0));
    assert_eq!((four.counts.dram_tokens, four.counts.hit_tokens()), (32 + 16 + 16, 64));
    assert_eq!(run(&trace, &one, System::Pool, Routing::LeastLoaded, blocks(4.0)).counts.hit_tokens(), 64);
    // Two instances in turn: the first has requests 0, 2 and 4, the second 1 and 3.
    let two = rack(|rack| rack.instances = 2.0);
    assert_eq!(run(&trace, &two, System::Own, Routing::RoundRobin, blocks(8.0)).counts.hit_tokens(), 32 + 31);
    assert_eq!(run(&trace, &two, System::Pool, Routing::RoundRobin, blocks(8.0)).counts.hit_tokens(), 110);
    assert_eq!(run(&trace, &two, System::Own, Routing::PrefixAware, blocks(8.0)).counts.hit_tokens(), 110);
    // Own DRAM in front of the pool: the second instance finds in the pool what the first has computed.
    let both = run(&trace, &two, System::PoolL2, Routing::RoundRobin, blocks(8.0)).counts;
    assert_eq!((both.pool_tokens, both.dram_tokens), (32 + 15, 32 + 31), "{both:?}");
    // What the accelerators have is not read.
    let hbm = run(&trace, &rack(|rack| rack.hbm_gib = blocks(8.0)), System::Pool, Routing::RoundRobin, blocks(8.0)).counts;
    assert_eq!((hbm.hbm_tokens, hbm.pool_read_bytes), (110, 0.0));
}

#[test]
fn an_owner_evicts_its_own_blocks_alone() {
    let trace = trace(&TINY);
    let owners = rack(|rack| (rack.instances, rack.owners, rack.chunk_cells) = (2.0, 1.0, 2.0));
    // The first instance takes all four cells for 1 2 3, so 4 gets none at the second one, which uses 2 and 1 in a later tick. 6 and 5 take
    // the cells of 3 and the free one. At last 1 and 2 are there, and then 5 and 6.
    let four = run(&trace, &owners, System::Pool, Routing::RoundRobin, blocks(4.0));
    assert_eq!(four.counts.hit_tokens(), 32 + 32 + 31);
    // With room for three each has its own chunks: nothing goes.
    assert_eq!(run(&trace, &owners, System::Pool, Routing::RoundRobin, blocks(8.0)).counts.hit_tokens(), 110);
    // Of six cells the first instance has 1 2 3 4, and the second one 9 and a free one. The second uses 1 and 2. In the tick in which they
    // were published their owner does not see that, and 5 and 6 take their cells; later it does. In one order for all it is seen at once.
    let hits = |owners, used_ms| {
        let requests =
            [(0, &[1, 2][..]), (1_000, &[9]), (2_000, &[3, 4]), (used_ms, &[1, 2]), (used_ms + 1_000, &[5, 6]), (used_ms + 2_000, &[1, 2])];
        let trace = self::trace(&requests.map(|(ms, ids)| (ms, 16 * ids.len() as u64, ids)));
        let rack = rack(|rack| (rack.instances, rack.owners, rack.chunk_cells) = (2.0, owners, 2.0));
        run(&trace, &rack, System::Pool, Routing::RoundRobin, blocks(6.0)).counts.hit_tokens()
    };
    assert_eq!((hits(1.0, 3_000), hits(1.0, 10_000)), (31, 31 + 31));
    assert_eq!((hits(0.0, 3_000), hits(0.0, 10_000)), (31 + 31, 31 + 31));
}

#[test]
fn some_cells_are_kept_free_once_all_are_taken() {
    let trace = trace(&[(0, 96, &[1, 2, 3, 4, 5, 6]), (10_000, 48, &[7, 8, 9]), (20_000, 96, &[1, 2, 3, 4, 5, 6])]);
    let hits = |low, high| {
        let rack = rack(|rack| (rack.low_water_percent, rack.high_water_percent) = (low, high));
        [System::Own, System::Pool].map(|system| run(&trace, &rack, system, Routing::LeastLoaded, blocks(8.0)).counts.hit_tokens())
    };
    // 9 takes the cell of 6. Then no cell is free, and 5, 4, 3 and 2 go as well.
    assert_eq!(hits(0.0, 0.0), [80, 80]);
    assert_eq!(hits(30.0, 50.0), [16, 16]);
}

#[test]
fn times_of_a_read_are_those_worked_out_by_hand() {
    let trace = trace(&[(0, 48, &[1, 2, 3]), (10_000, 48, &[1, 2, 3])]);
    let seconds_of = |change: fn(&mut Rack)| {
        let outcome = run(&trace, &rack(change), System::Pool, Routing::LeastLoaded, blocks(8.0));
        (outcome.breakdown.read_s * 2.0, outcome.breakdown.compute_s * 2.0, outcome.device_load_most * outcome.span_s)
    };
    let bytes = 3.0 * 16.0 * 128.0 * 1024.0;
    let near = |found: f64, wanted: f64| assert!((found - wanted).abs() < 5e-9, "{found} {wanted}");
    let (read, compute, busy) = seconds_of(|_| {});
    near(read, 3.0 * 100e-9 + bytes / 8e9);
    near(compute, 0.048 + 0.001);
    near(busy, 2.0 * bytes / 8e9);
    // The slower of link and devices counts, and interleaved blocks come from all devices.
    near(seconds_of(|rack| rack.read_gb_s = 2.0).0, 300e-9 + bytes / 2e9);
    near(seconds_of(|rack| (rack.read_gb_s, rack.devices) = (100.0, 3.0)).0, 300e-9 + bytes / 24e9);
    // The pool of eight cells on four devices: cells 0 and 1 are on the first, 2 on the second, without interleaving.
    near(seconds_of(|rack| (rack.read_gb_s, rack.devices, rack.interleave) = (100.0, 4.0, 0.0)).0, 300e-9 + bytes * 2.0 / 3.0 / 8e9);
    near(seconds_of(|rack| rack.block_latencies = 0.0).0, 100e-9 + bytes / 8e9);
    near(seconds_of(|rack| (rack.attention_tokens, rack.fixed_ms) = (48.0, 2.0)).1, 0.004 + 0.048 * 1.5 + 0.001 * (1.0 + 47.5 / 48.0));
}

#[test]
fn a_device_serves_one_transfer_after_the_other() {
    // Two instances ask for the same blocks at one time, from one device.
    let trace = trace(&[(0, 48, &[1, 2, 3]), (10_000, 48, &[1, 2, 3]), (10_000, 48, &[1, 2, 3])]);
    let two = rack(|rack| rack.instances = 2.0);
    let outcome = run(&trace, &two, System::Pool, Routing::LeastLoaded, blocks(8.0));
    let one = 3.0 * 16.0 * 128.0 * 1024.0 / 8e9;
    assert!((outcome.breakdown.read_s * 3.0 - 3.0 * one - 600e-9).abs() < 1e-8, "{outcome:?}");
    let many = rack(|rack| (rack.instances, rack.device_gb_s) = (2.0, 1e5));
    let outcome = run(&trace, &many, System::Pool, Routing::LeastLoaded, blocks(8.0));
    assert!((outcome.breakdown.read_s * 3.0 - 2.0 * one - 600e-9).abs() < 1e-8, "{outcome:?}");
}

#[test]
fn nand_costs_what_its_pages_do() {
    let trace = trace(&[(0, 48, &[1, 2, 3]), (10_000, 48, &[4, 5, 6]), (20_000, 48, &[1, 2, 3])]);
    let bytes = 16.0 * 128.0 * 1024.0;
    let read = |cache: f64, read_ahead: f64| {
        let nand = rack(|rack| (rack.nand_cache_gib, rack.nand_read_ahead) = (blocks(cache), read_ahead));
        run(&trace, &nand, System::Pool, Routing::LeastLoaded, blocks(8.0)).breakdown.read_s * 3.0
    };
    let near = |found: f64, wanted: f64| assert!((found - wanted).abs() < 5e-9, "{found} {wanted}");
    let bare = 300e-9 + 3.0 * bytes / 8e9;
    near(read(6.0, 0.0), bare);
    // Blocks 4, 5 and 6 have taken the three places: 512 pages each, 40 us for one, or for nine together.
    near(read(3.0, 0.0), bare + 3.0 * 512.0 * 40e-6);
    near(read(3.0, 8.0), bare + 3.0 * 57.0 * 40e-6);
    // Evicted blocks are dirty, so their pages are programmed, 64 at a time: 3 blocks when 4, 5 and 6 come, and 3 when 1, 2 and 3 do.
    let nand = rack(|rack| rack.nand_cache_gib = blocks(3.0));
    let outcome = run(&trace, &nand, System::Pool, Routing::LeastLoaded, blocks(8.0));
    let busy = 9.0 * bytes / 8e9 + 6.0 * 512.0 * 200e-6 / 64.0 + 3.0 * 512.0 * 40e-6 / 64.0;
    near(outcome.device_load_most * outcome.span_s, busy);
}

#[test]
fn a_hand_over_takes_the_network_or_the_pool() {
    let trace = trace(&[(0, 48, &[1, 2, 3])]);
    let split = rack(|rack| (rack.disaggregated, rack.network_gb_s, rack.network_latency_us) = (1.0, 4.0, 5.0));
    let bytes = 3.0 * 16.0 * 128.0 * 1024.0;
    let own = run(&trace, &split, System::Own, Routing::LeastLoaded, blocks(8.0));
    assert!((own.breakdown.hand_over_s - bytes / 4e9 - 5e-6).abs() < 5e-9 && own.counts.network_bytes == bytes, "{own:?}");
    let pool = run(&trace, &split, System::Pool, Routing::LeastLoaded, blocks(8.0));
    assert!((pool.breakdown.hand_over_s - 2.0 * (bytes / 8e9 + 300e-9)).abs() < 5e-9 && pool.counts.network_bytes == 0.0, "{pool:?}");
    assert!((pool.ttft.mean_s - pool.breakdown.hand_over_s - 0.048).abs() < 5e-9);
}

#[test]
fn blocks_are_found_only_once_they_are_there() {
    // The second request comes while the first computes, the third while it is published: 0.048 s and 0.8 ms.
    let trace = trace(&[(0, 48, &[1, 2, 3]), (10, 48, &[1, 2, 3]), (1_000, 48, &[1, 2, 3])]);
    let two = rack(|rack| rack.instances = 2.0);
    let counts = run(&trace, &two, System::Pool, Routing::RoundRobin, blocks(8.0)).counts;
    assert_eq!((counts.pool_tokens, counts.computed_tokens), (47, 97));
}

#[test]
fn a_request_of_a_session_waits_for_the_answer_before_it() {
    // Three of one session and one of another, all due at once, at two instances.
    let line = |session: u64, ids: &[u64]| {
        serde_json::json!({"timestamp": 0, "input_length": 32, "hash_ids": ids, "session": session}).to_string()
    };
    let text = [line(1, &[1, 2]), line(1, &[1, 2]), line(2, &[7, 8]), line(1, &[1, 3])].join("\n");
    let trace = Trace::parse("t", text.as_bytes(), usize::MAX, Some(16)).unwrap();
    let two = rack(|rack| (rack.instances, rack.hbm_gib) = (2.0, blocks(8.0)));
    let outcome = run(&trace, &two, System::Own, Routing::LeastLoaded, 0.0);
    // The second comes at 32 ms, and none of them waits: 32, 1, 32 and 16 ms, where the caches that have the beginning are met.
    let aware = run(&trace, &two, System::Own, Routing::PrefixAware, 0.0);
    assert_eq!((aware.counts.hbm_tokens, aware.breakdown.wait_s), (31 + 16, 0.0), "{aware:?}");
    assert!((aware.ttft.mean_s * 4.0 - 0.081).abs() < 1e-9 && (aware.span_s - 0.049).abs() < 1e-3, "{aware:?}");
    assert_eq!((outcome.counts.requests_in, outcome.counts.requests_out, outcome.breakdown.wait_s), (4, 4, 0.0));
    // The first token of one that is handed over is later than its computation, by a second here: whether the next one is due before that
    // or after it.
    let split = rack(|rack| (rack.instances, rack.disaggregated, rack.network_latency_us) = (2.0, 1.0, 1e6));
    assert!(run(&trace, &split, System::Own, Routing::LeastLoaded, 0.0).span_s > 2.0);
    let late = text.lines().next().unwrap().replace("\"timestamp\":0", "\"timestamp\":500");
    let text = [text.lines().next().unwrap(), late.as_str()].join("\n");
    let trace = Trace::parse("t", text.as_bytes(), usize::MAX, Some(16)).unwrap();
    assert_eq!(trace.requests[1].arrival_s, 0.5);
    assert!(run(&trace, &split, System::Own, Routing::LeastLoaded, 0.0).span_s > 1.03);
}

#[test]
fn what_is_found_is_used_when_it_is_found() {
    // A pool of four. While the third computes, which has found 1 and 2, blocks 7 and 8 come: 5 and 6 go for them, although they came later
    // than 1 and 2, so that the fifth finds what the third has found.
    let long: Vec<u64> = [1, 2].into_iter().chain(100..160).collect();
    let trace = trace(&[(0, 32, &[1, 2]), (10_000, 32, &[5, 6]), (20_000, 992, &long), (20_100, 32, &[7, 8]), (20_200, 32, &[1, 2])]);
    let two = rack(|rack| rack.instances = 2.0);
    let counts = run(&trace, &two, System::Pool, Routing::LeastLoaded, blocks(4.0)).counts;
    assert_eq!(counts.pool_tokens, 32 + 31, "{counts:?}");
}

/// Requests that share beginnings, with times at random.
fn crowd(seed: u64) -> Trace {
    let mut random = Random::new(seed);
    let mut requests = Vec::new();
    let mut now = 0;
    for number in 0..400u64 {
        now += random.below(60) as u64;
        let context = random.below(12) as u64;
        let shared = 1 + random.below(20) as u64;
        let own = random.below(5) as u64;
        let ids: Vec<u64> =
            (0..shared).map(|index| context * 1000 + index).chain((0..own).map(|index| 100_000 + number * 10 + index)).collect();
        let tokens = (shared + own) * 16 - random.below(16) as u64;
        requests.push((now, tokens, ids));
    }
    trace(&requests.iter().map(|(ms, tokens, ids)| (*ms, *tokens, ids.as_slice())).collect::<Vec<_>>())
}

#[test]
fn what_passes_outside_of_instances_keeps_none_of_them_busy() {
    // Two requests at one time and the next one of a session, with and without a hand-over.
    let trace = trace(&[(0, 48, &[1, 2, 3]), (0, 48, &[4, 5, 6]), (500, 48, &[7, 8, 9])]);
    for disaggregated in [0.0, 1.0] {
        let of = |overhead_ms| {
            let rack = rack(|rack| (rack.overhead_ms, rack.disaggregated) = (overhead_ms, disaggregated));
            run(&trace, &rack, System::Pool, Routing::LeastLoaded, blocks(16.0))
        };
        let (without, with) = (of(0.0), of(30.0));
        assert!((with.ttft.mean_s - without.ttft.mean_s - 0.030).abs() < 1e-9, "{with:?}");
        assert!((with.breakdown.hand_over_s - without.breakdown.hand_over_s - 0.030).abs() < 1e-9);
        assert_eq!((with.breakdown.wait_s, with.breakdown.compute_s), (without.breakdown.wait_s, without.breakdown.compute_s));
        assert_eq!(with.instance_load, without.instance_load);
    }
}

#[test]
fn what_comes_goes_and_a_seed_gives_one_outcome() {
    for seed in 0..4 {
        let trace = crowd(seed);
        for change in [
            (|rack| rack.hbm_gib = blocks(12.0)) as fn(&mut Rack),
            |rack| (rack.disaggregated, rack.devices, rack.interleave) = (1.0, 3.0, 0.0),
            |rack| (rack.nand_cache_gib, rack.fixed_ms) = (blocks(9.0), 1.5),
        ] {
            let rack = rack(|rack| {
                (rack.instances, rack.tokens_per_s) = (3.0, 4000.0);
                change(rack);
            });
            for (system, routing, eviction) in
                System::ALL.into_iter().flat_map(|s| Routing::ALL.into_iter().flat_map(move |r| PolicyKind::ALL.map(|e| (s, r, e))))
            {
                let setup = Setup { trace: &trace, rack: &rack, system, routing, eviction, dram_gib: blocks(20.0), pool_gib: blocks(60.0) };
                let outcome = setup.run().unwrap();
                let counts = outcome.counts;
                assert_eq!((counts.requests_in, counts.requests_out), (400, 400));
                assert_eq!(counts.asked_tokens, trace.asked_tokens());
                assert_eq!(counts.hit_tokens() + counts.computed_tokens, counts.asked_tokens);
                assert!(counts.hit_tokens() > 0 && outcome.hit_rate <= trace.ceiling() + 0.01, "{outcome:?}");
                let parts = outcome.breakdown;
                let sum = parts.wait_s + parts.read_s + parts.compute_s + parts.hand_over_s;
                assert!((outcome.ttft.mean_s - sum).abs() < 1e-6 && outcome.ttft.p50_s <= outcome.ttft.p99_s);
                assert!(outcome.device_load_most <= 1.0 && outcome.device_load_mean <= outcome.device_load_most);
                assert_eq!(outcome, setup.run().unwrap(), "the same again");
            }
        }
    }
}

#[test]
fn percentiles_are_values_that_so_many_do_not_exceed() {
    let times = Times::of((1..=200).rev().map(|value| value * 1_000_000_000).collect());
    assert_eq!((times.mean_s, times.p50_s, times.p99_s), (100.5, 100.0, 198.0));
    assert_eq!(Times::of(vec![3_000_000_000]), Times { mean_s: 3.0, p50_s: 3.0, p99_s: 3.0 });
    assert_eq!(Times::of(Vec::new()), Times::default());
}
