//! What every function that ggml calls needs: our name, and a wall that panics do not cross.

use crate::ggml::{Level, log};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Our name wherever ggml asks for one.
pub(super) const NAME: &std::ffi::CStr = c"MoEHot";

/// That of the device whose splits lie on the hot device.
pub(super) const NAME_ON_DEVICE: &std::ffi::CStr = c"MoEHotGPU";

/// Runs `body`; a panic becomes one log line and `fallback`.
pub(super) fn guard<T>(doing: &str, fallback: T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
        log(Level::Error, &format!("internal error while {doing}; please report it"));
        fallback
    })
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
