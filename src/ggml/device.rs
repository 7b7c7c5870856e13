//! Devices that the host has registered.

use super::{BufferType, c_text, sys};
use crate::{Error, Result};
use std::borrow::Cow;
use std::ptr::NonNull;

/// A registered device; lives as long as the process.
#[derive(Clone, Copy)]
pub struct Device(NonNull<sys::ggml_backend_device>);

impl Device {
    /// The CPU device. None means that this copy of ggml is not the host's.
    pub fn cpu() -> Result<Self> {
        Self::of_type(sys::GGML_BACKEND_DEVICE_TYPE_CPU).ok_or(Error::NoCpuDevice)
    }

    /// The first discrete GPU, if any.
    pub fn gpu() -> Option<Self> {
        Self::of_type(sys::GGML_BACKEND_DEVICE_TYPE_GPU)
    }

    /// A GPU that has no memory of its own, where no discrete one is there: llama.cpp then uses it.
    pub fn shared_memory_gpu() -> Option<Self> {
        if Self::gpu().is_some() { None } else { Self::of_type(sys::GGML_BACKEND_DEVICE_TYPE_IGPU) }
    }

    /// The device's short name.
    pub fn name(&self) -> Cow<'static, str> {
        // SAFETY: the device is registered and lives as long as the process, and so does its name.
        unsafe { c_text(sys::ggml_backend_dev_name(self.as_raw())) }
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
