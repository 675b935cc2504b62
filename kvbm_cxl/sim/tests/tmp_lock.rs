//! tmp
#[test]
fn scan() {
    let n: u64 = std::env::var("SEEDS").ok().and_then(|s| s.parse().ok()).unwrap_or(200);
    let only: Option<u64> = std::env::var("SEED").ok().and_then(|s| s.parse().ok());
    let which = std::env::var("SC").unwrap_or("lock".into());
    let sc = cxl_sim::scenarios::ALL.iter().find(|s| s.0 == which).unwrap().1;
    if only.is_some() {
        cxl_sim::explore("x", 1, sc);
        return;
    }
    let t = std::time::Instant::now();
    let (mut steps, mut fails) = (0, 0);
    for seed in only.map_or(0..n, |s| s..s + 1) {
        match sc(seed) {
            Ok(stats) => steps += stats.steps,
            Err(f) => {
                fails += 1;
                if fails < 8 || only.is_some() {
                    println!("{f}");
                }
                if only.is_some() {
                    for l in f.trace {
                        println!("{l}");
                    }
                }
            }
        }
    }
    println!("{fails} failures, {steps} steps {:?}", t.elapsed());
}
