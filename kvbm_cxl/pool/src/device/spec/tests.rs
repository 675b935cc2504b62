// SPDX-License-Identifier: Apache-2.0

use super::*;

#[test]
fn sizes() {
    for (text, bytes) in [("0", 0), ("4096", 4096), ("1K", 1 << 10), ("3m", 3 << 20), ("1G", 1 << 30), ("2TiB", 2 << 40)] {
        assert_eq!(parse_size(text).unwrap(), bytes, "{text}");
    }
    for text in ["", "G", "1.5G", "-1", "1GB", "iB", "1iB", "1 G", "99999999999999999999", "18446744073709551615K", "１G", "1é"] {
        assert!(parse_size(text).is_err(), "{text}");
    }
}

#[test]
fn names() {
    let spec = PoolSpec::parse("/dev/dax0.0, /dev/dax1.0 ,size=2G").unwrap();
    assert_eq!(spec.devices().map(|path| path.to_str().unwrap()).collect::<Vec<_>>(), ["/dev/dax0.0", "/dev/dax1.0"]);
    assert_eq!(spec.size_bytes(), Some(2 << 30));
    assert_eq!(PoolSpec::parse(&spec.to_string()).unwrap(), spec);
    assert_eq!(PoolSpec::parse("/dev/shm/kv").unwrap().size_bytes(), None);
    let part = PoolSpec::parse("/dev/dax0.0,offset=64G,size=32G").unwrap();
    assert_eq!((part.offset_bytes(), part.size_bytes()), (64 << 30, Some(32 << 30)));
    assert_eq!(part.to_string(), "/dev/dax0.0,offset=68719476736,size=34359738368");
    assert_eq!(PoolSpec::parse(&part.to_string()).unwrap(), part);
    assert_eq!(part.parts().map(|part| part.to_string()).collect::<Vec<_>>(), ["/dev/dax0.0,offset=68719476736"]);
    assert_ne!(part, part.clone().with_offset(0).unwrap());
    assert_eq!(part.clone().without_sizes().to_string(), "/dev/dax0.0,offset=68719476736");
    let text = "/dev/a,/dev/b,offset=4194304,size=8388608,metadata=/dev/m,metadata_offset=2097152,metadata_size=6291456";
    let apart = PoolSpec::parse("metadata=/dev/m,/dev/a, metadata_size=6M ,/dev/b,size=8M,offset=4M,metadata_offset=2M").unwrap();
    assert_eq!((apart.to_string().as_str(), &PoolSpec::parse(text).unwrap()), (text, &apart));
    let part =
        |path, offset: u64, size: u64| DevicePart { path: PathBuf::from(path), offset_bytes: offset << 20, size_bytes: Some(size << 20) };
    assert_eq!(apart.parts().collect::<Vec<_>>(), [part("/dev/m", 2, 6), part("/dev/a", 4, 8), part("/dev/b", 4, 8)]);
    assert_eq!((apart.metadata(), apart.devices().len()), (Some(&part("/dev/m", 2, 6)), 2));
    let name = "/dev/a,/dev/b,offset=4194304,metadata=/dev/m,metadata_offset=2097152";
    assert_eq!(apart.clone().without_sizes().to_string(), name);
    let short = PoolSpec::parse("/a,metadata=/m").unwrap();
    assert_eq!((short.to_string().as_str(), short.metadata()), ("/a,metadata=/m", Some(&DevicePart::whole("/m"))));
    for (text, reason) in [
        ("/a,metadata=", "not an absolute path"),
        ("/a,metadata=m", "not an absolute path"),
        ("/a,metadata=/m\0", "zero byte"),
        ("/a,metadata=/a", "twice"),
        ("/a,metadata=/m,metadata=/n", "two devices for metadata"),
        ("/a,metadata=/m,metadata_size=1M,metadata_size=1M", "two metadata sizes"),
        ("/a,metadata=/m,metadata_offset=2M,metadata_offset=2M", "two metadata offsets"),
        ("/a,metadata=/m,metadata_size=0", "zero"),
        ("/a,metadata=/m,metadata_offset=1M", "the next that is one is offset=2097152"),
        ("/a,metadata_size=8M", "does not name"),
        ("/a,metadata_offset=0", "does not name"),
        ("metadata=/m", "at least one"),
        ("", "neither"),
        ("dax0.0", "neither"),
        ("/a,", "neither"),
        ("size=1G", "at least one"),
        ("/a,size=1G,size=2G", "two sizes"),
        ("/a,/b,/a", "twice"),
        ("/a,size=0", "zero"),
        ("/a\0b", "zero byte"),
        ("/a,size=many", "not a size"),
        ("/a,offset=2M,offset=4M", "two offsets"),
        ("/a,offset=", "not a size"),
        ("offset=2M", "at least one"),
        ("/a,offset=1M", "the next that is one is offset=2097152"),
        ("/a,offset=18446744073709551615", "not a multiple"),
    ] {
        let error = PoolSpec::parse(text).unwrap_err().to_string();
        assert!(error.contains(reason), "{text:?}: {error}");
    }
    assert_eq!("/dev/m,offset=2M,size=6M".parse::<DevicePart>().unwrap(), part("/dev/m", 2, 6));
    for several in ["/a,/b", "/a,metadata=/b"] {
        assert!(several.parse::<DevicePart>().unwrap_err().to_string().contains("name one"));
    }
    let many: Vec<_> = (0..=MAX_DEVICES).map(|index| PathBuf::from(format!("/d{index}"))).collect();
    assert!(PoolSpec::new(many.clone(), None).unwrap_err().to_string().contains("at most"));
    let most = PoolSpec::new(many[1..].to_vec(), None).unwrap().with_metadata(Some(DevicePart::whole("/m")));
    assert!(most.unwrap_err().to_string().contains("at most"));
}
