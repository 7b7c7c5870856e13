//! Devices for tests that have a process of their own: once registered they stay. And what is logged meanwhile.

use super::{Device, sys};
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;
use std::ptr::{NonNull, null, null_mut};
use std::sync::Mutex;

/// Loads a backend's library into this process, for good.
pub(crate) fn load(library: &Path) {
    let path = CString::new(library.to_str().unwrap()).unwrap();
    // SAFETY: a NUL-terminated path.
    assert!(!unsafe { sys::ggml_backend_load(path.as_ptr()) }.is_null(), "{} was not loaded", library.display());
}

/// Loads all backends in a folder, and the devices of an RPC server if one is given, for good.
pub(crate) fn load_all(folder: &Path, rpc_server: Option<&str>) {
    let folder = CString::new(folder.to_str().unwrap()).unwrap();
    // SAFETY: a NUL-terminated path.
    unsafe { sys::ggml_backend_load_all_from_path(folder.as_ptr()) };
    let Some(server) = rpc_server else { return };
    let server = CString::new(server).unwrap();
    // SAFETY: NUL-terminated names; the RPC backend documents this function with exactly this signature.
    unsafe {
        let rpc = sys::ggml_backend_reg_by_name(c"RPC".as_ptr());
        assert!(!rpc.is_null(), "there is no RPC backend");
        let add_server = sys::ggml_backend_reg_get_proc_address(rpc, c"ggml_backend_rpc_add_server".as_ptr());
        assert!(!add_server.is_null(), "the RPC backend takes no servers");
        let add_server = std::mem::transmute::<
            *mut c_void,
            unsafe extern "C" fn(*const c_char) -> sys::ggml_backend_reg_t,
        >(add_server);
        let devices = add_server(server.as_ptr());
        assert!(!devices.is_null(), "no device there");
        sys::ggml_backend_register(devices);
    }
}

/// A GPU that is not there (`tests/fake-device`), loaded into this process, which should be one of the test's own.
pub(crate) struct FakeDevice {
    pub(crate) device: Device,
    set: unsafe extern "C" fn(*const c_char, i64) -> bool,
}

impl FakeDevice {
    pub(crate) fn load() -> Self {
        load(&crate::device::copy::testing::beside_this_program("libggml_fake.so"));
        let device = Device::named("FAKE0").unwrap();
        let set = device.proc_address(c"fake_set").unwrap();
        // SAFETY: FakeDevice documents this name with exactly this signature.
        let set =
            unsafe { std::mem::transmute::<NonNull<c_void>, unsafe extern "C" fn(*const c_char, i64) -> bool>(set) };
        Self { device, set }
    }

    /// Changes one of its settings or faults.
    pub(crate) fn set(&self, name: &str, value: i64) {
        let c_name = CString::new(name).unwrap();
        // SAFETY: a NUL-terminated name.
        assert!(unsafe { (self.set)(c_name.as_ptr(), value) }, "FakeDevice has no setting {name}");
    }
}

/// A device that calls itself CUDA's first, with ggml's CPU memory and mathematics. It has the bus id of the fake driver's
/// second device (`tests/fake-cuda`).
pub(crate) fn register_cuda_lookalike() -> Device {
    let iface = sys::ggml_backend_reg_i {
        get_name: Some(registry_name),
        get_device_count: Some(device_count),
        get_device: Some(device),
        get_proc_address: None,
    };
    let api_version = sys::GGML_BACKEND_API_VERSION as i32;
    let registry = Box::leak(Box::new(sys::ggml_backend_reg { api_version, iface, context: null_mut() }));
    let iface = sys::ggml_backend_device_i {
        get_name: Some(device_name),
        get_description: Some(device_name),
        get_memory: Some(memory),
        get_type: Some(kind),
        get_props: Some(props),
        init_backend: Some(backend),
        get_buffer_type: Some(buffer_type),
        get_host_buffer_type: None,
        buffer_from_host_ptr: None,
        supports_op: Some(supports_op),
        supports_buft: None,
        offload_op: None,
        event_new: None,
        event_free: None,
        event_synchronize: None,
    };
    let device = Box::leak(Box::new(sys::ggml_backend_device { iface, reg: registry, context: null_mut() }));
    registry.context = std::ptr::from_mut(device).cast();
    // SAFETY: both are complete and live as long as the process.
    unsafe { sys::ggml_backend_register(registry) };
    Device::named("CUDA0").unwrap()
}

unsafe extern "C" fn registry_name(_: sys::ggml_backend_reg_t) -> *const c_char {
    c"CUDA".as_ptr()
}

unsafe extern "C" fn device_count(_: sys::ggml_backend_reg_t) -> usize {
    1
}

unsafe extern "C" fn device(registry: sys::ggml_backend_reg_t, _: usize) -> sys::ggml_backend_dev_t {
    // SAFETY: our registry, whose context is its device.
    unsafe { (*registry).context.cast() }
}

unsafe extern "C" fn device_name(_: sys::ggml_backend_dev_t) -> *const c_char {
    c"CUDA0".as_ptr()
}

unsafe extern "C" fn memory(_: sys::ggml_backend_dev_t, free: *mut usize, total: *mut usize) {
    // SAFETY: ggml passes two valid pointers.
    unsafe {
        free.write(1 << 30);
        total.write(1 << 30);
    }
}

unsafe extern "C" fn kind(_: sys::ggml_backend_dev_t) -> sys::ggml_backend_dev_type {
    sys::GGML_BACKEND_DEVICE_TYPE_GPU
}

unsafe extern "C" fn props(_: sys::ggml_backend_dev_t, props: *mut sys::ggml_backend_dev_props) {
    // SAFETY: ggml passes a valid pointer to a struct that it has filled with zeros.
    unsafe { (*props).device_id = c"0000:02:00.0".as_ptr() };
}

unsafe extern "C" fn backend(_: sys::ggml_backend_dev_t, _: *const c_char) -> sys::ggml_backend_t {
    // SAFETY: a registered device; NULL asks for defaults.
    unsafe { sys::ggml_backend_dev_init(Device::cpu().unwrap().as_raw(), null()) }
}

unsafe extern "C" fn buffer_type(_: sys::ggml_backend_dev_t) -> sys::ggml_backend_buffer_type_t {
    // SAFETY: takes no arguments.
    unsafe { sys::ggml_backend_cpu_buffer_type() }
}

unsafe extern "C" fn supports_op(_: sys::ggml_backend_dev_t, op: *const sys::ggml_tensor) -> bool {
    // SAFETY: a registered device, asked about a valid tensor.
    unsafe { sys::ggml_backend_dev_supports_op(Device::cpu().unwrap().as_raw(), op) }
}

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Keeps our log lines from now on, for `logged`, instead of showing them.
pub(crate) fn keep_log() {
    // SAFETY: a function that lives as long as the process and uses no data.
    unsafe { sys::ggml_log_set(Some(keep), null_mut()) };
}

/// The lines since the last call.
pub(crate) fn logged() -> Vec<String> {
    std::mem::take(&mut LINES.lock().unwrap())
}

unsafe extern "C" fn keep(_: sys::ggml_log_level, line: *const c_char, _: *mut c_void) {
    // SAFETY: ggml passes a NUL-terminated line.
    let line = unsafe { CStr::from_ptr(line) }.to_string_lossy();
    if line.starts_with("moe-hot:") {
        LINES.lock().unwrap().push(line.into_owned());
    }
}
