// SPDX-License-Identifier: Apache-2.0
//! One suite for every kind of device that is available here, and the failures of single kinds.

use super::*;
use crate::coherence::Mapping;
use crate::limits::DEVICE_HEADER_BYTES;
use crate::media::Stripes;
use std::path::PathBuf;

/// Devices of one kind; dropping it removes its files.
struct Bench {
    name: &'static str,
    kind: DeviceKind,
    paths: Vec<PathBuf>,
    sysfs: Sysfs,
    _folder: Option<tempfile::TempDir>,
}

fn files(name: &'static str, below: Option<&str>, sizes: &[u64]) -> Bench {
    let folder = below.map_or_else(tempfile::tempdir, tempfile::tempdir_in).unwrap();
    let paths: Vec<_> = (0..sizes.len()).map(|index| folder.path().join(format!("device{index}"))).collect();
    for (path, size) in paths.iter().zip(sizes) {
        Device::open_or_create(path, *size, &Sysfs::default()).unwrap();
    }
    Bench { name, kind: DeviceKind::File, paths, sysfs: Sysfs::default(), _folder: Some(folder) }
}

fn hugetlb() -> Option<Bench> {
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
    let mount = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>()).find(|fields| fields.get(2) == Some(&"hugetlbfs"))?;
    let folder = tempfile::tempdir_in(mount[1]).ok()?;
    let path = folder.path().join("device0");
    let page = huge_page_bytes(&File::open(folder.path()).ok()?, folder.path()).ok()??;
    if let Err(error) = Device::open_or_create(&path, page.max(DEVICE_HEADER_BYTES) * 4, &Sysfs::default()) {
        println!("hugetlbfs at {} has no pages for us: {error}", mount[1]);
        return None;
    }
    let sysfs = Sysfs::default();
    Some(Bench { name: "hugetlbfs", kind: DeviceKind::Hugetlb, paths: vec![path], sysfs, _folder: Some(folder) })
}

/// Real devdax devices are written to, so they are only taken when the tester names them.
fn devdax() -> Option<Bench> {
    let text = std::env::var("CXL_TEST_DAX").ok()?;
    let paths = text.split(',').map(PathBuf::from).collect();
    Some(Bench { name: "devdax", kind: DeviceKind::Devdax, paths, sysfs: Sysfs::default(), _folder: None })
}

fn benches() -> Vec<Bench> {
    const M: u64 = 1 << 20;
    let mut benches = vec![
        files("plain file", None, &[8 * M]),
        files("file in /dev/shm", Some("/dev/shm"), &[8 * M]),
        files("two files", Some("/dev/shm"), &[10 * M, 13 * M]),
        files("three files on disk", None, &[6 * M, 5 * M, 6 * M]),
    ];
    for (name, bench) in [("hugetlbfs (needs a mount and free pages)", hugetlb()), ("devdax (name devices in CXL_TEST_DAX)", devdax())] {
        match bench {
            Some(bench) => benches.push(bench),
            None => println!("skipped: {name}"),
        }
    }
    benches
}

impl Bench {
    fn open(&self, access: Access) -> Vec<Device> {
        self.paths.iter().map(|path| Device::open(path, access, &self.sysfs).unwrap()).collect()
    }

    fn stripes(&self, devices: &[Device]) -> Stripes {
        let sizes: Vec<_> = devices.iter().map(|device| device.info().len_bytes).collect();
        let align = devices.iter().map(|device| device.info().align_bytes).max().unwrap();
        Stripes::fit(&sizes, (1 << 20).max(align)).unwrap()
    }
}

fn read(mapping: &Mapping, offset: u64) -> u64 {
    assert!(offset + 8 <= mapping.len_bytes);
    // SAFETY: the offset was checked, and the mapping is readable for as long as it lives.
    unsafe { mapping.base.as_ptr().add(offset as usize).cast::<u64>().read_volatile() }
}

fn write(mapping: &Mapping, offset: u64, value: u64) {
    assert!(offset + 8 <= mapping.len_bytes);
    // SAFETY: the offset was checked, and the mapping was made for writing.
    unsafe { mapping.base.as_ptr().add(offset as usize).cast::<u64>().write_volatile(value) }
}

fn stamp(offset: u64) -> u64 {
    offset.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}

#[test]
fn every_kind_of_device_conforms() {
    const STEP: usize = 64 * 1024 - 8;
    for bench in benches() {
        let devices = bench.open(Access::Write);
        for device in &devices {
            let info = device.info();
            assert_eq!(info.kind, bench.kind, "{}", bench.name);
            assert!(info.len_bytes > 0 && info.len_bytes % info.align_bytes == 0, "{}: {info:?}", bench.name);
        }
        let stripes = bench.stripes(&devices);
        let mapping = map(&devices, &stripes, mapping_limit()).unwrap();
        assert_eq!(mapping.len_bytes, stripes.len_bytes());
        assert_eq!(mapping.base.as_ptr() as u64 % devices[0].info().align_bytes, 0);
        let mut end = 0;
        for segment in &mapping.segments {
            assert_eq!(segment.start, end);
            end += segment.len_bytes;
        }
        assert_eq!(end, mapping.len_bytes);

        let offsets = || (0..mapping.len_bytes - 8).step_by(STEP).map(|offset| offset / 8 * 8).chain([mapping.len_bytes - 8]);
        offsets().for_each(|offset| write(&mapping, offset, stamp(offset)));
        // A second view, made by other opens, sees the same bytes at the same pool offsets; a read-only one as well.
        for access in [Access::Write, Access::Read] {
            let again = map(&bench.open(access), &stripes, mapping_limit()).unwrap();
            offsets().for_each(|offset| assert_eq!(read(&again, offset), stamp(offset), "{} at {offset:#x}", bench.name));
        }
        // And each stripe lies where the arrangement says, seen through the file system.
        if bench.kind == DeviceKind::File {
            use std::os::unix::fs::FileExt;
            for piece in stripes.pieces() {
                let file = File::open(&bench.paths[piece.device]).unwrap();
                for offset in offsets().filter(|offset| (piece.start..piece.start + piece.len_bytes - 7).contains(offset)) {
                    let mut bytes = [0; 8];
                    file.read_exact_at(&mut bytes, piece.device_offset + offset - piece.start).unwrap();
                    assert_eq!(u64::from_le_bytes(bytes), stamp(offset), "{} at {offset:#x}", bench.name);
                }
            }
        }
        for (index, device) in devices.iter().enumerate() {
            let header = map_header(device).unwrap();
            let pool_offset = index as u64 * DEVICE_HEADER_BYTES;
            assert!(header.len_bytes >= DEVICE_HEADER_BYTES);
            write(&mapping, pool_offset + 64, stamp(index as u64));
            assert_eq!(read(&header, 64), stamp(index as u64), "{}: header of device {index}", bench.name);
        }
        println!("conforms: {}", bench.name);
    }
}

#[test]
fn a_dropped_mapping_is_unmapped() {
    let bench = files("unmap", Some("/dev/shm"), &[8 << 20, 8 << 20]);
    let mapped = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().filter(|line| bench.paths.iter().any(|path| line.contains(path.to_str().unwrap()))).count()
    };
    let devices = bench.open(Access::Write);
    let stripes = bench.stripes(&devices);
    let mapping = map(&devices, &stripes, mapping_limit()).unwrap();
    assert_eq!(mapped() as u64, stripes.pieces_len());
    let owner = mapping.owner.clone();
    drop(mapping);
    assert_eq!(mapped() as u64, stripes.pieces_len(), "an owner is left");
    drop(owner);
    assert_eq!(mapped(), 0);
}

#[test]
fn too_many_mappings_are_refused_with_a_stripe_that_fits() {
    let bench = files("many", Some("/dev/shm"), &[10 << 20, 10 << 20]);
    let devices = bench.open(Access::Write);
    let stripes = Stripes::fit(&[10 << 20, 10 << 20], 64 << 10).unwrap();
    assert_eq!(stripes.pieces_len(), 2 + 256);
    let error = map(&devices, &stripes, 66).err().unwrap().to_string();
    assert!(error.contains("need 258 mappings") && error.contains("stripes of 262144 bytes"), "{error}");
    let fits = Stripes::fit(&[10 << 20, 10 << 20], 256 << 10).unwrap();
    assert_eq!(map(&devices, &fits, 66).unwrap().segments.len(), 66);
}

#[test]
fn a_device_shorter_than_the_arrangement_is_refused() {
    let bench = files("short", None, &[8 << 20]);
    let stripes = Stripes::fit(&[8 << 20], 1 << 20).unwrap();
    File::options().write(true).open(&bench.paths[0]).unwrap().set_len(7 << 20).unwrap();
    let error = map(&bench.open(Access::Write), &stripes, 10).err().unwrap().to_string();
    assert!(error.contains("truncated"), "{error}");
}

#[test]
fn creation_happens_once_and_keeps_what_is_there() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = folder.path().join("kv");
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let (device, _) = Device::open_or_create(&path, 4 << 20, &Sysfs::default()).unwrap();
                assert_eq!(device.info().len_bytes, 4 << 20);
            });
        }
    });
    std::fs::write(&path, vec![7; 3 << 20]).unwrap();
    let (device, _) = Device::open_or_create(&path, 4 << 20, &Sysfs::default()).unwrap();
    assert_eq!(device.info().len_bytes, 3 << 20);
    assert!(std::fs::read(&path).unwrap().iter().all(|&byte| byte == 7));
    let odd = Device::open_or_create(&folder.path().join("odd"), 4097, &Sysfs::default()).unwrap_err().to_string();
    assert!(odd.contains("multiple of the page"), "{odd}");
    let huge = Device::open_or_create(&folder.path().join("huge"), 1 << 55, &Sysfs::default()).unwrap_err().to_string();
    assert!(huge.contains("cannot be reserved"), "{huge}");
}

#[test]
fn what_cannot_be_opened_is_refused_with_a_reason() {
    let folder = tempfile::tempdir().unwrap();
    let empty = folder.path().join("empty");
    File::create(&empty).unwrap();
    let fifo = folder.path().join("fifo");
    let name = std::ffi::CString::new(fifo.to_str().unwrap()).unwrap();
    // SAFETY: the name is a valid C string for the call.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    for (path, reason) in [
        (folder.path().join("missing"), "no such device"),
        (folder.path().to_path_buf(), "directory"),
        (empty, "empty"),
        (fifo, "neither devdax nor a file"),
        (PathBuf::from("/dev/null"), "not devdax"),
    ] {
        let error = Device::open(&path, Access::Write, &Sysfs::default()).unwrap_err();
        assert!(matches!(error, Error::NotAPool { .. }) && error.to_string().contains(reason), "{}: {error}", path.display());
    }
}

#[test]
fn a_container_without_sysfs_is_told_of_it() {
    let nothing = tempfile::tempdir().unwrap();
    let error = Device::open(Path::new("/dev/null"), Access::Write, &Sysfs::at(nothing.path())).unwrap_err();
    assert!(matches!(error, Error::NotAPool { .. }) && error.to_string().contains("nothing is mounted at /sys"), "{error}");
}

#[test]
fn no_permission_says_so_and_names_the_way_out() {
    let bench = files("permission", None, &[8 << 20]);
    std::fs::set_permissions(bench._folder.as_ref().unwrap().path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    std::fs::set_permissions(&bench.paths[0], std::os::unix::fs::PermissionsExt::from_mode(0o444)).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // The raw system call changes this thread only, so that the test means the same under root.
            // SAFETY: no memory is involved; the thread ends with the closure.
            unsafe { libc::syscall(libc::SYS_setresuid, -1, 65_534, -1) };
            let error = Device::open(&bench.paths[0], Access::Write, &Sysfs::default()).unwrap_err().to_string();
            assert!(error.contains("no permission") && error.contains("read-only"), "{error}");
            Device::open(&bench.paths[0], Access::Read, &Sysfs::default()).unwrap();
        });
    });
}

/// A sysfs tree in which `/dev/zero` (character device 1:5, which can be mapped) is a devdax device.
fn fake_sysfs(size: &str, align: &str) -> (tempfile::TempDir, Sysfs) {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("dev/char/1:5");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("size"), size).unwrap();
    std::fs::write(folder.join("align"), align).unwrap();
    std::fs::write(folder.join("numa_node"), "3\n").unwrap();
    let sysfs = Sysfs::at(root.path());
    (root, sysfs)
}

#[test]
fn devdax_facts_come_from_sysfs() {
    let (root, sysfs) = fake_sysfs("1073741824\n", "2097152\n");
    let device = Device::open(Path::new("/dev/zero"), Access::Write, &sysfs).unwrap();
    let expected = DeviceInfo {
        name: "/dev/zero".into(),
        kind: DeviceKind::Devdax,
        offset_bytes: 0,
        len_bytes: 1 << 30,
        align_bytes: 2 << 20,
        numa_node: Some(3),
        identity: (u64::MAX, 261),
    };
    assert_eq!(*device.info(), expected);
    let mapping = map(&[device], &Stripes::fit(&[1 << 30], 2 << 20).unwrap(), 4).unwrap();
    assert_eq!((mapping.len_bytes, mapping.base.as_ptr() as usize % (2 << 20)), (1 << 30, 0));
    std::fs::write(root.path().join("dev/char/1:5/numa_node"), "-1\n").unwrap();
    assert_eq!(Device::open(Path::new("/dev/zero"), Access::Read, &sysfs).unwrap().info().numa_node, None);
}

#[test]
fn odd_devdax_facts_are_refused() {
    for (size, align, reason) in [
        ("x\n", "2097152\n", "not a number"),
        ("1073741824\n", "\n", "not a number"),
        ("1073741824\n", "3000000\n", "power of two"),
        ("1073741824\n", "512\n", "power of two"),
        ("1048576\n", "2097152\n", "empty"),
    ] {
        let (_root, sysfs) = fake_sysfs(size, align);
        let error = Device::open(Path::new("/dev/zero"), Access::Read, &sysfs).unwrap_err().to_string();
        assert!(error.contains(reason), "{size:?} {align:?}: {error}");
    }
    // Several devices with units larger than a header cannot form one range; one such device can.
    let (_root, sysfs) = fake_sysfs("4294967296\n", "1073741824\n");
    let open = || Device::open(Path::new("/dev/zero"), Access::Write, &sysfs).unwrap();
    let stripes = Stripes::fit(&[4 << 30, 4 << 30], 1 << 30).unwrap();
    let error = map(&[open(), open()], &stripes, 100).err().unwrap().to_string();
    assert!(error.contains("align of at most that"), "{error}");
    assert_eq!(map_header(&open()).unwrap().len_bytes, 1 << 30);
    assert_eq!(map(&[open()], &Stripes::fit(&[4 << 30], 1 << 30).unwrap(), 1).unwrap().base.as_ptr() as usize % (1 << 30), 0);
}
