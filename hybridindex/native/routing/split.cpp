#include "routing/split.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace hybridindex {

namespace {

constexpr int kNobody = -2;  // of ProbeNodes

std::string probe_name(std::int64_t q, std::int64_t list) {
    return "probe " + std::to_string(list) + " of query " + std::to_string(q);
}

}  // namespace

std::vector<ProbePart> split_probes(const Probes& batch, const ListPlaces& places, const QuerySplit& out,
                                    const ProbeNodes* nodes) {
    // Copies: what is written below could otherwise change them, as far as the compiler knows.
    const auto [probes, coarse, n, p] = batch;
    const auto [list_device, list_bytes, nlist, n_devices] = places;
    const auto [hit_rate, n_parts, n_probes] = out;
    const std::int16_t* const where = nodes ? nodes->where : nullptr;
    const int n_nodes = nodes ? nodes->n_nodes : 0;
    const int n_tiers = 1 + n_devices + n_nodes;  // slot 0 is the host
    // First pass: how many probes each (query, tier) holds, and the bytes behind them.
    std::vector<std::int32_t> counts(static_cast<std::size_t>(n) * n_tiers, 0);
    std::vector<std::int64_t> total_bytes(n_tiers, 0);
    std::vector<std::int64_t> total_count(n_tiers, 0);
    for (std::int64_t q = 0; q < n; ++q) {
        std::int32_t* const mine = counts.data() + q * n_tiers;
        std::int64_t all = 0, resident = 0, lost = 0;
        n_parts[q] = n_probes[q] = 0;
        for (std::int64_t j = 0; j < p; ++j) {
            const std::int64_t list = probes[q * p + j];
            if (list == -1) continue;
            if (list < -1 || list >= nlist)
                throw std::out_of_range(probe_name(q, list) + " is not a list id: expected -1 or 0.." +
                                        std::to_string(nlist - 1));
            const std::int64_t bytes = list_bytes[list];
            const int node = where ? where[q * p + j] : -1;
            ++n_probes[q];
            all += bytes;
            if (node != -1) {
                if (node < kNobody || node >= n_nodes)
                    throw std::out_of_range(probe_name(q, list) + " is for node " + std::to_string(node) + " of " +
                                            std::to_string(n_nodes));
                if (node == kNobody) {
                    lost += bytes;
                    continue;
                }
                const int tier = 1 + n_devices + node;
                n_parts[q] += mine[tier]++ == 0;
                total_bytes[tier] += bytes;
                continue;
            }
            const int device = list_device[list];
            if (device < -1 || device >= n_devices)
                throw std::out_of_range("list " + std::to_string(list) + " is mapped to device " +
                                        std::to_string(device) + " of " + std::to_string(n_devices));
            n_parts[q] += mine[device + 1]++ == 0;
            total_bytes[device + 1] += bytes;
            if (device >= 0) resident += bytes;
        }
        if (nodes) nodes->work[q] = all, nodes->lost[q] = lost;
        hit_rate[q] = all > 0 ? static_cast<float>(static_cast<double>(resident) / static_cast<double>(all)) : 0.0f;
        for (int t = 0; t < n_tiers; ++t) total_count[t] += mine[t];
    }

    std::vector<ProbePart> parts;
    std::vector<ProbePart*> part_of(n_tiers, nullptr);
    parts.reserve(n_tiers);
    for (int t = 0; t < n_tiers; ++t) {
        if (total_count[t] == 0) continue;
        ProbePart& part = *(part_of[t] = &parts.emplace_back());
        part.device = t - 1;
        part.total_bytes = total_bytes[t];
        part.whole = total_count[t] == n * p;
        if (part.whole) return parts;
        for (std::int64_t q = 0; q < n; ++q) {
            const std::int32_t count = counts[q * n_tiers + t];
            if (count == 0) continue;
            part.rows.push_back(static_cast<std::int32_t>(q));
            part.width = std::max<std::int64_t>(part.width, count);
        }
        part.probes.assign(part.rows.size() * part.width, -1);
        part.coarse.assign(part.rows.size() * part.width, 0.0f);
    }

    // Second pass: fill, keeping coarse order (scanners fill their heaps with near lists first).
    std::vector<std::int64_t> rows_filled(n_tiers, 0), at(n_tiers);
    for (std::int64_t q = 0; q < n; ++q) {
        for (int t = 0; t < n_tiers; ++t)
            if (counts[q * n_tiers + t] > 0) at[t] = rows_filled[t]++ * part_of[t]->width;
        for (std::int64_t j = 0; j < p; ++j) {
            const std::int64_t list = probes[q * p + j];
            if (list == -1) continue;
            const int node = where ? where[q * p + j] : -1;
            if (node == kNobody) continue;
            const int t = node == -1 ? list_device[list] + 1 : 1 + n_devices + node;
            part_of[t]->probes[at[t]] = list;
            part_of[t]->coarse[at[t]++] = coarse[q * p + j];
        }
    }
    return parts;
}

}  // namespace hybridindex
