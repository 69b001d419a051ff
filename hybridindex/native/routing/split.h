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

// Who scans each probe (n, p) where other nodes of a cluster do: -1 = a tier here, j = node j, -2 = nobody has its list.
struct ProbeNodes {
    const std::int16_t* where;
    int n_nodes;
    // Written for each query, (n): code bytes of all its probes, and of those that nobody has.
    std::int64_t* work;
    std::int64_t* lost;
};

// Parts with work: host first, then devices in order, then nodes, as devices n_devices + j; nodes: null where all lists
// are here. Throws std::out_of_range for a probe outside [-1, nlist), a device outside [-1, n_devices) and a node outside
// [-2, n_nodes).
std::vector<ProbePart> split_probes(const Probes& batch, const ListPlaces& places, const QuerySplit& out,
                                    const ProbeNodes* nodes = nullptr);

}  // namespace hybridindex
