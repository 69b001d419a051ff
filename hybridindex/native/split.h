// Probe split: which probed list is scanned where.
#pragma once
#include <cstdint>
#include <vector>

namespace hybridindex {

// The probes of one tier, compacted: only rows (queries) with work, only their own probes, in coarse order.
// probes and coarse are (rows.size(), width) row-major; short rows are padded with list id -1.
struct ProbePart {
    int device;  // -1: host
    std::int64_t width;
    std::vector<std::int32_t> rows;
    std::vector<std::int64_t> probes;
    std::vector<float> coarse;
    std::vector<std::int64_t> work_bytes;  // per row
    std::int64_t total_bytes = 0;          // their sum
};

struct SplitResult {
    std::vector<ProbePart> parts;         // host first when it has work, then devices in order; empty parts left out
    std::vector<float> hit_rate;          // (n) resident bytes / probed bytes; 0 where nothing was probed
    std::vector<std::int32_t> n_parts;    // (n) parts that hold work of this query
    std::vector<std::int32_t> n_probes;   // (n) probes that are list ids
};

// Throws std::out_of_range for a probe outside [-1, nlist) and for a device outside [-1, n_devices).
SplitResult split_probes(const std::int64_t* probes, const float* coarse, std::int64_t n, std::int64_t p,
                         const std::int16_t* list_device, const std::int64_t* list_bytes, std::int64_t nlist,
                         int n_devices);

}  // namespace hybridindex
