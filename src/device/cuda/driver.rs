//! The driver's functions that we use, loaded at run time, with every answer checked. What is made here is destroyed on
//! drop; for that, and for every other use, its context must be current.

use crate::{Error, Result};
use cudarc::driver::{DriverError, result, sys};
use std::ffi::{c_int, c_void};
use std::ptr::NonNull;

/// What cudarc looks up in the driver for us.
pub(super) const FUNCTIONS: [&str; 17] = [
    "cuInit",
    "cuPointerGetAttribute",
    "cuDeviceGet",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxSetCurrent",
    "cuStreamCreate",
    "cuStreamQuery",
    "cuStreamDestroy_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventDestroy_v2",
];

fn checked<T>(call: &'static str, result: Result<T, DriverError>) -> Result<T> {
    result.map_err(|DriverError(code)| Error::Cuda { call, reason: format!("{code:?}") })
}

/// `false` for work that is under way.
fn is_done(call: &'static str, result: Result<(), DriverError>) -> Result<bool> {
    match result {
        Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
        other => checked(call, other).map(|()| true),
    }
}

/// Loads and initialises the driver. cudarc panics where the library or a function is missing, so they are sought first.
fn load() -> Result<()> {
    // SAFETY: loads the system's CUDA driver, which ggml's CUDA backend has loaded before us.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::Cuda { call: "loading libcuda.so", reason: "there is no CUDA driver".into() });
    }
    // SAFETY: as above.
    let library = unsafe { sys::culib() };
    for name in FUNCTIONS {
        // SAFETY: the function is not called.
        if unsafe { library.get::<unsafe extern "C" fn()>(name) }.is_err() {
            return Err(Error::Cuda { call: "loading libcuda.so", reason: format!("it has no {name}") });
        }
    }
    checked("cuInit", result::init())
}

/// A device's primary context: the one that ggml's CUDA backend works in.
pub(super) struct Context {
    device: sys::CUdevice,
    raw: sys::CUcontext,
}

// SAFETY: the driver's functions may be called from any thread.
unsafe impl Send for Context {}

impl Context {
    /// That of the device whose memory is at `address`. Current on this thread when it returns.
    pub(super) fn of(address: usize) -> Result<Self> {
        load()?;
        let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
        let mut ordinal: c_int = 0;
        // SAFETY: a place for the answer, which is an int for this attribute; the driver looks the address up and no more.
        let code =
            unsafe { sys::cuPointerGetAttribute((&raw mut ordinal).cast(), attribute, address as sys::CUdeviceptr) };
        checked("cuPointerGetAttribute", code.result())?;
        let device = checked("cuDeviceGet", result::device::get(ordinal))?;
        // SAFETY: the driver has just named the device.
        let raw = checked("cuDevicePrimaryCtxRetain", unsafe { result::primary_ctx::retain(device) })?;
        let context = Self { device, raw };
        context.make_current()?;
        Ok(context)
    }

    /// Must come before all that is done in it on this thread, which may have used another device.
    pub(super) fn make_current(&self) -> Result<()> {
        // SAFETY: we hold the context.
        checked("cuCtxSetCurrent", unsafe { result::ctx::set_current(self.raw) })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once, in `new`. There is nobody to tell of a failure.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// A queue of copies that waits for no other stream.
pub(super) struct Stream(sys::CUstream);

// SAFETY: the driver's functions may be called from any thread.
unsafe impl Send for Stream {}

impl Stream {
    pub(super) fn new() -> Result<Self> {
        checked("cuStreamCreate", result::stream::create(result::stream::StreamKind::NonBlocking)).map(Self)
    }

    /// Queues a copy.
    ///
    /// # Safety
    /// `bytes` and as many bytes of the device's memory at `address` live, and are used by nobody else, until the stream is
    /// idle or an event that is recorded after this call is reached.
    pub(super) unsafe fn copy_to_device(&self, address: usize, bytes: &[u8]) -> Result<()> {
        // SAFETY: the caller's promise; the stream is live.
        let copied = unsafe { result::memcpy_htod_async(address as sys::CUdeviceptr, bytes, self.0) };
        checked("cuMemcpyHtoDAsync", copied)
    }

    /// Queues a copy back to the host.
    ///
    /// # Safety
    /// `to` and as many bytes of the device's memory at `address` live, and `to` is used by nobody else, until the stream is
    /// idle or an event that is recorded after this call is reached.
    pub(super) unsafe fn copy_to_host(&self, to: NonNull<u8>, address: usize, len: usize) -> Result<()> {
        // SAFETY: the caller's promise; the stream is live.
        let copied = unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_ptr().cast(), address as sys::CUdeviceptr, len, self.0) };
        checked("cuMemcpyDtoHAsync", copied.result())
    }

    /// Has `event` reached once everything is done that has been queued so far.
    pub(super) fn record(&self, event: &Event) -> Result<()> {
        // SAFETY: both are live.
        checked("cuEventRecord", unsafe { result::event::record(event.0, self.0) })
    }

    /// Whether everything queued is done.
    pub(super) fn is_idle(&self) -> Result<bool> {
        // SAFETY: the stream is live.
        is_done("cuStreamQuery", unsafe { sys::cuStreamQuery(self.0) }.result())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: we own it.
        let _ = unsafe { result::stream::destroy(self.0) };
    }
}

/// A mark in a stream.
pub(super) struct Event(sys::CUevent);

// SAFETY: the driver's functions may be called from any thread.
unsafe impl Send for Event {}

impl Event {
    pub(super) fn new() -> Result<Self> {
        checked("cuEventCreate", result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)).map(Self)
    }

    /// Whether the stream has come to where it was recorded last.
    pub(super) fn is_reached(&self) -> Result<bool> {
        // SAFETY: the event is live.
        is_done("cuEventQuery", unsafe { result::event::query(self.0) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: we own it.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}

/// Host memory that stays where it is, so that the device can read it by itself.
pub(super) struct PageLocked {
    start: NonNull<u8>,
    size: usize,
}

// SAFETY: plain memory that we own.
unsafe impl Send for PageLocked {}

impl PageLocked {
    /// `size` zeros.
    pub(super) fn new(size: usize) -> Result<Self> {
        // SAFETY: the memory is written to before it is read.
        let start = checked("cuMemHostAlloc", unsafe { result::malloc_host(size, 0) })?;
        let Some(start) = NonNull::new(start.cast::<u8>()) else {
            return Err(Error::Cuda { call: "cuMemHostAlloc", reason: "no address".into() });
        };
        // SAFETY: the driver gave us `size` bytes.
        unsafe { start.write_bytes(0, size) };
        Ok(Self { start, size })
    }

    /// Where it begins, for the device to write to.
    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// All of it. Staging is only read by the device; what is read back is looked at once the device has written it.
    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: ours, initialised in `new`; whoever writes borrows it mutably, and the device has written what it will.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.size) }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above. The device does not read it now: the engine lends out no block that is in flight.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.size) }
    }
}

impl Drop for PageLocked {
    fn drop(&mut self) {
        // SAFETY: allocated by the driver.
        let _ = unsafe { result::free_host(self.start.as_ptr().cast::<c_void>()) };
    }
}
