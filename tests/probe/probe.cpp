// moe-probe RUN.json OUT_DIR: loads a model as RUN.json says, runs its steps and writes OUT_DIR/result.json
// (devices, token ids, durations, expert counts) and OUT_DIR/logits.bin (every logit asked for, or embedding,
// raw f32, in the order of the steps), so that two runs can be compared byte for byte. It knows llama.cpp's public API
// only, nothing of the plugin, which comes in by GGML_BACKEND_PATH. Exit code: 2 bad input, 1 failed run.
//
// RUN.json (all but "model" and "steps" may be left out):
//   {"model": PATH, "load_mode": "mmap" | "none", "n_gpu_layers": 0, "rpc": "127.0.0.1:PORT", "device": NAME,
//    "experts_on": NAME, "cpu_moe": true, "repack": false, "contexts": 1, "n_ctx": 1024, "n_ubatch": 512, "n_seq": 1, "kv_unified": true,
//    "n_threads": 2, "count_experts": false, "rows_of": NAME, "count_waits": NAME, "embeddings": false, "lora": PATH, "more_models": [PATH, ...],
//    "steps": [STEP, ...]}
// "rows_of": the tensor NAME-N of the first layer N that has it is written to OUT_DIR/rows.bin, raw f32, batch by batch.
// Model 0 has the contexts; each of "more_models" has one more, numbered after those, and no adapter.
// STEP, on context "context" (0):
//   {"op": "decode", "sequences": [{"id": 0, "tokens": [...]}, ...], "outputs": "all" | "last" | "none"}
//   {"op": "greedy", "sequences": [0, ...], "n": 16}         n batches of one token per sequence
//   {"op": "threads", "threads": [[STEP, ...], ...]}         one thread per list; lists share no context and no model
//                                                            that is loaded or unloaded
//   {"op": "unload", "model": 0}                             with its contexts
//   {"op": "load", "model": 0}                               again, with new contexts
//   {"op": "note_waits"}                                     adds what the device of "count_waits" has made others wait
//                                                            so far to the result's "waits"
// Where FakeDevice (tests/fake-device) is loaded; elsewhere they do nothing:
//   {"op": "set", "name": "hold_writes", "value": 0}         changes a setting
//   {"op": "until", "counter": "set_async_calls", "least": 9} waits until so much is counted

#include "ggml-backend.h"
#include "listeners.h"
#include "llama.h"
#include "waits.h"

#include "nlohmann/json.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

using json = nlohmann::json;

namespace {

struct BadInput : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// ---- loading ----

struct ModelFree {
    void operator()(llama_model * m) const { llama_model_free(m); }
};
struct LoraFree {
    void operator()(llama_adapter_lora * a) const { llama_adapter_lora_free(a); }
};
struct ContextFree {
    void operator()(llama_context * c) const { llama_free(c); }
};
using ModelPtr   = std::unique_ptr<llama_model, ModelFree>;
using LoraPtr    = std::unique_ptr<llama_adapter_lora, LoraFree>;
using ContextPtr = std::unique_ptr<llama_context, ContextFree>;

// Registers the server's devices and returns them, NULL-terminated.
std::vector<ggml_backend_dev_t> rpc_devices(const std::string & endpoint) {
    ggml_backend_reg_t rpc = ggml_backend_reg_by_name("RPC");
    if (!rpc) {
        throw std::runtime_error("the RPC backend is not in " STOCK_BIN);
    }
    using add_server_t = ggml_backend_reg_t (*)(const char *);
    auto add_server = (add_server_t) ggml_backend_reg_get_proc_address(rpc, "ggml_backend_rpc_add_server");
    ggml_backend_reg_t server = add_server(endpoint.c_str());
    if (!server || ggml_backend_reg_dev_count(server) == 0) {
        throw std::runtime_error("no device at rpc endpoint " + endpoint);
    }
    ggml_backend_register(server);
    std::vector<ggml_backend_dev_t> devices;
    for (size_t i = 0; i < ggml_backend_reg_dev_count(server); i++) {
        devices.push_back(ggml_backend_reg_dev_get(server, i));
    }
    devices.push_back(nullptr);
    return devices;
}

// A registered device, NULL-terminated.
std::vector<ggml_backend_dev_t> device_by_name(const std::string & name) {
    ggml_backend_dev_t device = ggml_backend_dev_by_name(name.c_str());
    if (!device) {
        throw std::runtime_error("no device " + name);
    }
    return {device, nullptr};
}

ModelPtr load_model(const json & run, const std::string & path) {
    std::vector<ggml_backend_dev_t> devices = {nullptr};
    if (run.contains("rpc")) {
        devices = rpc_devices(run.at("rpc"));
    } else if (run.contains("device")) {
        devices = device_by_name(run.at("device"));
    }
    ggml_backend_buffer_type_t experts_on = ggml_backend_cpu_buffer_type();
    if (run.contains("experts_on")) {
        devices    = device_by_name(run.at("experts_on"));
        experts_on = ggml_backend_dev_buffer_type(devices[0]);
    }
    // the pattern of --cpu-moe (common/common.h)
    const llama_model_tensor_buft_override placed[] = {
        {"\\.ffn_(up|down|gate|gate_up)_(ch|)exps", experts_on}, {nullptr, nullptr}};

    const std::string load_mode = run.value("load_mode", "mmap");
    if (load_mode != "mmap" && load_mode != "none") {
        throw BadInput("load_mode is \"" + load_mode + "\", not \"mmap\" or \"none\"");
    }
    llama_model_params params    = llama_model_default_params();
    params.devices               = devices.data();
    params.n_gpu_layers          = run.value("n_gpu_layers", 0);
    params.load_mode             = load_mode == "mmap" ? LLAMA_LOAD_MODE_MMAP : LLAMA_LOAD_MODE_NONE;
    params.tensor_buft_overrides = run.value("cpu_moe", true) ? placed : nullptr;
    params.use_extra_bufts       = run.value("repack", false);

    if (!std::filesystem::exists(path)) {
        throw BadInput("no model file " + path);
    }
    ModelPtr model(llama_model_load_from_file(path.c_str(), params));
    if (!model) {
        throw std::runtime_error("cannot load " + path);
    }
    return model;
}

// An adapter for the whole run, or none.
LoraPtr load_lora(llama_model * model, const json & run) {
    if (!run.contains("lora")) {
        return nullptr;
    }
    const std::string path = run.at("lora");
    LoraPtr lora(llama_adapter_lora_init(model, path.c_str()));
    if (!lora) {
        throw std::runtime_error("cannot load adapter " + path);
    }
    return lora;
}

ContextPtr make_context(llama_model * model, const json & run, llama_adapter_lora * lora, const Listener & listener) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx                = run.value("n_ctx", 1024);
    params.n_batch              = params.n_ctx;
    params.n_ubatch             = run.value("n_ubatch", 512);
    params.n_seq_max            = run.value("n_seq", 1);
    params.kv_unified           = run.value("kv_unified", true);
    params.n_threads            = run.value("n_threads", 2);
    params.n_threads_batch      = params.n_threads;
    if (run.value("embeddings", false)) {
        params.embeddings   = true;
        params.pooling_type = LLAMA_POOLING_TYPE_NONE;  // one row per token
    }
    params.cb_eval           = listener.callback;
    params.cb_eval_user_data = listener.data;
    ContextPtr context(llama_init_from_model(model, params));
    if (!context) {
        throw std::runtime_error("cannot create a context");
    }
    float scale = 1.0f;
    if (lora && llama_set_adapters_lora(context.get(), &lora, 1, &scale) != 0) {
        throw std::runtime_error("cannot use the adapter");
    }
    return context;
}

// ---- FakeDevice ----

// A function of FakeDevice's, or NULL where it is not loaded.
template <typename Function> Function of_fake_device(const char * name) {
    ggml_backend_dev_t device = ggml_backend_dev_by_name("FAKE0");
    return device ? (Function) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), name) : nullptr;
}

void set(const std::string & name, int64_t value) {
    auto set = of_fake_device<bool (*)(const char *, int64_t)>("fake_set");
    if (set && !set(name.c_str(), value)) {
        throw BadInput("FakeDevice has no setting \"" + name + "\"");
    }
}

// Whoever started us ends a wait without an end.
void wait_until(const std::string & counter, uint64_t least) {
    auto stat = of_fake_device<uint64_t (*)(const char *)>("fake_stat");
    if (stat && stat(counter.c_str()) == UINT64_MAX) {
        throw BadInput("FakeDevice has no counter \"" + counter + "\"");
    }
    while (stat && stat(counter.c_str()) < least) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

// ---- steps ----

// A context and, per sequence, where it stands.
struct Session {
    struct Sequence {
        llama_pos n_past = 0;
        llama_token next = LLAMA_TOKEN_NULL;  // argmax after the last output
    };

    size_t model = 0;
    ContextPtr context;
    bool embeddings = false;
    std::map<llama_seq_id, Sequence> sequences;

    // The logits, or the embedding, of one token of the last batch.
    std::vector<float> row(int32_t i) const {
        const llama_model * model = llama_get_model(context.get());
        const float * values      = embeddings ? llama_get_embeddings_ith(context.get(), i)
                                               : llama_get_logits_ith(context.get(), i);
        if (!values) {
            throw std::runtime_error("no output for token " + std::to_string(i));
        }
        const int32_t size =
            embeddings ? llama_model_n_embd_out(model) : llama_vocab_n_tokens(llama_model_get_vocab(model));
        return {values, values + size};
    }
};

// The models that are loaded and their contexts.
class Host {
public:
    Host(const json & run, Listener listener) : run(run), listener(listener) {
        std::vector<std::string> more = run.value("more_models", std::vector<std::string>());
        paths.push_back(run.at("model"));
        paths.insert(paths.end(), more.begin(), more.end());
        models.resize(paths.size());
        sessions.resize(run.value("contexts", 1) + more.size());
        for (size_t i = 0; i < more.size(); i++) {
            sessions[sessions.size() - more.size() + i].model = 1 + i;
        }
        for (size_t i = 0; i < models.size(); i++) {
            load(i);
        }
    }

    void load(size_t index) {
        models.at(index) = load_model(run, paths.at(index));
        if (index == 0) {
            lora = load_lora(models[index].get(), run);
        }
        for (Session & session : sessions) {
            if (session.model == index) {
                llama_adapter_lora * adapter = index == 0 ? lora.get() : nullptr;
                session.context    = make_context(models[index].get(), run, adapter, listener);
                session.embeddings = run.value("embeddings", false);
            }
        }
    }

    void unload(size_t index) {
        for (Session & session : sessions) {
            if (session.model == index) {
                session.context.reset();
                session.sequences.clear();
            }
        }
        if (index == 0) {
            lora.reset();
        }
        models.at(index).reset();
    }

    size_t model(size_t index) const {
        if (index >= models.size()) {
            throw BadInput("step uses model " + std::to_string(index) + " of " + std::to_string(models.size()));
        }
        return index;
    }

    Session & session(size_t index) {
        if (index >= sessions.size()) {
            throw BadInput("step uses context " + std::to_string(index) + " of " + std::to_string(sessions.size()));
        }
        if (!sessions[index].context) {
            throw BadInput("step uses context " + std::to_string(index) + ", which is unloaded");
        }
        return sessions[index];
    }

private:
    const json & run;
    Listener listener;
    std::vector<std::string> paths;
    std::vector<ModelPtr> models;
    LoraPtr lora;
    std::vector<Session> sessions;  // last, so that contexts go before their models
};

// What a step leaves: one record per decoded batch, and the logits in the same order.
struct Output {
    json batches = json::array();
    json waits   = json::array();
    std::vector<float> logits;

    void append(const Output & other) {
        batches.insert(batches.end(), other.batches.begin(), other.batches.end());
        waits.insert(waits.end(), other.waits.begin(), other.waits.end());
        logits.insert(logits.end(), other.logits.begin(), other.logits.end());
    }
};

struct SequenceTokens {
    llama_seq_id id;
    std::vector<llama_token> tokens;
};

class BatchPtr {
public:
    explicit BatchPtr(int32_t n_tokens) : batch(llama_batch_init(n_tokens, 0, 1)) {}
    ~BatchPtr() { llama_batch_free(batch); }
    BatchPtr(const BatchPtr &) = delete;
    BatchPtr & operator=(const BatchPtr &) = delete;

    void add(llama_token token, llama_pos pos, llama_seq_id seq, bool output) {
        const int32_t i       = batch.n_tokens++;
        batch.token[i]        = token;
        batch.pos[i]          = pos;
        batch.n_seq_id[i]     = 1;
        batch.seq_id[i][0]    = seq;
        batch.logits[i]       = output;
    }

    llama_batch batch;
};

// Decodes one batch that holds all given tokens; outputs: "all", "last" of each sequence, or "none".
Output decode(Session & session, const std::vector<SequenceTokens> & input, const std::string & outputs) {
    size_t n_tokens = 0;
    for (const auto & sequence : input) {
        n_tokens += sequence.tokens.size();
    }
    BatchPtr batch(n_tokens);
    for (const auto & [id, tokens] : input) {
        Session::Sequence & sequence = session.sequences[id];
        for (size_t i = 0; i < tokens.size(); i++) {
            const bool output = outputs == "all" || (outputs == "last" && i + 1 == tokens.size());
            batch.add(tokens[i], sequence.n_past++, id, output);
        }
    }

    const auto start = std::chrono::steady_clock::now();
    const int status = llama_decode(session.context.get(), batch.batch);
    llama_synchronize(session.context.get());
    const auto end = std::chrono::steady_clock::now();
    if (status != 0) {
        throw std::runtime_error("llama_decode returned " + std::to_string(status));
    }

    Output out;
    json next = json::array();
    for (int32_t i = 0; i < batch.batch.n_tokens; i++) {
        if (!batch.batch.logits[i]) {
            continue;
        }
        const std::vector<float> row = session.row(i);
        const llama_token token      = std::max_element(row.begin(), row.end()) - row.begin();
        session.sequences[batch.batch.seq_id[i][0]].next = token;
        next.push_back(token);
        out.logits.insert(out.logits.end(), row.begin(), row.end());
    }
    const auto us = std::chrono::duration_cast<std::chrono::microseconds>(end - start).count();
    out.batches.push_back({{"n_tokens", n_tokens}, {"next", next}, {"microseconds", us}});
    return out;
}

Output greedy(Session & session, const std::vector<llama_seq_id> & ids, int n) {
    Output out;
    for (int i = 0; i < n; i++) {
        std::vector<SequenceTokens> input;
        for (llama_seq_id id : ids) {
            if (session.sequences[id].next == LLAMA_TOKEN_NULL) {
                throw BadInput("greedy on sequence " + std::to_string(id) + ", which has no output yet");
            }
            input.push_back({id, {session.sequences[id].next}});
        }
        out.append(decode(session, input, "last"));
    }
    return out;
}

Output run_steps(Host & host, const json & steps);

// One thread per list of steps; outputs are joined in the order of the lists.
Output run_threads(Host & host, const json & lists) {
    std::vector<std::future<Output>> threads;
    for (const json & steps : lists) {
        threads.push_back(std::async(std::launch::async, [&host, &steps] { return run_steps(host, steps); }));
    }
    Output out;
    for (auto & thread : threads) {
        out.append(thread.get());
    }
    return out;
}

Output run_step(Host & host, const json & step) {
    const std::string op = step.at("op");
    if (op == "threads") {
        return run_threads(host, step.at("threads"));
    }
    if (op == "load" || op == "unload") {
        const size_t model = host.model(step.at("model"));
        op == "load" ? host.load(model) : host.unload(model);
        return {};
    }
    if (op == "set") {
        set(step.at("name"), step.at("value"));
        return {};
    }
    if (op == "until") {
        wait_until(step.at("counter"), step.at("least"));
        return {};
    }
    if (op == "note_waits") {
        const Waits so_far = waits_so_far();
        Output out;
        out.waits.push_back({{"waits", so_far.waits}, {"blocking_copies", so_far.blocking_copies}});
        return out;
    }
    Session & session = host.session(step.value("context", 0));
    if (op == "greedy") {
        return greedy(session, step.at("sequences"), step.at("n"));
    }
    if (op == "decode") {
        std::vector<SequenceTokens> input;
        for (const json & sequence : step.at("sequences")) {
            input.push_back({sequence.at("id"), sequence.at("tokens")});
        }
        return decode(session, input, step.value("outputs", "all"));
    }
    throw BadInput("unknown op \"" + op + "\"");
}

Output run_steps(Host & host, const json & steps) {
    Output out;
    for (const json & step : steps) {
        out.append(run_step(host, step));
    }
    return out;
}

// ---- the program ----

json read_json(const std::string & path) {
    std::ifstream file(path);
    if (!file) {
        throw BadInput("cannot read " + path);
    }
    return json::parse(file);
}

json device_names() {
    json names = json::array();
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        names.push_back(ggml_backend_dev_name(ggml_backend_dev_get(i)));
    }
    return names;
}

void write_file(const std::filesystem::path & path, const char * data, size_t size) {
    std::ofstream file(path, std::ios::binary);
    file.write(data, size);
    if (!file.flush()) {
        throw std::runtime_error("cannot write " + path.string());
    }
}

void run(const json & run, const std::filesystem::path & out_dir) {
    ExpertCounter counter;
    const bool count_experts = run.value("count_experts", false);
    if (run.contains("count_waits")) {
        count_waits(run.at("count_waits"));
    }

    RowRecorder recorder(run.value("rows_of", ""));
    Listener listener;
    if (count_experts) {
        listener = {ExpertCounter::callback, &counter};
    } else if (run.contains("rows_of")) {
        listener = {RowRecorder::callback, &recorder};
    }

    Host host(run, listener);
    const Output output = run_steps(host, run.at("steps"));

    json result = {{"devices", device_names()}, {"batches", output.batches}, {"waits", output.waits}};
    if (count_experts) {
        result["expert_counts"] = counter.to_json();
    }
    const std::string text = result.dump();
    write_file(out_dir / "result.json", text.data(), text.size());
    write_file(out_dir / "logits.bin", (const char *) output.logits.data(), output.logits.size() * sizeof(float));
    if (run.contains("rows_of")) {
        write_file(out_dir / "rows.bin", (const char *) recorder.values.data(), recorder.values.size() * sizeof(float));
    }
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: moe-probe RUN.json OUT_DIR\n");
        return 2;
    }
    // Another folder's backends, say stock's and one more.
    const char * folder = std::getenv("MOE_PROBE_BACKENDS");
    ggml_backend_load_all_from_path(folder ? folder : STOCK_BIN);
    llama_backend_init();
    try {
        const json config = read_json(argv[1]);
        std::filesystem::create_directories(argv[2]);
        run(config, argv[2]);
    } catch (const json::exception & e) {
        fprintf(stderr, "moe-probe: %s: %s\n", argv[1], e.what());
        return 2;
    } catch (const BadInput & e) {
        fprintf(stderr, "moe-probe: %s: %s\n", argv[1], e.what());
        return 2;
    } catch (const std::exception & e) {
        fprintf(stderr, "moe-probe: %s\n", e.what());
        return 1;
    }
    llama_backend_free();
    return 0;
}
