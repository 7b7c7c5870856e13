//! A device's memory under another name.
//!
//! Backends know their own memory by the functions of its type, not by the type's address. So a copy of the type, with an
//! allocation that puts the copy's address into each buffer, is theirs to compute in; the scheduler takes it for another kind.

use crate::ggml::{BackendApi, BufferType, Device, sys};
use crate::plugin::buffer_type::{InterfaceV2, InterfaceV3, Versioned};
use std::collections::BTreeMap;
use std::ptr::null_mut;
use std::sync::{Mutex, PoisonError};

/// The memory of splits on one device.
pub(super) struct SplitMemory {
    device: Device,
    device_kind: BufferType,
    split_kind: BufferType,
}

/// Which type each copy stands for, by addresses. Copies live as long as the process.
static ORIGINALS: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

impl SplitMemory {
    /// That of `device`; `None` if the device does not take it for its own.
    pub(super) fn of(device: Device, api: BackendApi) -> Option<Self> {
        let device_kind = device.buffer_type().filter(|kind| !kind.is_host())?;
        // SAFETY: the type of a registered device, in the version that all tables of this process have.
        let split_kind = unsafe {
            match api {
                BackendApi::V2 => {
                    let mut copy = std::ptr::read(device_kind.as_raw().cast::<Versioned<InterfaceV2>>());
                    copy.iface.alloc_buffer = alloc_buffer;
                    Box::into_raw(Box::new(copy)).cast()
                }
                BackendApi::V3 => {
                    let mut copy = std::ptr::read(device_kind.as_raw().cast::<Versioned<InterfaceV3>>());
                    (copy.iface.alloc_buffer, copy.iface.alloc_buffer_n) = (alloc_buffer, None);
                    Box::into_raw(Box::new(copy)).cast()
                }
            }
        };
        // SAFETY: never freed.
        let split_kind = unsafe { BufferType::from_raw(split_kind) }?;
        originals().insert(split_kind.as_raw() as usize, device_kind.as_raw() as usize);
        device.supports_memory(split_kind).then_some(Self { device, device_kind, split_kind })
    }

    pub(super) fn device(&self) -> Device {
        self.device
    }

    /// The device's own.
    pub(super) fn device_kind(&self) -> BufferType {
        self.device_kind
    }

    /// The same under our name for it.
    pub(super) fn split_kind(&self) -> BufferType {
        self.split_kind
    }
}

fn originals() -> std::sync::MutexGuard<'static, BTreeMap<usize, usize>> {
    ORIGINALS.lock().unwrap_or_else(PoisonError::into_inner)
}

unsafe extern "C" fn alloc_buffer(kind: sys::ggml_backend_buffer_type_t, size: usize) -> sys::ggml_backend_buffer_t {
    crate::plugin::guard::guard("allocating a buffer", null_mut(), || {
        let Some(original) = originals().get(&(kind as usize)).copied() else { return null_mut() };
        // SAFETY: the original is registered; the buffer is new and nobody else's.
        unsafe {
            let buffer = sys::ggml_backend_buft_alloc_buffer(original as sys::ggml_backend_buffer_type_t, size);
            if !buffer.is_null() {
                (*buffer).buft = kind;
            }
            buffer
        }
    })
}
