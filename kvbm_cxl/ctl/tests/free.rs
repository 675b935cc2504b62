// SPDX-License-Identifier: Apache-2.0
//! `cxlctl free`: memory that programs kept and that outlived them, however they ended.

mod common;

use common::Bench;
use serde_json::Value;
use std::collections::BTreeSet;

/// Kept blocks as `inspect blocks` shows them: offset and name.
fn kept(bench: &Bench) -> Vec<(u64, Option<String>)> {
    let (code, chunks) = bench.json(&["inspect", "blocks", "all"]);
    assert_eq!(code, 0, "{chunks:#}");
    let blocks = chunks.as_array().unwrap().iter().flat_map(|chunk| chunk["kept"].as_array().unwrap());
    blocks.map(|block| (block["offset"].as_u64().unwrap(), block["name"].as_str().map(String::from))).collect()
}

fn freed(answer: &Value) -> BTreeSet<u64> {
    answer["freed"].as_array().unwrap().iter().map(|block| block["offset"].as_u64().unwrap()).collect()
}

/// A pool whose only host was killed with a counter, a directory that names stand for, and 40 blocks without a name.
fn left_by_a_killed_host() -> Bench {
    let bench = Bench::formatted();
    let mut host = bench.host("machine-a");
    for order in [r#""Prepare""#, r#"{"Publish":{"round":1}}"#] {
        host.order(order);
        let reply = host.reply();
        assert!(!reply.contains("Failed"), "{reply}");
    }
    let used = bench.run(&["free", "--unnamed"]);
    assert!(used.code == 4 && used.err.contains("use the pool"), "{} {}", used.out, used.err);
    host.kill();
    bench
}

#[test]
fn what_a_killed_process_kept_is_listed_and_freed() {
    let bench = left_by_a_killed_host();
    let before = kept(&bench);
    let (named, unnamed): (Vec<_>, Vec<_>) = before.iter().partition(|(_, name)| name.is_some());
    assert_eq!((named.len(), unnamed.len()), (2, 40), "{before:?}");
    let listed = bench.run(&["inspect", "blocks", "all"]).out;
    assert_eq!(listed.matches("without a name").count(), 40, "{listed}");

    // One by its offset, which may be written in both ways, one by its name, and nothing that is not meant.
    let (first, second) = (unnamed[0].0, unnamed[1].0);
    let (code, answer) = bench.json(&["free", &format!("{first:#x}"), &second.to_string()]);
    assert_eq!((code, freed(&answer)), (0, BTreeSet::from([first, second])), "{answer:#}");
    let (directory, name) = (named[0].0, named[0].1.clone().unwrap());
    let refused = bench.run(&["free", &format!("{directory:#x}")]);
    assert!(refused.code == 4 && refused.err.contains(&name), "{}", refused.err);
    assert_eq!(bench.run(&["free", &format!("{:#x}", unnamed[2].0 + 64)]).code, 1, "no block begins there");
    assert_eq!(bench.run(&["free", &format!("{first:#x}")]).code, 1, "it is free already");
    assert_eq!(bench.run(&["free", "a name that there is not"]).code, 2);
    let (code, answer) = bench.json(&["free", &name]);
    assert_eq!((code, freed(&answer)), (0, BTreeSet::from([directory])), "{answer:#}");
    assert!(!bench.run(&["inspect", "objects"]).out.contains(&name));

    let (code, answer) = bench.json(&["free", "--unnamed"]);
    assert_eq!((code, freed(&answer)), (0, unnamed[2..].iter().map(|(offset, _)| *offset).collect()), "{answer:#}");
    assert_eq!(kept(&bench), [named[1].clone()], "what has a name stays");
    assert_eq!(bench.run(&["fsck"]).code, 0);
    assert!(bench.run(&["free", "--unnamed"]).out.contains("every kept block has a name"));
}

/// Its stores may still lie in the caches of its machine, which another machine cannot bring out.
#[test]
fn memory_of_another_machine_stays_until_its_death_is_proven() {
    let mut bench = left_by_a_killed_host();
    let place = kept(&bench).into_iter().find(|(_, name)| name.is_none()).unwrap().0;
    // A machine that the kernel does not know: its mark is of another file.
    let image = std::fs::read(bench.file()).unwrap();
    std::fs::remove_file(bench.file()).unwrap();
    std::fs::write(bench.file(), image).unwrap();
    bench.machine = "machine-b";
    let (code, answer) = bench.json(&["free", &format!("{place:#x}"), "--timeout-ms", "10000"]);
    assert_eq!((code, freed(&answer).len()), (1, 0), "{answer:#}");
    assert!(answer["left"][0]["why"].as_str().unwrap().contains("machine"), "{answer:#}");
    let slot =
        bench.json(&["hosts", "--watch-ms", "0"]).1["slots"].as_array().unwrap().iter().find(|slot| slot["state"] == "live").cloned();
    let slot = slot.unwrap_or_else(|| panic!("{:#}", bench.json(&["hosts", "--watch-ms", "0"]).1));
    let (number, incarnation) = (slot["slot"].to_string(), slot["incarnation"].to_string());
    let declared = bench.run(&["hosts", "declare-dead", &number, "--incarnation", &incarnation, "--i-know-it-is-gone"]);
    assert_eq!(declared.code, 0, "{} {}", declared.out, declared.err);
    let (code, answer) = bench.json(&["free", &format!("{place:#x}")]);
    assert_eq!((code, freed(&answer)), (0, BTreeSet::from([place])), "{answer:#}");
}
