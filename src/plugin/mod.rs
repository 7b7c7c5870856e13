//! The ggml vtables: registry, device, buffer type, buffer, backend. Nothing else.
//!
//! Every `extern "C"` body is one call inside [`guard`], so that a panic never crosses into C.

mod backend;
mod buffer;
mod buffer_type;
mod device;
mod event;
mod registry;

use crate::ggml::{Level, log, sys};
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Our name wherever ggml asks for one.
const NAME: &std::ffi::CStr = c"MoEHot";

/// What llama.cpp looks for in the library that `GGML_BACKEND_PATH` names. Called more than once.
///
/// Returns NULL, after saying why, if host and plugin do not fit together; the host then goes on without us.
#[unsafe(no_mangle)]
pub extern "C" fn ggml_backend_init() -> sys::ggml_backend_reg_t {
    guard("loading", std::ptr::null_mut(), registry::init)
}

/// Runs `body`; a panic becomes one log line and `fallback`.
fn guard<T>(doing: &str, fallback: T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
        log(Level::Error, &format!("internal error while {doing}; please report it"));
        fallback
    })
}

/// A static that ggml points into. ggml only reads it.
struct Shared<T>(UnsafeCell<T>);

// SAFETY: neither we nor ggml write to these statics after their constant initialisation.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    const fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    const fn get(&self) -> *mut T {
        self.0.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_the_fallback() {
        assert_eq!(guard("testing", 7, || panic!("inside")), 7);
        assert_eq!(guard("testing", 7, || 8), 8);
    }
}
