// SPDX-License-Identifier: Apache-2.0
//! What a cached block is called: the namespace says how its bytes were made, the key says of which tokens.
//!
//! Two workers share blocks only when every number that shapes the bytes is the same for both. [`NamespaceFields`] lists them all;
//! [`Namespace`] is their digest. Blocks of different namespaces never meet, even with the same tokens and so the same [`BlockKey`].
//!
//! # Encoding, version 1
//! The input of the digest is unambiguous, because it can be read back: a domain, then every field in the order of [`NamespaceFields`],
//! present or not. A number is 4 bytes, a text or byte string 8 bytes of length and then its bytes, a list 8 bytes of count and then its
//! items; all little-endian. The digest is the first 16 bytes of SHA-256. Another version has another domain, so that its digests meet none
//! of these.

use crate::error::{Error, Result};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// First bytes of what a namespace digests. The version of the encoding is part of it.
const NAMESPACE_DOMAIN: &[u8; 24] = b"kvbm-cxl namespace v1\0\0\0";
/// First bytes of what [`chain`] digests.
const CHAIN_DOMAIN: &[u8; 24] = b"kvbm-cxl block key v1\0\0\0";

/// Makes a 16-byte name with hexadecimal text.
macro_rules! name_of_16_bytes {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, bytemuck::Pod, bytemuck::Zeroable)]
        pub struct $name(pub [u8; 16]);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:032x}", u128::from_be_bytes(self.0))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{self}")
            }
        }

        impl FromStr for $name {
            type Err = Error;

            /// Reads 32 hexadecimal digits, as `Display` writes them.
            fn from_str(text: &str) -> Result<Self> {
                let is_hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
                match u128::from_str_radix(text, 16) {
                    Ok(value) if is_hex => Ok($name(value.to_be_bytes())),
                    _ => Err(Error::Invalid(format!("{:?} is no {}: it takes 32 hexadecimal digits", text, $what))),
                }
            }
        }
    };
}

name_of_16_bytes!(
    /// How the bytes of a block were made, as a digest of [`NamespaceFields`].
    Namespace,
    "namespace"
);
name_of_16_bytes!(
    /// Which tokens a block is of: a hash over its tokens and all tokens before them, as vLLM, Dynamo or [`chain`] computes it.
    BlockKey,
    "block key"
);

/// A secret that keeps tenants apart. Its text does not show in `Debug`.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Salt(pub Vec<u8>);

impl fmt::Debug for Salt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Salt({} bytes)", self.0.len())
    }
}

/// Everything that shapes the bytes of a block besides its tokens.
///
/// Texts are compared byte for byte: `Llama` and `llama` are two models. What does not apply stays empty or zero.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct NamespaceFields {
    /// Name of the model, as the engine knows it.
    pub model: String,
    /// Revision of its weights.
    pub revision: String,
    /// Type of the cached numbers, with whatever scales belong to it: `bfloat16`, `fp8_e4m3`.
    pub dtype: String,
    /// First layer of this worker (pipeline parallelism).
    pub first_layer: u32,
    /// Layers of this worker.
    pub layer_count: u32,
    /// Key/value heads of this worker.
    pub kv_head_count: u32,
    /// Numbers per head.
    pub head_size: u32,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Order of the dimensions within a block.
    pub layout: String,
    /// This worker among those of its tensor-parallel group.
    pub tp_rank: u32,
    /// Workers in the tensor-parallel group.
    pub tp_size: u32,
    /// Adapters (LoRA) in the order in which they apply, each with its revision.
    pub adapters: Vec<String>,
    /// Keeps tenants apart that share a model.
    pub tenant_salt: Salt,
    /// Whatever else shapes the bytes.
    pub extra: BTreeMap<String, String>,
}

impl NamespaceFields {
    /// The digest of all fields.
    pub fn namespace(&self) -> Namespace {
        Namespace(first_16(Sha256::digest(self.encode())))
    }

    fn encode(&self) -> Vec<u8> {
        // Named one by one, so that a new field cannot be forgotten here. It needs a new version of the encoding, too.
        let NamespaceFields {
            model,
            revision,
            dtype,
            first_layer,
            layer_count,
            kv_head_count,
            head_size,
            block_tokens,
            layout,
            tp_rank,
            tp_size,
            adapters,
            tenant_salt,
            extra,
        } = self;
        let mut bytes = NAMESPACE_DOMAIN.to_vec();
        [model, revision, dtype].into_iter().for_each(|text| put(&mut bytes, text.as_bytes()));
        [first_layer, layer_count, kv_head_count, head_size, block_tokens].into_iter().for_each(|number| put_number(&mut bytes, *number));
        put(&mut bytes, layout.as_bytes());
        [tp_rank, tp_size].into_iter().for_each(|number| put_number(&mut bytes, *number));
        put_len(&mut bytes, adapters.len());
        adapters.iter().for_each(|adapter| put(&mut bytes, adapter.as_bytes()));
        put(&mut bytes, &tenant_salt.0);
        put_len(&mut bytes, extra.len());
        for (name, value) in extra {
            put(&mut bytes, name.as_bytes());
            put(&mut bytes, value.as_bytes());
        }
        bytes
    }
}

fn put_number(bytes: &mut Vec<u8>, number: u32) {
    bytes.extend_from_slice(&number.to_le_bytes());
}

fn put_len(bytes: &mut Vec<u8>, len: usize) {
    bytes.extend_from_slice(&(len as u64).to_le_bytes());
}

fn put(bytes: &mut Vec<u8>, text: &[u8]) {
    put_len(bytes, text.len());
    bytes.extend_from_slice(text);
}

fn first_16(digest: impl Into<[u8; 32]>) -> [u8; 16] {
    let digest: [u8; 32] = digest.into();
    std::array::from_fn(|index| digest[index])
}

/// The key of a block for users without a chained hash of their own.
///
/// `parent` is the key of the block before, `None` for the first of a sequence; `extra` is whatever else makes the block differ, such as
/// the hash of an image among its tokens. A key stands for all tokens up to the end of its block, not for the block's tokens alone.
pub fn chain(parent: Option<BlockKey>, tokens: &[u32], extra: &[u8]) -> BlockKey {
    let mut digest = Sha256::new();
    digest.update(CHAIN_DOMAIN);
    digest.update([u8::from(parent.is_some())]);
    digest.update(parent.map_or([0; 16], |key| key.0));
    digest.update((tokens.len() as u64).to_le_bytes());
    // In pieces, so that long blocks are hashed without a copy of their own.
    for piece in tokens.chunks(64) {
        let mut bytes = [0; 256];
        bytes.as_chunks_mut::<4>().0.iter_mut().zip(piece).for_each(|(place, token)| *place = token.to_le_bytes());
        digest.update(&bytes[..piece.len() * 4]);
    }
    digest.update(extra);
    BlockKey(first_16(digest.finalize()))
}

#[cfg(test)]
mod tests;
