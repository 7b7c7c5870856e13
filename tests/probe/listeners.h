// What a context tells as it computes: which experts its tokens use, and the rows that come out of a layer.
#pragma once

#include "ggml-backend.h"

#include "nlohmann/json.hpp"

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

constexpr int OP_OFFLOAD_MIN_BATCH = 32;  // ggml's default threshold: larger batches are not the plugin's

// Counts experts, by the tensors named ffn_moe_topk-<layer>.
class ExpertCounter {
public:
    // ids: [n_expert_used, n_rows], i32, rows nb[1] bytes apart (a view of an argsort)
    void count(const ggml_tensor * ids) {
        const int64_t n_used = ids->ne[0];
        const int64_t n_rows = ids->ne[1];
        if (n_rows == 0) {
            return;
        }
        const int layer = std::stoi(ids->name + strlen(PREFIX));
        std::vector<int32_t> row(n_used);
        std::lock_guard<std::mutex> lock(mutex);
        Counts & counts = layers[layer][batch_class(n_rows)];
        counts.calls++;
        for (int64_t r = 0; r < n_rows; r++) {
            ggml_backend_tensor_get(ids, row.data(), r * ids->nb[1], n_used * sizeof(int32_t));
            for (int32_t expert : row) {
                counts.experts[expert]++;
            }
        }
    }

    // {"<layer>": {"batch_1": {"calls": n, "experts": [[id, count], ...]}, "batch_2_up": .., "stock": ..}}
    nlohmann::json to_json() const {
        nlohmann::json out = nlohmann::json::object();
        for (const auto & [layer, classes] : layers) {
            for (const auto & [name, counts] : classes) {
                nlohmann::json experts = nlohmann::json::array();
                for (const auto & [expert, count] : counts.experts) {
                    experts.push_back({expert, count});
                }
                out[std::to_string(layer)][name] = {{"calls", counts.calls}, {"experts", experts}};
            }
        }
        return out;
    }

    static bool wants(const ggml_tensor * t) { return strncmp(t->name, PREFIX, strlen(PREFIX)) == 0; }

    static bool callback(ggml_tensor * t, bool ask, void * self) {
        if (ask) {
            return wants(t);
        }
        static_cast<ExpertCounter *>(self)->count(t);
        return true;
    }

private:
    static constexpr const char * PREFIX = "ffn_moe_topk-";

    struct Counts {
        int64_t calls = 0;
        std::map<int32_t, int64_t> experts;
    };

    static const char * batch_class(int64_t n_rows) {
        if (n_rows == 1) {
            return "batch_1";
        }
        return n_rows < OP_OFFLOAD_MIN_BATCH ? "batch_2_up" : "stock";
    }

    std::mutex mutex;
    std::map<int, std::map<std::string, Counts>> layers;
};

// Keeps what one tensor of the first layer that has it holds, as it is computed.
class RowRecorder {
public:
    explicit RowRecorder(std::string name) : prefix(std::move(name) + "-") {}

    static bool callback(ggml_tensor * t, bool ask, void * self) {
        auto * recorder = static_cast<RowRecorder *>(self);
        if (ask) {
            return recorder->wants(t);
        }
        std::vector<float> values(ggml_nelements(t));
        ggml_backend_tensor_get(t, values.data(), 0, ggml_nbytes(t));
        recorder->values.insert(recorder->values.end(), values.begin(), values.end());
        return true;
    }

    std::vector<float> values;

private:
    bool wants(const ggml_tensor * t) {
        if (strncmp(t->name, prefix.c_str(), prefix.size()) != 0 || t->type != GGML_TYPE_F32 || !ggml_is_contiguous(t)) {
            return false;
        }
        if (tensor.empty()) {
            tensor = t->name;
        }
        return tensor == t->name;
    }

    const std::string prefix;
    std::string tensor;
};

// What contexts are made to tell as they compute, if anything.
struct Listener {
    ggml_backend_sched_eval_callback callback = nullptr;
    void * data                               = nullptr;
};
