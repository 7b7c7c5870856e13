//! The registry: one device; and the way in for a second library, which `FAKE_LOAD` names.

use crate::{Shared, buffer_type, device, guard, say, settings, stats, sys};
use std::env;
use std::ffi::{CStr, CString, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::ptr::null_mut;
use std::sync::OnceLock;

pub(crate) static REGISTRY: Shared<sys::ggml_backend_reg> = Shared::new(sys::ggml_backend_reg {
    api_version: sys::GGML_BACKEND_API_VERSION as i32,
    iface: sys::ggml_backend_reg_i {
        get_name: Some(get_name),
        get_device_count: Some(get_device_count),
        get_device: Some(get_device),
        get_proc_address: Some(get_proc_address),
    },
    context: null_mut(),
});

/// NULL, after a line that says why, if the environment holds a setting that we do not know.
pub(crate) fn init() -> sys::ggml_backend_reg_t {
    static READY: OnceLock<bool> = OnceLock::new();
    let mut is_first = false;
    let is_ready = *READY.get_or_init(|| {
        is_first = true;
        match settings::load_environment() {
            Ok(()) => true,
            Err(error) => {
                say(&error);
                false
            }
        }
    });
    if !is_ready {
        return null_mut();
    }
    if is_first {
        speak_as_host();
        stats::DEVICES.add(1);
        stats::write_at_exit();
        load_other();
    }
    REGISTRY.get()
}

/// Takes the API of the registries that are there already. Of 2 and 3, no more: the host refuses another.
fn speak_as_host() {
    // SAFETY: registries begin with their version; nobody has seen our tables yet, and this runs once.
    unsafe {
        if sys::ggml_backend_reg_count() > 0 && (*sys::ggml_backend_reg_get(0)).api_version == 3 {
            (*REGISTRY.get()).api_version = 3;
            buffer_type::DEVICE_TYPE.become_api_3();
            buffer_type::HOST_TYPE.become_api_3();
        }
    }
}

/// Loads the library of `FAKE_LOAD`. We are registered before it, as a real GPU would be; the host, which registers
/// what `init` returns, then finds that done. It holds no position in its lists while it calls `init`.
fn load_other() {
    let Some(path) = env::var_os("FAKE_LOAD").filter(|path| !path.is_empty()) else { return };
    let Ok(path) = CString::new(path.as_bytes()) else { return };
    // SAFETY: the registry is a complete static, the path NUL-terminated.
    let other = unsafe {
        sys::ggml_backend_register(REGISTRY.get());
        sys::ggml_backend_load(path.as_ptr())
    };
    if other.is_null() {
        say(&format!("FAKE_LOAD: {} was not loaded", path.to_string_lossy()));
    }
}

unsafe extern "C" fn get_name(_: sys::ggml_backend_reg_t) -> *const c_char {
    c"Fake".as_ptr()
}

unsafe extern "C" fn get_device_count(_: sys::ggml_backend_reg_t) -> usize {
    1
}

unsafe extern "C" fn get_device(_: sys::ggml_backend_reg_t, index: usize) -> sys::ggml_backend_dev_t {
    if index == 0 { device::DEVICE.get() } else { null_mut() }
}

unsafe extern "C" fn get_proc_address(_: sys::ggml_backend_reg_t, name: *const c_char) -> *mut c_void {
    guard("looking up a function", null_mut(), || {
        // SAFETY: ggml passes a NUL-terminated name.
        match unsafe { CStr::from_ptr(name) }.to_bytes() {
            b"fake_stat" => fake_stat as *mut c_void,
            b"fake_set" => fake_set as *mut c_void,
            _ => null_mut(),
        }
    })
}

/// A counter of `stats` by its name; `u64::MAX` if there is none of that name.
unsafe extern "C" fn fake_stat(name: *const c_char) -> u64 {
    guard("reading a counter", u64::MAX, || {
        // SAFETY: the caller passes a NUL-terminated name.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        stats::read(&name).unwrap_or(u64::MAX)
    })
}

/// Changes a setting by its name (that of the environment in lower case, without `FAKE_`); false if there is none.
unsafe extern "C" fn fake_set(name: *const c_char, value: i64) -> bool {
    guard("changing a setting", false, || {
        // SAFETY: the caller passes a NUL-terminated name.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        settings::set(&name, value)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Rig;
    use std::mem::transmute;

    #[test]
    fn a_host_in_this_process_reads_counters_and_changes_settings() {
        let _turn = Rig::new();
        // SAFETY: the registry is complete; both functions have the types that this module gives them.
        unsafe {
            let find = |name: &CStr| sys::ggml_backend_reg_get_proc_address(REGISTRY.get(), name.as_ptr());
            let stat: unsafe extern "C" fn(*const c_char) -> u64 = transmute(find(c"fake_stat"));
            let set: unsafe extern "C" fn(*const c_char, i64) -> bool = transmute(find(c"fake_set"));
            assert!(stat(c"allocations".as_ptr()) > 0);
            assert_eq!(stat(c"nothing".as_ptr()), u64::MAX);
            assert!(set(c"latency_us".as_ptr(), 5) && set(c"fault_alloc".as_ptr(), 0));
            assert_eq!(settings::LATENCY_US.get(), 5);
            assert!(!set(c"nothing".as_ptr(), 5));
            assert!(find(c"ggml_backend_set_n_threads").is_null());
        }
    }
}
