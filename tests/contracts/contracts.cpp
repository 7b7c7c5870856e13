// moe-contracts: what the plugin promises to a host, seen from a host that is not llama.cpp.
//
//   moe-contracts BACKENDS --list     names of the contracts, one a line
//   moe-contracts BACKENDS NAME       checks one; exit code 0 if it is kept, else a line that says what was not
//
// BACKENDS is the folder with the ggml backends; the plugin is the one that GGML_BACKEND_PATH names.
// Each contract runs in a process of its own and talks to the plugin through ggml alone.

#include "host.h"

#include <functional>
#include <utility>

namespace {

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
        require(gets_thread("moe-hot-save"), "recording has a thread");
    }
    require(!has_thread("moe-hot-save"), "no thread is left after the last backend");
    Host again(true);
    require_expected(again, experts, 1, distinct_ids(1));
    require(gets_thread("moe-hot-save"), "recording goes on with a new backend");
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

// A registry with one device, as far as the plugin looks at it.
struct FakeRegistry {
    ggml_backend_reg    registry = {};
    ggml_backend_device device   = {};

    FakeRegistry(const char * (*registry_name)(ggml_backend_reg_t), const char * (*device_name)(ggml_backend_dev_t),
                 enum ggml_backend_dev_type (*type)(ggml_backend_dev_t)) {
        device.reg                      = &registry;
        device.iface.get_name           = device_name;
        device.iface.get_type           = type;
        registry.api_version            = GGML_BACKEND_API_VERSION;
        registry.context                = &device;
        registry.iface.get_name         = registry_name;
        registry.iface.get_device_count = [](ggml_backend_reg_t) -> size_t { return 1; };
        registry.iface.get_device       = [](ggml_backend_reg_t reg, size_t) { return (ggml_backend_dev_t) reg->context; };
    }
};

void beside_a_gpu_that_shares_host_memory_we_decline_and_say_so() {
    static FakeRegistry shared([](ggml_backend_reg_t) { return "Shared"; }, [](ggml_backend_dev_t) { return "Shared0"; },
                               [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_IGPU; });
    // a GPU on another machine does not count: llama.cpp uses the local one beside it
    static FakeRegistry remote([](ggml_backend_reg_t) { return "RPC"; }, [](ggml_backend_dev_t) { return "RPC0"; },
                               [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; });
    ggml_backend_register(&shared.registry);
    ggml_backend_register(&remote.registry);
    Experts experts(0);
    require(!supports(experts, 512, GGML_BACKEND_BUFFER_USAGE_ANY), "nothing to win on such a GPU: declined");
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
    require(ggml_backend_reg_dev_count(first) == 2, "one device for each place that splits can lie in");
    require(ggml_backend_reg_get_proc_address(first, "no_such_function") == nullptr, "unknown functions are NULL");
}

size_t times_said(const std::string & words) {
    size_t n = 0;
    for (size_t at = logged.find(words); at != std::string::npos; at = logged.find(words, at + 1)) {
        n++;
    }
    return n;
}

constexpr int      MANY_BATCHES = 300;
const char * const INERT        = "inert: llama.cpp keeps the experts to itself";

// As llama.cpp does: it sets the threads, then computes.
void compute_batch(Host & host, Ffn & ffn, int64_t n_tokens) {
    auto set = (ggml_backend_set_n_threads_t) host.function("ggml_backend_set_n_threads");
    set(host.backends[0], 1);
    require(host.compute(ffn, distinct_ids(n_tokens)) == GGML_STATUS_SUCCESS, "a batch is computed");
}

// A host with an expert cache of its own: it computes with copies, in one graph for many tokens.
void decode_with_copies(Host & host) {
    Experts copies(0);
    copies.allocate(ggml_backend_dev_buffer_type(cpu_device()));
    Ffn ffn(copies, 1);
    host.place(ffn);
    for (int batch = 0; batch < MANY_BATCHES; batch++) {
        compute_batch(host, ffn, 1);
    }
}

void a_host_that_keeps_the_experts_to_itself_is_told_once_that_we_are_inert() {
    Experts experts(0);
    allocate_with_us(experts);
    {
        Host host(true);
        decode_with_copies(host);
        require(times_said(INERT) == 1, "it is said: " + logged);
        decode_with_copies(host);
        require(times_said(INERT) == 1, "it is said once");
    }
    require(times_said("nothing was recorded: no expert layer has reached moe-hot") == 1, "and at the end: " + logged);
}

void large_batches_are_no_sign_that_we_are_inert() {
    Experts experts(0);
    allocate_with_us(experts);
    {
        Host host(true);
        for (int batch = 0; batch < MANY_BATCHES; batch++) {
            Ffn ffn(experts, 32);
            host.place(ffn);
            compute_batch(host, ffn, 32);
        }
    }
    require(times_said("inert") == 0, "nothing is said meanwhile: " + logged);
    require(times_said("nothing was recorded: only batches of more than 31 tokens") == 1, "but at the end: " + logged);
}

void a_host_that_has_used_us_once_is_not_told_that_we_are_inert() {
    Experts experts(0);
    allocate_with_us(experts);
    Host host(true);
    require_expected(host, experts, 1, distinct_ids(1));
    decode_with_copies(host);
    require(times_said("inert") == 0, "what is recorded is not nothing: " + logged);
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
    CONTRACT(a_host_that_keeps_the_experts_to_itself_is_told_once_that_we_are_inert),
    CONTRACT(large_batches_are_no_sign_that_we_are_inert),
    CONTRACT(a_host_that_has_used_us_once_is_not_told_that_we_are_inert),
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
