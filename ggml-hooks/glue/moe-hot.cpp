// Glue between llama.cpp's patched programs and the plugin: calls and conversions, no decisions.

#include "moe-hot.h"

#include "../moe_hot_api.h"
#include "common.h"
#include "ggml-backend.h"
#include "json.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>

#include <unistd.h>

namespace {

using json = common_json;

const char * const REGISTRY  = "MoEHot";
const char * const PLUGIN    = "libggml_moe_hot.so";
const char * const OUR_FLAGS = "--moe-";
const size_t       MIB       = 1024 * 1024;

struct option {
    const char * flag;
    const char * variable;
    const char * value_name;
    const char * help;
    void (*handler)(common_params & params, const std::string & value);
};

// What was given on the command line, in the environment or in an INI file; of one option the last value counts.
std::map<std::string, std::string> & given() {
    static std::map<std::string, std::string> values;
    return values;
}

// The table of options: options.inc is made from src/options/table.rs.
const std::vector<option> & table() {
#define MOE_HOT_OPTION(flag, variable, value_name, help) \
    { flag, variable, value_name, help, [](common_params &, const std::string & value) { given()[flag] = value; } },
    static const std::vector<option> options = {
#include "options.inc"
    };
#undef MOE_HOT_OPTION
    return options;
}

const option * find_option(const std::string & flag) {
    for (const auto & option : table()) {
        if (flag == option.flag) {
            return &option;
        }
    }
    return nullptr;
}

std::string variable(const char * name) {
    const char * value = std::getenv(name);
    return value ? value : "";
}

[[noreturn]] void refuse(int code, const std::string & why) {
    fflush(stdout);
    fprintf(stderr, "moe-hot: %s\n", why.c_str());
    exit(code);
}

ggml_backend_reg_t registry() {
    return ggml_backend_reg_by_name(REGISTRY);
}

// The plugin beside the program.
std::filesystem::path plugin_beside() {
    std::error_code error;
    const auto program = std::filesystem::read_symlink("/proc/self/exe", error);
    return error ? std::filesystem::path(PLUGIN) : program.parent_path() / PLUGIN;
}

// Loads what llama.cpp would load, and the plugin beside the program if that was not it (GGML_BACKEND_PATH).
void load() {
    if (registry()) {
        return;
    }
    ggml_backend_load_all();
    if (registry()) {
        return;
    }
    const std::string path = plugin_beside().string();
    if (!ggml_backend_load(path.c_str()) || !registry()) {
        refuse(1, path + ": the plugin cannot be loaded; expected it beside the program (cargo build --features llama)");
    }
}

const moe_hot_api_v1 * api() {
    static std::atomic<const moe_hot_api_v1 *> found = nullptr;
    if (!found && registry()) {
        const auto * offered = (const moe_hot_api_v1 *) ggml_backend_reg_get_proc_address(registry(), MOE_HOT_API_NAME);
        if (offered && offered->version == MOE_HOT_API_VERSION && offered->size >= sizeof(moe_hot_api_v1)) {
            found = offered;
        }
    }
    return found;
}

// The text that the plugin returned, which is given back to it.
std::string take(char * text) {
    if (!text) {
        return "";
    }
    const std::string copy = text;
    api()->free_text(text);
    return copy;
}

bool is_asked_for() {
    for (const auto & option : table()) {
        if (!variable(option.variable).empty()) {
            return true;
        }
    }
    return !given().empty();
}

// What was given otherwise than in the environment, which the plugin reads itself.
json given_options() {
    json options = json::object();
    for (const auto & [flag, value] : given()) {
        const option * known = find_option(flag);
        const char *   env   = known ? std::getenv(known->variable) : nullptr;
        if (!env || value != env) {
            options[flag] = value;
        }
    }
    return options;
}

template <typename T> json to_json(const std::vector<T> & values) {
    json list = json::array();
    for (const auto & value : values) {
        list.push_back(value);
    }
    return list;
}

std::vector<size_t> numbers(const json & list) {
    std::vector<size_t> values;
    for (size_t i = 0; i < list.size(); i++) {
        values.push_back(list[i].get<uint64_t>());
    }
    return values;
}

// Starts the program anew with these variables, which backends read while they are loaded: once, since they are set then. Where
// that is not possible the program goes on without them.
void restart_with(const json & variables) {
    std::vector<std::string> words;
    std::ifstream            command_line("/proc/self/cmdline", std::ios::binary);
    for (std::string word; std::getline(command_line, word, '\0');) {
        words.push_back(word);
    }
    std::vector<char *> argv;
    for (auto & word : words) {
        argv.push_back(&word[0]);
    }
    argv.push_back(nullptr);
    if (words.empty() || variables.size() == 0) {
        return;
    }
    for (const auto & [name, value] : variables.items()) {
        setenv(name.c_str(), value.get<std::string>().c_str(), 1);
    }
    fflush(nullptr);
    execv("/proc/self/exe", argv.data());
    for (const auto & [name, value] : variables.items()) {
        unsetenv(name.c_str());
    }
}

// Asks the plugin what follows, and ends the program if the answer is no.
json prepare(const json & request) {
    load();
    if (!api()) {
        refuse(1, "the plugin is of another version than this program");
    }
    const std::string text = take(api()->prepare(request.dump_safe().c_str()));
    if (text.empty()) {
        refuse(1, "internal error in the plugin");
    }
    json answer = json::parse(text);
    if (answer.contains("error")) {
        refuse(answer.at("code").get<int>(), answer.at("error").get<std::string>());
    }
    restart_with(answer.at("restart_with"));
    for (const auto & [name, value] : answer.at("environment").items()) {
        setenv(name.c_str(), value.get<std::string>().c_str(), 1);
    }
    return answer;
}

} // namespace

void moe_hot_add_options(std::vector<common_arg> & options) {
    for (const auto & option : table()) {
        options.push_back(common_arg({ option.flag }, option.value_name, option.help, option.handler).set_env(option.variable));
    }
}

bool moe_hot_is_ours(const common_arg & option) {
    return find_option(option.args.front()) != nullptr;
}

void moe_hot_print_usage() {
    std::vector<common_arg> options;
    moe_hot_add_options(options);
    printf("\n\n----- expert cache params (moe-hot) -----\n\n");
    for (const auto & option : options) {
        printf("%s", option.to_string().c_str());
    }
}

void moe_hot_before_parse(int argc, char ** argv) {
    bool is_asked = is_asked_for();
    for (int i = 1; i < argc; i++) {
        is_asked = is_asked || strncmp(argv[i], OUR_FLAGS, strlen(OUR_FLAGS)) == 0;
    }
    if (is_asked) {
        load();
    }
}

void moe_hot_after_parse(common_params & params, llama_example ex) {
    if (params.usage || params.completion || !params.server_base.empty() || !is_asked_for()) {
        return;
    }
    const bool is_fetched = !params.model.hf_repo.empty() || !params.model.docker_repo.empty();
    std::vector<std::string> overrides;
    for (const auto & placed : params.tensor_buft_overrides) {
        if (placed.pattern) {
            overrides.push_back(placed.pattern);
        }
    }
    json request = json::object();
    request["models"]    = to_json(std::vector<std::string>{ is_fetched ? "" : params.model.path });
    request["overrides"] = to_json(overrides);
    request["options"]   = given_options();
    request["is_router"] = ex == LLAMA_EXAMPLE_SERVER && params.model.path.empty() && !is_fetched;
    request["fits"]      = params.fit_params ? "always" : "never";
    request["no_host"]   = params.no_host;
    const int n_threads = params.cpuparams_batch.n_threads > 0 ? params.cpuparams_batch.n_threads : params.cpuparams.n_threads;
    request["n_threads"] = to_json(n_threads > 0 ? std::vector<int>{ n_threads } : std::vector<int>{});
    request["n_gpu_layers"]  = to_json(params.n_gpu_layers >= 0 ? std::vector<int>{ params.n_gpu_layers } : std::vector<int>{});
    request["has_load_mode"] = params.load_mode != LLAMA_LOAD_MODE_AUTO;
    request["no_op_offload"] = params.no_op_offload;
    json targets = json::array();
    for (const size_t bytes : params.fit_params_target) {
        targets.push_back((uint64_t) (bytes / MIB));
    }
    request["fit_target_mib"] = targets;
    json devices = json::array();
    for (const auto & device : params.devices) {
        if (device) {
            devices.push_back(ggml_backend_dev_name(device));
        }
    }
    request["devices"] = devices;

    const json answer = prepare(request);
    if (answer.at("place_experts").get<bool>()) {
        params.tensor_buft_overrides.push_back(llm_ffn_exps_cpu_override());
    }
    const auto targets_mib = numbers(answer.at("fit_target_mib"));
    for (size_t i = 0; i < params.fit_params_target.size() && !targets_mib.empty(); i++) {
        if (targets_mib.size() == 1 || i < targets_mib.size()) {
            params.fit_params_target[i] = targets_mib[targets_mib.size() == 1 ? 0 : i] * MIB;
        }
    }
}

void moe_hot_counters::start() {
    if (api()) {
        moe_hot_totals totals = {};
        api()->totals(&totals);
        is_on           = true;
        requests_before = totals.requests;
        hits_before     = totals.hits;
    }
}

void moe_hot_counters::stop() {
    if (is_on) {
        moe_hot_totals totals = {};
        api()->totals(&totals);
        requests = totals.requests - requests_before;
        hits     = totals.hits - hits_before;
    }
}

std::string moe_hot_metrics() {
    return api() ? take(api()->metrics()) : "";
}

bool moe_hot_ask(const char * what, const std::string & body, std::string & answer) {
    if (!api()) {
        return false;
    }
    if (strcmp(what, "mode") == 0) {
        answer = take(api()->set_mode(body.data(), body.size()));
    } else if (strcmp(what, "profile") == 0) {
        answer = take(api()->apply_profile(body.data(), body.size()));
    } else {
        answer = take(api()->snapshot());
    }
    return true;
}

std::string moe_hot_page(bool in_router) {
    static const char * const page =
#include "page.inc"
        ;
    return in_router || api() ? page : "";
}

bool moe_hot_bench_arg(int argc, char ** argv, int & i) {
    std::string flag = argv[i];
    for (char & c : flag) {
        c = c == '_' ? '-' : c;
    }
    if (!find_option(flag) || i + 1 >= argc) {
        return false;
    }
    given()[flag] = argv[++i];
    return true;
}

void moe_hot_bench_prepare(moe_hot_bench & bench) {
    if (!is_asked_for()) {
        return;
    }
    json request = json::object();
    request["options"]   = given_options();
    request["models"]    = to_json(bench.models);
    request["overrides"] = to_json(bench.overrides);
    request["n_cpu_moe"] = to_json(bench.n_cpu_moe);
    request["no_host"]   = bench.no_host;
    request["n_threads"]     = to_json(bench.n_threads);
    request["n_gpu_layers"]  = to_json(bench.n_gpu_layers);
    request["has_load_mode"] = bench.has_load_mode;
    request["no_op_offload"] = bench.no_op_offload;
    request["fits"]      = bench.fit_target_mib.empty() ? "never" : "each";
    json targets = json::array();
    for (const size_t mib : bench.fit_target_mib) {
        targets.push_back((uint64_t) mib);
    }
    request["fit_target_mib"] = targets;

    const json answer = prepare(request);
    if (answer.at("place_experts").get<bool>()) {
        const int all_layers = 999;
        bench.n_cpu_moe = { all_layers };
    }
    const auto targets_mib = numbers(answer.at("fit_target_mib"));
    if (!targets_mib.empty()) {
        bench.fit_target_mib = targets_mib;
    }
}

std::vector<std::string> moe_hot_bench_fields(std::vector<std::string> fields) {
    if (api()) {
        fields.insert(fields.end(), { "moe_hot_cache", "moe_hot_hit_rate" });
    }
    return fields;
}

void moe_hot_bench_values(std::vector<std::string> & values, const moe_hot_counters & counters) {
    if (api()) {
        const json cache = json::parse(take(api()->snapshot())).at("cache");
        values.push_back(cache.at("on").get<bool>() ? cache.at("device").get<std::string>() : "off");
        values.push_back(counters.requests > 0 ? std::to_string(counters.hit_rate()) : "null");
    }
}

void moe_hot_bench_done(moe_hot_counters & counters) {
    if (!counters.is_on) {
        return;
    }
    counters.stop();
    const json cache = json::parse(take(api()->snapshot())).at("cache");
    if (cache.at("on").get<bool>()) {
        fprintf(stderr, "moe-hot: hot cache on %s: %llu of %llu requests hit, hit rate %.1f %%\n",
                cache.at("device").get<std::string>().c_str(), (unsigned long long) counters.hits,
                (unsigned long long) counters.requests, 100.0 * counters.hit_rate());
    } else {
        fprintf(stderr, "moe-hot: no hot cache: %s\n", cache.at("why").get<std::string>().c_str());
    }
}
