// SPDX-License-Identifier: Apache-2.0
//! `cxlctl doctor --gpu` over a driver that is faked: what it finds, measures and advises, and how it ends.

#[path = "../../pool/tests/cuda/device.rs"]
#[allow(dead_code)] // The tests of the engine use the rest; the same below.
mod device;
#[path = "../../pool/tests/cuda/fake.rs"]
#[allow(dead_code)]
mod fake;

use fake::{Fake, Kind};
use serde_json::Value;
use std::process::{Command, Output};

fn doctor(arguments: &[&str], environment: &[(&str, &str)]) -> (Option<i32>, Value) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cxlctl"));
    command.args(["--json", "doctor", "--batches", "1", "--chosen-only", "--scratch-bytes", "8M"]).args(arguments);
    if !arguments.contains(&"--rounds") {
        command.args(["--rounds", "16"]);
    }
    command.env_remove("CXL_POOL").env_remove("CXL_COHERENCE").envs(environment.iter().copied());
    let Output { status, stdout, stderr } = command.output().unwrap();
    let text = || format!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    (status.code(), serde_json::from_slice(&stdout).unwrap_or_else(|error| panic!("{error}: {}", text())))
}

fn lengths(report: &Value) -> Vec<u64> {
    report["gpu"]["speeds"].as_array().unwrap().iter().map(|speed| speed["piece_bytes"].as_u64().unwrap()).collect()
}

#[test]
fn copies_are_compared_and_timed() {
    // On hosts without coherence the right bytes need every step.
    for coherence in ["native", "emulated:noise=0"] {
        let fake = Fake::new(Kind::Engine);
        let (code, report) = doctor(&["--gpu"], &[("CXL_CUDA_LIBRARY", fake.path()), ("CXL_COHERENCE", coherence)]);
        assert_eq!(code, Some(0), "{report}");
        let gpu = &report["gpu"];
        assert_eq!((&gpu["version"], &gpu["dma"], &gpu["device"]), (&"13.0".into(), &"cached".into(), &0.into()));
        assert_eq!(gpu["gpus"][0], serde_json::json!(["Fake GPU 0", "9.0", 1u64 << 30]));
        assert!(gpu["registered"][0].as_u64().unwrap() >= 8 << 20 && gpu["refusal"].is_null(), "{gpu}");
        assert_eq!(lengths(&report), [160, 32 << 10, 1 << 20]);
        for speed in gpu["speeds"].as_array().unwrap() {
            assert!(speed["to_pool_gb_per_s"].as_f64().unwrap() > 0.0 && speed["from_pool_gb_per_s"].as_f64().unwrap() > 0.0, "{speed}");
        }
        assert!(report["findings"].to_string().contains("no kernels"), "{report}");
    }
}

#[test]
fn uncached_dma_is_warned_of() {
    let fake = Fake::new(Kind::Engine);
    let with =
        |coherence| doctor(&["--gpu"], &[("CXL_CUDA_LIBRARY", fake.path()), ("CXL_CUDA_DMA", "uncached"), ("CXL_COHERENCE", coherence)]);
    // One host cannot tell whether it is true.
    let (code, report) = with("emulated:noise=0,dma=uncached");
    assert_eq!((code, &report["gpu"]["dma"]), (Some(0), &"uncached".into()), "{report}");
    assert!(report["findings"].to_string().contains("uncacheable on this host and DDIO is off"), "{report}");
}

#[test]
fn what_keeps_a_gpu_from_being_used_is_said() {
    let fake = Fake::new(Kind::Engine);
    let broken = Fake::new(Kind::Broken);
    for (library, device, said) in [
        ("none", "0", "CXL_CUDA_LIBRARY turns off"),
        ("libno-such-driver.so.1", "0", "install NVIDIA's driver"),
        (broken.path(), "0", "cuEventQuery of a driver of CUDA 11 or newer"),
        (fake.path(), "3", "GPU 3 (this process sees 1)"),
    ] {
        let (code, report) = doctor(&["--gpu", device, "--look"], &[("CXL_CUDA_LIBRARY", library)]);
        assert!(code == Some(1) && report["findings"].to_string().contains(said), "{library}: {code:?} {report}");
        assert_eq!((&report["verdict"], &report["gpu"]), (&"not-usable".into(), &Value::Null));
    }
    // With --look the driver is asked, and nothing is measured.
    let (code, report) = doctor(&["--gpu", "0", "--look"], &[("CXL_CUDA_LIBRARY", fake.path())]);
    assert_eq!((code, &report["gpu"]["registered"], lengths(&report).len()), (Some(0), &Value::Null, 0), "{report}");
}

/// Arguments and environment of a host's `doctor`.
type Side<'a> = (&'a [&'a str], &'a [(&'a str, &'a str)]);

/// Both roles over one file, as two hosts: what each ends with.
fn two_hosts(sides: [Side<'_>; 2]) -> [(Option<i32>, Value); 2] {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("memory");
    std::fs::File::create(&path).unwrap().set_len(16 << 20).unwrap();
    let pool = path.to_str().unwrap();
    let run = |(role, (arguments, environment)): (&str, Side<'_>)| {
        let both = ["--pool", pool, "--scratch-offset", "4M", "--peer-role", role, "--rounds", "256"];
        doctor(&[&both, arguments].concat(), environment)
    };
    std::thread::scope(|scope| {
        let second = scope.spawn(|| run(("b", sides[1])));
        [run(("a", sides[0])), second.join().unwrap()]
    })
}

fn gpu_trial(report: &Value) -> &Value {
    let trials = report["devices"][0]["litmus"]["trials"].as_array().unwrap();
    trials.iter().find(|trial| trial["test"] == "gpu-payload").unwrap_or_else(|| panic!("{report}"))
}

#[test]
fn two_hosts_show_whether_dma_is_as_it_is_said_to_be() {
    let fake = Fake::new(Kind::Engine);
    // What the platforms do, what the side with the GPU says, whether the other one has a GPU, too.
    for (platform, said, both, passes) in [
        ("cached", "cached", true, true),
        ("cached", "cached", false, true),
        ("uncached", "uncached", true, true),
        ("uncached", "cached", true, true),
        ("cached", "uncached", true, false),
        ("cached", "uncached", false, false),
    ] {
        let coherence = format!("emulated:seed=5,noise=4,dma={platform}");
        let environment = [("CXL_CUDA_LIBRARY", fake.path()), ("CXL_CUDA_DMA", said), ("CXL_COHERENCE", coherence.as_str())];
        let other: &[&str] = if both { &["--gpu"] } else { &[] };
        let [(code, first), (_, second)] = two_hosts([(&["--gpu"], &environment), (other, &environment)]);
        let trial = gpu_trial(&first);
        assert!(trial["checks"].as_u64().unwrap() >= 2 * 64, "{trial}");
        assert_eq!((trial["violations"] == 0, code), (passes, Some(i32::from(!passes))), "{platform} {said} {both}: {first}");
        assert_eq!(first["findings"].to_string().contains("CXL_CUDA_DMA=cached"), !passes, "{first}");
        // All other tests pass on both sides.
        for report in [&first, &second] {
            let trials = report["devices"][0]["litmus"]["trials"].as_array().unwrap();
            assert!(trials.len() == 5 && trials.iter().all(|trial| trial["test"] == "gpu-payload" || trial["violations"] == 0), "{report}");
        }
    }
}

#[test]
fn a_flush_that_is_left_out_around_dma_is_noticed() {
    let fake = Fake::new(Kind::Engine);
    let environment = [("CXL_CUDA_LIBRARY", fake.path()), ("CXL_COHERENCE", "emulated:seed=2")];
    let left_out: &[&str] = &["--gpu", "--leave-out", "payload-flush"];
    let [(code, report), _] = two_hosts([(left_out, &environment), (left_out, &environment)]);
    assert!(code == Some(1) && gpu_trial(&report)["violations"].as_u64().unwrap() > 0, "{report}");
}

#[test]
fn a_gpu_that_does_not_reach_the_memory_ends_the_tests() {
    let fake = Fake::new(Kind::Engine);
    let environment = [("CXL_CUDA_LIBRARY", "none"), ("CXL_COHERENCE", "emulated:seed=2")];
    let other = [("CXL_CUDA_LIBRARY", fake.path()), ("CXL_COHERENCE", "emulated:seed=2")];
    let short: &[&str] = &["--timeout-ms", "3000"];
    let [(code, report), _] = two_hosts([(&[&["--gpu"], short].concat(), &environment), (short, &other)]);
    assert!(code == Some(1) && report["findings"].to_string().contains("the visibility tests stopped"), "{report}");
}
