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
    command.args(["--json", "doctor", "--batches", "1", "--rounds", "16", "--chosen-only", "--scratch-bytes", "8M"]).args(arguments);
    command.env_remove("CXL_POOL").env_remove("CXL_COHERENCE").envs(environment.iter().copied());
    let Output { status, stdout, stderr } = command.output().unwrap();
    let text = || format!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    (status.code(), serde_json::from_slice(&stdout).unwrap_or_else(|error| panic!("{error}: {}", text())))
}

fn ways(report: &Value) -> Vec<&str> {
    let mut ways: Vec<&str> = report["gpu"]["speeds"].as_array().unwrap().iter().map(|speed| speed["way"].as_str().unwrap()).collect();
    ways.dedup();
    ways
}

#[test]
fn ways_are_measured_and_settings_follow() {
    for (kind, version, expected) in [(Kind::New, "13.0", &["batch", "plain"][..]), (Kind::Old, "11.4", &["plain"])] {
        let fake = Fake::new(kind);
        let (code, report) = doctor(&["--gpu"], &[("CXL_CUDA_LIBRARY", fake.path())]);
        assert_eq!(code, Some(0), "{report}");
        let gpu = &report["gpu"];
        assert_eq!((&gpu["version"], &gpu["dma"], &gpu["device"]), (&version.into(), &"cached".into(), &0.into()));
        assert_eq!(gpu["gpus"][0], serde_json::json!(["Fake GPU 0", "9.0", 1u64 << 30]));
        assert!(gpu["registered"][0].as_u64().unwrap() >= 8 << 20 && gpu["refusal"].is_null(), "{gpu}");
        assert_eq!(ways(&report), expected);
        for speed in gpu["speeds"].as_array().unwrap() {
            assert!(speed["to_pool_gb_per_s"].as_f64().unwrap() > 0.0 && speed["from_pool_gb_per_s"].as_f64().unwrap() > 0.0, "{speed}");
        }
        // Without a kernel nothing goes by it.
        assert_eq!(gpu["settings"][0], serde_json::json!(["CXL_CUDA_KERNEL_PIECE_BYTES", 0]));
        assert!(report["findings"].to_string().contains("no kernels"), "{report}");
    }
    // On hosts without coherence the right bytes need every step.
    let fake = Fake::new(Kind::Older);
    let (code, report) = doctor(&["--gpu"], &[("CXL_CUDA_LIBRARY", fake.path()), ("CXL_COHERENCE", "emulated:noise=0")]);
    assert_eq!((code, ways(&report)), (Some(0), vec!["batch", "plain"]), "{report}");
}

#[test]
fn uncached_dma_is_warned_of() {
    let fake = Fake::new(Kind::New);
    let with =
        |coherence| doctor(&["--gpu"], &[("CXL_CUDA_LIBRARY", fake.path()), ("CXL_CUDA_DMA", "uncached"), ("CXL_COHERENCE", coherence)]);
    // One host cannot tell whether it is true.
    let (code, report) = with("emulated:noise=0,dma=uncached");
    assert_eq!((code, &report["gpu"]["dma"]), (Some(0), &"uncached".into()), "{report}");
    assert!(report["findings"].to_string().contains("uncacheable on this host and DDIO is off"), "{report}");
}

#[test]
fn what_keeps_a_gpu_from_being_used_is_said() {
    let fake = Fake::new(Kind::New);
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
    assert_eq!((code, &report["gpu"]["registered"], ways(&report).len()), (Some(0), &Value::Null, 0), "{report}");
    let output = Command::new(env!("CARGO_BIN_EXE_cxlctl"))
        .args(["doctor", "--gpu", "0", "--peer-role", "a", "--scratch-offset", "4G", "--pool", "/dev/null"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("another host pulls all of them"));
}
