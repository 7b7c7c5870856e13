//! A small safe host for unit tests: one device buffer with tensors in it, instances, events. Settings and counters
//! are the process's, so that tests take turns.

use crate::{device, lock, settings, stats, sys};
use std::ptr::{null, null_mut};
use std::sync::{Mutex, MutexGuard, Once};
use std::time::Duration;

pub(crate) const N: usize = 16;
const N_EXPERTS: i64 = 4;
/// The end of a wait for what has gone wrong; no machine takes so long.
pub(crate) const NEVER: Duration = Duration::from_secs(120);
static TURN: Mutex<()> = Mutex::new(());

/// `result = input * 2`, and a graph with experts in it, in device memory.
pub(crate) struct Rig {
    _turn: MutexGuard<'static, ()>,
    context: *mut sys::ggml_context,
    graph: *mut sys::ggml_cgraph,
    pub(crate) input: *mut sys::ggml_tensor,
    pub(crate) result: *mut sys::ggml_tensor,
    experts: *mut sys::ggml_cgraph,
    /// As large as what the graph with experts computes, twice.
    places: [*mut sys::ggml_tensor; 2],
    buffer: sys::ggml_backend_buffer_t,
}

impl Rig {
    pub(crate) fn new() -> Self {
        let turn = lock(&TURN);
        load_cpu();
        settings::reset();
        let params = sys::ggml_init_params { mem_size: 1 << 20, mem_buffer: null_mut(), no_alloc: true };
        // SAFETY: plain parameters; all that is made lives in the context, which we own.
        unsafe {
            let context = sys::ggml_init(params);
            let input = sys::ggml_new_tensor_1d(context, sys::GGML_TYPE_F32, N as i64);
            let result = sys::ggml_scale(context, input, 2.0);
            let graph = sys::ggml_new_graph(context);
            sys::ggml_build_forward_expand(graph, result);
            let n = N as i64;
            let weights = sys::ggml_new_tensor_3d(context, sys::GGML_TYPE_F32, n, n, N_EXPERTS);
            let rows = sys::ggml_new_tensor_3d(context, sys::GGML_TYPE_F32, n, 1, 1);
            let ids = sys::ggml_new_tensor_2d(context, sys::GGML_TYPE_I32, N_EXPERTS, 1);
            let experts = sys::ggml_new_graph(context);
            sys::ggml_build_forward_expand(experts, sys::ggml_mul_mat_id(context, weights, rows, ids));
            let places = [(); 2].map(|()| sys::ggml_new_tensor_1d(context, sys::GGML_TYPE_F32, n * N_EXPERTS));
            let kind = sys::ggml_backend_dev_buffer_type(device::DEVICE.get());
            let buffer = sys::ggml_backend_alloc_ctx_tensors_from_buft(context, kind);
            assert!(!buffer.is_null());
            for tensor in [ids, weights, rows].into_iter().chain(places) {
                sys::ggml_backend_tensor_memset(tensor, 0, 0, sys::ggml_nbytes(tensor));
            }
            Self { _turn: turn, context, graph, input, result, experts, places, buffer }
        }
    }

    pub(crate) fn instance(&self) -> Instance {
        // SAFETY: our device; NULL parameters ask for defaults.
        let backend = unsafe { sys::ggml_backend_dev_init(device::DEVICE.get(), null()) };
        assert!(!backend.is_null());
        Instance(backend)
    }

    pub(crate) fn compute(&self, on: &Instance) -> sys::ggml_status {
        // SAFETY: both are live.
        unsafe { sys::ggml_backend_graph_compute_async(on.0, self.graph) }
    }

    pub(crate) fn compute_experts(&self, on: &Instance) -> sys::ggml_status {
        // SAFETY: both are live.
        unsafe { sys::ggml_backend_graph_compute_async(on.0, self.experts) }
    }

    /// Has the graph with experts, which has only zeros to compute with, write them to one of two places that hold ones;
    /// returns which of the two hold zeros then.
    pub(crate) fn compute_experts_at(&self, on: &Instance, place: usize, uid: u64) -> [bool; 2] {
        // SAFETY: the graph, its only node and both places are live and ours; nothing is queued that uses them.
        unsafe {
            for place in self.places {
                sys::ggml_backend_tensor_set(place, [1.0_f32; N].as_ptr().cast(), 0, size_of::<[f32; N]>());
            }
            let node = *(*self.experts).nodes;
            ((*node).data, (*self.experts).uid) = ((*self.places[place]).data, uid);
        }
        assert_eq!(self.compute_experts(on), sys::GGML_STATUS_SUCCESS);
        on.synchronize();
        self.places.map(|place| self.read(place) == [0.0; N])
    }

    /// What is in device memory now, whatever is queued.
    pub(crate) fn read(&self, tensor: *mut sys::ggml_tensor) -> [f32; N] {
        let mut values = [0.0; N];
        // SAFETY: the tensor holds `N` floats.
        unsafe { sys::ggml_backend_tensor_get(tensor, values.as_mut_ptr().cast(), 0, size_of_val(&values)) };
        values
    }

    pub(crate) fn write(&self, tensor: *mut sys::ggml_tensor, values: &[f32; N]) {
        // SAFETY: the tensor holds `N` floats.
        unsafe { sys::ggml_backend_tensor_set(tensor, values.as_ptr().cast(), 0, size_of_val(values)) };
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        // SAFETY: we own both; instances of the test are gone or stuck.
        unsafe {
            sys::ggml_backend_buffer_free(self.buffer);
            sys::ggml_free(self.context);
        }
    }
}

/// A backend instance, freed on drop.
pub(crate) struct Instance(sys::ggml_backend_t);

// SAFETY: our instances only have a queue behind a lock.
unsafe impl Sync for Instance {}

impl Instance {
    /// Reads `values` when its turn comes: they must live, in place, until then.
    pub(crate) fn set(&self, tensor: *mut sys::ggml_tensor, values: *const [f32; N]) {
        // SAFETY: the test keeps the values until it synchronizes.
        unsafe { sys::ggml_backend_tensor_set_async(self.0, tensor, values.cast(), 0, size_of::<[f32; N]>()) };
    }

    /// Writes `values` when its turn comes: as for `set`.
    pub(crate) fn get(&self, tensor: *mut sys::ggml_tensor, values: *mut [f32; N]) {
        // SAFETY: as for `set`.
        unsafe { sys::ggml_backend_tensor_get_async(self.0, tensor, values.cast(), 0, size_of::<[f32; N]>()) };
    }

    /// Copies a tensor by this queue, in order with the other one.
    pub(crate) fn copy_to(&self, other: &Self, from: *mut sys::ggml_tensor, to: *mut sys::ggml_tensor) {
        // SAFETY: live instances, and tensors of the same layout.
        unsafe { sys::ggml_backend_tensor_copy_async(self.0, other.0, from, to) };
    }

    pub(crate) fn synchronize(&self) {
        // SAFETY: a live instance.
        unsafe { sys::ggml_backend_synchronize(self.0) };
    }

    pub(crate) fn record(&self, event: &Event) {
        // SAFETY: both are live.
        unsafe { sys::ggml_backend_event_record(event.0, self.0) };
    }

    pub(crate) fn wait(&self, event: &Event) {
        // SAFETY: both are live.
        unsafe { sys::ggml_backend_event_wait(self.0, event.0) };
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // SAFETY: we own it.
        unsafe { sys::ggml_backend_free(self.0) };
    }
}

/// An event, freed on drop.
pub(crate) struct Event(sys::ggml_backend_event_t);

// SAFETY: an event's state is behind a lock.
unsafe impl Sync for Event {}

impl Event {
    pub(crate) fn new() -> Self {
        // SAFETY: our device.
        Self(unsafe { sys::ggml_backend_event_new(device::DEVICE.get()) })
    }

    pub(crate) fn synchronize(&self) {
        // SAFETY: a live event.
        unsafe { sys::ggml_backend_event_synchronize(self.0) };
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: we own it.
        unsafe { sys::ggml_backend_event_free(self.0) };
    }
}

/// A device buffer of a size, freed at once: was it to be had?
pub(crate) fn can_allocate(size: usize) -> bool {
    // SAFETY: our buffer type; NULL is freed without effect.
    unsafe {
        let buffer = sys::ggml_backend_buft_alloc_buffer(sys::ggml_backend_dev_buffer_type(device::DEVICE.get()), size);
        sys::ggml_backend_buffer_free(buffer);
        !buffer.is_null()
    }
}

pub(crate) fn count(name: &str) -> u64 {
    stats::read(name).unwrap()
}

/// Loads the CPU backend that stands beside the test's ggml.
fn load_cpu() {
    static ONCE: Once = Once::new();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../build/stock/bin\0");
    // SAFETY: a NUL-terminated path.
    ONCE.call_once(|| unsafe { sys::ggml_backend_load_all_from_path(folder.as_ptr().cast()) });
}
