#include "routing/merge.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace hybridindex {
namespace {

struct Hit {
    float distance;
    std::int64_t id;
};

float worst_distance(bool keep_max) {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    return keep_max ? -infinity : infinity;
}

auto better(bool keep_max) {
    return [keep_max](const Hit& a, const Hit& b) {
        if (a.distance != b.distance) return keep_max ? a.distance > b.distance : a.distance < b.distance;
        return a.id < b.id;
    };
}

}  // namespace

void finish_topk(const TopK& answer, bool keep_max) {
    auto [distances, ids, n, k] = answer;
    const auto before = better(keep_max);
    std::vector<Hit> hits;
    for (std::int64_t row = 0; row < n; ++row, distances += k, ids += k) {
        bool in_order = true;
        for (std::int64_t j = 0; j + 1 < k && in_order; ++j)
            in_order = ids[j + 1] < 0 || (ids[j] >= 0 && !before({distances[j + 1], ids[j + 1]}, {distances[j], ids[j]}));
        if (!in_order) {
            hits.clear();
            for (std::int64_t j = 0; j < k; ++j)
                if (ids[j] >= 0) hits.push_back({distances[j], ids[j]});
            std::sort(hits.begin(), hits.end(), before);
            for (std::int64_t j = 0; j < k; ++j) {
                const bool filled = j < static_cast<std::int64_t>(hits.size());
                distances[j] = filled ? hits[j].distance : 0.0f;
                ids[j] = filled ? hits[j].id : -1;
            }
        }
        for (std::int64_t j = k; j-- > 0 && ids[j] < 0;) {
            ids[j] = -1;
            distances[j] = worst_distance(keep_max);
        }
    }
}

void merge_topk(TopK best, PartTopK coming, bool keep_max) {
    const auto [best_distances, best_ids, n, k] = best;
    const auto [rows, part_distances, part_ids, m, part_k] = coming;
    const float worst = worst_distance(keep_max);
    const auto before = better(keep_max);
    std::vector<Hit> part, merged(k);
    for (std::int64_t i = 0; i < m; ++i) {
        const std::int64_t row = rows[i];
        if (row < 0 || row >= n) throw std::out_of_range("row " + std::to_string(row) + " is outside the batch");
        part.clear();
        for (std::int64_t j = 0; j < part_k; ++j)
            if (part_ids[i * part_k + j] >= 0 && part_distances[i * part_k + j] == part_distances[i * part_k + j])
                part.push_back({part_distances[i * part_k + j], part_ids[i * part_k + j]});
        // Scanners answer sorted by distance, with ties in any order.
        if (!std::is_sorted(part.begin(), part.end(), before)) std::sort(part.begin(), part.end(), before);
        float* distances = best_distances + row * k;
        std::int64_t* ids = best_ids + row * k;
        std::int64_t a = 0, b = 0, filled = 0;
        while (filled < k) {
            const bool has_a = a < k && ids[a] >= 0;
            const bool has_b = b < static_cast<std::int64_t>(part.size());
            if (!has_a && !has_b) break;
            if (has_a && (!has_b || !before(part[b], Hit{distances[a], ids[a]}))) {
                merged[filled++] = {distances[a], ids[a]};
                ++a;
            } else {
                merged[filled++] = part[b++];
            }
        }
        for (std::int64_t j = 0; j < k; ++j) {
            distances[j] = j < filled ? merged[j].distance : worst;
            ids[j] = j < filled ? merged[j].id : -1;
        }
    }
}

bool leave_out(TopK best, const float* distances, const std::int64_t* ids, std::int64_t width, const std::int64_t* gone,
               std::int64_t n_gone, bool keep_max) {
    auto [out, out_ids, n, k] = best;
    for (std::int64_t row = 0; row < n; ++row, distances += width, ids += width, out += k, out_ids += k) {
        std::int64_t kept = 0;
        for (std::int64_t j = 0; j < width && kept < k; ++j) {
            if (std::binary_search(gone, gone + n_gone, ids[j])) continue;
            out[kept] = distances[j];
            out_ids[kept++] = ids[j];
        }
        if (kept < k && ids[width - 1] >= 0) return false;
        std::fill(out + kept, out + k, worst_distance(keep_max));
        std::fill(out_ids + kept, out_ids + k, std::int64_t{-1});
    }
    return true;
}

}  // namespace hybridindex
