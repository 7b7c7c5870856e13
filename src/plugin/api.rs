//! What patched programs look up by name: `ggml-hooks/moe_hot_api.h`, and nothing else.

use super::guard::guard;
use crate::cli;
use crate::ggml::sys;
use crate::runtime::runtime;
use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::null_mut;

static API: sys::moe_hot_api_v1 = sys::moe_hot_api_v1 {
    version: sys::MOE_HOT_API_VERSION,
    size: size_of::<sys::moe_hot_api_v1>(),
    prepare: Some(prepare),
    snapshot: Some(snapshot),
    set_mode: Some(set_mode),
    apply_profile: Some(apply_profile),
    metrics: Some(metrics),
    totals: Some(totals),
    free_text: Some(free_text),
};

/// The table, which lives as long as the process.
pub(super) fn table() -> *mut c_void {
    // Programs only read it.
    (&raw const API).cast_mut().cast()
}

/// A text for C, which gives it back with [`free_text`].
fn to_c(text: String) -> *mut c_char {
    CString::new(text).map_or(null_mut(), CString::into_raw)
}

/// # Safety
/// `body` points to `len` bytes that stay during the call; anything if `len` is 0.
unsafe fn bytes<'a>(body: *const c_char, len: usize) -> &'a [u8] {
    if body.is_null() || len == 0 {
        return &[];
    }
    // SAFETY: passed on from the caller.
    unsafe { std::slice::from_raw_parts(body.cast(), len) }
}

unsafe extern "C" fn prepare(request: *const c_char) -> *mut c_char {
    guard("reading a command line", null_mut(), || {
        // SAFETY: the program passes a NUL-terminated text that stays during the call.
        let request = unsafe { CStr::from_ptr(request) };
        to_c(cli::prepare(&request.to_string_lossy()))
    })
}

unsafe extern "C" fn snapshot() -> *mut c_char {
    guard("making a snapshot", null_mut(), || to_c(runtime().snapshot()))
}

unsafe extern "C" fn set_mode(body: *const c_char, len: usize) -> *mut c_char {
    // SAFETY: the program passes a text of this length that stays during the call.
    guard("setting a mode", null_mut(), || to_c(runtime().set_mode(unsafe { bytes(body, len) })))
}

unsafe extern "C" fn apply_profile(body: *const c_char, len: usize) -> *mut c_char {
    // SAFETY: the program passes a text of this length that stays during the call.
    guard("applying a profile", null_mut(), || to_c(runtime().apply_profile(unsafe { bytes(body, len) })))
}

unsafe extern "C" fn metrics() -> *mut c_char {
    guard("summing up", null_mut(), || to_c(runtime().metrics()))
}

unsafe extern "C" fn totals(totals: *mut sys::moe_hot_totals) {
    guard("summing up", (), || {
        let (requests, hits) = runtime().requests_and_hits();
        // SAFETY: the program passes a valid pointer.
        unsafe { totals.write(sys::moe_hot_totals { requests, hits }) };
    });
}

unsafe extern "C" fn free_text(text: *mut c_char) {
    guard("freeing a text", (), || {
        if !text.is_null() {
            // SAFETY: it was made by `to_c` and is given back once.
            drop(unsafe { CString::from_raw(text) });
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ggml::testing::load_cpu;

    /// What a function returns, and that it can be given back.
    fn text(text: *mut c_char) -> String {
        assert!(!text.is_null());
        // SAFETY: a text that was made for C and is given back once.
        unsafe {
            let copy = CStr::from_ptr(text).to_str().unwrap().to_owned();
            free_text(text);
            copy
        }
    }

    #[test]
    fn every_function_answers_before_anything_is_loaded() {
        load_cpu();
        assert_eq!((API.version, API.size), (1, size_of_val(&API)));
        // SAFETY: as a program would call them.
        unsafe {
            assert!(text(snapshot()).contains("\"layers\":[]"));
            assert!(text(metrics()).contains("moe_hot:hits_total 0"));
            assert!(text(prepare(c"{}".as_ptr())).contains("\"code\":1"));
            assert!(text(set_mode(c"{\"mode\":\"on\"}".as_ptr(), 13)).starts_with("{\"error\":{\"kind\":\"input\""));
            assert!(text(apply_profile(std::ptr::null(), 0)).starts_with("{\"error\":{\"kind\":\"input\""));
            let mut sums = sys::moe_hot_totals { requests: 1, hits: 1 };
            totals(&raw mut sums);
            assert_eq!((sums.requests, sums.hits), (0, 0));
            free_text(null_mut());
        }
    }
}
