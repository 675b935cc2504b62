// SPDX-License-Identifier: Apache-2.0
//! A worker that has a G2 in host memory and the tier, and nothing else: no GPU, no NIXL transfers.
//!
//! A worker with a GPU is KVBM's own: `PhysicalWorker::builder().object_client(Arc::new(blocks))`.

use crate::blocks::{Answers, CxlBlocks};
use futures::future::BoxFuture;
use kvbm_common::LogicalLayoutHandle;
use kvbm_engine::object::ObjectBlockOps;
use kvbm_engine::worker::{
    ConnectRemoteResponse, ImportMetadataResponse, LayoutHandle, RemoteDescriptor, SerializedLayout, SerializedLayoutResponse,
    TransferCompleteNotification, Worker, WorkerTransfers,
};
use kvbm_engine::{BlockId, InstanceId, SequenceHash};
use kvbm_physical::layout::PhysicalLayout;
use kvbm_physical::transfer::TransferOptions;
use std::sync::Arc;
use velo::{Handler, Messenger};

/// What a leader calls so that a worker of another process makes the layouts of G2 and G3. No published crate answers.
const CONFIGURE_LAYOUTS: &str = "kvbm.worker.configure_layouts";

type Transfer = std::result::Result<TransferCompleteNotification, anyhow::Error>;

/// The worker of one rank.
pub struct HostWorker {
    g2: PhysicalLayout,
    blocks: CxlBlocks,
    handle: LayoutHandle,
}

impl HostWorker {
    /// A worker whose G2 is `g2`. `worker_id` tells the workers of an instance apart.
    pub fn new(worker_id: u64, g2: PhysicalLayout, blocks: CxlBlocks) -> HostWorker {
        HostWorker { g2, blocks, handle: LayoutHandle::new(worker_id, 0) }
    }

    fn refused(what: &str) -> anyhow::Error {
        anyhow::anyhow!("{what}: this worker has a G2 in host memory and the CXL tier alone; use KVBM's PhysicalWorker with a GPU")
    }
}

/// Answers a leader that wants to configure the layouts of this process's worker: it is refused, and told what to do. Without this it is
/// told that there is no such handler.
///
/// The answer to that call has the worker's NIXL metadata in it, with which peers read and write its G2 past this crate. A worker with a
/// GPU may have some, and its program registers a handler of its own; a [`HostWorker`] has none.
///
/// # Errors
/// Those of the messenger, which may have such a handler.
pub fn refuse_layouts(messenger: &Messenger) -> Result<(), anyhow::Error> {
    let refused = |_| {
        Err(anyhow::anyhow!(
            "{CONFIGURE_LAYOUTS}: a worker of the CXL tier makes no layouts for a leader; make its G2 in its own process \
             (`cxl_tier::memory::host_layout`), before the leader, and give it to `HostWorker::new`"
        ))
    };
    messenger.register_handler(Handler::unary_handler(CONFIGURE_LAYOUTS, refused).build())
}

impl WorkerTransfers for HostWorker {
    fn execute_local_transfer(
        &self,
        _: LogicalLayoutHandle,
        _: LogicalLayoutHandle,
        _: Arc<[BlockId]>,
        _: Arc<[BlockId]>,
        _: TransferOptions,
    ) -> Transfer {
        Err(Self::refused("transfer between two layouts of a worker"))
    }

    fn execute_remote_onboard(&self, _: RemoteDescriptor, _: LogicalLayoutHandle, _: Arc<[BlockId]>, _: TransferOptions) -> Transfer {
        Err(Self::refused("transfer from another worker"))
    }

    fn execute_remote_offload(&self, _: LogicalLayoutHandle, _: Arc<[BlockId]>, _: RemoteDescriptor, _: TransferOptions) -> Transfer {
        Err(Self::refused("transfer to another worker"))
    }

    fn connect_remote(&self, _: InstanceId, _: Vec<SerializedLayout>) -> Result<ConnectRemoteResponse, anyhow::Error> {
        Err(Self::refused("connection to another worker"))
    }

    fn has_remote_metadata(&self, _: InstanceId) -> bool {
        false
    }

    fn execute_remote_onboard_for_instance(
        &self,
        _: InstanceId,
        _: LogicalLayoutHandle,
        _: Vec<BlockId>,
        _: LogicalLayoutHandle,
        _: Arc<[BlockId]>,
        _: TransferOptions,
    ) -> Transfer {
        Err(Self::refused("transfer from another instance"))
    }
}

impl ObjectBlockOps for HostWorker {
    fn has_blocks(&self, keys: Vec<SequenceHash>) -> BoxFuture<'static, Vec<(SequenceHash, Option<usize>)>> {
        self.blocks.has_blocks(keys)
    }

    fn put_blocks(&self, keys: Vec<SequenceHash>, source: LogicalLayoutHandle, ids: Vec<BlockId>) -> BoxFuture<'static, Answers> {
        match source {
            LogicalLayoutHandle::G2 => self.blocks.put_blocks_with_layout(keys, self.g2.clone(), ids),
            other => self.blocks.put_blocks(keys, other, ids),
        }
    }

    fn get_blocks(&self, keys: Vec<SequenceHash>, destination: LogicalLayoutHandle, ids: Vec<BlockId>) -> BoxFuture<'static, Answers> {
        match destination {
            LogicalLayoutHandle::G2 => self.blocks.get_blocks_with_layout(keys, self.g2.clone(), ids),
            other => self.blocks.get_blocks(keys, other, ids),
        }
    }

    fn put_blocks_with_layout(&self, keys: Vec<SequenceHash>, layout: PhysicalLayout, ids: Vec<BlockId>) -> BoxFuture<'static, Answers> {
        self.blocks.put_blocks_with_layout(keys, layout, ids)
    }

    fn get_blocks_with_layout(&self, keys: Vec<SequenceHash>, layout: PhysicalLayout, ids: Vec<BlockId>) -> BoxFuture<'static, Answers> {
        self.blocks.get_blocks_with_layout(keys, layout, ids)
    }
}

impl Worker for HostWorker {
    fn g1_handle(&self) -> Option<LayoutHandle> {
        None
    }

    fn g2_handle(&self) -> Option<LayoutHandle> {
        Some(self.handle)
    }

    fn g3_handle(&self) -> Option<LayoutHandle> {
        None
    }

    fn export_metadata(&self) -> Result<SerializedLayoutResponse, anyhow::Error> {
        Err(Self::refused("metadata for other workers"))
    }

    fn import_metadata(&self, _: SerializedLayout) -> Result<ImportMetadataResponse, anyhow::Error> {
        Err(Self::refused("metadata of other workers"))
    }
}
