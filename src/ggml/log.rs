//! Log lines through the callback that the host gave ggml, so that they appear where its own do.
//!
//! Some hosts (llama-bench) give ggml a callback that does nothing. What users must see goes to stderr then.

use super::sys;
use std::ffi::{CString, c_void};
use std::fs::File;
use std::io::{Write, stderr};
use std::os::unix::fs::FileExt;
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
    let line = format!("moe-hot: {}\n", message.replace('\0', " "));
    if !sys::is_found(c"ggml_log_get") {
        // No ggml to hand it to, and nobody to tell of a failure.
        let _ = stderr().write_all(line.as_bytes());
        return;
    }
    let (callback, user_data) = current();
    if is_silent(callback) {
        if level != Level::Info {
            // There is nobody to tell of a failure.
            let _ = stderr().write_all(line.as_bytes());
        }
        return;
    }
    let level = match level {
        Level::Info => sys::GGML_LOG_LEVEL_INFO,
        Level::Warn => sys::GGML_LOG_LEVEL_WARN,
        Level::Error => sys::GGML_LOG_LEVEL_ERROR,
    };
    let Ok(line) = CString::new(line) else { return };
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

/// Whether lines go where they went at load, or to stderr because the host is silent. Not so while llama.cpp's fit measures: it
/// hides them meanwhile.
pub fn is_hosts_log() -> bool {
    let callback = current().0;
    AT_LOAD.get().is_none_or(|at_load| *at_load == address(callback)) || is_silent(callback)
}

/// x86-64 code that a function which does nothing consists of, up to where it returns. None of it calls, jumps, or writes
/// anywhere but to the function's own arguments on the stack.
const IDLE: [&[u8]; 8] = [
    &[0xf3, 0x0f, 0x1e, 0xfa], // endbr64
    &[0x55],                   // push %rbp
    &[0x48, 0x89, 0xe5],       // mov %rsp, %rbp
    &[0x89, 0x7d, 0xfc],       // mov %edi, -4(%rbp): level
    &[0x48, 0x89, 0x75, 0xf0], // mov %rsi, -16(%rbp): text
    &[0x48, 0x89, 0x55, 0xe8], // mov %rdx, -24(%rbp): user data
    &[0x90],                   // nop
    &[0x5d],                   // pop %rbp
];
/// `ret`, also as older compilers write it.
const RETURN: [&[u8]; 2] = [&[0xc3], &[0xf3, 0xc3]];
/// More than all of that together.
const CODE_BYTES: usize = 32;

/// Whether a callback does nothing, whatever it is told: its code returns at once.
fn is_silent(callback: sys::ggml_log_callback) -> bool {
    let mut code = [0; CODE_BYTES];
    // Through the file, since code need not be readable where it is.
    let read = File::open("/proc/self/mem").and_then(|memory| memory.read_at(&mut code, address(callback) as u64));
    callback.is_some() && cfg!(target_arch = "x86_64") && read.is_ok_and(|n| returns_at_once(&code[..n]))
}

fn returns_at_once(mut code: &[u8]) -> bool {
    while let Some(idle) = IDLE.iter().find(|&&idle| code.starts_with(idle)) {
        code = &code[idle.len()..];
    }
    RETURN.iter().any(|&end| code.starts_with(end))
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::c_char;

    unsafe extern "C" fn silent(_: sys::ggml_log_level, _: *const c_char, _: *mut c_void) {}

    unsafe extern "C" fn counting(_: sys::ggml_log_level, _: *const c_char, count: *mut c_void) {
        // SAFETY: never called.
        unsafe { *count.cast::<u32>() += 1 };
    }

    #[test]
    #[cfg_attr(
        debug_assertions,
        ignore = "without optimisation Rust's own such function is not as C compilers write it"
    )]
    fn a_callback_that_does_nothing_is_told_from_one_that_may() {
        assert!(is_silent(Some(silent)));
        assert!(!is_silent(Some(counting)) && !is_silent(None));
        assert!(!is_silent(current().0), "ggml's own");
    }

    #[test]
    fn code_that_returns_at_once_is_known_as_compilers_write_it() {
        let unoptimised = b"\x55\x48\x89\xe5\x89\x7d\xfc\x48\x89\x75\xf0\x48\x89\x55\xe8\x90\x5d\xc3";
        for code in [&b"\xc3"[..], b"\xf3\xc3", b"\xf3\x0f\x1e\xfa\xc3", unoptimised] {
            assert!(returns_at_once(code), "{code:x?}");
        }
        for code in [&b""[..], b"\xf3\x0f\x1e\xfa", b"\xe9\x00\x00\x00\x00", b"\x55\x48\x89\xe5\xe8", b"\x31\xc0\xc3"] {
            assert!(!returns_at_once(code), "{code:x?}");
        }
    }
}
