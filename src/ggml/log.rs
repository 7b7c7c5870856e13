//! Log lines through the callback that the host gave ggml, so that they appear where its own do.

use super::sys;
use std::ffi::{CString, c_void};
use std::sync::OnceLock;

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
    if !sys::is_found(c"ggml_log_get") {
        // No ggml to hand it to.
        eprint!("{line}");
        return;
    }
    let Ok(line) = CString::new(line) else { return };
    let (callback, user_data) = current();
    if let Some(callback) = callback {
        // SAFETY: the host registered this callback for NUL-terminated lines with its own user data.
        unsafe { callback(level, line.as_ptr(), user_data) };
    }
}

/// The callback that was set when the host loaded us.
static AT_LOAD: OnceLock<usize> = OnceLock::new();

/// Notes the host's callback; to be called at load.
pub fn remember_hosts_log() {
    AT_LOAD.get_or_init(|| address(current().0));
}

/// Whether lines go where they went at load. Not so while llama.cpp's fit measures: it silences the log meanwhile.
pub fn is_hosts_log() -> bool {
    AT_LOAD.get().is_none_or(|at_load| *at_load == address(current().0))
}

fn address(callback: sys::ggml_log_callback) -> usize {
    callback.map_or(0, |callback| callback as usize)
}

fn current() -> (sys::ggml_log_callback, *mut c_void) {
    let (mut callback, mut user_data) = (None, std::ptr::null_mut());
    // SAFETY: both pointers are valid for writing; ggml fills them with its current callback.
    unsafe { sys::ggml_log_get(&mut callback, &mut user_data) };
    (callback, user_data)
}
