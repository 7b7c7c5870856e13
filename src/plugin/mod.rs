//! The ggml vtables: registry, device, buffer type, buffer, backend. Nothing else.
//!
//! Every `extern "C"` body is one call inside `guard`, so that a panic never crosses into C. The tables are made when the
//! library is loaded, and each is given the pointers that it needs: registry, then device, then buffer type. Buffers and
//! backend instances belong to the table that they are asked for.

mod api;
mod backend;
mod buffer;
mod buffer_type;
mod device;
mod event;
mod guard;
mod on_device;
mod registry;
mod sources;

use crate::ggml::sys;
use guard::guard;
use std::ffi::c_void;
use std::ptr::null_mut;

/// What llama.cpp looks for in the library that `GGML_BACKEND_PATH` names. Called more than once.
///
/// Returns NULL, after saying why, if host and plugin do not fit together; the host then goes on without us.
///
/// Nothing but a jump that notes where the call comes from: that is the ggml to join, where a process holds several.
#[unsafe(naked)]
#[unsafe(no_mangle)]
#[cfg(target_arch = "x86_64")]
pub extern "C" fn ggml_backend_init() -> sys::ggml_backend_reg_t {
    // The return address lies on top of the stack; the first argument goes to rdi.
    core::arch::naked_asm!("mov rdi, [rsp]", "jmp {}", sym init)
}

/// The same for another processor.
#[unsafe(naked)]
#[unsafe(no_mangle)]
#[cfg(target_arch = "aarch64")]
pub extern "C" fn ggml_backend_init() -> sys::ggml_backend_reg_t {
    // The return address is in x30; the first argument goes to x0.
    core::arch::naked_asm!("mov x0, x30", "b {}", sym init)
}

/// Elsewhere: the only ggml in the process is the one to join.
#[unsafe(no_mangle)]
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub extern "C" fn ggml_backend_init() -> sys::ggml_backend_reg_t {
    init(std::ptr::null())
}

extern "C" fn init(caller: *const c_void) -> sys::ggml_backend_reg_t {
    guard("loading", null_mut(), || registry::init(caller))
}
