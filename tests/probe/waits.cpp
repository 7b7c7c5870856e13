#include "waits.h"

#include "ggml-backend-impl.h"

#include <atomic>
#include <stdexcept>

namespace {

std::atomic<uint64_t> waits, blocking_copies;

// The backend's own functions. One device is counted, whose instances and buffers all have the same.
ggml_backend_device_i device_functions;
ggml_backend_i backend_functions;
ggml_backend_buffer_type_i type_functions;
ggml_backend_buffer_i buffer_functions;

void synchronize(ggml_backend_t backend) {
    waits++;
    backend_functions.synchronize(backend);
}

void event_synchronize(ggml_backend_dev_t device, ggml_backend_event_t event) {
    waits++;
    device_functions.event_synchronize(device, event);
}

void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    blocking_copies++;
    buffer_functions.set_tensor(buffer, tensor, data, offset, size);
}

void get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    blocking_copies++;
    buffer_functions.get_tensor(buffer, tensor, data, offset, size);
}

ggml_backend_t init_backend(ggml_backend_dev_t device, const char * params) {
    ggml_backend_t backend = device_functions.init_backend(device, params);
    if (backend) {
        backend_functions          = backend->iface;
        backend->iface.synchronize = synchronize;
    }
    return backend;
}

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    ggml_backend_buffer_t buffer = type_functions.alloc_buffer(type, size);
    if (buffer) {
        buffer_functions         = buffer->iface;
        buffer->iface.set_tensor = set_tensor;
        buffer->iface.get_tensor = get_tensor;
    }
    return buffer;
}

}  // namespace

void count_waits(const std::string & name) {
    ggml_backend_dev_t device = ggml_backend_dev_by_name(name.c_str());
    if (!device) {
        throw std::runtime_error("no device " + name + " whose waits could be counted");
    }
    device_functions                = device->iface;
    device->iface.init_backend      = init_backend;
    if (device_functions.event_synchronize) {
        device->iface.event_synchronize = event_synchronize;
    }
    ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(device);
    type_functions                  = type->iface;
    type->iface.alloc_buffer        = alloc_buffer;
}

Waits waits_so_far() {
    return {waits, blocking_copies};
}
