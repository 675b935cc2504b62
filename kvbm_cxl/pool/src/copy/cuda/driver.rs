// SPDX-License-Identifier: Apache-2.0
//! The CUDA driver, found at run time: the few functions that are used, by the names of their versions, so that nothing needs CUDA when it
//! is built or loaded. Names, values and signatures are those of the CUDA driver API reference.

use super::described::GpuInfo;
use crate::background::held;
use crate::error::{Error, Result};
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex};

/// A context, stream or event of the driver. Null is the default stream.
pub(super) type Handle = *mut c_void;
/// An address of a GPU's, or as the driver sees it of the host's, memory.
pub(super) type Address = u64;

pub(super) const SUCCESS: c_int = 0;
pub(super) const ERROR_NOT_READY: c_int = 600;
pub(super) const ERROR_ALREADY_REGISTERED: c_int = 712;
pub(super) const ERROR_INVALID_VALUE: c_int = 1;
pub(super) const ERROR_OUT_OF_MEMORY: c_int = 2;
pub(super) const ERROR_OPERATING_SYSTEM: c_int = 304;
pub(super) const ERROR_NOT_PERMITTED: c_int = 800;
pub(super) const ERROR_NOT_SUPPORTED: c_int = 801;

/// Whether an error stays: the driver's reference says of these that the process gets the same one from every further call.
pub(super) fn is_lasting(code: c_int) -> bool {
    // Uncorrectable ECC error; illegal address; launch timeout; context destroyed; assert; errors of the hardware to launch failed.
    matches!(code, 214 | 700 | 702 | 709 | 710 | 714..=719)
}

pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
pub(super) const EVENT_DISABLE_TIMING: c_uint = 2;
/// Pinned for every context.
pub(super) const HOST_PORTABLE: c_uint = 1;
/// Kernels reach registered memory, too.
pub(super) const REGISTER_DEVICE_MAP: c_uint = 2;
/// The registered range is memory of a device: its pages are looked up, not held.
pub(super) const REGISTER_IO_MEMORY: c_uint = 4;

pub(super) const ATTRIBUTE_CAPABILITY_MAJOR: c_int = 75;
pub(super) const ATTRIBUTE_CAPABILITY_MINOR: c_int = 76;
pub(super) const ATTRIBUTE_MEMORY_TYPE: c_int = 2;
pub(super) const ATTRIBUTE_DEVICE_ORDINAL: c_int = 9;
pub(super) const MEMORY_TYPE_DEVICE: c_int = 2;

macro_rules! functions {
    ($(#[$about:meta])* $group:ident: $($name:ident = $symbol:literal ($($argument:ty),*);)*) => {
        $(#[$about])*
        pub(super) struct $group {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl $group {
            /// Finds them in a library; those that are missing otherwise.
            fn find(library: &Library) -> std::result::Result<Self, Vec<&'static str>> {
                $(let $name = library.symbol($symbol);)*
                let all = [$(($symbol, $name)),*];
                let missing: Vec<&str> = all.iter().filter(|(_, found)| found.is_null()).map(|(symbol, _)| *symbol).collect();
                if !missing.is_empty() {
                    return Err(missing);
                }
                Ok($group {
                    // SAFETY: found, and a function of this signature by the driver's reference.
                    $($name: unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> c_int>($name) },)*
                })
            }
        }
    };
}

/// A function of the host that a stream calls.
pub(super) type HostFunction = unsafe extern "C" fn(*mut c_void);

functions! {
    /// The driver's functions that every copy needs. All return a `CUresult`.
    Functions:
    init = "cuInit"(c_uint);
    device_count = "cuDeviceGetCount"(*mut c_int);
    device_get = "cuDeviceGet"(*mut c_int, c_int);
    context_retain = "cuDevicePrimaryCtxRetain"(*mut Handle, c_int);
    context_release = "cuDevicePrimaryCtxRelease_v2"(c_int);
    context_push = "cuCtxPushCurrent_v2"(Handle);
    context_pop = "cuCtxPopCurrent_v2"(*mut Handle);
    stream_create = "cuStreamCreate"(*mut Handle, c_uint);
    stream_destroy = "cuStreamDestroy_v2"(Handle);
    stream_query = "cuStreamQuery"(Handle);
    stream_wait = "cuStreamWaitEvent"(Handle, Handle, c_uint);
    host_function = "cuLaunchHostFunc"(Handle, HostFunction, *mut c_void);
    event_create = "cuEventCreate"(*mut Handle, c_uint);
    event_destroy = "cuEventDestroy_v2"(Handle);
    event_record = "cuEventRecord"(Handle, Handle);
    event_query = "cuEventQuery"(Handle);
    host_register = "cuMemHostRegister_v2"(*mut c_void, usize, c_uint);
    host_unregister = "cuMemHostUnregister"(*mut c_void);
    host_allocate = "cuMemHostAlloc"(*mut *mut c_void, usize, c_uint);
    host_free = "cuMemFreeHost"(*mut c_void);
    pointer_attribute = "cuPointerGetAttribute"(*mut c_void, c_int, Address);
    copy = "cuMemcpyAsync"(Address, Address, usize, Handle);
    error_name = "cuGetErrorName"(c_int, *mut *const c_char);
}

functions! {
    /// What kernels take beyond that.
    Launching:
    module_load = "cuModuleLoadData"(*mut Handle, *const c_void);
    module_unload = "cuModuleUnload"(Handle);
    module_function = "cuModuleGetFunction"(*mut Handle, Handle, *const c_char);
    launch = "cuLaunchKernel"(Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void);
    mapped_address = "cuMemHostGetDevicePointer_v2"(*mut Address, *mut c_void, c_uint);
}

functions! {
    /// Memory of GPUs: of the tables of kernels, and of programs that measure.
    Allocating:
    allocate = "cuMemAlloc_v2"(*mut Address, usize);
    free = "cuMemFree_v2"(Address);
}

functions! {
    /// What tells of GPUs.
    Describing:
    name = "cuDeviceGetName"(*mut c_char, c_int, c_int);
    memory = "cuDeviceTotalMem_v2"(*mut usize, c_int);
    attribute = "cuDeviceGetAttribute"(*mut c_int, c_int, c_int);
}

/// A library that stays loaded until the process ends: the driver has threads and exit handlers of its own.
struct Library(*mut c_void);

impl Library {
    fn open(name: &str) -> std::result::Result<Library, String> {
        let path = CString::new(name).map_err(|_| format!("{name:?} is no name of a library"))?;
        // SAFETY: a terminated string. What a library does when it is loaded is the responsibility of the caller that named it.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_NODELETE) };
        if !handle.is_null() {
            return Ok(Library(handle));
        }
        // SAFETY: the text, if there is one, is this thread's until its next call of the loader.
        let reason = unsafe {
            let text = libc::dlerror();
            if text.is_null() { name.to_owned() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
        };
        Err(reason)
    }

    /// Null where the library has none of that name.
    fn symbol(&self, name: &str) -> *mut c_void {
        match CString::new(name) {
            // SAFETY: a loaded library and a terminated string.
            Ok(name) => unsafe { libc::dlsym(self.0, name.as_ptr()) },
            Err(_) => null_mut(),
        }
    }

    /// The version of CUDA that the driver is of, major and minor; it may be asked before the driver is started.
    fn version(&self) -> Option<(u32, u32)> {
        let found = self.symbol("cuDriverGetVersion");
        if found.is_null() {
            return None;
        }
        // SAFETY: a function of this signature by the driver's reference.
        let version_of = unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_int) -> c_int>(found) };
        let mut version = 0;
        // SAFETY: the driver writes the version.
        let number = (unsafe { version_of(&mut version) } == SUCCESS).then_some(version).and_then(|found| u32::try_from(found).ok())?;
        Some((number / 1000, number % 1000 / 10))
    }
}

/// The driver, loaded and started.
pub(super) struct Driver {
    functions: Functions,
    /// The missing functions, where no kernel can be launched.
    pub(super) launching: std::result::Result<Launching, Vec<&'static str>>,
    /// The missing functions, where no memory of a GPU can be allocated.
    pub(super) allocating: std::result::Result<Allocating, Vec<&'static str>>,
    describing: Option<Describing>,
    devices: u32,
    version: Option<(u32, u32)>,
}

impl std::ops::Deref for Driver {
    type Target = Functions;

    fn deref(&self) -> &Functions {
        &self.functions
    }
}

/// The drivers of this process, by the names of their libraries.
static LOADED: Mutex<Option<HashMap<String, Arc<Driver>>>> = Mutex::new(None);

impl Driver {
    /// Loads the driver and starts it.
    ///
    /// # Errors
    /// [`Error::NotFound`] when there is none, when it is too old, or when it has no GPU.
    pub(super) fn load(library: &str) -> Result<Arc<Driver>> {
        if library.is_empty() || library == "none" {
            return Err(Error::NotFound(format!("the CUDA driver, which {} turns off,", super::LIBRARY_ENVIRONMENT)));
        }
        let mut loaded = held(&LOADED);
        let loaded = loaded.get_or_insert_default();
        if let Some(driver) = loaded.get(library) {
            return Ok(driver.clone());
        }
        let handle = Library::open(library).map_err(|reason| Error::NotFound(format!("the CUDA driver ({reason})")))?;
        let functions = Functions::find(&handle)
            .map_err(|missing| Error::NotFound(format!("{} of a driver of CUDA 11 or newer in {library}", missing.join(", "))))?;
        let mut driver = Driver {
            functions,
            launching: Launching::find(&handle),
            allocating: Allocating::find(&handle),
            describing: Describing::find(&handle).ok(),
            devices: 0,
            version: handle.version(),
        };
        let mut devices = 0;
        // SAFETY: the driver's first call; the second writes to `devices`.
        let code = match unsafe { (driver.init)(0) } {
            // SAFETY: as above.
            SUCCESS => unsafe { (driver.device_count)(&mut devices) },
            code => code,
        };
        driver.devices = u32::try_from(devices).unwrap_or(0);
        if code != SUCCESS || driver.devices == 0 {
            return Err(Error::NotFound(format!("a GPU of the CUDA driver {library} ({})", driver.name_of(code))));
        }
        Ok(loaded.entry(library.to_owned()).or_insert(Arc::new(driver)).clone())
    }

    /// The version of CUDA that it is of, major and minor.
    pub(super) fn version(&self) -> Option<(u32, u32)> {
        self.version
    }

    /// GPUs that this process sees.
    pub(super) fn devices(&self) -> u32 {
        self.devices
    }

    /// What there is to know of a GPU that this process sees.
    pub(super) fn describe(&self, number: u32) -> GpuInfo {
        let (Some(describing), Ok(ordinal)) = (&self.describing, c_int::try_from(number)) else { return GpuInfo::default() };
        let (mut device, mut text, mut memory) = (0, [0 as c_char; 256], 0usize);
        // SAFETY: the driver writes the device.
        if unsafe { (self.functions.device_get)(&mut device, ordinal) } != SUCCESS {
            return GpuInfo::default();
        }
        // SAFETY: the driver writes at most so many bytes, with a zero after the name; the last byte stays one.
        let is_named = unsafe { (describing.name)(text.as_mut_ptr(), text.len() as c_int - 1, device) } == SUCCESS;
        // SAFETY: as above.
        let name = is_named.then(|| unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned());
        // SAFETY: the driver writes the size.
        let has_memory = unsafe { (describing.memory)(&mut memory, device) } == SUCCESS;
        let attribute = |attribute: c_int| {
            let mut value = 0;
            // SAFETY: the driver writes the value.
            let code = unsafe { (describing.attribute)(&mut value, attribute, device) };
            (code == SUCCESS).then_some(value).and_then(|value| u32::try_from(value).ok())
        };
        GpuInfo {
            name,
            capability: attribute(ATTRIBUTE_CAPABILITY_MAJOR).zip(attribute(ATTRIBUTE_CAPABILITY_MINOR)),
            memory_bytes: has_memory.then_some(memory as u64),
        }
    }

    /// The driver's name for what a call answered.
    pub(super) fn name_of(&self, code: c_int) -> String {
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: the driver writes the address of a text that stays.
        match unsafe { (self.functions.error_name)(code, &mut name) } {
            // SAFETY: as above.
            SUCCESS if !name.is_null() => format!("{} {code}", unsafe { CStr::from_ptr(name) }.to_string_lossy()),
            _ => format!("error {code}"),
        }
    }
}
