// What llama.cpp's patched programs call. Everything else about moe-hot is in moe-hot.cpp and in the plugin.
#pragma once

#include "arg.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

// Adds our options to those of a program.
void moe_hot_add_options(std::vector<common_arg> & options);
// Whether an option is one of ours: it is printed under a heading of its own.
bool moe_hot_is_ours(const common_arg & option);
// Prints our options under that heading.
void moe_hot_print_usage();

// Before the command line is read: loads the plugin if one of our flags or variables is there, so that other flags can name
// its device. Afterwards: checks what was given, hands it to the plugin, and places experts. Ends the program on bad input.
void moe_hot_before_parse(int argc, char ** argv);
void moe_hot_after_parse(common_params & params, llama_example ex);

// Requests and hits of the plugin between start and stop.
struct moe_hot_counters {
    bool     is_on    = false;
    uint64_t requests = 0;
    uint64_t hits     = 0;

    void start();
    void stop();
    // Adds `moe_hot` to an answer's timings, if something was counted.
    template <typename Json> void add_to(Json & timings) const {
        if (is_on) {
            timings["moe_hot"] = { {"requests", requests}, {"hits", hits}, {"hit_rate", hit_rate()} };
        }
    }
    double hit_rate() const { return requests > 0 ? double(hits) / double(requests) : 0.0; }

private:
    uint64_t requests_before = 0;
    uint64_t hits_before     = 0;
};

// Lines for Prometheus; empty without the plugin.
std::string moe_hot_metrics();
// What an endpoint answers: `what` is snapshot, mode or profile. False without the plugin.
bool moe_hot_ask(const char * what, const std::string & body, std::string & answer);
// The page.
std::string moe_hot_page(bool in_router);

// llama-bench has a parser of its own.
bool moe_hot_bench_arg(int argc, char ** argv, int & i);
struct moe_hot_bench {
    std::vector<std::string> models;
    std::vector<std::string> overrides; // patterns
    std::vector<int>         n_cpu_moe;
    std::vector<size_t>      fit_target_mib;
    std::vector<int>         n_threads;
    std::vector<int>         n_gpu_layers;
    bool                     no_host       = false;
    bool                     has_load_mode = false;
    bool                     no_op_offload = false;
};
void moe_hot_bench_prepare(moe_hot_bench & bench);
// `params`: llama-bench's, before its defaults are set.
template <typename Params> void moe_hot_bench_after_parse(Params & params) {
    moe_hot_bench bench;
    bench.models         = params.model;
    bench.n_cpu_moe      = params.n_cpu_moe;
    bench.fit_target_mib = params.fit_params_target;
    bench.n_threads      = params.n_threads;
    bench.n_gpu_layers   = params.n_gpu_layers;
    bench.has_load_mode  = !params.load_mode.empty();
    for (const bool no_op_offload : params.no_op_offload) {
        bench.no_op_offload = bench.no_op_offload || no_op_offload;
    }
    for (const auto & test : params.tensor_buft_overrides) {
        for (const auto & placed : test) {
            if (placed.pattern) {
                bench.overrides.push_back(placed.pattern);
            }
        }
    }
    for (const bool no_host : params.no_host) {
        bench.no_host = bench.no_host || no_host;
    }
    moe_hot_bench_prepare(bench);
    params.n_cpu_moe         = bench.n_cpu_moe;
    params.fit_params_target = bench.fit_target_mib;
}
std::vector<std::string> moe_hot_bench_fields(std::vector<std::string> fields);
void moe_hot_bench_values(std::vector<std::string> & values, const moe_hot_counters & counters);
void moe_hot_bench_done(moe_hot_counters & counters);
