#include "scan_pages.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "distances.h"

namespace hybridindex {
namespace {

// Rows decoded at a time: they stay in the first-level cache while all queries of the list pass over them.
constexpr std::int64_t kRowTile = 16;

struct Candidate {
    float score;  // smaller is better
    std::int64_t position;
};

bool worse_on_top(const Candidate& a, const Candidate& b) { return a.score < b.score; }

void check(const PagedCodes& codes, const ScanPlan& plan, std::int64_t n) {
    for (std::int64_t l = 0; l < plan.n_lists; ++l) {
        if (plan.list_ids[l] < 0 || plan.list_ids[l] > std::numeric_limits<std::int32_t>::max())
            throw std::out_of_range("list id " + std::to_string(plan.list_ids[l]) + " does not fit a position");
        const std::int64_t held = plan.page_starts[l + 1] - plan.page_starts[l];
        if (plan.sizes[l] < 0 || plan.sizes[l] > std::numeric_limits<std::uint32_t>::max() ||
            plan.sizes[l] > held * codes.rows_per_page)
            throw std::out_of_range("list " + std::to_string(plan.list_ids[l]) + " has more rows than its pages hold");
        for (std::int64_t p = plan.page_starts[l]; p < plan.page_starts[l + 1]; ++p)
            if (plan.pages[p] < 0 || plan.pages[p] >= codes.n_pages)
                throw std::out_of_range("page " + std::to_string(plan.pages[p]) + " is outside the arena");
        for (std::int64_t i = plan.member_starts[l]; i < plan.member_starts[l + 1]; ++i)
            if (plan.members[i] < 0 || plan.members[i] >= n)
                throw std::out_of_range("query " + std::to_string(plan.members[i]) + " is outside the batch");
    }
}

// Rows [first, first + count) of a list, decoded, as kRowTile pointers; f32 rows are read in place.
void decode_rows(const PagedCodes& codes, const std::int32_t* pages, std::int64_t first, std::int64_t count,
                 const float* centroid, std::vector<float>& buffer, const float** rows) {
    for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t row = first + i;
        const std::uint8_t* code = codes.base + static_cast<std::int64_t>(pages[row / codes.rows_per_page]) * codes.page_bytes +
                                   (row % codes.rows_per_page) * codes.code_size;
        if (codes.kind == CodeKind::f32 && centroid == nullptr) {
            rows[i] = reinterpret_cast<const float*>(code);
            continue;
        }
        float* decoded = buffer.data() + i * codes.dim;
        if (codes.kind == CodeKind::sq8)
            decode_sq8(code, codes.scale, codes.offset, codes.dim, decoded);
        else if (codes.kind == CodeKind::f16)
            decode_f16(code, codes.dim, decoded);
        else
            std::copy_n(reinterpret_cast<const float*>(code), codes.dim, decoded);
        if (centroid != nullptr)
            for (std::int64_t j = 0; j < codes.dim; ++j) decoded[j] += centroid[j];
        rows[i] = decoded;
    }
}

}  // namespace

void scan_pages(const PagedCodes& codes, const ScanPlan& plan, const float* queries, std::int64_t n, std::int64_t k,
                bool keep_max, float* distances, std::int64_t* positions) {
    check(codes, plan, n);
    // Per query a heap of its k best, worst on top.
    std::vector<Candidate> heaps(static_cast<std::size_t>(n) * k);
    std::vector<std::int64_t> held(n, 0);
    const bool in_place = codes.kind == CodeKind::f32 && plan.centroids == nullptr;
    std::vector<float> buffer(in_place ? 0 : kRowTile * codes.dim);
    const float* rows[kRowTile];
    for (std::int64_t l = 0; l < plan.n_lists; ++l) {
        const std::int32_t* pages = plan.pages + plan.page_starts[l];
        const float* centroid = plan.centroids == nullptr ? nullptr : plan.centroids + l * codes.dim;
        for (std::int64_t first = 0; first < plan.sizes[l]; first += kRowTile) {
            const std::int64_t count = std::min(kRowTile, plan.sizes[l] - first);
            decode_rows(codes, pages, first, count, centroid, buffer, rows);
            for (std::int64_t m = plan.member_starts[l]; m < plan.member_starts[l + 1]; m += kQueryTile) {
                const std::int64_t in_tile = std::min<std::int64_t>(kQueryTile, plan.member_starts[l + 1] - m);
                const float* x[kQueryTile];
                for (int i = 0; i < kQueryTile; ++i)  // a short tile repeats its last query
                    x[i] = queries + plan.members[m + std::min<std::int64_t>(i, in_tile - 1)] * codes.dim;
                for (std::int64_t r = 0; r < count; ++r) {
                    float found[kQueryTile];
                    if (keep_max)
                        inner_products(rows[r], x, codes.dim, found);
                    else
                        squared_l2(rows[r], x, codes.dim, found);
                    for (std::int64_t i = 0; i < in_tile; ++i) {
                        const std::int64_t q = plan.members[m + i];
                        // As in faiss: what is not a number, or as far as can be, is no candidate.
                        if (!((keep_max ? -found[i] : found[i]) < std::numeric_limits<float>::max())) continue;
                        const Candidate candidate{keep_max ? -found[i] : found[i],
                                                  plan.list_ids[l] << 32 | (first + r)};
                        Candidate* heap = heaps.data() + q * k;
                        if (held[q] < k) {
                            heap[held[q]++] = candidate;
                            std::push_heap(heap, heap + held[q], worse_on_top);
                        } else if (candidate.score < heap[0].score) {
                            std::pop_heap(heap, heap + k, worse_on_top);
                            heap[k - 1] = candidate;
                            std::push_heap(heap, heap + k, worse_on_top);
                        }
                    }
                }
            }
        }
    }
    const float empty = keep_max ? -std::numeric_limits<float>::infinity() : std::numeric_limits<float>::infinity();
    for (std::int64_t q = 0; q < n; ++q) {
        Candidate* heap = heaps.data() + q * k;
        std::sort_heap(heap, heap + held[q], worse_on_top);
        for (std::int64_t j = 0; j < k; ++j) {
            distances[q * k + j] = j < held[q] ? (keep_max ? -heap[j].score : heap[j].score) : empty;
            positions[q * k + j] = j < held[q] ? heap[j].position : -1;
        }
    }
}

}  // namespace hybridindex
