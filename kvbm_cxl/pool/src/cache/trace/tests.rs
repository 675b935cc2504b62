// SPDX-License-Identifier: Apache-2.0
//! The recorder: the contents of the file, bounds, a disk that is full, ids.

use super::*;
use std::time::Instant;

const MODEL: Namespace = Namespace([7; 16]);

fn keys(from: u8, count: u8) -> Vec<BlockKey> {
    (from..from + count).map(|number| BlockKey([number; 16])).collect()
}

fn config(directory: &Path, salt: &str) -> TraceConfig {
    TraceConfig { directory: directory.into(), salt: salt.into(), block_tokens: 64, most_bytes: 1 << 30 }
}

fn lines(path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap();
    assert!(text.ends_with('\n'), "whole lines: {text}");
    text.lines().map(String::from).collect()
}

/// Waits until entries were handled, whatever became of them.
fn settled(recorder: &TraceRecorder, entries: u64) -> TraceCounts {
    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        let counts = recorder.counts();
        if counts.written + counts.dropped + counts.failed >= entries {
            return counts;
        }
        assert!(Instant::now() < deadline, "{counts:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn requests_and_publishes_stand_in_the_file_by_salted_ids() {
    let directory = tempfile::tempdir().unwrap();
    let recorder = TraceRecorder::start(&config(directory.path(), "secret")).unwrap();
    let before = now_us();
    recorder.asked(MODEL, &keys(1, 3), 200, 128);
    recorder.published(MODEL, &keys(3, 1));
    recorder.published(MODEL, &[]);
    let path = recorder.path().to_path_buf();
    drop(recorder);
    let lines = lines(&path);
    let id = |number: u8| trace_id("secret", MODEL, BlockKey([number; 16]));
    assert_eq!(lines.len(), 4, "{lines:?}");
    assert!(
        lines[0].starts_with(&format!("{{\"recorder\": 1, \"salt\": \"{}\", \"block_tokens\": 64, ", fingerprint("secret"))),
        "{lines:?}"
    );
    let wanted = format!("\"input_length\": 200, \"found\": 128, \"hash_ids\": [{}, {}, {}]}}", id(1), id(2), id(3));
    assert!(lines[1].ends_with(&wanted), "{} {wanted}", lines[1]);
    assert!(lines[2].ends_with(&format!("\"published\": [{}]}}", id(3))), "{lines:?}");
    assert!(lines[3].ends_with("\"dropped\": 0, \"failed\": 0}"), "{lines:?}");
    let at: u64 = lines[1].trim_start_matches("{\"at_us\": ").split(',').next().unwrap().parse().unwrap();
    assert!((before..=now_us()).contains(&at), "{at}");
    assert!(!lines.concat().contains("secret") && !format!("{:?}", config(directory.path(), "secret")).contains("secret"));
    use std::os::unix::fs::PermissionsExt;
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn ids_depend_on_salt_namespace_and_key_and_on_nothing_else() {
    let key = BlockKey([1; 16]);
    let id = trace_id("one", MODEL, key);
    assert_eq!(id, trace_id("one", MODEL, key));
    for other in [trace_id("two", MODEL, key), trace_id("one", Namespace([8; 16]), key), trace_id("one", MODEL, BlockKey([2; 16]))] {
        assert_ne!(id, other);
    }
    assert!((0..=255).all(|number| trace_id("one", MODEL, BlockKey([number; 16])) < 1 << ID_BITS));
    assert_ne!(fingerprint("one"), fingerprint("two"));
}

#[test]
fn a_full_queue_drops_and_counts_and_does_not_grow() {
    let directory = tempfile::tempdir().unwrap();
    let recorder = TraceRecorder::start(&config(directory.path(), "secret")).unwrap();
    // A chain that does not fit at all, and many that do not fit together: the thread rests between two writes.
    let huge = vec![BlockKey([1; 16]); MOST_WAITING_BYTES / 16];
    recorder.asked(MODEL, &huge, 1, 0);
    assert_eq!(recorder.counts().dropped, 1);
    let long = vec![BlockKey([2; 16]); MOST_WAITING_BYTES / 16 / 4];
    let most = held(&recorder.queue).len_bytes;
    assert_eq!(most, 0);
    for _ in 0..64 {
        recorder.asked(MODEL, &long, 1, 0);
        assert!(held(&recorder.queue).len_bytes <= MOST_WAITING_BYTES);
    }
    let counts = settled(&recorder, 65);
    assert_eq!(counts.written + counts.dropped, 65, "{counts:?}");
    assert!(counts.dropped > 1, "{counts:?}");
    let path = recorder.path().to_path_buf();
    drop(recorder);
    assert_eq!(lines(&path).len() as u64, 2 + counts.written);
    assert!(lines(&path).last().unwrap().ends_with(&format!("\"dropped\": {}, \"failed\": 0}}", counts.dropped)));
}

#[test]
fn a_file_ends_where_it_may_not_be_longer() {
    let directory = tempfile::tempdir().unwrap();
    let recorder = TraceRecorder::start(&TraceConfig { most_bytes: 2000, ..config(directory.path(), "secret") }).unwrap();
    for number in 0..100 {
        recorder.asked(MODEL, &keys(number, 3), 192, 0);
    }
    // A short one after those that did not fit would make a hole.
    settled(&recorder, 100);
    recorder.asked(MODEL, &[], 1, 0);
    let counts = settled(&recorder, 101);
    let path = recorder.path().to_path_buf();
    drop(recorder);
    assert!(std::fs::metadata(&path).unwrap().len() <= 2000);
    assert_eq!((counts.written + counts.dropped, counts.failed), (101, 0), "{counts:?}");
    let lines = lines(&path);
    assert!(counts.dropped > 50 && lines.len() as u64 == 2 + counts.written, "{counts:?}");
    assert!(!lines.concat().contains("\"input_length\": 1,"));
    assert!(lines[lines.len() - 1].contains(&format!("\"dropped\": {},", counts.dropped)));
}

#[test]
fn a_disk_that_is_full_costs_entries_and_no_caller_waits() {
    let directory = tempfile::tempdir().unwrap();
    let recorder = TraceRecorder::start(&config(directory.path(), "secret")).unwrap();
    let (file, path) = (OpenOptions::new().write(true).open("/dev/full").unwrap(), recorder.path().to_path_buf());
    let mut writer = Writer {
        file,
        path: path.clone(),
        len_bytes: 0,
        most_bytes: 1 << 20,
        salt: "secret".into(),
        counted: recorder.counted.clone(),
        is_full: false,
    };
    let entry = || Recorded { at_us: 1, what: What::Published, namespace: MODEL, keys: keys(1, 2).into() };
    let error = writer.write(&[entry(), entry()]).unwrap_err().to_string();
    assert!(error.contains("No space left") && error.contains(&path.display().to_string()), "{error}");
    assert_eq!(recorder.counts(), TraceCounts { written: 0, dropped: 0, failed: 2 });
    // And by the thread: entries that it cannot write are recorded as failed and logged, and the recorder continues.
    let queue = Arc::<Mutex<Queue>>::default();
    held(&queue).entries.push(entry());
    let mut round = Round { writer, queue, failed_rounds: recorder.failed_rounds.clone() };
    round.run();
    assert_eq!(recorder.counts().failed, 3);
    assert!(recorder.last_error().unwrap().contains("No space left"));
    recorder.asked(MODEL, &keys(1, 1), 64, 0);
    assert_eq!(settled(&recorder, 4).written, 1, "its own file takes it");
}

#[test]
fn what_cannot_be_is_refused_and_says_why() {
    let directory = tempfile::tempdir().unwrap();
    let refused = |config: TraceConfig| TraceRecorder::start(&config).map(drop).unwrap_err().to_string();
    assert!(refused(config(directory.path(), "")).contains("salt"));
    assert!(refused(TraceConfig { block_tokens: 0, ..config(directory.path(), "s") }).contains("tokens of a block"));
    assert!(refused(TraceConfig { most_bytes: 1023, ..config(directory.path(), "s") }).contains("1024 bytes"));
    assert!(refused(config(Path::new("/proc/nowhere"), "s")).contains("/proc/nowhere"));
}
