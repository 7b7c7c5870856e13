//! Instances whose splits lie on the device.
//!
//! A split is computed in host memory of the same layout. Inputs are read into it and results written from it on the instance
//! that the inputs come from: so they stand in order with its graphs, and the host waits for what it reads itself. llama.cpp waits
//! once more, for the results, before a split that takes no other input.

use super::memory::SplitMemory;
use crate::ggml::{AbortCallback, Level, Shadows, log, sys};
use crate::plugin::event;
use crate::plugin::guard::{NAME_ON_DEVICE, guard};
use crate::plugin::sources::{Sources, is_in_host_memory};
use crate::runtime::{Context, runtime};
use crate::{Error, Result};
use std::ffi::{c_char, c_int};
use std::ptr::null_mut;

const INTERFACE: sys::ggml_backend_i = sys::ggml_backend_i {
    get_name: Some(get_name),
    free: Some(free),
    set_tensor_async: None,
    get_tensor_async: None,
    set_tensor_2d_async: None,
    get_tensor_2d_async: None,
    cpy_tensor_async: Some(cpy_tensor_async),
    synchronize: Some(synchronize),
    graph_plan_create: None,
    graph_plan_free: None,
    graph_plan_update: None,
    graph_plan_compute: None,
    graph_compute: Some(graph_compute),
    event_record: Some(event::record),
    event_wait: Some(event::wait),
    graph_optimize: None,
};

/// Identifies these instances: `moe-hot v1 splits`, in ASCII.
static GUID: sys::ggml_guid = *b"moe-hotv1-splits";

/// Behind a backend instance. It stands for nothing but its own splits: the llama.cpp context has another instance, of the first
/// device, that counts its batches.
pub(in crate::plugin) struct Instance {
    /// Made for the first split: as a rule one of the two instances computes nothing.
    context: Option<Context>,
    n_threads: Option<c_int>,
    abort_callback: Option<AbortCallback>,
    /// `None`: there is no memory for splits, and there will be none.
    shadows: Option<Shadows>,
    sources: Sources,
    /// The hot device's instance of the same llama.cpp context; NULL until an input has come from it that it could be asked for
    /// without a wait. Without it results are written at once: what the instance does has been waited for with the inputs.
    stream: sys::ggml_backend_t,
    /// Whether it may still be reading results from our host memory.
    is_writing: bool,
    /// What went wrong with an input.
    broken: Option<Error>,
}

/// A new instance on `device`, that of our instances. Without `memory` it will be handed no splits.
pub(super) fn new(device: sys::ggml_backend_dev_t, memory: Option<&SplitMemory>) -> sys::ggml_backend_t {
    let pinned = !runtime().config().no_host;
    let shadows = memory.map(|memory| Shadows::new(memory.device(), memory.device_kind(), memory.split_kind(), pinned));
    let instance = Instance {
        context: None,
        n_threads: None,
        abort_callback: None,
        shadows,
        sources: Sources::NONE,
        stream: null_mut(),
        is_writing: false,
        broken: None,
    };
    Box::into_raw(Box::new(sys::ggml_backend {
        // ggml only reads it.
        guid: (&raw const GUID).cast_mut(),
        iface: INTERFACE,
        device,
        context: Box::into_raw(Box::new(instance)).cast(),
    }))
}

/// Whether a backend is one of these instances.
///
/// # Safety
/// `backend` is alive.
pub(in crate::plugin) unsafe fn is_ours(backend: sys::ggml_backend_t) -> bool {
    // SAFETY: passed on from the caller.
    std::ptr::eq(unsafe { (*backend).guid }, &raw const GUID)
}

/// # Safety
/// `backend` was made by [`new`], is not freed yet, and is used by this thread alone.
pub(in crate::plugin) unsafe fn instance<'a>(backend: sys::ggml_backend_t) -> &'a mut Instance {
    // SAFETY: `new` stored a boxed `Instance`; the caller vouches for the rest.
    unsafe { &mut *(*backend).context.cast::<Instance>() }
}

impl Instance {
    pub(in crate::plugin) fn set_threads(&mut self, n_threads: c_int) {
        self.n_threads = Some(n_threads);
        if let Some(context) = &mut self.context {
            context.use_threads(n_threads);
        }
    }

    pub(in crate::plugin) fn set_abort_callback(&mut self, callback: AbortCallback) {
        self.abort_callback = Some(callback);
        if let Some(context) = &mut self.context {
            context.set_abort_callback(callback);
        }
    }

    fn context(&mut self) -> Result<&mut Context> {
        if self.context.is_none() {
            let mut context = Context::new()?;
            if let Some(n_threads) = self.n_threads {
                context.use_threads(n_threads);
            }
            if let Some(callback) = self.abort_callback {
                context.set_abort_callback(callback);
            }
            self.context = Some(context);
        }
        self.context.as_mut().ok_or(Error::Contract("a context that is not there"))
    }

    /// Waits until nobody reads results from host memory any more.
    ///
    /// # Safety
    /// The stream is alive, if results are on their way on it.
    unsafe fn wait_for_results(&mut self) {
        if std::mem::take(&mut self.is_writing) {
            // SAFETY: passed on from the caller.
            unsafe { sys::ggml_backend_synchronize(self.stream) };
        }
    }

    /// # Safety
    /// As for [`cpy_tensor_async`].
    unsafe fn take_input(
        &mut self,
        source: sys::ggml_backend_t,
        src: *const sys::ggml_tensor,
        dst: *mut sys::ggml_tensor,
    ) -> Result<()> {
        // SAFETY: the scheduler passes live instances and valid tensors with memory; `dst` is our split's and stays until that has
        // been computed. Its shadow is read after the sources have been waited for. Whatever is not queued on the stream, which
        // keeps order, waits for what the stream still reads.
        unsafe {
            let is_on_host = is_in_host_memory(src);
            let device = (*source).device;
            let shadows = self.shadows.as_mut().ok_or(NO_MEMORY)?;
            if !shadows.has(dst) {
                return Err(Error::Contract("an input outside our memory"));
            }
            if (*src).type_ != (*dst).type_ || (*src).ne != (*dst).ne || (*src).nb != (*dst).nb {
                return Err(Error::Contract("an input of another layout"));
            }
            let can_queue = !is_on_host && (*source).iface.get_tensor_async.is_some();
            let is_on_stream = can_queue && device == shadows.device().as_raw();
            if is_on_stream {
                self.stream = source;
            } else {
                self.wait_for_results();
            }
            let shadows = self.shadows.as_mut().ok_or(NO_MEMORY)?;
            if can_queue && self.sources.add(source) {
                return shadows.queue_read(source, src, dst);
            }
            sys::ggml_backend_synchronize(source);
            let to = shadows.place(dst)?;
            sys::ggml_backend_tensor_get(src, to, 0, sys::ggml_nbytes(src));
        }
        Ok(())
    }

    /// # Safety
    /// As for [`graph_compute`].
    unsafe fn compute(&mut self, graph: *mut sys::ggml_cgraph) -> Result<sys::ggml_status> {
        // SAFETY: passed on from the caller.
        let result = unsafe { self.compute_split(graph) };
        if let Some(shadows) = &mut self.shadows {
            shadows.forget_inputs();
        }
        result
    }

    /// # Safety
    /// As for [`graph_compute`].
    unsafe fn compute_split(&mut self, graph: *mut sys::ggml_cgraph) -> Result<sys::ggml_status> {
        self.context()?;
        let is_waited_for = self.sources.has(self.stream);
        // SAFETY: the scheduler took this split's inputs from live backends.
        unsafe { self.sources.wait() };
        // Nor is anything written over what the stream's own graphs may still read.
        self.is_writing = !is_waited_for && !self.stream.is_null();
        // SAFETY: as above.
        unsafe { self.wait_for_results() };
        if let Some(error) = self.broken.take() {
            return Err(error);
        }
        let (Some(context), Some(shadows)) = (&mut self.context, &mut self.shadows) else { return Err(NO_MEMORY) };
        // SAFETY: the scheduler hands a valid graph to a live instance, on the one thread that uses both, and nothing is on its
        // way to or from the shadows: the stream has been waited for. What has no number is looked at by a callback, which may
        // read anything.
        let (status, is_in_place, for_callback) = unsafe {
            let for_callback = (*graph).uid == 0;
            let stream = if for_callback || runtime().config().test_host_rows { null_mut() } else { self.stream };
            let (status, is_in_place) =
                shadows.on_host(graph, stream, |graph, place| context.compute_at(graph, place))?;
            (status, is_in_place, for_callback)
        };
        if status != sys::GGML_STATUS_SUCCESS || is_in_place {
            return Ok(status);
        }
        // SAFETY: as above.
        unsafe { shadows.write_results(self.stream, graph, for_callback) }?;
        self.is_writing = !self.stream.is_null();
        Ok(status)
    }
}

const NO_MEMORY: Error = Error::Contract("a split on a device that there is none for");

unsafe extern "C" fn get_name(_: sys::ggml_backend_t) -> *const c_char {
    NAME_ON_DEVICE.as_ptr()
}

/// The device's instance may be gone: nothing is waited for. llama.cpp has done so before it frees backends.
unsafe extern "C" fn free(backend: sys::ggml_backend_t) {
    guard("freeing a backend", (), || {
        // SAFETY: ggml frees each instance once; both boxes were made by `new`. The context's address is read before the
        // instance becomes a box, after which the pointer must not be used.
        unsafe {
            drop(Box::from_raw((*backend).context.cast::<Instance>()));
            drop(Box::from_raw(backend));
        }
    });
}

/// Takes an input of a split from another backend. Always: what the host would copy goes past our host memory.
unsafe extern "C" fn cpy_tensor_async(
    source: sys::ggml_backend_t,
    backend: sys::ggml_backend_t,
    src: *const sys::ggml_tensor,
    dst: *mut sys::ggml_tensor,
) -> bool {
    // SAFETY: the scheduler passes live instances, ours last, and valid tensors with memory.
    let taken = guard("taking an input", Err(Error::Contract("an input that was not taken")), || unsafe {
        instance(backend).take_input(source, src, dst)
    });
    if let Err(error) = taken {
        // SAFETY: as above.
        unsafe { instance(backend) }.broken = Some(error);
    }
    true
}

/// Waits for results that are on their way: the scheduler calls this before anybody but the device's own instance reads them.
unsafe extern "C" fn synchronize(backend: sys::ggml_backend_t) {
    // SAFETY: llama.cpp waits for live instances; the device's lives as long as ours.
    guard("waiting", (), || unsafe { instance(backend).wait_for_results() });
}

unsafe extern "C" fn graph_compute(backend: sys::ggml_backend_t, graph: *mut sys::ggml_cgraph) -> sys::ggml_status {
    guard("computing experts", sys::GGML_STATUS_FAILED, || {
        // SAFETY: the scheduler hands a valid graph to a live instance, on the one thread that uses both.
        unsafe { instance(backend).compute(graph) }.unwrap_or_else(|error| {
            log(Level::Error, &format!("a split on the device was not computed: {error}"));
            sys::GGML_STATUS_FAILED
        })
    })
}
