// A ggml host for tests: experts in a buffer, the graph of an expert FFN, and a scheduler over the plugin and the CPU.
// For one translation unit.
#pragma once

#include "ggml-alloc.h"
#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {


constexpr int64_t N_EMBD   = 64;
constexpr int64_t N_FF     = 32;
constexpr int64_t N_EXPERT = 8;
constexpr int64_t N_USED   = 2;

[[noreturn]] void fail(const std::string & what) {
    fprintf(stderr, "not kept: %s\n", what.c_str());
    exit(1);
}

void require(bool kept, const std::string & what) {
    if (!kept) {
        fail(what);
    }
}

ggml_backend_dev_t cpu_device() { return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU); }

ggml_backend_dev_t our_device() {
    ggml_backend_dev_t device = ggml_backend_dev_by_name("MoEHot");
    require(device != nullptr, "the plugin is loaded as device MoEHot");
    return device;
}

ggml_context * new_context() { return ggml_init({ 4u << 20, nullptr, true }); }

std::vector<float> random_floats(size_t n, unsigned seed) {
    std::mt19937                    generator(seed);
    std::normal_distribution<float> normal;
    std::vector<float>              values(n);
    for (float & value : values) {
        value = normal(generator);
    }
    return values;
}

// Memory as a page-aligned map of a file gives it.
struct alignas(4096) Page {
    char bytes[4096];
};
using Memory = std::vector<Page>;
constexpr size_t MEMORY_PAGES = 64;

// The experts of one layer, F32, in one buffer.
struct Experts {
    ggml_context *        context = new_context();
    ggml_tensor *         gate;
    ggml_tensor *         up;
    ggml_tensor *         down;
    ggml_backend_buffer_t buffer = nullptr;

    explicit Experts(int layer, int64_t n_expert = N_EXPERT) {
        gate = add("gate", layer, N_EMBD, N_FF, n_expert);
        up   = add("up", layer, N_EMBD, N_FF, n_expert);
        down = add("down", layer, N_FF, N_EMBD, n_expert);
    }

    Experts(const Experts &) = delete;

    ~Experts() {
        ggml_backend_buffer_free(buffer);
        ggml_free(context);
    }

    ggml_tensor * add(const char * part, int layer, int64_t n_in, int64_t n_out, int64_t n_expert) {
        ggml_tensor * tensor = ggml_new_tensor_3d(context, GGML_TYPE_F32, n_in, n_out, n_expert);
        ggml_format_name(tensor, "blk.%d.ffn_%s_exps.weight", layer, part);
        return tensor;
    }

    // In memory that the buffer type allocates.
    void allocate(ggml_backend_buffer_type_t type) {
        buffer = ggml_backend_alloc_ctx_tensors_from_buft(context, type);
        require(buffer != nullptr, "weights can be allocated");
        finish();
    }

    // In memory that is there already, as a memory-mapped model's is.
    void map(ggml_backend_dev_t device, Memory & memory) {
        const size_t size  = memory.size() * sizeof(Page);
        buffer             = ggml_backend_dev_buffer_from_host_ptr(device, memory.data(), size, size);
        ggml_tallocr alloc = ggml_tallocr_new(buffer);
        for (ggml_tensor * tensor : { gate, up, down }) {
            require(ggml_tallocr_alloc(&alloc, tensor) == GGML_STATUS_SUCCESS, "a tensor fits into mapped memory");
        }
        finish();
    }

    void finish() {
        ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        unsigned seed = 1;
        for (ggml_tensor * tensor : { gate, up, down }) {
            std::vector<float> values = random_floats(ggml_nelements(tensor), seed++);
            ggml_backend_tensor_set(tensor, values.data(), 0, ggml_nbytes(tensor));
        }
    }
};

// A graph over some experts: x and ids in, one row per (token, expert) pair out.
struct Ffn {
    ggml_context * context = new_context();
    ggml_cgraph *  graph   = ggml_new_graph(context);
    ggml_tensor *  x;        // [n_embd, 1, n_tokens], at least one token: a batch of none is a view of it
    ggml_tensor *  all_ids;  // [n_expert, n_tokens]: ids are a strided view of it, as after an argsort
    ggml_tensor *  rows;

    Ffn(const Experts & experts, int64_t n_tokens) {
        const int64_t n_input = std::max<int64_t>(n_tokens, 1);
        x                     = ggml_new_tensor_3d(context, GGML_TYPE_F32, N_EMBD, 1, n_input);
        all_ids               = ggml_new_tensor_2d(context, GGML_TYPE_I32, N_EXPERT, n_input);
        ggml_set_input(x);
        ggml_set_input(all_ids);
        ggml_tensor * rows_of_x = ggml_view_3d(context, x, N_EMBD, 1, n_tokens, x->nb[1], x->nb[2], 0);
        ggml_tensor * ids  = ggml_view_2d(context, all_ids, N_USED, n_tokens, all_ids->nb[1], 0);
        ggml_tensor * gate = ggml_mul_mat_id(context, experts.gate, rows_of_x, ids);
        ggml_tensor * up   = ggml_mul_mat_id(context, experts.up, rows_of_x, ids);
        rows               = ggml_mul_mat_id(context, experts.down, ggml_swiglu_split(context, gate, up), ids);
        ggml_set_output(rows);
        ggml_build_forward_expand(graph, rows);
    }

    Ffn(const Ffn &) = delete;

    ~Ffn() { ggml_free(context); }
};

std::vector<int32_t> distinct_ids(int64_t n_tokens) {
    std::vector<int32_t> ids(N_EXPERT * n_tokens);
    for (int64_t token = 0; token < n_tokens; token++) {
        for (int64_t i = 0; i < N_EXPERT; i++) {
            ids[token * N_EXPERT + i] = (3 * token + 5 * i) % N_EXPERT;
        }
    }
    return ids;
}

// A scheduler over our device (if wanted) and the CPU, as llama.cpp makes one per context.
struct Host {
    std::vector<ggml_backend_t> backends;
    ggml_backend_sched_t        sched;

    explicit Host(bool with_plugin) {
        if (with_plugin) {
            backends.push_back(ggml_backend_dev_init(our_device(), nullptr));
        }
        backends.push_back(ggml_backend_dev_init(cpu_device(), nullptr));
        sched = ggml_backend_sched_new(backends.data(), nullptr, (int) backends.size(), 256, false, true);
    }

    Host(const Host &) = delete;

    ~Host() {
        ggml_backend_sched_free(sched);
        for (ggml_backend_t backend : backends) {
            ggml_backend_free(backend);
        }
    }

    void * function(const char * name) {
        ggml_backend_reg_t registry = ggml_backend_dev_backend_reg(ggml_backend_get_device(backends[0]));
        void *             found    = ggml_backend_reg_get_proc_address(registry, name);
        require(found != nullptr, std::string("the registry offers ") + name);
        return found;
    }

    void place(Ffn & ffn) {
        ggml_backend_sched_reset(sched);
        require(ggml_backend_sched_alloc_graph(sched, ffn.graph), "the graph can be allocated");
    }

    // Computes a placed graph. On success `rows` gets the result.
    ggml_status compute(Ffn & ffn, const std::vector<int32_t> & ids, std::vector<float> * rows = nullptr) {
        std::vector<float> x = random_floats(ggml_nelements(ffn.x), 99);
        ggml_backend_tensor_set(ffn.x, x.data(), 0, ggml_nbytes(ffn.x));
        ggml_backend_tensor_set(ffn.all_ids, ids.data(), 0, ggml_nbytes(ffn.all_ids));
        ggml_status status = ggml_backend_sched_graph_compute(sched, ffn.graph);
        if (status == GGML_STATUS_SUCCESS && rows != nullptr) {
            rows->resize(ggml_nelements(ffn.rows));
            ggml_backend_tensor_get(ffn.rows, rows->data(), 0, ggml_nbytes(ffn.rows));
        }
        return status;
    }
};

// What the CPU alone computes for the same weights and ids.
std::vector<float> expected_rows(int64_t n_tokens, const std::vector<int32_t> & ids, int64_t n_expert = N_EXPERT) {
    Experts experts(0, n_expert);
    experts.allocate(ggml_backend_dev_buffer_type(cpu_device()));
    Host host(false);
    Ffn  ffn(experts, n_tokens);
    host.place(ffn);
    std::vector<float> rows;
    require(host.compute(ffn, ids, &rows) == GGML_STATUS_SUCCESS, "the CPU computes it");
    return rows;
}

bool same_bits(const std::vector<float> & a, const std::vector<float> & b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void require_expected(Host & host, const Experts & experts, int64_t n_tokens, const std::vector<int32_t> & ids) {
    Ffn ffn(experts, n_tokens);
    host.place(ffn);
    require(ggml_backend_sched_get_tensor_backend(host.sched, ffn.rows) == host.backends[0], "the plugin computes it");
    std::vector<float> rows;
    require(host.compute(ffn, ids, &rows) == GGML_STATUS_SUCCESS, "the plugin succeeds");
    require(same_bits(rows, expected_rows(n_tokens, ids)), "rows are the CPU's, bit for bit");
}

void allocate_with_us(Experts & experts) { experts.allocate(ggml_backend_dev_buffer_type(our_device())); }

bool has_thread(const std::string & name) {
    for (const auto & task : std::filesystem::directory_iterator("/proc/self/task")) {
        std::ifstream comm(task.path() / "comm");
        std::string   found;
        if (std::getline(comm, found) && found == name) {
            return true;
        }
    }
    return false;
}

// A new thread names itself: wait for that.
bool gets_thread(const std::string & name) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!has_thread(name)) {
        if (std::chrono::steady_clock::now() > deadline) {
            return false;
        }
        std::this_thread::yield();
    }
    return true;
}

// Probes as llama.cpp's loader makes them: an empty buffer, not yet marked as weights.
bool supports(Experts & experts, size_t n_tokens, ggml_backend_buffer_usage usage) {
    ggml_backend_buffer_t empty = ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(our_device()), 0);
    ggml_backend_buffer_set_usage(empty, usage);
    experts.up->buffer = empty;
    Ffn  ffn(experts, (int64_t) n_tokens);
    bool answer = false;
    for (int i = 0; i < ggml_graph_n_nodes(ffn.graph); i++) {
        ggml_tensor * node = ggml_graph_node(ffn.graph, i);
        if (node->src[0] == experts.up) {
            answer = ggml_backend_dev_supports_op(our_device(), node);
        }
    }
    experts.up->buffer = nullptr;
    ggml_backend_buffer_free(empty);
    return answer;
}

// What ggml has logged since it was last cleared.
std::string logged;

}  // namespace
