// Top-k merge of one tier's answer into the batch's running answer.
#pragma once
#include <cstdint>

namespace hybridindex {

// An answer, (n, k): sorted by (distance, id). Empty places come last; they have id -1 and distance +inf, or -inf where
// larger is better (keep_max).
struct TopK {
    float* distances;
    std::int64_t* ids;
    std::int64_t n, k;
};

// One tier's answer to some rows of a batch, (m, k) best first; equal distances in any order.
struct PartTopK {
    const std::int32_t* rows;
    const float* distances;
    const std::int64_t* ids;
    std::int64_t m, k;
};

// Merges row i of `coming` into row coming.rows[i] of `best`, for every i.
void merge_topk(TopK best, PartTopK coming, bool keep_max);

// Sorts one scanner's complete answer, best first, in place: the same result as merge_topk into an empty answer.
void finish_topk(const TopK& answer, bool keep_max);

// The first best.k of each row of an answer (best.n, width) whose ids are not among n_gone ascending ones. False where a
// row has fewer of them and might have had more.
bool leave_out(TopK best, const float* distances, const std::int64_t* ids, std::int64_t width, const std::int64_t* gone,
               std::int64_t n_gone, bool keep_max);

}  // namespace hybridindex
