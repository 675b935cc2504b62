// SPDX-License-Identifier: Apache-2.0
//! The engine for GPU memory on the GPUs of this machine. Without one there is nothing to try: `tests/cuda` tries all of it with a driver
//! that is faked.

#[path = "cuda/device.rs"]
#[allow(dead_code)] // The tests over the fake driver use the rest.
mod device;
#[path = "cuda/real.rs"]
mod real;
#[path = "cuda/scenes.rs"]
mod scenes;

use cxl_pool::copy::CudaConfig;

#[test]
fn blocks_of_real_gpus_are_right() {
    let config = CudaConfig::from_env().unwrap();
    match device::Gpu::count(&config.library) {
        Ok(count) => real::on_every_gpu(&config, count),
        Err(reason) => println!("skipped: no GPU to try: {reason}"),
    }
}
