// SPDX-License-Identifier: Apache-2.0
//! Pools whose metadata lies on a device of its own: layout, names that open them, and formats refused without a byte written.

use super::*;
use crate::device::DevicePart;
use crate::error::PartitionProblem;
use crate::media::METADATA_APART;

const M: u64 = 1 << 20;

/// Two devices of payload (numbers 1 and 2) and one of metadata (number 0), which is longer than it needs.
fn apart(payload: usize) -> Bench {
    let bench = Bench::new(payload + 1);
    drop(Pool::format(&spec(&bench, Some(24 * M)), &options()).unwrap());
    bench
}

fn spec(bench: &Bench, metadata_size: Option<u64>) -> PoolSpec {
    let part = DevicePart { size_bytes: metadata_size, ..DevicePart::whole(&bench.paths[0]) };
    PoolSpec::new(bench.paths[1..].to_vec(), metadata_size.map(|_| SIZE)).unwrap().with_metadata(Some(part)).unwrap()
}

fn whole(metadata: &PathBuf, payload: &[&PathBuf]) -> PoolSpec {
    let payload = payload.iter().map(|path| (*path).clone()).collect();
    PoolSpec::new(payload, None).unwrap().with_metadata(Some(DevicePart::whole(metadata))).unwrap()
}

#[test]
fn metadata_lies_on_its_device_and_payload_on_the_others() {
    for payload in [1, 2, 3] {
        let bench = apart(payload);
        let before = bench.bytes();
        let pool = open(&spec(&bench, None)).unwrap();
        let (layout, memory) = (pool.layout().clone(), pool.lines().memory().clone());
        let geometry = *layout.geometry();
        assert_eq!(pool.superblock().features()[2] & METADATA_APART, METADATA_APART);
        assert_eq!(
            (geometry.devices as usize, pool.payload_device().unwrap().name.as_str()),
            (payload + 1, bench.paths[1].to_str().unwrap())
        );
        assert_eq!(geometry.len_bytes, geometry.metadata_bytes + payload as u64 * SIZE);
        let stripes = Stripes::of(&geometry).unwrap();
        let first = layout.spans()[0].offset;
        for offset in (0..geometry.len_bytes).step_by(4096) {
            let device = stripes.piece_at(offset).unwrap().device;
            assert_eq!(device == 0, offset < 2 * M || (first..layout.cells_offset()).contains(&offset), "{offset:#x}");
        }
        let used: Vec<u64> = (0..=payload).map(|device| stripes.device_len_bytes(device)).collect();
        assert_eq!((used[0], &used[1..]), (geometry.metadata_bytes, &vec![SIZE; payload][..]));
        // What the metadata does not need of its device is as it was made.
        assert!(geometry.metadata_bytes < 24 * M && before[0][geometry.metadata_bytes as usize..].iter().all(|&byte| byte == 0));

        // The last bytes of the payload, and a line of metadata: each changes its own device alone.
        memory.copy_in(geometry.len_bytes - 64, &[0x5a; 64]).unwrap();
        memory.fence_stores();
        let written = bench.bytes();
        assert!(written[0] == before[0] && written[payload].ends_with(&[0x5a; 64]));
        pool.lines().publish(0, Seat { epoch: 9, ..Seat::default() }).unwrap();
        let after = bench.bytes();
        assert!(after[0] != written[0] && after[1..] == written[1..]);
        assert_eq!(open(&spec(&bench, None)).unwrap().lines().fetch::<Seat>(0).unwrap().epoch, 9);
    }
}

#[test]
fn any_name_with_all_devices_opens_it() {
    let bench = apart(2);
    let [m, a, b] = [&bench.paths[0], &bench.paths[1], &bench.paths[2]];
    let names = |pool: Pool| pool.devices().iter().map(|info| PathBuf::from(&info.name)).collect::<Vec<_>>();
    for spec in [whole(m, &[a, b]), whole(m, &[b, a]), whole(a, &[m, b]), bench.spec_of(&[2, 0, 1])] {
        assert_eq!(names(open(&spec).unwrap()), bench.paths, "{spec}");
    }
    let text = format!("{},{},metadata={}", a.display(), b.display(), m.display());
    assert_eq!(names(open(&PoolSpec::parse(&text).unwrap()).unwrap()), bench.paths);
}

#[test]
fn a_wrong_pair_is_refused_and_nothing_is_written() {
    let (bench, other) = (apart(1), apart(1));
    let striped = Bench::formatted(2);
    let [m, a, n, b] = [&bench.paths[0], &bench.paths[1], &other.paths[0], &other.paths[1]];
    let empty = bench.folder.path().join("empty");
    File::create(&empty).unwrap().set_len(SIZE).unwrap();
    let gone = bench.folder.path().join("gone");
    let before = [bench.bytes(), other.bytes(), striped.bytes()];
    let refused = |spec: &PoolSpec, texts: &[&str]| {
        for outcome in [open(spec), open_read_only(spec), Pool::format(spec, &options())] {
            let reason = refusal(outcome);
            assert!(texts.iter().any(|text| reason.contains(text)) || reason.contains("it holds"), "{spec}: {reason}");
        }
        let reason = refusal(open(spec));
        assert!(texts.iter().any(|text| reason.contains(text)), "{spec}: {reason}");
    };
    refused(&whole(n, &[a]), &["foreign: it belongs to pool"]);
    refused(&whole(m, &[b]), &["foreign: it belongs to pool"]);
    refused(&whole(m, &[&striped.paths[0]]), &["foreign: it belongs to pool"]);
    refused(&PoolSpec::new(vec![a.clone()], None).unwrap(), &["it carries the metadata: name it with metadata=PATH"]);
    refused(&PoolSpec::new(vec![m.clone()], None).unwrap(), &["device 1 of 2"]);
    refused(&whole(&empty, &[a]), &["empty: there is no pool on it yet"]);
    refused(&whole(m, &[&gone]), &["no such device"]);
    assert!([bench.bytes(), other.bytes(), striped.bytes()] == before);

    // The device of the metadata, formatted for another pool, is recognized; and so is a leftover payload.
    let old = bench.bytes();
    Pool::erase(&spec(&bench, None), &options()).unwrap();
    bench.patch(1, 0, &old[1][..4096]);
    drop(Pool::format(&PoolSpec::new(vec![m.clone()], None).unwrap(), &options()).unwrap());
    let before = bench.bytes();
    assert!(refusal(open(&whole(m, &[a]))).contains("foreign"));
    assert!(bench.bytes() == before);
}

#[test]
fn a_device_too_small_for_the_metadata_says_how_much_they_need() {
    let bench = Bench::new(2);
    let format = |size| Pool::format(&spec(&bench, Some(size)), &options());
    let reason = refusal(format(2 * M));
    let needed: u64 = reason.split("metadata_size=").nth(1).unwrap().split(',').next().unwrap().parse().unwrap();
    assert!(!bench.paths.iter().any(|path| path.exists()), "files of a format that fails go");
    assert!(refusal(format(needed - 4096)).contains(&format!("needs {needed} bytes")));
    let pool = format(needed).unwrap();
    assert_eq!(pool.layout().geometry().metadata_bytes, needed);
    drop(pool);
    // Less than what the payload's device has is enough for it.
    assert!(needed < SIZE);
    open(&spec(&bench, None)).unwrap();
    // A device that is cut under the pool is named.
    File::options().write(true).open(&bench.paths[0]).unwrap().set_len(needed - 4096).unwrap();
    let reason = refusal(open(&spec(&bench, None)));
    assert!(reason.contains("device0") && reason.contains(&format!("truncated: the pool uses {needed} bytes")), "{reason}");
}

#[test]
fn metadata_of_several_pools_share_a_device_and_nothing_beside_them_changes() {
    let bench = Bench::new(3);
    File::create(&bench.paths[0]).unwrap().set_len(64 * M).unwrap();
    let at = |payload: usize, offset_bytes: u64, size: Option<u64>| {
        let part = DevicePart { path: bench.paths[0].clone(), offset_bytes, size_bytes: None };
        PoolSpec::new(vec![bench.paths[payload].clone()], size).unwrap().with_metadata(Some(part)).unwrap()
    };
    let first = Pool::format(&at(1, 0, Some(SIZE)), &options()).unwrap();
    let next = first.layout().geometry().metadata_bytes;
    let before = bench.bytes_of(0);
    match Pool::format(&at(2, next - 2 * M, Some(SIZE)), &options()) {
        Err(Error::Partition { problem: PartitionProblem::Overlaps { pool_offset: 0, pool_bytes, .. }, .. }) => {
            assert_eq!(pool_bytes, next)
        }
        other => panic!("{:?}", other.map(|_| ())),
    }
    assert!(bench.bytes_of(0) == before && !bench.paths[2].exists());
    let second = Pool::format(&at(2, next, Some(SIZE)), &options()).unwrap();
    assert!(bench.bytes_of(0)[..next as usize] == before[..next as usize], "the first one's metadata changed");
    let given = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&bench.paths[0]).unwrap()) * 512;
    assert!(given <= next + second.layout().geometry().metadata_bytes, "{given} bytes of memory: more than the pools need of the device");
    second.lines().publish(0, Seat { epoch: 4, ..Seat::default() }).unwrap();
    let device = DevicePart::whole(&bench.paths[0]).open(Access::Write, &Sysfs::default()).unwrap();
    let found: Vec<_> = pools_on(&device).unwrap().iter().map(|pool| (pool.offset_bytes, pool.len_bytes)).collect();
    let lens = [first, second].map(|pool| pool.layout().geometry().metadata_bytes);
    assert_eq!(found, [(0, lens[0]), (next, lens[1])]);
    assert_eq!(open(&at(2, next, None)).unwrap().lines().fetch::<Seat>(0).unwrap().epoch, 4);
    assert_eq!(open(&at(1, 0, None)).unwrap().lines().fetch::<Seat>(0).unwrap().epoch, 0);
    assert!(refusal(open(&at(1, next, None))).contains("foreign"), "the metadata of the other pool");
}

#[test]
fn two_formats_do_not_share_a_device_of_metadata_at_one_time() {
    let bench = apart(1);
    let device = DevicePart::whole(&bench.paths[0]).open(Access::Write, &Sysfs::default()).unwrap();
    let force = FormatOptions { force: true, ..options() };
    let turn = device.lock_for_format().unwrap();
    let before = bench.bytes();
    assert!(refusal(Pool::format(&spec(&bench, None), &force)).contains("device0: another process is formatting it"));
    assert!(bench.bytes() == before);
    drop(turn);
    drop(Pool::format(&spec(&bench, None), &force).unwrap());
}

#[test]
fn only_a_whole_pool_is_erased() {
    let bench = apart(1);
    let pool = open(&spec(&bench, None)).unwrap();
    let before = bench.bytes();
    for half in [0, 1] {
        let spec = PoolSpec::new(vec![bench.paths[half].clone()], None).unwrap();
        let reason = Pool::erase(&spec, &options()).unwrap_err().to_string();
        assert!(reason.contains("is missing"), "{reason}");
    }
    assert!(bench.bytes() == before);
    Pool::erase(&spec(&bench, None), &options()).unwrap();
    assert!(matches!(pool.check_not_replaced(), Err(Error::Replaced { now: 0, .. })));
    for (path, bytes) in bench.paths.iter().zip(bench.bytes()) {
        assert!(bytes[..DEVICE_HEADER_BYTES as usize].iter().all(|&byte| byte == 0), "{}", path.display());
    }
    // Half of a pool whose other device is lost goes when that is asked for.
    drop(Pool::format(&spec(&bench, Some(24 * M)), &options()).unwrap());
    std::fs::remove_file(&bench.paths[0]).unwrap();
    let rest = PoolSpec::new(vec![bench.paths[1].clone()], None).unwrap();
    assert!(Pool::erase(&rest, &options()).is_err());
    Pool::erase(&rest, &FormatOptions { evict_hosts: true, ..options() }).unwrap();
    assert!(refusal(open(&rest)).contains("empty"));
}

#[test]
fn a_format_over_one_device_sees_the_hosts_by_the_other() {
    for half in [0, 1] {
        let bench = apart(1);
        let pool = open(&spec(&bench, None)).unwrap();
        let host = join(&bench, &pool, 3, HostConfig { heartbeat_ms: 5, ..HostConfig::default() });
        let service = host.serve().unwrap();
        let alone = PoolSpec::new(vec![bench.paths[half].clone()], None).unwrap();
        let force = FormatOptions { force: true, ..options() };
        // With its partner, or with a device of another pool, whose hosts it has none.
        let other = apart(1);
        let mixed = if half == 0 { whole(&bench.paths[0], &[&other.paths[1]]) } else { whole(&other.paths[0], &[&bench.paths[1]]) };
        for spec in [&spec(&bench, None), &alone, &mixed] {
            match Pool::format(spec, &force) {
                Err(Error::InUse { slots }) => assert_eq!(slots, [host.slot()]),
                other => panic!("{spec}: {:?}", other.map(|_| ())),
            }
        }

        // The other device has another name, as on another machine, or something else lies there.
        let moved = bench.paths[1 - half].with_extension("moved");
        std::fs::rename(&bench.paths[1 - half], &moved).unwrap();
        let unseen = |what: &str| match Pool::format(&alone, &force) {
            Err(error @ Error::HostsUnseen { .. }) => assert!(error.to_string().contains(what), "{error}"),
            other => panic!("{:?}", other.map(|_| ())),
        };
        unseen("no such device");
        std::fs::write(&bench.paths[1 - half], vec![0; 4 << 20]).unwrap();
        unseen("empty");
        std::fs::copy(&other.paths[1 - half], &bench.paths[1 - half]).unwrap();
        unseen("foreign");
        std::fs::rename(&moved, &bench.paths[1 - half]).unwrap();
        drop(host.enter().unwrap());
        pool.check_not_replaced().unwrap();

        let new = Pool::format(&alone, &FormatOptions { evict_hosts: true, ..force.clone() }).unwrap();
        assert!(matches!(host.enter().map(|_| ()), Err(Error::Replaced { .. })), "the format waits for hosts that it sees");
        drop((service, host, new));
        // The rest of the old one is a part of a pool whose metadata is gone.
        let rest = PoolSpec::new(vec![bench.paths[1 - half].clone()], None).unwrap();
        assert!(matches!(Pool::format(&rest, &force), Err(Error::HostsUnseen { .. })));
        Pool::format(&rest, &FormatOptions { evict_hosts: true, ..force }).unwrap();
        open(&alone).unwrap();
    }
}

#[test]
fn a_format_waits_for_hosts_that_it_cannot_see() {
    let bench = apart(1);
    let pool = open(&spec(&bench, None)).unwrap();
    let host = join(&bench, &pool, 3, HostConfig { heartbeat_ms: 5, ..HostConfig::default() });
    let service = host.serve().unwrap();
    std::fs::rename(&bench.paths[0], bench.paths[0].with_extension("moved")).unwrap();
    let alone = PoolSpec::new(vec![bench.paths[1].clone()], None).unwrap();
    let begun = std::time::Instant::now();
    Pool::format(&alone, &FormatOptions { force: true, evict_hosts: true, ..options() }).unwrap();
    assert!(begun.elapsed().as_millis() >= HostConfig::default().suspect_ms.into(), "the host was given no time to notice");
    let deadline = begun + std::time::Duration::from_secs(60);
    while !matches!(host.enter().map(|_| ()), Err(Error::Replaced { .. })) {
        assert!(std::time::Instant::now() < deadline, "the host never noticed");
    }
    drop((service, host));
}

#[test]
fn hosts_notice_when_either_device_is_formatted_under_them() {
    for lost in [0, 1] {
        let bench = apart(1);
        let pool = open(&spec(&bench, None)).unwrap();
        let host = join(&bench, &pool, 3, HostConfig { heartbeat_ms: 1, ..HostConfig::default() });
        host.service_round().unwrap();
        drop(host.enter().unwrap());
        bench.patch(lost, 0, &[0; 64]);
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while !matches!(host.service_round(), Err(Error::Replaced { .. })) {
            assert!(std::time::Instant::now() < deadline, "the host never noticed that device {lost} went");
        }
    }
}

#[test]
fn emulated_hosts_without_coherence_share_it() {
    let bench = apart(2);
    let memory = Some("emulated:seed=7".parse::<CoherenceOptions>().unwrap());
    let native = open(&spec(&bench, None)).unwrap();
    let emulated = Pool::open(&spec(&bench, None), &OpenOptions { memory, ..OpenOptions::default() }).unwrap();
    assert!(emulated.description().starts_with("emulated"));
    native.lines().publish(0, Seat { epoch: 9, ..Seat::default() }).unwrap();
    assert_eq!(emulated.lines().fetch::<Seat>(0).unwrap().epoch, 9);
    let offset = emulated.layout().data_offset() + (64 << 10) - 64;
    let block: Vec<u8> = (0..(128 << 10)).map(|at: u32| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    emulated.lines().memory().copy_in(offset, &block).unwrap();
    emulated.lines().memory().fence_stores();
    let mut found = vec![0; block.len()];
    native.lines().memory().flush_range(offset, block.len() as u64).unwrap();
    native.lines().memory().fence_all();
    native.lines().memory().copy_out(offset, &mut found).unwrap();
    assert!(found == block, "three stripes over two devices");
}

#[test]
fn cells_take_their_share_of_the_payload() {
    let bench = Bench::new(2);
    let cells = vec![CellArea { cell_bytes: 4096, share: Share::Percent(75) }];
    let pool = Pool::format(&spec(&bench, Some(24 * M)), &FormatOptions { cells, ..options() }).unwrap();
    let geometry = *pool.layout().geometry();
    assert_eq!(geometry.payload_bytes(), SIZE - 2 * M);
    assert!((geometry.payload_bytes() * 7 / 10..=geometry.payload_bytes() * 3 / 4).contains(&geometry.cells_len_bytes()));
    assert_eq!(pool.layout().cells_offset(), geometry.len_bytes - geometry.payload_bytes());
}
