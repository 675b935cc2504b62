// SPDX-License-Identifier: Apache-2.0
//! Namespaces: everything that shapes the bytes of a block besides its tokens.

use crate::error::{Error, Result};
use crate::keys::ENCODING;
use cxl_pool::cache::{Namespace, NamespaceFields, Salt};
use kvbm_physical::layout::{KvBlockLayout, LayoutConfig};
use std::collections::BTreeMap;

/// Which numbers a worker computes. Two workers share blocks only if all of it is the same for both.
#[derive(Clone, Debug, Default)]
pub struct Model {
    /// Name of the model, as the engine knows it.
    pub name: String,
    /// Revision of its weights.
    pub revision: String,
    /// Type of the cached numbers with the scales that belong to it: `bfloat16`, `fp8_e4m3`. KVBM knows only its width.
    pub dtype: String,
    /// Adapters (LoRA) in the order in which they apply, each with its revision.
    pub adapters: Vec<String>,
    /// Keeps tenants apart that share a model.
    pub tenant_salt: Vec<u8>,
    /// Whatever else shapes the bytes.
    pub extra: BTreeMap<String, String>,
}

/// How many bytes a block has and in which order. Independent of how blocks lie in memory: a block of a fully contiguous layout and of a
/// layer-separate one have the same bytes in the same order (layer, outer, page, inner).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockShape {
    config: LayoutConfig,
    order: KvBlockLayout,
}

impl BlockShape {
    /// The shape of the blocks of a layout.
    ///
    /// `order` is that of the dimensions within a page: [`KvBlockLayout::OperationalNHD`], [`KvBlockLayout::OperationalHND`], or
    /// [`KvBlockLayout::Unknown`], which shares blocks only with workers that do not know it either.
    ///
    /// # Errors
    /// [`Error::Field`] for dimensions of zero, blocks of more than 4 GiB, and orders that do not have layer and outer dimension outermost.
    pub fn new(config: &LayoutConfig, order: KvBlockLayout) -> Result<BlockShape> {
        let dims = [config.num_layers, config.outer_dim, config.page_size, config.inner_dim, config.dtype_width_bytes];
        let bytes = dims.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim)).unwrap_or(usize::MAX);
        if bytes == 0 || bytes > u32::MAX as usize {
            let reason = format!("{dims:?} (layers, outer, page, inner, width) are {bytes} bytes a block: it takes 1 to {}", u32::MAX);
            return Err(Error::Field { field: "layout", reason });
        }
        if !order.is_operational() && order != KvBlockLayout::Unknown {
            let reason = format!("blocks in order {order} are not stored: layer and outer dimension have to be outermost");
            return Err(Error::Field { field: "order", reason });
        }
        Ok(BlockShape { config: config.clone(), order })
    }

    /// Bytes of a block.
    pub fn block_bytes(&self) -> usize {
        self.config.bytes_per_block()
    }

    /// Tokens of a block.
    pub(crate) fn block_tokens(&self) -> usize {
        self.config.page_size
    }

    /// Bytes of a block that lie together in every layout: one layer's K or V.
    pub fn piece_bytes(&self) -> usize {
        self.config.page_size * self.config.inner_dim * self.config.dtype_width_bytes
    }

    /// Whether the blocks of another layout have these bytes. How many blocks there are does not matter.
    pub fn is_of(&self, config: &LayoutConfig, order: KvBlockLayout) -> bool {
        let dims = |config: &LayoutConfig| {
            (config.num_layers, config.outer_dim, config.page_size, config.inner_dim, config.dtype_width_bytes, config.num_heads)
        };
        // The builder of the published crates names no order, whatever the engine's is.
        dims(&self.config) == dims(config) && (order == self.order || order == KvBlockLayout::Unknown)
    }
}

/// A worker among those that each hold a part of every block (tensor parallel).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ranks {
    rank: u32,
    count: u32,
}

impl Ranks {
    /// The only worker.
    pub const ALONE: Ranks = Ranks { rank: 0, count: 1 };

    /// Worker `rank` of `count`.
    ///
    /// # Errors
    /// [`Error::Field`] when there is no such worker.
    pub fn new(rank: u32, count: u32) -> Result<Ranks> {
        match rank < count && count <= 1024 {
            true => Ok(Ranks { rank, count }),
            false => {
                Err(Error::Field { field: "rank", reason: format!("{rank} of {count}: it takes a rank below the count, of up to 1024") })
            }
        }
    }

    /// This one.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// All of them.
    pub fn count(&self) -> u32 {
        self.count
    }
}

/// The namespaces of all ranks, in their order.
///
/// # Errors
/// [`Error::Field`] for a model without a name or a type of numbers: blocks of all such models would be taken for one another's.
pub fn namespaces(model: &Model, shape: &BlockShape, ranks: Ranks) -> Result<Vec<Namespace>> {
    for (field, text) in [("model name", &model.name), ("dtype", &model.dtype)] {
        if text.trim().is_empty() {
            return Err(Error::Field { field, reason: "it is empty: name it, because blocks of other models have the same keys".into() });
        }
    }
    Ok((0..ranks.count).map(|rank| namespace(model, shape, rank, ranks.count)).collect())
}

fn namespace(model: &Model, shape: &BlockShape, rank: u32, count: u32) -> Namespace {
    let config = &shape.config;
    let mut extra = model.extra.clone();
    extra.insert("kvbm.keys".into(), ENCODING.into());
    let layout = format!(
        "kvbm: layer, outer {}, page, inner {} of {} bytes, {}",
        config.outer_dim,
        config.inner_dim,
        config.dtype_width_bytes,
        shape.order.name()
    );
    let fields = NamespaceFields {
        model: model.name.clone(),
        revision: model.revision.clone(),
        dtype: model.dtype.clone(),
        first_layer: 0,
        // `BlockShape::new` bounds their product.
        layer_count: config.num_layers as u32,
        kv_head_count: config.num_heads.unwrap_or(0) as u32,
        head_size: 0,
        block_tokens: config.page_size as u32,
        layout,
        tp_rank: rank,
        tp_size: count,
        adapters: model.adapters.clone(),
        tenant_salt: Salt(model.tenant_salt.clone()),
        extra,
    };
    fields.namespace()
}

#[cfg(test)]
mod tests;
