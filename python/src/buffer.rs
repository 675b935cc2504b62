// SPDX-License-Identifier: Apache-2.0
//! Memory that an object exports by the buffer protocol. An exporter that names no strides, as ctypes, has contiguous items.

use crate::failure::invalid;
use pyo3::ffi;
use pyo3::prelude::*;
use std::slice;

/// A view of an object's memory, which neither moves nor shrinks while this is there.
pub struct Export(Box<ffi::Py_buffer>);

// SAFETY: the fields of a view do not change between its request and its release, and may be read from any thread.
unsafe impl Send for Export {}
// SAFETY: as above.
unsafe impl Sync for Export {}

impl Export {
    pub fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut view = Box::new(ffi::Py_buffer::new());
        // SAFETY: the object is alive, the view is ours; it has an address of its own, which it keeps until its release.
        if unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &raw mut *view, ffi::PyBUF_FULL_RO) } == 0 {
            return Ok(Export(view));
        }
        let error = PyErr::fetch(object.py());
        let name = object.get_type().name().map_or_else(|_| "the object".into(), |name| name.to_string());
        Err(invalid(format!("{name} has no memory to copy ({error}): give a buffer, a tensor, or a list of them")))
    }

    pub fn address(&self) -> usize {
        self.0.buf.addr()
    }

    /// Its bytes, gaps left out.
    pub fn len_bytes(&self) -> usize {
        self.0.len.unsigned_abs()
    }

    pub fn item_bytes(&self) -> usize {
        self.0.itemsize.unsigned_abs()
    }

    pub fn is_read_only(&self) -> bool {
        self.0.readonly != 0
    }

    pub fn is_contiguous(&self) -> bool {
        // SAFETY: a view that was filled.
        unsafe { ffi::PyBuffer_IsContiguous(&raw const *self.0, b'C' as _) != 0 }
    }

    pub fn shape(&self) -> Vec<usize> {
        self.dimensions(self.0.shape).iter().map(|count| count.unsigned_abs()).collect()
    }

    /// Bytes from an item to the next, in each dimension.
    pub fn strides(&self) -> Vec<isize> {
        if !self.0.strides.is_null() {
            return self.dimensions(self.0.strides).to_vec();
        }
        let mut strides = vec![self.0.itemsize];
        for count in self.shape().iter().skip(1).rev() {
            strides.push(strides[strides.len() - 1] * *count as isize);
        }
        strides.reverse();
        strides
    }

    fn dimensions(&self, numbers: *const isize) -> &[isize] {
        if numbers.is_null() {
            return &[];
        }
        // SAFETY: the exporter gives `ndim` numbers, which stay until the release.
        unsafe { slice::from_raw_parts(numbers, self.0.ndim.unsigned_abs() as usize) }
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        // Not attached when the interpreter ends: then no object is left to tell.
        Python::try_attach(|_| {
            // SAFETY: the view was filled, and is released once.
            unsafe { ffi::PyBuffer_Release(&raw mut *self.0) };
        });
    }
}
