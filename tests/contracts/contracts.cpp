// moe-contracts: what the plugin promises to a host, seen from a host that is not llama.cpp.
//
//   moe-contracts BACKENDS --list     names of the contracts, one a line
//   moe-contracts BACKENDS NAME       checks one; exit code 0 if it is kept, else a line that says what was not
//
// BACKENDS is the folder with the ggml backends; the plugin is the one that GGML_BACKEND_PATH names.
// Each contract runs in a process of its own and talks to the plugin through ggml alone.

#include "ggml-alloc.h"
#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <utility>
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

void memory_is_reused_inside_a_split() {
    Experts experts(0);
    allocate_with_us(experts);
    Host host(true);
    Ffn  ffn(experts, 3);
    host.place(ffn);
    bool shared = false;
    for (int i = 0; i < ggml_graph_n_nodes(ffn.graph); i++) {
        for (int j = 0; j < i; j++) {
            shared |= ggml_graph_node(ffn.graph, i)->data == ggml_graph_node(ffn.graph, j)->data;
        }
    }
    require(shared, "the allocator lets nodes of the split share memory, else this shows nothing");
    require_expected(host, experts, 3, distinct_ids(3));
}

void every_small_batch_is_ours_and_equal() {
    Experts experts(0);
    allocate_with_us(experts);
    Host host(true);
    for (int64_t n_tokens = 1; n_tokens < 32; n_tokens++) {
        require_expected(host, experts, n_tokens, distinct_ids(n_tokens));
    }
    Ffn large(experts, 32);
    host.place(large);
    require(ggml_backend_sched_get_tensor_backend(host.sched, large.rows) == host.backends[1], "32 tokens are stock's");
}

void no_tokens_are_a_success() {
    Experts experts(0);
    allocate_with_us(experts);
    Host host(true);
    require_expected(host, experts, 2, distinct_ids(2));  // llama.cpp too has reserved memory before a batch of none comes
    Ffn ffn(experts, 0);
    host.place(ffn);
    require(ggml_backend_sched_graph_compute(host.sched, ffn.graph) == GGML_STATUS_SUCCESS, "a batch of 0 tokens succeeds");
    require_expected(host, experts, 2, distinct_ids(2));
}

void ids_out_of_range_fail_that_call_only() {
    Experts experts(0);
    allocate_with_us(experts);
    Host host(true);
    for (int32_t bad : { (int32_t) N_EXPERT, -1, INT32_MAX, INT32_MIN }) {
        Ffn                  ffn(experts, 2);
        std::vector<int32_t> ids = distinct_ids(2);
        ids[N_EXPERT + 1]        = bad;
        host.place(ffn);
        require(host.compute(ffn, ids) == GGML_STATUS_FAILED, "id " + std::to_string(bad) + " is an error");
        require_expected(host, experts, 2, distinct_ids(2));
    }
}

void ids_beyond_the_used_ones_do_not_matter() {
    Experts experts(0);
    allocate_with_us(experts);
    Host                 host(true);
    std::vector<int32_t> ids = distinct_ids(2);
    for (int64_t i = N_USED; i < N_EXPERT; i++) {
        ids[i] = -7;  // outside the strided view
    }
    Ffn ffn(experts, 2);
    host.place(ffn);
    require(host.compute(ffn, ids) == GGML_STATUS_SUCCESS, "only the ids in the view are looked at");
}

void repeated_ids_within_a_token_are_computed() {
    Experts experts(0);
    allocate_with_us(experts);
    Host                 host(true);
    std::vector<int32_t> ids(N_EXPERT * 5, 3);
    require_expected(host, experts, 5, ids);
}

bool every_node(ggml_tensor *, bool, void *) { return true; }

void nodes_that_come_one_at_a_time_are_computed() {
    Experts experts(0);
    allocate_with_us(experts);
    Host host(true);
    ggml_backend_sched_set_eval_callback(host.sched, every_node, nullptr);
    require_expected(host, experts, 4, distinct_ids(4));
}

bool always(void *) { return true; }

void an_abort_ends_the_call_and_the_next_one_works() {
    Experts experts(0);
    allocate_with_us(experts);
    Host host(true);
    auto set = (ggml_backend_set_abort_callback_t) host.function("ggml_backend_set_abort_callback");
    Ffn  ffn(experts, 2);
    host.place(ffn);
    set(host.backends[0], always, nullptr);
    require(host.compute(ffn, distinct_ids(2)) == GGML_STATUS_ABORTED, "the host's abort callback is asked");
    set(host.backends[0], nullptr, nullptr);
    require_expected(host, experts, 2, distinct_ids(2));
}

void any_number_of_threads_gives_the_same_bits() {
    Experts experts(0);
    allocate_with_us(experts);
    Host host(true);
    auto set = (ggml_backend_set_n_threads_t) host.function("ggml_backend_set_n_threads");
    for (int n_threads : { 1, 2, 3, 7 }) {
        set(host.backends[0], n_threads);
        require_expected(host, experts, 6, distinct_ids(6));
    }
}

void addresses_may_be_used_again_by_another_model() {
    Memory memory(MEMORY_PAGES);
    for (int64_t n_expert : { N_EXPERT, N_EXPERT / 2, N_EXPERT }) {
        Experts experts(0, n_expert);
        experts.map(our_device(), memory);
        Host                 host(true);
        Ffn                  ffn(experts, 1);
        std::vector<int32_t> ids = distinct_ids(1);
        host.place(ffn);
        ids[0]          = (int32_t) n_expert;
        ggml_status bad = host.compute(ffn, ids);
        require(bad == GGML_STATUS_FAILED, "ids are checked against the experts that are there now");
        ids[0]          = (int32_t) n_expert - 1;
        ids[1]          = 0;
        std::vector<float> rows;
        require(host.compute(ffn, ids, &rows) == GGML_STATUS_SUCCESS, "the model at the old addresses computes");
        require(same_bits(rows, expected_rows(1, ids, n_expert)), "with its own weights");
    }
}

void one_model_may_go_while_another_computes() {
    Experts busy(0);
    allocate_with_us(busy);
    std::atomic<bool> done{ false };
    std::thread       worker([&] {
        Host host(true);
        while (!done) {
            require_expected(host, busy, 2, distinct_ids(2));
        }
    });
    for (int round = 0; round < 50; round++) {
        Experts passing(1);
        allocate_with_us(passing);
        Host host(true);
        Ffn  ffn(passing, 1);
        host.place(ffn);
        require(host.compute(ffn, distinct_ids(1)) == GGML_STATUS_SUCCESS, "the passing model computes");
    }
    done = true;
    worker.join();
}

void our_thread_ends_with_the_last_backend() {
    Experts experts(0);
    allocate_with_us(experts);
    {
        Host first(true);
        Host second(true);
        require(!has_thread("moe-hot-save"), "making backends starts no thread");
        require_expected(first, experts, 1, distinct_ids(1));
        require(has_thread("moe-hot-save"), "recording has a thread");
    }
    require(!has_thread("moe-hot-save"), "no thread is left after the last backend");
    Host again(true);
    require_expected(again, experts, 1, distinct_ids(1));
    require(has_thread("moe-hot-save"), "recording goes on with a new backend");
}

void measuring_leaves_nothing_behind() {
    for (int i = 0; i < 3; i++) {
        Host host(true);
    }
    require(!has_thread("moe-hot-save"), "no thread");
    require(!std::filesystem::exists(getenv("LLAMA_ARG_MOE_LAYER_PERF_OUT")), "no file");
}

void the_three_states_of_supports_op() {
    Experts experts(0);
    require(supports(experts, 512, GGML_BACKEND_BUFFER_USAGE_ANY), "the loader's probe gets a yes while recording");
    require(supports(experts, 31, GGML_BACKEND_BUFFER_USAGE_WEIGHTS), "measuring: 31 tokens are ours");
    require(!supports(experts, 32, GGML_BACKEND_BUFFER_USAGE_WEIGHTS), "measuring: 32 tokens are stock's");
}

void without_recording_the_loader_is_turned_away() {
    unsetenv("LLAMA_ARG_MOE_LAYER_PERF_OUT");
    Experts experts(0);
    require(!supports(experts, 512, GGML_BACKEND_BUFFER_USAGE_ANY), "nothing to win: experts stay where stock puts them");
}

// A GPU without memory of its own, as far as the plugin looks at it.
ggml_backend_reg_t shared_memory_gpu() {
    static ggml_backend_reg    registry = {};
    static ggml_backend_device device   = {};
    device.reg                          = &registry;
    device.iface.get_name               = [](ggml_backend_dev_t) { return "Shared0"; };
    device.iface.get_type               = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_IGPU; };
    registry.api_version                = GGML_BACKEND_API_VERSION;
    registry.iface.get_name             = [](ggml_backend_reg_t) { return "Shared"; };
    registry.iface.get_device_count     = [](ggml_backend_reg_t) -> size_t { return 1; };
    registry.iface.get_device           = [](ggml_backend_reg_t, size_t) { return &device; };
    return &registry;
}

std::string logged;

void beside_a_gpu_that_shares_host_memory_we_decline_and_say_so() {
    ggml_backend_register(shared_memory_gpu());
    Experts experts(0);
    require(!supports(experts, 512, GGML_BACKEND_BUFFER_USAGE_ANY), "stock runs host experts on such a GPU: declined");
    require(logged.empty(), "asking is silent");
    Host host(true);
    require(logged.find("Shared0 shares the host's memory") != std::string::npos, "the line names the device: " + logged);
    logged.clear();
    Host again(true);
    require(logged.empty(), "it is said once");
}

void a_mapped_buffer_is_the_memory_itself() {
    Memory  memory(MEMORY_PAGES);
    Experts experts(0);
    experts.map(our_device(), memory);
    require(ggml_backend_buffer_get_base(experts.buffer) == memory.data(), "no copy is made");
    require(ggml_backend_buffer_is_host(experts.buffer), "it is host memory, which stock's op-offload may read");
    Host host(true);
    require_expected(host, experts, 3, distinct_ids(3));
}

void buffers_write_read_fill_copy_and_clear() {
    Experts ours(0);
    Experts plain(0);
    allocate_with_us(ours);
    plain.allocate(ggml_backend_dev_buffer_type(cpu_device()));
    const size_t       size = ggml_nbytes(ours.up);
    std::vector<float> values(size / sizeof(float));
    ggml_backend_tensor_memset(ours.up, 0, 0, size);
    ggml_backend_tensor_get(ours.up, values.data(), 0, size);
    require(values == std::vector<float>(values.size()), "fill and read");
    ggml_backend_tensor_copy(plain.up, ours.up);
    ggml_backend_tensor_get(ours.up, values.data(), 0, size);
    require(values == random_floats(values.size(), 2), "copy from plain memory");
    ggml_backend_tensor_memset(plain.up, 0, 0, size);
    ggml_backend_tensor_copy(ours.up, plain.up);
    ggml_backend_tensor_get(plain.up, values.data(), 0, size);
    require(values == random_floats(values.size(), 2), "copy to plain memory");
    ggml_backend_buffer_clear(ours.buffer, 0);
    ggml_backend_tensor_get(ours.down, values.data(), 0, size);
    require(values == std::vector<float>(values.size()), "clear");
}

void events_and_async_are_offered_and_do_no_harm() {
    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(our_device(), &props);
    require(props.type == GGML_BACKEND_DEVICE_TYPE_ACCEL, "not counted as a GPU");
    require(props.caps.async && props.caps.events, "pipeline parallelism on several GPUs is not lost through us");
    require(ggml_backend_dev_host_buffer_type(our_device()) == nullptr, "no host buffer type of our own");
    ggml_backend_t       backend = ggml_backend_dev_init(our_device(), nullptr);
    ggml_backend_event_t event   = ggml_backend_event_new(our_device());
    require(event != nullptr, "an event can be made");
    ggml_backend_event_record(event, backend);
    ggml_backend_event_wait(backend, event);
    ggml_backend_event_synchronize(event);
    ggml_backend_synchronize(backend);
    ggml_backend_event_free(event);
    ggml_backend_free(backend);
}

void loading_again_gives_the_same_registry() {
    ggml_backend_reg_t first = ggml_backend_dev_backend_reg(our_device());
    require(ggml_backend_load(getenv("GGML_BACKEND_PATH")) == first, "the same pointer each time");
    require(ggml_backend_reg_dev_count(first) == 1, "one device");
    require(ggml_backend_reg_get_proc_address(first, "no_such_function") == nullptr, "unknown functions are NULL");
}

#define CONTRACT(name) { #name, name }
const std::vector<std::pair<std::string, std::function<void()>>> CONTRACTS = {
    CONTRACT(memory_is_reused_inside_a_split),
    CONTRACT(every_small_batch_is_ours_and_equal),
    CONTRACT(no_tokens_are_a_success),
    CONTRACT(ids_out_of_range_fail_that_call_only),
    CONTRACT(ids_beyond_the_used_ones_do_not_matter),
    CONTRACT(repeated_ids_within_a_token_are_computed),
    CONTRACT(nodes_that_come_one_at_a_time_are_computed),
    CONTRACT(an_abort_ends_the_call_and_the_next_one_works),
    CONTRACT(any_number_of_threads_gives_the_same_bits),
    CONTRACT(addresses_may_be_used_again_by_another_model),
    CONTRACT(one_model_may_go_while_another_computes),
    CONTRACT(our_thread_ends_with_the_last_backend),
    CONTRACT(measuring_leaves_nothing_behind),
    CONTRACT(the_three_states_of_supports_op),
    CONTRACT(without_recording_the_loader_is_turned_away),
    CONTRACT(beside_a_gpu_that_shares_host_memory_we_decline_and_say_so),
    CONTRACT(a_mapped_buffer_is_the_memory_itself),
    CONTRACT(buffers_write_read_fill_copy_and_clear),
    CONTRACT(events_and_async_are_offered_and_do_no_harm),
    CONTRACT(loading_again_gives_the_same_registry),
};

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: moe-contracts BACKENDS --list | NAME\n");
        return 2;
    }
    const std::string wanted = argv[2];
    for (const auto & [name, check] : CONTRACTS) {
        if (wanted == "--list") {
            printf("%s\n", name.c_str());
        } else if (wanted == name) {
            ggml_log_set([](ggml_log_level, const char * line, void *) { logged += line; }, nullptr);
            ggml_backend_load_all_from_path(argv[1]);
            logged.clear();
            check();
            return 0;
        }
    }
    if (wanted != "--list") {
        fprintf(stderr, "moe-contracts: %s: no such contract; --list shows them\n", wanted.c_str());
        return 2;
    }
    return 0;
}
