// SPDX-License-Identifier: Apache-2.0
//! A leader that asks a worker of another process to make layouts is told what to do.

use crate::bench::PATIENCE;
use cxl_tier::worker::refuse_layouts;
use kvbm_engine::testing::create_messenger_pair_tcp;
use kvbm_engine::worker::{LeaderLayoutConfig, VeloWorkerClient};

#[tokio::test]
async fn layouts_by_the_leader_are_refused_with_what_to_do() {
    let pair = create_messenger_pair_tcp().await.unwrap();
    refuse_layouts(&pair.messenger_b).unwrap();
    let client = VeloWorkerClient::new(pair.messenger_a.clone(), pair.messenger_b.instance_id());
    let parallelism = Default::default();
    let config = LeaderLayoutConfig { rank: 0, host_block_count: 8, disk_block_count: None, object: None, parallelism };
    let answer = tokio::time::timeout(PATIENCE, client.configure_layouts(config).unwrap()).await.expect("an answer");
    let told = format!("{:#}", answer.expect_err("it is refused"));
    assert!(told.contains("kvbm.worker.configure_layouts") && told.contains("host_layout") && told.contains("HostWorker::new"), "{told}");
}
