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
mod registry;

use crate::ggml::sys;
use guard::guard;

/// What llama.cpp looks for in the library that `GGML_BACKEND_PATH` names. Called more than once.
///
/// Returns NULL, after saying why, if host and plugin do not fit together; the host then goes on without us.
#[unsafe(no_mangle)]
pub extern "C" fn ggml_backend_init() -> sys::ggml_backend_reg_t {
    guard("loading", std::ptr::null_mut(), registry::init)
}
