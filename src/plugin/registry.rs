//! The registry: two devices, and the functions that llama.cpp looks up by name.

use super::guard::{NAME, guard};
use super::{api, backend, device, on_device};
use crate::ggml::{AbortCallback, BackendApi, Level, NOT_SERVED, join_host, log, remember_hosts_log, sys};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::OnceLock;

/// Our registry, which lives as long as the process.
struct Registry(NonNull<sys::ggml_backend_reg>);

// SAFETY: neither we nor ggml write to our tables once they are made.
unsafe impl Send for Registry {}
// SAFETY: as above.
unsafe impl Sync for Registry {}

/// Our devices in the order in which the scheduler asks them. The registry's context.
type Devices = [sys::ggml_backend_dev_t; 2];

/// A registry with its devices, in the version of the tables that the host speaks.
fn make(api: BackendApi) -> Registry {
    let registry = NonNull::from(Box::leak(Box::new(sys::ggml_backend_reg {
        api_version: api.number(),
        iface: sys::ggml_backend_reg_i {
            get_name: Some(get_name),
            get_device_count: Some(get_device_count),
            get_device: Some(get_device),
            get_proc_address: Some(get_proc_address),
        },
        context: null_mut(),
    })));
    let device = device::make(registry.as_ptr(), api);
    let devices: Devices = [on_device::make(registry.as_ptr(), device, api), device];
    // SAFETY: nobody else knows the registry yet.
    unsafe { (*registry.as_ptr()).context = Box::into_raw(Box::new(devices)).cast() };
    Registry(registry)
}

/// Joins the ggml that the code at `caller` is of, once, and says once why not.
pub(super) fn init(caller: *const c_void) -> sys::ggml_backend_reg_t {
    static REGISTRY: OnceLock<Option<Registry>> = OnceLock::new();
    let join = || match join_host(caller) {
        Ok(api) => {
            remember_hosts_log();
            Some(make(api))
        }
        Err(error) => {
            log(Level::Warn, &format!("{NOT_SERVED}{error}"));
            None
        }
    };
    REGISTRY.get_or_init(join).as_ref().map_or(null_mut(), |registry| registry.0.as_ptr())
}

unsafe extern "C" fn get_name(_: sys::ggml_backend_reg_t) -> *const c_char {
    NAME.as_ptr()
}

unsafe extern "C" fn get_device_count(_: sys::ggml_backend_reg_t) -> usize {
    size_of::<Devices>() / size_of::<sys::ggml_backend_dev_t>()
}

unsafe extern "C" fn get_device(registry: sys::ggml_backend_reg_t, index: usize) -> sys::ggml_backend_dev_t {
    guard("asking for a device", null_mut(), || {
        // SAFETY: ggml calls this on our registry, whose context is its devices.
        let devices = unsafe { &*(*registry).context.cast::<Devices>() };
        devices.get(index).copied().unwrap_or(null_mut())
    })
}

unsafe extern "C" fn get_proc_address(_: sys::ggml_backend_reg_t, name: *const c_char) -> *mut c_void {
    guard("looking up a function", null_mut(), || {
        // SAFETY: ggml passes a NUL-terminated name.
        match unsafe { CStr::from_ptr(name) }.to_bytes() {
            b"ggml_backend_set_n_threads" => set_n_threads as *mut c_void,
            b"ggml_backend_set_abort_callback" => set_abort_callback as *mut c_void,
            b"moe_hot_api_v1" => api::table(),
            _ => null_mut(),
        }
    })
}

/// Found by llama.cpp under this name with `ggml_backend` in front.
unsafe extern "C" fn set_n_threads(backend: sys::ggml_backend_t, n_threads: c_int) {
    // SAFETY: llama.cpp calls this on a live instance of ours between computations.
    guard("setting threads", (), || unsafe {
        if on_device::is_instance(backend) {
            on_device::instance(backend).set_threads(n_threads);
        } else {
            backend::set_threads(backend, n_threads);
        }
    });
}

/// Found by llama.cpp under this name with `ggml_backend` in front.
unsafe extern "C" fn set_abort_callback(
    backend: sys::ggml_backend_t,
    function: sys::ggml_abort_callback,
    data: *mut c_void,
) {
    // SAFETY: as for `set_n_threads`. The host keeps function and data valid until it sets others or frees the instance.
    guard("setting the abort callback", (), || unsafe {
        let callback = AbortCallback::new(function, data);
        if on_device::is_instance(backend) {
            on_device::instance(backend).set_abort_callback(callback);
        } else {
            backend::set_abort_callback(backend, callback);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ggml::testing::load_cpu;
    use std::ptr::null;

    #[test]
    fn each_table_leads_to_the_others_and_an_instance_is_made_and_freed() {
        load_cpu();
        let registry = init(null());
        assert_eq!(registry, init(null()), "made once");
        // SAFETY: the registry and what it leads to live as long as the process; the instance and the buffer are freed once.
        unsafe {
            let device = sys::ggml_backend_reg_dev_get(registry, 1);
            assert_eq!(sys::ggml_backend_dev_backend_reg(device), registry);
            let kind = sys::ggml_backend_dev_buffer_type(device);
            assert_eq!(sys::ggml_backend_buft_get_device(kind), device);

            let buffer = sys::ggml_backend_buft_alloc_buffer(kind, 64);
            assert_eq!(sys::ggml_backend_buffer_get_type(buffer), kind);
            sys::ggml_backend_buffer_free(buffer);

            let instance = sys::ggml_backend_dev_init(device, null());
            assert_eq!(sys::ggml_backend_get_device(instance), device);
            sys::ggml_backend_free(instance);
        }
    }

    #[test]
    fn the_device_for_splits_offers_the_loader_no_memory_and_takes_nothing_without_a_cache() {
        load_cpu();
        let registry = init(null());
        // SAFETY: the registry and what it leads to live as long as the process; the instance is freed once.
        unsafe {
            let registered = sys::ggml_backend_reg_dev_get(registry, 0);
            assert_eq!(sys::ggml_backend_dev_backend_reg(registered), registry);
            assert_eq!(sys::ggml_backend_dev_buffer_type(registered), sys::ggml_backend_cpu_buffer_type());

            let instance = sys::ggml_backend_dev_init(registered, null());
            let device = sys::ggml_backend_get_device(instance);
            assert_ne!(device, registered);
            assert_eq!(sys::ggml_backend_dev_backend_reg(device), registry);
            assert_eq!(sys::ggml_backend_dev_buffer_type(device), sys::ggml_backend_cpu_buffer_type());
            sys::ggml_backend_free(instance);
        }
    }
}
