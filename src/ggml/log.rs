//! Log lines through the callback that the host gave ggml, so that they appear where its own do.

use super::sys;
use std::ffi::CString;

/// How loud a line is. llama.cpp hides `Info` by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Shown only when the user asks for more.
    Info,
    /// Shown always: what users must see.
    Warn,
    /// A request failed.
    Error,
}

/// Writes one line, prefixed with `moe-hot: `.
pub fn log(level: Level, message: &str) {
    let level = match level {
        Level::Info => sys::GGML_LOG_LEVEL_INFO,
        Level::Warn => sys::GGML_LOG_LEVEL_WARN,
        Level::Error => sys::GGML_LOG_LEVEL_ERROR,
    };
    let line = format!("moe-hot: {}\n", message.replace('\0', " "));
    let Ok(line) = CString::new(line) else { return };
    let mut callback = None;
    let mut user_data = std::ptr::null_mut();
    // SAFETY: both pointers are valid for writing; ggml fills them with its current callback.
    unsafe { sys::ggml_log_get(&mut callback, &mut user_data) };
    if let Some(callback) = callback {
        // SAFETY: the host registered this callback for NUL-terminated lines with its own user data.
        unsafe { callback(level, line.as_ptr(), user_data) };
    }
}
