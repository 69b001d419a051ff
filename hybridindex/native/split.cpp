#include "split.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace hybridindex {

SplitResult split_probes(const std::int64_t* probes, const float* coarse, std::int64_t n, std::int64_t p,
                         const std::int16_t* list_device, const std::int64_t* list_bytes, std::int64_t nlist,
                         int n_devices) {
    const int n_tiers = n_devices + 1;  // slot 0 is the host
    // First pass: how many probes each (tier, query) holds, and the bytes behind them.
    std::vector<std::int32_t> counts(static_cast<std::size_t>(n_tiers) * n, 0);
    std::vector<std::int64_t> work(static_cast<std::size_t>(n_tiers) * n, 0);
    for (std::int64_t q = 0; q < n; ++q) {
        for (std::int64_t j = 0; j < p; ++j) {
            const std::int64_t list = probes[q * p + j];
            if (list == -1) continue;
            if (list < -1 || list >= nlist)
                throw std::out_of_range("probe " + std::to_string(list) + " of query " + std::to_string(q) +
                                        " is not a list id: expected -1 or 0.." + std::to_string(nlist - 1));
            const int device = list_device[list];
            if (device < -1 || device >= n_devices)
                throw std::out_of_range("list " + std::to_string(list) + " is mapped to device " +
                                        std::to_string(device) + " of " + std::to_string(n_devices));
            const std::size_t slot = static_cast<std::size_t>(device + 1) * n + q;
            ++counts[slot];
            work[slot] += list_bytes[list];
        }
    }

    SplitResult out;
    out.hit_rate.assign(n, 0.0f);
    out.n_parts.assign(n, 0);
    out.n_probes.assign(n, 0);
    std::vector<std::int32_t> row_of(static_cast<std::size_t>(n_tiers) * n, -1);
    std::vector<int> part_of(n_tiers, -1);
    for (int t = 0; t < n_tiers; ++t) {
        ProbePart part{t - 1, 0, {}, {}, {}, {}, 0};
        for (std::int64_t q = 0; q < n; ++q) {
            const std::size_t slot = static_cast<std::size_t>(t) * n + q;
            if (counts[slot] == 0) continue;
            row_of[slot] = static_cast<std::int32_t>(part.rows.size());
            part.rows.push_back(static_cast<std::int32_t>(q));
            part.work_bytes.push_back(work[slot]);
            part.total_bytes += work[slot];
            out.n_probes[q] += counts[slot];
            part.width = std::max<std::int64_t>(part.width, counts[slot]);
            ++out.n_parts[q];
        }
        if (part.rows.empty()) continue;
        part.probes.assign(part.rows.size() * part.width, -1);
        part.coarse.assign(part.rows.size() * part.width, 0.0f);
        part_of[t] = static_cast<int>(out.parts.size());
        out.parts.push_back(std::move(part));
    }

    // Second pass: fill, keeping coarse order (scanners fill their heaps with near lists first).
    std::fill(counts.begin(), counts.end(), 0);
    for (std::int64_t q = 0; q < n; ++q) {
        std::int64_t total = 0, resident = 0;
        for (int t = 0; t < n_tiers; ++t) {
            total += work[static_cast<std::size_t>(t) * n + q];
            if (t > 0) resident += work[static_cast<std::size_t>(t) * n + q];
        }
        if (total > 0) out.hit_rate[q] = static_cast<float>(static_cast<double>(resident) / static_cast<double>(total));
        for (std::int64_t j = 0; j < p; ++j) {
            const std::int64_t list = probes[q * p + j];
            if (list == -1) continue;
            const int tier = list_device[list] + 1;
            const std::size_t slot = static_cast<std::size_t>(tier) * n + q;
            ProbePart& part = out.parts[part_of[tier]];
            const std::size_t at = static_cast<std::size_t>(row_of[slot]) * part.width + counts[slot]++;
            part.probes[at] = list;
            part.coarse[at] = coarse[q * p + j];
        }
    }
    return out;
}

}  // namespace hybridindex
