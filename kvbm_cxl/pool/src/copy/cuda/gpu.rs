// SPDX-License-Identifier: Apache-2.0
//! One GPU: its primary context, which frameworks such as PyTorch use as well, and the calls that need it to be current.

use super::driver::{
    ATTRIBUTE_DEVICE_ORDINAL, ATTRIBUTE_MEMORY_TYPE, Address, Driver, ERROR_NOT_READY, EVENT_DISABLE_TIMING, HOST_PORTABLE, Handle,
    HostFunction, Launching, MEMORY_TYPE_DEVICE, STREAM_NON_BLOCKING, SUCCESS,
};
use crate::error::{Error, Result};
use std::ffi::{CStr, c_int, c_uint, c_void};
use std::marker::PhantomData;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

/// A GPU whose primary context is retained.
pub(super) struct Gpu {
    driver: Arc<Driver>,
    number: u32,
    device: c_int,
    context: Handle,
}

// SAFETY: the driver may be called from any thread; the context is only a name for it.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

impl Gpu {
    /// Retains the primary context of the GPU of that number.
    pub(super) fn open(driver: Arc<Driver>, number: u32) -> Result<Arc<Gpu>> {
        let failed = |what: &str, code| Error::Gpu { device: number, what: format!("{what}: {}", driver.name_of(code)) };
        let ordinal = c_int::try_from(number).ok().filter(|_| number < driver.devices());
        let Some(ordinal) = ordinal else {
            return Err(Error::NotFound(format!("GPU {number} (this process sees {})", driver.devices())));
        };
        let (mut device, mut context) = (0, null_mut());
        // SAFETY: the driver writes the device, then the context.
        let code = unsafe { (driver.device_get)(&mut device, ordinal) };
        if code != SUCCESS {
            return Err(failed("finding it", code));
        }
        // SAFETY: as above.
        match unsafe { (driver.context_retain)(&mut context, device) } {
            SUCCESS => Ok(Arc::new(Gpu { driver, number, device, context })),
            code => Err(failed("retaining its primary context", code)),
        }
    }

    pub(super) fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    pub(super) fn number(&self) -> u32 {
        self.number
    }

    /// What a failed call means.
    pub(super) fn failed(&self, what: impl std::fmt::Display, code: c_int) -> Error {
        Error::Gpu { device: self.number, what: format!("{what}: {}", self.driver.name_of(code)) }
    }

    /// The same error once more.
    pub(super) fn failed_again(&self, error: &Error) -> Error {
        match error {
            Error::Gpu { device, what } => Error::Gpu { device: *device, what: what.clone() },
            other => Error::Gpu { device: self.number, what: other.to_string() },
        }
    }

    /// Makes the context current on this thread until the result is dropped.
    pub(super) fn enter(&self) -> Result<Entered<'_>> {
        // SAFETY: the context is retained.
        match unsafe { (self.driver.context_push)(self.context) } {
            SUCCESS => Ok(Entered { gpu: self, thread: PhantomData }),
            code => Err(self.failed("making its context current", code)),
        }
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: retained by `open`, and nothing of it is used any more. A driver that has ended before us says so.
        unsafe { (self.driver.context_release)(self.device) };
    }
}

/// This thread, with a GPU's context current.
pub(super) struct Entered<'g> {
    gpu: &'g Gpu,
    /// The context is current on one thread.
    thread: PhantomData<*const ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut popped = null_mut();
        // SAFETY: pushed by `enter` on this thread, and code that pushed another meanwhile has popped it.
        unsafe { (self.gpu.driver.context_pop)(&mut popped) };
    }
}

/// How far the GPU is with what it was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Done,
    UnderWay,
    /// The context is damaged. It does nothing any more (CUDA driver API, `cuStreamQuery`: errors of earlier asynchronous work).
    Failed(c_int),
}

impl From<c_int> for Progress {
    fn from(code: c_int) -> Self {
        match code {
            SUCCESS => Progress::Done,
            ERROR_NOT_READY => Progress::UnderWay,
            code => Progress::Failed(code),
        }
    }
}

/// Calls that need the context. Handles are those of this GPU that were made and not destroyed.
impl Entered<'_> {
    pub(super) fn answer(&self, code: c_int, what: impl std::fmt::Display) -> Result<()> {
        if code == SUCCESS { Ok(()) } else { Err(self.gpu.failed(what, code)) }
    }

    pub(super) fn make_stream(&self) -> Result<Handle> {
        let mut stream = null_mut();
        // SAFETY: the driver writes the stream.
        let code = unsafe { (self.gpu.driver.stream_create)(&mut stream, STREAM_NON_BLOCKING) };
        self.answer(code, "making a stream").map(|()| stream)
    }

    pub(super) fn make_event(&self) -> Result<Handle> {
        let mut event = null_mut();
        // SAFETY: the driver writes the event.
        let code = unsafe { (self.gpu.driver.event_create)(&mut event, EVENT_DISABLE_TIMING) };
        self.answer(code, "making an event").map(|()| event)
    }

    pub(super) fn make_buffer(&self, len_bytes: usize) -> Result<NonNull<u8>> {
        let mut buffer = null_mut();
        // SAFETY: the driver writes the address.
        let code = unsafe { (self.gpu.driver.host_allocate)(&mut buffer, len_bytes, HOST_PORTABLE) };
        self.answer(code, format_args!("allocating {len_bytes} bytes of pinned memory"))?;
        NonNull::new(buffer.cast()).ok_or_else(|| self.gpu.failed("allocating pinned memory gave none", SUCCESS))
    }

    /// The driver's answer.
    ///
    /// # Safety
    /// The event and the stream, each ours or the caller's of the copy, are there.
    pub(super) unsafe fn record(&self, event: Handle, stream: Handle) -> c_int {
        // SAFETY: as this function demands.
        unsafe { (self.gpu.driver.event_record)(event, stream) }
    }

    /// # Safety
    /// The stream and the event, which may be the caller's of the copy, are there.
    pub(super) unsafe fn wait(&self, stream: Handle, event: Handle) -> Result<()> {
        // SAFETY: as this function demands.
        self.answer(unsafe { self.order(stream, event) }, "ordering the copy after the caller's work")
    }

    /// As [`Entered::wait`]; the driver's answer.
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn order(&self, stream: Handle, event: Handle) -> c_int {
        // SAFETY: as this function demands.
        unsafe { (self.gpu.driver.stream_wait)(stream, event, 0) }
    }

    /// Has a stream call a function after its work so far, on a thread of the driver's.
    ///
    /// # Safety
    /// The stream is there; the function, which may be called at any later moment, may have this argument, and calls nothing of CUDA.
    pub(super) unsafe fn call(&self, stream: Handle, function: HostFunction, argument: *mut c_void) -> Result<()> {
        // SAFETY: as this function demands.
        let code = unsafe { (self.gpu.driver.host_function)(stream, function, argument) };
        self.answer(code, "queueing a flush")
    }

    /// # Safety
    /// The event is there.
    pub(super) unsafe fn event_progress(&self, event: Handle) -> Progress {
        // SAFETY: as this function demands.
        unsafe { (self.gpu.driver.event_query)(event) }.into()
    }

    /// # Safety
    /// The stream is there.
    pub(super) unsafe fn stream_progress(&self, stream: Handle) -> Progress {
        // SAFETY: as this function demands.
        unsafe { (self.gpu.driver.stream_query)(stream) }.into()
    }

    /// One copy.
    ///
    /// # Safety
    /// The stream is there. Whatever lies at the addresses may be read and written until the stream is done; addresses that are none are an
    /// error of the driver.
    pub(super) unsafe fn copy(&self, destination: Address, source: Address, len_bytes: usize, stream: Handle) -> Result<()> {
        // SAFETY: as this function demands.
        let code = unsafe { (self.gpu.driver.copy)(destination, source, len_bytes, stream) };
        self.answer(code, format_args!("copying {len_bytes} bytes from {source:#x} to {destination:#x}"))
    }

    fn launching(&self) -> Result<&Launching> {
        let missing = |names: &Vec<&str>| Error::NotFound(format!("{} of the CUDA driver, for kernels,", names.join(", ")));
        self.gpu.driver.launching.as_ref().map_err(missing)
    }

    /// Loads an image of kernels: PTX with a zero after it, or a cubin.
    pub(super) fn load_module(&self, image: &[u8]) -> Result<Handle> {
        let launching = self.launching()?;
        let mut module = null_mut();
        // SAFETY: the driver reads the image, whose own contents tell its length, and writes the module.
        let code = unsafe { (launching.module_load)(&mut module, image.as_ptr().cast()) };
        self.answer(code, "loading kernels").map(|()| module)
    }

    /// A kernel of a module.
    ///
    /// # Safety
    /// The module is loaded.
    pub(super) unsafe fn kernel(&self, module: Handle, name: &CStr) -> Result<Handle> {
        let launching = self.launching()?;
        let mut kernel = null_mut();
        // SAFETY: as this function demands; the driver writes the kernel.
        let code = unsafe { (launching.module_function)(&mut kernel, module, name.as_ptr()) };
        self.answer(code, format_args!("finding the kernel {}", name.to_string_lossy())).map(|()| kernel)
    }

    /// Has a stream run a kernel that takes one parameter.
    ///
    /// # Safety
    /// The stream is there and the kernel's module stays loaded; the kernel takes a `P`, and may use all memory that it names until the
    /// stream is done.
    pub(super) unsafe fn launch<P>(&self, kernel: Handle, blocks: c_uint, threads: c_uint, parameter: &P, stream: Handle) -> Result<c_int> {
        let launching = self.launching()?;
        let mut parameters = [std::ptr::from_ref(parameter).cast_mut().cast::<c_void>()];
        // SAFETY: as this function demands. The driver copies the parameter before it returns.
        Ok(unsafe { (launching.launch)(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, parameters.as_mut_ptr(), null_mut()) })
    }

    /// The address by which kernels on this GPU reach registered memory; `None` where they do not.
    pub(super) fn mapped_address(&self, address: *mut u8) -> Option<Address> {
        let mut mapped = 0;
        // SAFETY: the driver looks the address up in its own tables alone, and writes the other one.
        let code = unsafe { (self.launching().ok()?.mapped_address)(&mut mapped, address.cast(), 0) };
        (code == SUCCESS).then_some(mapped)
    }

    /// Memory of this GPU.
    pub(super) fn allocate(&self, len_bytes: usize) -> Result<Address> {
        let missing = |names: &Vec<&str>| Error::NotFound(format!("{} of the CUDA driver", names.join(", ")));
        let allocating = self.gpu.driver.allocating.as_ref().map_err(missing)?;
        let mut address = 0;
        // SAFETY: the driver writes the address.
        let code = unsafe { (allocating.allocate)(&mut address, len_bytes) };
        self.answer(code, format_args!("allocating {len_bytes} bytes of its memory")).map(|()| address)
    }

    /// # Safety
    /// Memory that [`Entered::allocate`] gave and nothing uses any more.
    pub(super) unsafe fn free(&self, address: Address) {
        if let Ok(allocating) = &self.gpu.driver.allocating {
            // SAFETY: as this function demands.
            unsafe { (allocating.free)(address) };
        }
    }

    /// # Safety
    /// A module of ours none of whose kernels is under way.
    pub(super) unsafe fn unload_module(&self, module: Handle) {
        if let Ok(launching) = self.launching() {
            // SAFETY: as this function demands.
            unsafe { (launching.module_unload)(module) };
        }
    }

    /// Whether an address lies in memory of this GPU, as far as the driver knows.
    pub(super) fn is_own(&self, address: Address) -> bool {
        let attribute = |attribute: c_int| {
            let mut value: c_int = -1;
            // SAFETY: both attributes are of four bytes. The driver looks the address up in its own tables alone.
            let code = unsafe { (self.gpu.driver.pointer_attribute)((&raw mut value).cast(), attribute, address) };
            (code == SUCCESS).then_some(value)
        };
        attribute(ATTRIBUTE_MEMORY_TYPE) == Some(MEMORY_TYPE_DEVICE)
            && attribute(ATTRIBUTE_DEVICE_ORDINAL).and_then(|ordinal| u32::try_from(ordinal).ok()) == Some(self.gpu.number)
    }

    /// Registers memory of this process; the driver's answer.
    ///
    /// # Safety
    /// The range is mapped, and is unregistered before it is not.
    pub(super) unsafe fn register(&self, address: *mut u8, len_bytes: usize, flags: c_uint) -> c_int {
        // SAFETY: as this function demands.
        unsafe { (self.gpu.driver.host_register)(address.cast::<c_void>(), len_bytes, flags) }
    }

    /// # Safety
    /// Registered at this address, and no copy uses it.
    pub(super) unsafe fn unregister(&self, address: *mut u8) {
        // SAFETY: as this function demands. Nothing can be done about an error, which a driver that has ended gives.
        unsafe { (self.gpu.driver.host_unregister)(address.cast::<c_void>()) };
    }

    /// # Safety
    /// Each is one of ours that nothing uses any more. The same for the next two.
    pub(super) unsafe fn destroy_stream(&self, stream: Handle) {
        // SAFETY: as this function demands.
        unsafe { (self.gpu.driver.stream_destroy)(stream) };
    }

    /// # Safety
    /// As [`Entered::destroy_stream`].
    pub(super) unsafe fn destroy_event(&self, event: Handle) {
        // SAFETY: as this function demands.
        unsafe { (self.gpu.driver.event_destroy)(event) };
    }

    /// # Safety
    /// As [`Entered::destroy_stream`].
    pub(super) unsafe fn free_buffer(&self, buffer: NonNull<u8>) {
        // SAFETY: as this function demands.
        unsafe { (self.gpu.driver.host_free)(buffer.as_ptr().cast::<c_void>()) };
    }
}
