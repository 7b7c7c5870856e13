// The one header that bindgen reads: everything of ggml that moe-hot touches, and what it offers to patched programs.
// ggml-impl.h is here for struct ggml_cgraph, which backends receive but the public headers hide.
#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "moe_hot_api.h"
