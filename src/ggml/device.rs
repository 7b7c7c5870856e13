//! Devices that the host has registered.

use super::{BufferType, c_text, sys};
use crate::{Error, Result};
use std::borrow::Cow;
use std::ptr::NonNull;

/// The name that the plugin's device has.
pub const OUR_NAME: &str = "MoEHot";

/// A registered device; lives as long as the process.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Device(NonNull<sys::ggml_backend_device>);

// SAFETY: registered devices live as long as the process, and ggml's device functions may be called from any thread.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// The CPU device. None means that this copy of ggml is not the host's.
    pub fn cpu() -> Result<Self> {
        Self::of_type(sys::GGML_BACKEND_DEVICE_TYPE_CPU).ok_or(Error::NoCpuDevice)
    }

    /// The first discrete GPU, if any.
    pub fn gpu() -> Option<Self> {
        Self::of_type(sys::GGML_BACKEND_DEVICE_TYPE_GPU)
    }

    /// The GPU that shares the host's memory and that llama.cpp will use: it prefers discrete ones, but not remote ones.
    pub fn shared_memory_gpu() -> Option<Self> {
        if Self::local_gpu().is_some() {
            return None;
        }
        Self::of_type(sys::GGML_BACKEND_DEVICE_TYPE_IGPU)
    }

    /// All devices that are registered.
    pub fn all() -> impl Iterator<Item = Self> {
        // SAFETY: takes no arguments.
        let count = unsafe { sys::ggml_backend_dev_count() };
        // SAFETY: the index is below the count; devices are not taken away while programs run.
        (0..count).filter_map(|index| NonNull::new(unsafe { sys::ggml_backend_dev_get(index) }).map(Self))
    }

    fn kind(&self) -> sys::ggml_backend_dev_type {
        // SAFETY: the device is registered.
        unsafe { sys::ggml_backend_dev_type(self.as_raw()) }
    }

    /// Whether it is the CPU itself.
    pub fn is_cpu(&self) -> bool {
        self.kind() == sys::GGML_BACKEND_DEVICE_TYPE_CPU
    }

    /// Whether it is on another machine, as llama.cpp tells it: by its registry's name. Graphs of one such device must not be
    /// computed by two threads at once: the client remembers, for all instances, which graph the server has seen last.
    pub fn is_remote(&self) -> bool {
        self.registry_name() == "RPC"
    }

    /// Name of the registry that the device belongs to, such as `CUDA`.
    pub fn registry_name(&self) -> Cow<'static, str> {
        // SAFETY: a registered device has a registry with a name, and both live as long as the process.
        unsafe { c_text(sys::ggml_backend_reg_name(sys::ggml_backend_dev_backend_reg(self.as_raw()))) }
    }

    /// The device's short name.
    pub fn name(&self) -> Cow<'static, str> {
        // SAFETY: the device is registered and lives as long as the process, and so does its name.
        unsafe { c_text(sys::ggml_backend_dev_name(self.as_raw())) }
    }

    /// The device with this name, as the program's `--list-devices` prints it.
    pub fn named(name: &str) -> Option<Self> {
        Self::all().find(|device| device.name() == name)
    }

    /// The first discrete GPU of this machine: with memory of its own, and not remote.
    pub fn local_gpu() -> Option<Self> {
        Self::all().find(Self::is_local_gpu)
    }

    /// Whether it is of ggml's CUDA backend, by one of the names that it is built under.
    pub fn is_of_cuda_backend(&self) -> bool {
        ["CUDA", "ROCm", "MUSA"].contains(&&*self.registry_name())
    }

    /// Whether it is a discrete GPU of this machine.
    pub fn is_local_gpu(&self) -> bool {
        self.kind() == sys::GGML_BACKEND_DEVICE_TYPE_GPU && !self.is_remote()
    }

    /// Whether it is one of the plugin's own devices.
    pub fn is_ours(&self) -> bool {
        self.kind() == sys::GGML_BACKEND_DEVICE_TYPE_ACCEL && self.registry_name() == OUR_NAME
    }

    /// The memory that its tensors lie in.
    pub fn buffer_type(&self) -> Option<BufferType> {
        // SAFETY: the device is registered; ggml returns NULL or a registered buffer type.
        unsafe { BufferType::from_raw(sys::ggml_backend_dev_buffer_type(self.as_raw())) }
    }

    /// Whether its operations read and write memory of this kind, by its own word.
    pub fn supports_memory(&self, kind: BufferType) -> bool {
        // SAFETY: the device is registered; the buffer type is valid.
        unsafe { (*self.as_raw()).iface.supports_buft.is_some_and(|supports| supports(self.as_raw(), kind.as_raw())) }
    }

    /// Free and total memory in bytes, by the device's own report; 0 and 0 if it does not tell.
    pub fn memory(&self) -> (u64, u64) {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the device is registered and both pointers are valid for writing.
        unsafe { sys::ggml_backend_dev_memory(self.as_raw(), &mut free, &mut total) };
        (free as u64, total as u64)
    }

    fn of_type(kind: sys::ggml_backend_dev_type) -> Option<Self> {
        // SAFETY: ggml returns NULL or a registered device.
        NonNull::new(unsafe { sys::ggml_backend_dev_by_type(kind) }).map(Self)
    }

    pub(crate) fn as_raw(&self) -> sys::ggml_backend_dev_t {
        self.0.as_ptr()
    }

    /// Page-locked host memory that this device copies from fastest, if it offers any.
    pub fn host_buffer_type(&self) -> Option<BufferType> {
        // SAFETY: the device is registered; ggml returns NULL or a registered buffer type.
        unsafe { BufferType::from_raw(sys::ggml_backend_dev_host_buffer_type(self.as_raw())) }
    }

    /// A function that the device's registry offers under `name`.
    pub(crate) fn proc_address(&self, name: &std::ffi::CStr) -> Option<NonNull<std::ffi::c_void>> {
        // SAFETY: a registered device has a registry; ggml only reads both.
        NonNull::new(unsafe {
            sys::ggml_backend_reg_get_proc_address(sys::ggml_backend_dev_backend_reg(self.as_raw()), name.as_ptr())
        })
    }
}
