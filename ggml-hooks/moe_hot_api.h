// What the plugin offers to programs that were patched with ggml-hooks/patches, under the name "moe_hot_api_v1"
// (ggml_backend_reg_get_proc_address). Texts are UTF-8 and end with NUL; those that are returned as `char *` are given back
// with `free_text`. Every function may be called from any thread at any time; NULL comes back after an internal error.
#ifndef MOE_HOT_API_H
#define MOE_HOT_API_H

#include <stddef.h>
#include <stdint.h>

#define MOE_HOT_API_NAME "moe_hot_api_v1"
#define MOE_HOT_API_VERSION 1

#ifdef __cplusplus
extern "C" {
#endif

// (token, expert) pairs of all models since the program was started.
struct moe_hot_totals {
    uint64_t requests;
    uint64_t hits; // those whose expert was resident
};

struct moe_hot_api_v1 {
    uint32_t version; // MOE_HOT_API_VERSION
    size_t   size;    // of this struct, as the plugin knows it

    // Checks what the user has said before a model is loaded, and says what follows from it. JSON in and out: `Request` and
    // `Answer` in src/cli/native.rs.
    char * (*prepare)(const char * request);
    // What was counted since the mode was last set, who is resident, and the resolved configuration, as JSON.
    char * (*snapshot)(void);
    // {"mode": "full" | "update" | "off"}. The answer is a snapshot, or {"error": {"kind", "message"}}.
    char * (*set_mode)(const char * body, size_t len);
    // A profile, or {"profile": {...}, "save_to_disk": true}. The answer says what was done, or {"error": {"kind", "message"}}.
    char * (*apply_profile)(const char * body, size_t len);
    // Lines for Prometheus.
    char * (*metrics)(void);
    void (*totals)(struct moe_hot_totals * totals);
    void (*free_text)(char * text);
};

#ifdef __cplusplus
}
#endif

#endif
