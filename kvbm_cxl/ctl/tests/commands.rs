// SPDX-License-Identifier: Apache-2.0
//! Every command, as an operator runs it: output, JSON, exit codes.

mod common;

use common::{Bench, EXE, ran};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};

const REGIONS: [&str; 25] = [
    "seat", "grant", "binding", "fence", "death", "join-box", "identity", "summary", "request", "intent", "record", "claim", "free-box",
    "free-ack", "chunk-head", "keep-map", "stats", "descriptor", "hint", "pin", "cell-claim", "ask", "splitter", "claimant", "seat-claim",
];

#[test]
fn format_tells_what_it_made_and_refuses_to_overwrite_it() {
    let bench = Bench::formatted();
    let (code, info) = bench.json(&["info"]);
    assert_eq!(code, 0);
    assert_eq!(info["geometry"]["slots"], 4);
    assert_eq!(info["geometry"]["chunk_bytes"], 65536);
    assert_eq!(info["geometry"]["len_bytes"], 16 << 20);
    assert_eq!(info["layout"].as_array().unwrap().len(), REGIONS.len());
    assert_eq!(info["usage"]["free_chunks"], info["geometry"]["chunks"]);
    let uuid = info["uuid"].as_str().unwrap().to_owned();

    let again = bench.run(&["format"]);
    assert_eq!(again.code, 4);
    assert!(again.err.contains(&uuid) && again.err.contains("--force"), "{}", again.err);
    assert_eq!(bench.json(&["info"]).1["uuid"], uuid.as_str());

    let forced = bench.run(&["format", "--force", "--advanced", "seat_machine=000102030405060708090a0b0c0d0e0f"]);
    assert_eq!(forced.code, 0);
    let (_, info) = bench.json(&["info"]);
    assert_ne!(info["uuid"], uuid.as_str());
    assert_eq!(info["seat_machines"][1], "000102030405060708090a0b0c0d0e0f");
}

#[test]
fn cells_are_made_as_asked_and_by_default_where_enough_fit() {
    let bench = Bench::formatted();
    let cache = &bench.json(&["info"]).1["cache"];
    assert_eq!((&cache["classes"][0]["cell_bytes"], &cache["classes"][1]["cell_bytes"]), (&4096.into(), &65536.into()));
    let per_chunk = cache["cells_per_chunk"].as_u64().unwrap();
    assert_eq!(cache["classes"][0]["cells"], 512 / per_chunk * per_chunk);
    assert!((23.0..=25.0).contains(&cache["classes"][1]["share_percent"].as_f64().unwrap()), "{cache}");
    let text = bench.run(&["info"]).out;
    assert!(text.contains("cells in chunks of") && text.contains("64 KiB"), "{text}");
    for (size, args, cells) in [
        ("128M", &[][..], Some((1 << 20, 64..=96))),
        ("64M", &[][..], None),
        ("128M", &["--cells", "none"], None),
        ("32M", &["--cells", "1M"], Some((1 << 20, 20..=24))),
        ("32M", &["--cells", "128K:50%", "--cells", "16K:4M"], Some((16 << 10, 240..=256))),
    ] {
        let bench = Bench::new();
        let (code, info) = bench.json(&[&["format", "--size", size], args].concat());
        assert_eq!(code, 0);
        match cells {
            None => assert_eq!((&info["cache"]["cells"], &info["cache"]["classes"]), (&0.into(), &serde_json::json!([]))),
            Some((cell_bytes, ref count)) => {
                let class = &info["cache"]["classes"][0];
                assert_eq!(class["cell_bytes"], cell_bytes, "{size} {args:?}");
                assert!(count.contains(&class["cells"].as_u64().unwrap()), "{class}");
            }
        }
        assert_eq!(bench.run(&["fsck"]).code, 0);
        assert_eq!(bench.run(&["cache", "stat"]).code, i32::from(cells.is_none()));
    }
    assert!(bench.run(&["format", "--help"]).out.contains("at least 64 of them fit"));
}

#[test]
fn cells_of_a_model_are_shown_and_made() {
    let bench = Bench::new();
    let config = bench.directory.path().join("config.json");
    let write = |model_type: &str| {
        let text = r#"{"model_type": "TYPE", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "sliding_window": 64}"#;
        std::fs::write(&config, text.replace("TYPE", model_type)).unwrap();
    };
    write("llama");
    let (file, folder) = (config.to_str().unwrap(), bench.directory.path().to_str().unwrap());
    let asked = ["cells", "--model", folder, "--block-size", "16", "--tp", "2"];
    let shown = bench.run(&asked);
    // Keys and values of 4 layers, 2 of 4 heads, 64 numbers of 2 bytes, 16 tokens.
    let bytes = 2 * 4 * 2 * 64 * 2 * 16;
    assert_eq!(shown.code, 0, "{}", shown.err);
    assert!(
        shown.out.contains("every token  4       16") && shown.out.contains(&format!("cxlctl format --cells {bytes}:75%")),
        "{}",
        shown.out
    );
    let (_, json) = bench.json(&asked);
    assert_eq!(json["cell_bytes"], bytes);
    assert_eq!(json["groups"][0]["block_bytes"], bytes);

    let (code, info) = bench.json(&["format", "--size", "32M", "--model", file, "--block-size", "16", "--tp", "2", "--cells", "2K:1%"]);
    let classes = &info["cache"]["classes"];
    assert_eq!((code, &classes[0]["cell_bytes"], &classes[1]["cell_bytes"]), (0, &2048.into(), &bytes.into()));
    assert!((70.0..=75.0).contains(&classes[1]["share_percent"].as_f64().unwrap()), "{classes}");

    let refused = |args: &[&str], words: &str| {
        let ran = bench.run(args);
        assert!(ran.code == 2 && ran.err.contains(words), "{args:?}: {}", ran.err);
    };
    refused(&["cells", "--model", file], "--block-size");
    refused(&["format", "--model", file], "--block-size");
    refused(&["format", "--tp", "2"], "--model");
    refused(&["format", "--model", file, "--block-size", "16", "--cells", "none"], "none stands alone");
    refused(&["format", "--model", file, "--block-size", "16", "--cells", "2K"], "its share");
    refused(&["cells", "--model", "/no/such/file", "--block-size", "16"], "No such file");
    write("mamba2");
    refused(&["cells", "--model", file, "--block-size", "16"], "model type \"mamba2\" is not known");
    std::fs::write(&config, "{").unwrap();
    refused(&["cells", "--model", file, "--block-size", "16"], "EOF");
}

#[test]
fn format_refuses_foreign_data_and_says_so() {
    let bench = Bench::new();
    std::fs::write(bench.file(), vec![7; 16 << 20]).unwrap();
    let refused = bench.run(&["format"]);
    assert_eq!(refused.code, 4);
    assert!(refused.err.contains("unknown data"), "{}", refused.err);
    assert!(std::fs::read(bench.file()).unwrap().iter().all(|&byte| byte == 7));
}

/// The format job of the chart and of Compose formats empty devices, and leaves a pool and other data as they are.
#[test]
fn the_format_job_destroys_nothing() {
    let bench = Bench::new();
    let file = std::fs::File::options().read(true).write(true).create_new(true).open(bench.file()).unwrap();
    file.set_len(96 << 20).unwrap();
    let job = || {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/images/format-if-empty");
        let folder = std::path::Path::new(EXE).parent().unwrap().display().to_string();
        let path = format!("{folder}:{}", std::env::var("PATH").unwrap());
        ran(Command::new(script).env("CXL_POOL", bench.spec()).env("PATH", path).output().unwrap())
    };
    for (at, name) in
        [(24u64 << 20, "data (at byte 0x1800000)"), ((96 << 20) - 1, "data (at byte 0x5ffffff)"), (0x438, "an ext2, ext3 or ext4")]
    {
        file.write_all_at(b"\x53\xef", at).unwrap();
        file.set_len(96 << 20).unwrap();
        let refused = job();
        assert_eq!(refused.code, 4, "{}", refused.err);
        assert!(refused.err.contains(name) && refused.err.contains("--force"), "{}", refused.err);
        let mut found = [0; 1];
        file.read_exact_at(&mut found, at).unwrap();
        assert_eq!(found, [0x53]);
        file.write_all_at(&[0; 2], at).unwrap();
        file.set_len(96 << 20).unwrap();
    }
    assert_eq!(job().code, 0);
    let uuid = bench.json(&["info"]).1["uuid"].clone();
    let again = job();
    assert!(again.code == 0 && again.out.contains("is a pool: left as it is"), "{} {}", again.out, again.err);
    assert_eq!(bench.json(&["info"]).1["uuid"], uuid);
}

#[test]
fn wrong_usage_is_2() {
    let bench = Bench::formatted();
    for args in [
        &["no-such-command"][..],
        &["format", "--size", "many"],
        &["format", "--force", "--slots", "65"],
        &["format", "--force", "--advanced", "machine=xyz"],
        &["format", "--force", "--advanced", "locks"],
        &["format", "--force", "--advanced", "colour=2"],
        &["format", "--force", "--advanced", "objects=16385"],
        &["format", "--force", "--cells", "1M:0%"],
        &["format", "--force", "--cells", "1M", "--cells", "64K:10%"],
        &["format", "--force", "--cells", "none", "--cells", "64K:10%"],
        &["format", "--force", "--cells", "100:10%"],
        &["format", "--force", "--cells", "1G:10%"],
        &["format", "--force", "--cells", "4K:10%", "--cells", "4K:20%"],
        &["format", "--force", "--cells", "4K:80%", "--cells", "8K:80%"],
        &["why", "12"],
        &["cache"],
        &["cache", "clear"],
        &["cache", "clear", "--all", "--namespace", "000102030405060708090a0b0c0d0e0f"],
        &["cache", "ls", "--state", "gone"],
        &["format", "--force", "--advanced", "seats=1", "--advanced", "seat_machine=000102030405060708090a0b0c0d0e0f"],
        &["--pool", "relative/path", "info"],
        &["inspect", "nothing"],
        &["inspect", "seat", "200"],
        &["inspect", "seat", "-1"],
        &["inspect", "superblock", "1"],
        &["inspect", "blocks", "999999"],
        &["fsck", "--accept-loss"],
        &["hosts", "declare-dead", "0"],
    ] {
        let ran = bench.run(args);
        assert_eq!((ran.code, ran.out.as_str()), (2, ""), "{args:?}: {}", ran.err);
        assert!(!ran.err.is_empty());
    }
    let nameless = ran(Command::new(EXE).arg("info").env_remove("CXL_POOL").output().unwrap());
    assert_eq!(nameless.code, 2);
    assert!(nameless.err.contains("CXL_POOL") && nameless.err.contains("--pool"), "{}", nameless.err);
}

#[test]
fn every_region_and_view_can_be_inspected() {
    let bench = Bench::formatted();
    for region in REGIONS.into_iter().chain(["superblock", "locks", "objects", "blocks"]) {
        let text = bench.run(&["inspect", region]);
        assert_eq!(text.code, 0, "{region}: {}", text.err);
        assert!(!text.out.is_empty(), "{region}");
        let (code, value) = bench.json(&["inspect", region, "all", "--raw"]);
        assert_eq!(code, 0, "{region}");
        assert!(value.is_array(), "{region}");
    }
    let (_, seats) = bench.json(&["inspect", "seat", "all", "--raw"]);
    // Two seats, and one for each of the four slots.
    assert_eq!(seats.as_array().unwrap().len(), 6);
    assert_eq!(seats[1]["name"], "SEAT[1]");
    assert_eq!(seats[1]["valid"], true);
    assert_eq!(seats[1]["raw"].as_str().unwrap().len(), 128);
    assert_eq!(bench.json(&["inspect", "seat"]).1, serde_json::json!([]));
    let raw = bench.run(&["inspect", "superblock", "0", "--raw"]);
    assert!(raw.out.contains("kvbmcxl"), "{}", raw.out);
}

#[test]
fn a_damaged_line_is_shown_as_such() {
    let bench = Bench::formatted();
    let pool = bench.open();
    let offset = pool.layout().line_offset(cxl_pool::media::Region::Identity, 2).unwrap();
    let mut line = pool.lines().fetch_raw(offset).unwrap();
    line.0[9] ^= 4;
    pool.lines().memory().write_line(offset, &line).unwrap();
    pool.lines().memory().fence_stores();
    let (code, found) = bench.json(&["inspect", "identity"]);
    assert_eq!(code, 1);
    assert_eq!(found.as_array().unwrap().len(), 1);
    assert_eq!((&found[0]["index"], &found[0]["valid"]), (&2.into(), &false.into()));
    assert!(bench.run(&["inspect", "identity", "2"]).out.contains("NOT VALID"));
}

#[test]
fn a_closed_pipe_ends_the_output_and_nothing_else() {
    let bench = Bench::formatted();
    for (args, code) in [(&["inspect", "keep-map", "all", "--raw"][..], 0), (&["completions", "bash"], 0), (&["info"], 0), (&["fsck"], 0)] {
        let mut command = bench.command(bench.machine);
        let mut child = command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let mut err = String::new();
        child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
        assert_eq!((child.wait().unwrap().code(), err.as_str()), (Some(code), ""), "{args:?}");
    }
}

#[test]
fn completions_and_manual_pages() {
    let bench = Bench::new();
    for shell in ["bash", "zsh", "fish"] {
        let script = bench.run(&["completions", shell]);
        assert_eq!(script.code, 0);
        assert!(script.out.contains("fsck") && script.out.contains("cxlctl"), "{shell}");
    }
    let pages = bench.directory.path().join("man/man1");
    assert_eq!(bench.run(&["man", pages.to_str().unwrap()]).code, 0);
    let page = std::fs::read_to_string(pages.join("cxlctl-hosts-declare-dead.1")).unwrap();
    assert!(page.contains("DATA IS CORRUPTED"), "{page}");
    assert!(std::fs::read_to_string(pages.join("cxlctl.1")).unwrap().contains("Exit codes"));
    assert!(!pages.join("cxlctl-demo-reader.1").exists(), "a hidden command has no page");
    for (program, name) in [(env!("CARGO_BIN_EXE_cxl-bench"), "cxl-bench"), (env!("CARGO_BIN_EXE_cxl-plan"), "cxl-plan")] {
        assert!(Command::new(program).arg("man").arg(&pages).output().unwrap().status.success());
        let page = std::fs::read_to_string(pages.join(format!("{name}.1"))).unwrap();
        assert!(page.contains("Exit codes") && !pages.join(format!("{name}-man.1")).exists());
    }
    std::fs::write(bench.directory.path().join("file"), "").unwrap();
    assert_eq!(bench.run(&["man", bench.directory.path().join("file").to_str().unwrap()]).code, 1);
}

#[test]
fn help_documents_the_exit_codes_and_the_danger() {
    let bench = Bench::new();
    let help = bench.run(&["--help"]);
    assert!(help.code == 0 && help.out.contains("Exit codes") && help.out.contains("CXL_POOL"));
    let help = bench.run(&["hosts", "declare-dead", "--help"]);
    assert!(help.out.contains("DATA IS CORRUPTED"), "{}", help.out);
}
