// Probe split: which probed list is scanned where.
#pragma once
#include <cstdint>
#include <vector>

namespace hybridindex {

// The probes of one tier, compacted: only rows (queries) with work, only their own probes, in coarse order.
// probes and coarse are (rows.size(), width) row-major; short rows are padded with list id -1. A whole part has every
// probe of the batch; its vectors are empty, as they would repeat the input.
struct ProbePart {
    int device;  // -1: host
    bool whole = false;
    std::int64_t width = 0;
    std::vector<std::int32_t> rows;
    std::vector<std::int64_t> probes;
    std::vector<float> coarse;
    std::int64_t total_bytes = 0;  // code bytes behind the probes
};

// The probes of a batch: list ids, -1 = skip, and coarse distances, both (n, p).
struct Probes {
    const std::int64_t* lists;
    const float* coarse;
    std::int64_t n, p;
};

// Where each of nlist lists is: its device, -1 = host, and its code bytes.
struct ListPlaces {
    const std::int16_t* device;
    const std::int64_t* bytes;
    std::int64_t nlist;
    int n_devices;
};

// Written for each query, (n).
struct QuerySplit {
    float* hit_rate;        // resident bytes / probed bytes, 0 where nothing was probed
    std::int32_t* n_parts;  // parts that hold work of it
    std::int32_t* n_probes; // probes that are list ids
};

// Parts with work: host first, then devices in order. Throws std::out_of_range for a probe outside [-1, nlist) and for a
// device outside [-1, n_devices).
std::vector<ProbePart> split_probes(const Probes& batch, const ListPlaces& places, const QuerySplit& out);

}  // namespace hybridindex
