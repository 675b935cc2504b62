// SPDX-License-Identifier: Apache-2.0
//! `cxl-plan` as a process: what it answers, that a seed gives one answer, and what it says to files that are wrong.

use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn plan(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_cxl-plan")).args(arguments).output().unwrap()
}

fn text(output: &[u8]) -> String {
    String::from_utf8(output.to_vec()).unwrap()
}

fn answered(arguments: &[&str]) -> Value {
    let output = plan(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The one line with which it refuses, and its exit code.
fn refused(arguments: &[&str]) -> (i32, String) {
    let output = plan(arguments);
    let said = text(&output.stderr);
    assert_eq!((output.stdout.len(), said.lines().count()), (0, 1), "{arguments:?}: one clear line: {said}");
    (output.status.code().unwrap(), said)
}

/// A folder with a trace of requests that share beginnings, 200 ms apart.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        let folder = Folder(tempfile::tempdir().unwrap());
        let line = |number: u64| {
            let ids: Vec<u64> = (0..4).map(|index| number % 7 * 10 + index).chain([1000 + number]).collect();
            json!({"timestamp": number * 200, "input_length": 5 * 512 - number % 5, "output_length": 9, "hash_ids": ids}).to_string()
        };
        folder.write("trace.jsonl", &((0..120).map(line).collect::<Vec<_>>().join("\n") + "\n"));
        folder
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    fn write(&self, name: &str, text: &str) -> String {
        std::fs::write(self.0.path().join(name), text).unwrap();
        self.path(name)
    }
}

#[test]
fn a_seed_gives_one_plan_and_another_seed_another() {
    let folder = Folder::new();
    let trace = folder.path("trace.jsonl");
    let with = |seed| answered(&["run", &trace, "--json", "--poisson", "3", "--seed", seed, "--set", "rack.instances=3"]);
    let (one, again, other) = (with("1"), with("1"), with("2"));
    assert_eq!(one, again);
    assert_ne!(one["rows"], other["rows"]);
    let rows = one["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 9, "three systems by three routings");
    for row in rows {
        let counts = &row["counts"];
        let tokens = |name: &str| counts[name].as_u64().unwrap();
        assert_eq!((tokens("requests_in"), tokens("requests_out")), (120, 120));
        let found = tokens("hbm_tokens") + tokens("dram_tokens") + tokens("pool_tokens");
        assert_eq!(found + tokens("computed_tokens"), one["trace"]["asked_tokens"].as_u64().unwrap());
    }
    assert!(one["assumptions"].as_array().unwrap().len() > 8);
    assert_eq!(one["trace"]["block_tokens"], 512, "found out from the numbers of hashes");
}

#[test]
fn sizes_are_compared() {
    let folder = Folder::new();
    let trace = folder.path("trace.jsonl");
    let arguments = ["run", &trace, "--pool-gib", "0.25,1,16", "--set", "rack.hbm_gib=0", "--set", "rack.instances=2"];
    let output = plan(&arguments);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let shown = text(&output.stdout);
    assert!(shown.contains("A pool of 16 GiB is the smallest of these to find") && shown.contains("Assumptions\n  Simulated"), "{shown}");
    let json = answered(&[&arguments[..], &["--json"]].concat());
    let rate = |system: &str, routing: &str, size: f64| {
        let rows = json["rows"].as_array().unwrap().iter();
        let row = rows.filter(|row| row["system"] == system && row["routing"] == routing).find(|row| row["size_gib"] == size).unwrap();
        row["hit_rate"].as_f64().unwrap()
    };
    // 7 contexts of 4 blocks, 64 MiB a block: 1.75 GiB of contexts. In one pool of 16 GiB each is computed once, in two caches twice.
    assert!(rate("pool", "least-loaded", 16.0) > rate("own", "round-robin", 16.0), "{shown}");
    assert!(rate("pool", "least-loaded", 0.25) < rate("pool", "least-loaded", 16.0), "{shown}");
    assert_eq!(json["sizing"]["enough_gib"], 16.0);
}

#[test]
fn a_printed_rack_is_the_same_rack_again() {
    let folder = Folder::new();
    for preset in ["tract", "beluga", "beluga-cpu", "beluga-one-by-one", "cxl-ssd"] {
        let file = folder.write("rack.toml", &text(&plan(&["rack", "--preset", preset, "--set", "rack.disaggregated=true"]).stdout));
        let (first, again) = (
            answered(&["rack", "--json", "--preset", preset, "--set", "rack.disaggregated=1"]),
            answered(&["rack", "--json", "--rack", &file]),
        );
        assert_eq!(first, again, "{preset}");
    }
    let numbers = answered(&["rack", "--json", "--preset", "tract"]);
    assert_eq!((numbers["device.latency_ns"].as_f64(), numbers["device.read_gb_s"].as_f64()), (Some(640.0), Some(10.1)));
    assert_eq!(answered(&["presets", "--json"]).as_array().unwrap().len(), 6);
    // The file counts before the preset, options before the file, and the preset of the command line before that of the file.
    let file = folder.write("rack.toml", "preset = \"tract\"\n[device]\nlatency_ns = 1_000\nread_gb_s = 0x10\n");
    let numbers = answered(&["rack", "--json", "--rack", &file, "--set", "device.read_gb_s=9.5"]);
    assert_eq!((numbers["device.latency_ns"].as_f64(), numbers["device.read_gb_s"].as_f64()), (Some(1000.0), Some(9.5)));
    assert_eq!(answered(&["rack", "--json", "--rack", &file, "--preset", "beluga"])["device.count"], 32.0);
}

#[test]
fn recorded_figures_of_this_machine_make_a_rack() {
    let records = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../perf/records");
    let names = std::fs::read_dir(&records).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    let latest = |what: &str| records.join(names.iter().rfind(|name| name.contains(what)).unwrap()).display().to_string();
    let (line, pool) = (latest("perf-line"), latest("perf-pool"));
    let numbers = answered(&["rack", "--json", "--preset", "this-machine", "--measured", &line, "--measured", &pool]);
    for name in ["device.latency_ns", "device.read_gb_s", "device.write_gb_s", "device.device_gb_s"] {
        assert!(numbers[name].as_f64().unwrap() > 0.1, "{name}: {numbers}");
    }
    let (code, said) = refused(&["rack", "--preset", "this-machine", "--measured", &pool]);
    assert!(code == 2 && said.contains("device.latency_ns") && said.contains("--measured"), "{said}");
}

#[test]
fn a_trace_that_is_wrong_is_refused_by_line() {
    let folder = Folder::new();
    let good = r#"{"timestamp": 10, "input_length": 600, "hash_ids": [1, 2]}"#;
    let with = |line: &str| {
        let file = folder.write("bad.jsonl", &format!("{good}\n{line}\n{good}\n"));
        let (code, said) = refused(&["run", &file]);
        assert_eq!(code, 2, "{said}");
        assert!(said.contains("bad.jsonl:2: "), "{said}");
        said
    };
    let of =
        |timestamp: &str, input: &str, ids: &str| format!(r#"{{"timestamp": {timestamp}, "input_length": {input}, "hash_ids": {ids}}}"#);
    for (line, what) in [
        ("not json".to_string(), "not JSON"),
        (good[..30].to_string(), "not JSON"),
        ("[1, 2]".to_string(), "not a JSON object"),
        (String::new(), "an empty line between requests: delete it"),
        (of("-1", "600", "[1, 2]"), "timestamp is -1: give milliseconds from 0"),
        (of("1e999", "600", "[1, 2]"), "not JSON"),
        (of("9", "600", "[1, 2]"), "timestamp 9 is before 10 of the line above: sort the trace"),
        (of("10", "-600", "[1, 2]"), "input_length is -600: give tokens from 1"),
        (of("10", "0", "[]"), "input_length is 0"),
        (of("10", "99999999999", "[1, 2]"), "input_length is 99999999999"),
        (of("10", "600.5", "[1, 2]"), "give a whole number of tokens"),
        (of("10", "\"600\"", "[1, 2]"), "input_length is \"600\""),
        (of("10", "600", "[1, null]"), "hash_ids[1] is null: give whole numbers"),
        (of("10", "600", "[1, -2]"), "hash_ids[1] is -2"),
        (of("10", "600", "[1, 2.5]"), "hash_ids[1] is 2.5"),
        (of("10", "600", "7"), "no list hash_ids"),
        (r#"{"timestamp": 10, "hash_ids": [1, 2]}"#.to_string(), "no input_length: every request needs it"),
        (r#"{"input_length": 600, "hash_ids": [1, 2]}"#.to_string(), "no timestamp"),
        (r#"{"timestamp": 10, "input_length": 600}"#.to_string(), "no list hash_ids"),
        (format!(r#"{}, "output_length": -1}}"#, good.trim_end_matches('}')), "output_length is -1"),
    ] {
        let said = with(&line);
        assert!(said.contains(what), "{line}: {said}");
    }
    let whole = |text: &str, arguments: &[&str]| {
        let file = folder.write("bad.jsonl", text);
        let (code, said) = refused(&[&["run", &file], arguments].concat());
        assert_eq!(code, 2, "{said}");
        said
    };
    assert!(whole("", &[]).contains("bad.jsonl: no request in it"));
    assert!(whole("\n \n", &[]).contains("bad.jsonl: no request in it"));
    assert!(whole(good, &["--requests", "0"]).contains("no request in it"));
    assert!(whole(good, &["--block-tokens", "64"]).contains("bad.jsonl:1: 2 hashes for 600 tokens do not fit blocks of 64 tokens"));
    assert!(whole(&of("1", "600", "[]"), &[]).contains("several sizes of a block fit"));
    assert!(whole(&of("1", "600", "[1, 2, 3, 4, 5, 6, 7]"), &[]).contains("no size of a block fits"));
    let long = of("1", "900", "[1, 2]");
    assert!(whole(&format!("{long}\n{long}"), &["--load", "0.5"]).contains("give --poisson"));
    std::fs::write(folder.path("bad.jsonl"), b"{\"timestamp\": \xff}\n").unwrap();
    assert!(refused(&["run", &folder.path("bad.jsonl")]).1.contains("bad.jsonl:1: not JSON"));
    let (code, said) = refused(&["run", &folder.path("none.jsonl")]);
    assert!(code == 1 && said.contains("none.jsonl: No such file"), "{said}");
    assert_eq!(refused(&["run", &folder.path("")]).0, 1, "a folder is no trace");
}

#[test]
fn a_rack_that_is_wrong_is_refused_by_line() {
    let folder = Folder::new();
    for (file, what) in [
        ("[device]\nlatency_ns = -1\n", "rack.toml:2: device.latency_ns is -1: give a number from 0"),
        ("\n[device]\nread_gb_s = 0\n", "rack.toml:3: device.read_gb_s is 0"),
        ("[device]\nread_gb_s = nan\n", "rack.toml:2: device.read_gb_s is NaN"),
        ("[rack]\ninstances = 2.5\n", "rack.toml:2: rack.instances is 2.5: give a whole number from 1 to 256"),
        ("[rack]\ninstances = 99999999999999999999\n", "rack.toml:2: rack.instances is no number"),
        ("[rack]\ninstances = \"8\"\n", "rack.toml:2: rack.instances is no number but of type string"),
        ("[rack]\ninstances = 8\ninstances = 9\n", "rack.toml:3: not TOML"),
        ("[rack\n", "rack.toml:1: not TOML"),
        ("[device]\nlatency = 3\n", "rack.toml:2: key \"device.latency\" is not known: choose one of rack.instances"),
        ("[devices]\nlatency_ns = 3\n", "rack.toml:2: key \"devices.latency_ns\" is not known"),
        ("preset = \"belugo\"\n", "rack.toml:1: preset \"belugo\" is not known: choose one of tract, beluga"),
        ("preset = 3\n", "rack.toml:1: preset is of type integer"),
        ("speed = 3\n", "rack.toml:1: speed is of type integer"),
        ("preset = \"this-machine\"\n", "the rack has no device.latency_ns (time to fetch one line): give it with --set"),
    ] {
        let rack = folder.write("rack.toml", file);
        let (code, said) = refused(&["rack", "--rack", &rack]);
        assert!(code == 2 && said.contains(what), "{file}: {said}");
    }
    let trace = folder.path("trace.jsonl");
    for (arguments, what) in [
        (&["--preset", "none"][..], "--preset none: preset \"none\" is not known: choose one of"),
        (&["--set", "device.latency_ns"], "--set device.latency_ns: no =: give KEY=NUMBER"),
        (&["--set", "device.latency_ns=fast"], "not a number after the ="),
        (&["--set", "device.latency_ns=-5"], "device.latency_ns is -5"),
        (&["--routing", "random"], "--routing: routing \"random\" is not known: choose one of round-robin, least-loaded, prefix-aware"),
        (&["--system", "pool,ours"], "--system: system \"ours\" is not known: choose one of own, pool, pool+l2"),
        (&["--eviction", "clock"], "--eviction: eviction policy \"clock\" is not known: choose one of lru, leaf-lru"),
        (&["--pool-gib", "64,-1"], "--pool-gib: it is -1: give GiB from"),
        (&["--load", "nan"], "--load: it is NaN"),
        (&["--faster", "0"], "--faster: it is 0"),
        (&["--poisson", "inf"], "--poisson: it is inf"),
        (&["--measured", &trace], "trace.jsonl:2: not JSON"),
    ] {
        let (code, said) = refused(&[&["run", &trace], arguments].concat());
        assert!(code == 2 && said.contains(what), "{arguments:?}: {said}");
    }
    assert_eq!(refused(&["rack", "--rack", "/nowhere/rack.toml"]).0, 1);
}

/// Recorded traces are large and not ours: TRACES names a folder that has them.
fn recorded(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("TRACES").map(|folder| Path::new(&folder).join(name));
    match path {
        Some(path) if path.exists() => Some(path),
        Some(path) => {
            println!("skipped: there is no {}", path.display());
            None
        }
        None => {
            println!("skipped: set TRACES to a folder with {name}");
            None
        }
    }
}

#[test]
fn a_pool_finds_more_of_a_recorded_trace_than_own_caches_do() {
    let Some(path) = recorded("mooncake_conversation.jsonl") else { return };
    let trace = path.display().to_string();
    let begun = std::time::Instant::now();
    let rates = |gib: &str| {
        let arguments = ["run", &trace, "--json", "--load", "0.85", "--pool-gib", gib, "--system", "own,pool"];
        let plan = answered(&arguments);
        let rows: Vec<f64> = plan["rows"].as_array().unwrap().iter().map(|row| row["hit_rate"].as_f64().unwrap() * 100.0).collect();
        assert!((plan["trace"]["ceiling_hit_rate"].as_f64().unwrap() * 100.0 - 37.4).abs() < 0.2, "{}", plan["trace"]);
        rows
    };
    // Eight instances with 64, 256 and 1024 GiB each, beside a first simulation with another program that knows no delay of publishes: own
    // caches round robin and prefix aware, and one pool.
    for (gib, in_turn, aware, pool) in [("512", 6.3, 15.0, 18.5), ("2048", 10.1, 28.9, 34.2), ("8192", 13.7, 32.5, 37.2)] {
        let rates = rates(gib);
        let found = [rates[0], rates[2], rates[4]];
        let near = found.iter().zip([in_turn, aware, pool]).all(|(found, wanted)| (found - wanted).abs() < 2.5);
        assert!(near && rates[4] > rates[2] && rates[2] > rates[0], "{gib} GiB: {rates:?}");
    }
    println!("18 simulations of 12,031 requests in {:.1} s", begun.elapsed().as_secs_f64());
}

#[test]
fn numbers_at_the_ends_of_their_ranges_end_in_an_answer() {
    let folder = Folder::new();
    let huge = r#"{"timestamp": 31622400000, "input_length": 67108864, "hash_ids": "#;
    let ids: Vec<u64> = (0..32_768).collect();
    let line = format!("{huge}{ids:?}}}");
    let trace = folder.write("huge.jsonl", &format!("{line}\n{line}\n{line}\n"));
    let least = ["model.prefill_tokens_per_s=0.001", "model.kv_kib_per_token=100000", "device.read_gb_s=0.001", "device.device_gb_s=0.001"];
    let most =
        ["model.prefill_tokens_per_s=1e9", "model.kv_kib_per_token=0.001", "device.count=4096", "rack.instances=256", "rack.pool_gib=1e9"];
    let nand =
        ["nand.cache_gib=1e6", "nand.page_kib=0.0625", "nand.read_ahead=4096", "model.attention_tokens=1e-300", "rack.disaggregated=1"];
    for numbers in
        [least.as_slice(), &most, &nand, &[&least[..], &nand].concat(), &["rack.dram_gib=0", "rack.pool_gib=0", "rack.hbm_gib=0"]]
    {
        let set: Vec<&str> = numbers.iter().flat_map(|number| ["--set", number]).collect();
        let plan = answered(&[&["run", &trace, "--json"], set.as_slice()].concat());
        assert_eq!(plan["rows"].as_array().unwrap().len(), 9, "{numbers:?}");
    }
    let rows = answered(&["run", &trace, "--json", "--pool-gib", "0.000001,1000000000", "--poisson", "1000000"])["rows"].clone();
    assert!(rows.as_array().unwrap().iter().all(|row| row["counts"]["requests_out"] == 3), "{rows}");
}
