// SPDX-License-Identifier: Apache-2.0
//! Memory and streams of a GPU as an application has them, by calls of the driver of its own: of a real one or of the fake.

use cxl_pool::copy::LocalRange;
use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::ptr::{NonNull, null_mut, with_exposed_provenance_mut};

/// A library of the process.
pub struct Library(*mut c_void);

// SAFETY: only a name of what is loaded; its functions may be called from any thread.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    /// Loads it, or says why not.
    pub fn open(name: &str) -> Result<Library, String> {
        let path = CString::new(name).unwrap();
        // SAFETY: a terminated string.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_NODELETE) };
        if handle.is_null() {
            // SAFETY: the loader has just failed on this thread and has a text.
            return Err(unsafe { CStr::from_ptr(libc::dlerror()) }.to_string_lossy().into_owned());
        }
        Ok(Library(handle))
    }

    /// A function of it.
    ///
    /// # Safety
    /// `F` is the type of a pointer to the function of that name.
    pub unsafe fn get<F: Copy>(&self, name: &str) -> F {
        let symbol = CString::new(name).unwrap();
        // SAFETY: a loaded library and a terminated string.
        let found = unsafe { libc::dlsym(self.0, symbol.as_ptr()) };
        assert!(!found.is_null(), "{name} is not in the library");
        assert_eq!(size_of::<F>(), size_of::<*mut c_void>());
        // SAFETY: as this function demands.
        unsafe { std::mem::transmute_copy(&found) }
    }
}

/// A GPU.
pub struct Gpu {
    library: Library,
    device: c_int,
    context: *mut c_void,
}

/// Memory of a GPU.
pub struct Memory<'g> {
    gpu: &'g Gpu,
    pub address: u64,
    pub len_bytes: usize,
}

/// A stream of a GPU.
pub struct Stream<'g> {
    gpu: &'g Gpu,
    pub handle: u64,
}

/// An event of a GPU.
pub struct Event<'g> {
    gpu: &'g Gpu,
    pub handle: u64,
}

// SAFETY: the context is only named, and each call makes it current on its own thread.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

macro_rules! call {
    ($gpu:expr, $name:literal ($($argument:expr => $type:ty),* $(,)?)) => {{
        // SAFETY: a function of the driver of this signature, on what it gave.
        let code = unsafe { $gpu.library.get::<unsafe extern "C" fn($($type),*) -> c_int>($name)($($argument),*) };
        assert_eq!(code, 0, $name);
    }};
}

impl Gpu {
    /// GPUs that a driver has, or why there is no driver or none.
    pub fn count(library: &str) -> Result<u32, String> {
        let library = Library::open(library)?;
        let mut count = 0;
        // SAFETY: functions of the driver of these signatures.
        let codes = unsafe {
            [
                library.get::<unsafe extern "C" fn(c_uint) -> c_int>("cuInit")(0),
                library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>("cuDeviceGetCount")(&mut count),
            ]
        };
        if codes == [0, 0] && count > 0 { Ok(count as u32) } else { Err(format!("{count} GPUs, the driver answers {codes:?}")) }
    }

    /// One that is there.
    pub fn open(library: &str, number: u32) -> Gpu {
        let mut gpu = Gpu { library: Library::open(library).unwrap(), device: 0, context: null_mut() };
        call!(gpu, "cuInit"(0 => c_uint));
        call!(gpu, "cuDeviceGet"(&mut gpu.device => *mut c_int, number as c_int => c_int));
        call!(gpu, "cuDevicePrimaryCtxRetain"(&mut gpu.context => *mut *mut c_void, gpu.device => c_int));
        gpu
    }

    fn within<T>(&self, call: impl FnOnce() -> T) -> T {
        call!(self, "cuCtxPushCurrent_v2"(self.context => *mut c_void));
        let result = call();
        let mut popped = null_mut();
        call!(self, "cuCtxPopCurrent_v2"(&mut popped => *mut *mut c_void));
        result
    }

    /// Memory with these bytes in it.
    pub fn memory(&self, bytes: &[u8]) -> Memory<'_> {
        let mut address = 0;
        self.within(|| call!(self, "cuMemAlloc_v2"(&mut address => *mut u64, bytes.len() => usize)));
        let memory = Memory { gpu: self, address, len_bytes: bytes.len() };
        memory.write(bytes);
        memory
    }

    /// A stream that waits for no other.
    pub fn stream(&self) -> Stream<'_> {
        let mut handle = null_mut();
        self.within(|| call!(self, "cuStreamCreate"(&mut handle => *mut *mut c_void, 1 => c_uint)));
        Stream { gpu: self, handle: handle.expose_provenance() as u64 }
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        call!(self, "cuDevicePrimaryCtxRelease_v2"(self.device => c_int));
    }
}

impl Memory<'_> {
    pub fn write(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.len_bytes);
        self.gpu.within(
            || call!(self.gpu, "cuMemcpyHtoD_v2"(self.address => u64, bytes.as_ptr().cast() => *const c_void, bytes.len() => usize)),
        );
    }

    pub fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0u8; self.len_bytes];
        self.gpu.within(
            || call!(self.gpu, "cuMemcpyDtoH_v2"(bytes.as_mut_ptr().cast() => *mut c_void, self.address => u64, bytes.len() => usize)),
        );
        bytes
    }

    /// The part from `start` on.
    pub fn range(&self, start: usize, len_bytes: usize) -> LocalRange {
        assert!(start + len_bytes <= self.len_bytes);
        let address = with_exposed_provenance_mut((self.address + start as u64) as usize);
        LocalRange { address: NonNull::new(address).unwrap(), len_bytes }
    }
}

impl Drop for Memory<'_> {
    fn drop(&mut self) {
        self.gpu.within(|| call!(self.gpu, "cuMemFree_v2"(self.address => u64)));
    }
}

impl Stream<'_> {
    /// Gives the stream work: writes words to memory, each 1024 times.
    pub fn write_words(&self, memory: &Memory<'_>, words: &[u32]) {
        let stream = with_exposed_provenance_mut::<c_void>(self.handle as usize);
        for (index, word) in words.iter().enumerate() {
            let to = memory.address + 4096 * index as u64;
            assert!(4096 * (index + 1) <= memory.len_bytes);
            self.gpu.within(|| {
                call!(self.gpu, "cuMemsetD32Async"(to => u64, *word => c_uint, 1024 => usize, stream => *mut c_void));
            });
        }
    }

    /// Whether it has done all that it was given.
    pub fn is_done(&self) -> bool {
        let stream = with_exposed_provenance_mut::<c_void>(self.handle as usize);
        type Query = unsafe extern "C" fn(*mut c_void) -> c_int;
        // SAFETY: a function of the driver of this signature, on what it gave.
        let code = self.gpu.within(|| unsafe { self.gpu.library.get::<Query>("cuStreamQuery")(stream) });
        assert!([0, 600].contains(&code), "cuStreamQuery: {code}");
        code == 0
    }

    /// An event behind what the stream was given so far.
    pub fn event(&self) -> Event<'_> {
        let mut event = null_mut();
        let stream = with_exposed_provenance_mut::<c_void>(self.handle as usize);
        self.gpu.within(|| {
            call!(self.gpu, "cuEventCreate"(&mut event => *mut *mut c_void, 2 => c_uint));
            call!(self.gpu, "cuEventRecord"(event => *mut c_void, stream => *mut c_void));
        });
        Event { gpu: self.gpu, handle: event.expose_provenance() as u64 }
    }
}

impl Drop for Event<'_> {
    fn drop(&mut self) {
        let event = with_exposed_provenance_mut::<c_void>(self.handle as usize);
        self.gpu.within(|| call!(self.gpu, "cuEventDestroy_v2"(event => *mut c_void)));
    }
}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        let stream = with_exposed_provenance_mut::<c_void>(self.handle as usize);
        self.gpu.within(|| call!(self.gpu, "cuStreamDestroy_v2"(stream => *mut c_void)));
    }
}
