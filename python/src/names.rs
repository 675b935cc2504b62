// SPDX-License-Identifier: Apache-2.0
//! Namespaces and keys: what blocks are called.

use crate::failure::invalid;
use cxl_pool::cache::{BlockKey, NamespaceFields, Salt, chain};
use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyType};
use std::collections::BTreeMap;

/// How the bytes of blocks were made.
#[pyclass(frozen, eq, hash, from_py_object, module = "kvbm_cxl")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Namespace(pub cxl_pool::cache::Namespace);

pub fn key_of(key: &Bound<'_, PyAny>) -> PyResult<BlockKey> {
    match key.cast::<PyBytes>() {
        Ok(bytes) => match bytes.as_bytes().try_into() {
            Ok(bytes) => Ok(BlockKey(bytes)),
            Err(_) => Err(invalid(format!("a key has 16 bytes, not {}", bytes.as_bytes().len()))),
        },
        Err(_) => Err(invalid(format!("a key is bytes of length 16, not {}", key.get_type().name()?))),
    }
}

/// Keys as Python has them: any iterable of them.
pub fn keys_of(keys: &Bound<'_, PyAny>) -> PyResult<Vec<BlockKey>> {
    if keys.is_instance_of::<PyBytes>() {
        return Err(invalid("keys are a sequence of bytes of length 16, not bytes alone: put the key in a list"));
    }
    keys.try_iter()?.map(|key| key_of(&key?)).collect()
}

pub fn parent_of(parent: Option<&Bound<'_, PyAny>>) -> PyResult<Option<BlockKey>> {
    parent.map(key_of).transpose()
}

#[pymethods]
impl Namespace {
    #[new]
    #[pyo3(signature = (*, model, revision="", dtype, first_layer=0, layer_count, kv_head_count, head_size, block_tokens, layout, tp_rank=0,
        tp_size=1, adapters=Vec::new(), tenant_salt=Vec::new(), extra=BTreeMap::new()))]
    #[expect(clippy::too_many_arguments, reason = "all by name: they are the fields of the library's structure")]
    fn new(
        model: String,
        revision: &str,
        dtype: String,
        first_layer: u32,
        layer_count: u32,
        kv_head_count: u32,
        head_size: u32,
        block_tokens: u32,
        layout: String,
        tp_rank: u32,
        tp_size: u32,
        adapters: Vec<String>,
        tenant_salt: Vec<u8>,
        extra: BTreeMap<String, String>,
    ) -> PyResult<Self> {
        if tp_rank >= tp_size {
            return Err(invalid(format!("worker {tp_rank} of a tensor-parallel group of {tp_size} does not exist")));
        }
        let fields = NamespaceFields {
            model,
            revision: revision.into(),
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
            tenant_salt: Salt(tenant_salt),
            extra,
        };
        Ok(Namespace(fields.namespace()))
    }

    #[classmethod]
    fn from_bytes(_class: &Bound<'_, PyType>, digest: &[u8]) -> PyResult<Self> {
        match digest.try_into() {
            Ok(digest) => Ok(Namespace(cxl_pool::cache::Namespace(digest))),
            Err(_) => Err(invalid(format!("a namespace has 16 bytes, not {}", digest.len()))),
        }
    }

    fn __bytes__<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.0)
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("Namespace({})", self.0)
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, (Bound<'py, PyBytes>,))> {
        Ok((py.get_type::<Namespace>().getattr("from_bytes")?, (self.__bytes__(py),)))
    }
}

/// Key of a block, chained to the one before it.
#[pyfunction]
#[pyo3(signature = (parent, tokens, extra=None))]
pub fn chain_key<'py>(
    py: Python<'py>,
    parent: Option<&Bound<'py, PyAny>>,
    tokens: &Bound<'py, PyAny>,
    extra: Option<&[u8]>,
) -> PyResult<Bound<'py, PyBytes>> {
    let tokens: Vec<u32> = tokens.extract().map_err(|error: PyErr| match error.is_instance_of::<PyOverflowError>(py) {
        true => invalid("a token is a number from 0 to 2**32 - 1"),
        false => error,
    })?;
    Ok(PyBytes::new(py, &chain(parent_of(parent)?, &tokens, extra.unwrap_or(&[])).0))
}

/// Keys of blocks, each with its parent's where parents are given: one for each key.
pub fn chained_keys_of(keys: &Bound<'_, PyAny>, parents: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<(BlockKey, Option<BlockKey>)>> {
    let keys = keys_of(keys)?;
    let mut given = vec![None; keys.len()];
    if let Some(parents) = parents {
        let parents = parents.try_iter()?.map(|parent| parent.and_then(|parent| parent_of(Some(&parent).filter(|it| !it.is_none()))));
        given = parents.collect::<PyResult<_>>()?;
    }
    if given.len() != keys.len() {
        return Err(invalid(format!("{} keys, but {} parents: give one for each key", keys.len(), given.len())));
    }
    Ok(keys.into_iter().zip(given).collect())
}
