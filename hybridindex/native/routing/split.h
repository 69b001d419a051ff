// Probe split: which probed list is scanned where.
#pragma once
#include <cstdint>
#include <vector>

namespace hybridindex {

// The probes of one tier, compacted: only rows (queries) with work, only their own probes, in coarse order.
// probes and coarse are (rows.size(), width) row-major; short rows are padded with list id -1. A whole part has every
// probe of the batch and leaves the vectors empty: they would be copies of what came in.
struct ProbePart {
    int device;  // -1: host
    bool whole = false;
    std::int64_t width = 0;
    std::vector<std::int32_t> rows;
    std::vector<std::int64_t> probes;
    std::vector<float> coarse;
    std::int64_t total_bytes = 0;  // code bytes behind the probes
};

// Parts with work: host first, then devices in order. Writes for each of the n queries: hit_rate, resident bytes /
// probed bytes or 0 where nothing was probed; n_parts, parts that hold work of it; n_probes, probes that are list ids.
// Throws std::out_of_range for a probe outside [-1, nlist) and for a device outside [-1, n_devices).
std::vector<ProbePart> split_probes(const std::int64_t* probes, const float* coarse, std::int64_t n, std::int64_t p,
                                    const std::int16_t* list_device, const std::int64_t* list_bytes,
                                    std::int64_t nlist, int n_devices, float* hit_rate, std::int32_t* n_parts,
                                    std::int32_t* n_probes);

}  // namespace hybridindex
