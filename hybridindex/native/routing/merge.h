// Top-k merge of one tier's answer into the batch's running answer.
#pragma once
#include <cstdint>

namespace hybridindex {

// For every i: merges part row i, (m, part_k) best first, into best row rows[i], (n, k) sorted by (distance, id).
// Empty places are id -1; their distance becomes +inf (keep_max: -inf). Equal distances are ordered by id.
void merge_topk(float* best_distances, std::int64_t* best_ids, std::int64_t n, std::int64_t k,
                const std::int32_t* rows, const float* part_distances, const std::int64_t* part_ids, std::int64_t m,
                std::int64_t part_k, bool keep_max);

// Puts one scanner's complete answer, (n, k) best first, into its public form, in place: ties by id, empty places last with
// id -1 and an infinite distance. What merge_topk into an empty answer leaves.
void finish_topk(float* distances, std::int64_t* ids, std::int64_t n, std::int64_t k, bool keep_max);

}  // namespace hybridindex
