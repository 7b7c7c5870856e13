// Counts how often somebody waits for a device: through ggml's interface, so that it works for any backend.
#pragma once

#include <cstdint>
#include <string>

struct Waits {
    uint64_t waits           = 0;  // for all that an instance, or an event, has to do
    uint64_t blocking_copies = 0;  // between the device and the host
};

// From now on counts for all instances of the device, and all buffers of its type, that are made later.
void count_waits(const std::string & device);

Waits waits_so_far();
