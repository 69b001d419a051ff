#include "pq/pq_pages.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace hybridindex {
namespace {

constexpr std::int64_t kBytesAhead = 4 << 10;

}  // namespace

void scan_pq_pages(const PqPages& pages, const PqForm& form, const PagePlan& plan, const PqIds& ids, const PageTask& task,
                   const PqKernels& kernels) {
    check_plan(plan, pages.n_pages, pages.rows_per_page, task.n);
    for (std::int64_t l = 0; l < plan.n_lists; ++l)
        if (ids.starts[l] < 0 || ids.starts[l] > ids.n - plan.sizes[l])
            throw std::out_of_range("ids of list " + std::to_string(plan.list_ids[l]) + " begin at " +
                                    std::to_string(ids.starts[l]) + "; there are " + std::to_string(ids.n));
    PqQueries queries(form, kernels);
    queries.prepare(task.queries, task.n);
    std::vector<QueryHeap> heaps(static_cast<std::size_t>(task.n));
    for (std::int64_t q = 0; q < task.n; ++q)
        heaps[static_cast<std::size_t>(q)].reset(task.distances + q * task.k, task.positions + q * task.k, task.k);
    const std::int64_t row_bytes = form.row_bytes(), code_size = form.code_size();
    PqGroup group;
    group.make_room(std::min(kGroup, task.n));
    float terms[kPqRows] = {};
    for (std::int64_t l = 0; l < plan.n_lists; ++l) {
        const std::int32_t* const own = plan.pages + plan.page_starts[l];
        const std::int64_t* const own_ids = ids.base + ids.starts[l];
        const std::int64_t step = std::min(kGroup, task.n);
        for (std::int64_t first = plan.member_starts[l]; first < plan.member_starts[l + 1]; first += step) {
            const std::int32_t* const members = plan.members + first;
            const int n = static_cast<int>(std::min(step, plan.member_starts[l + 1] - first));
            group.start(queries, members, n, plan.centroids == nullptr ? nullptr : plan.centroids + l * form.dim);
            for (int m = 0; m < n; ++m) {
                QueryHeap& heap = heaps[static_cast<std::size_t>(members[m])];
                group.find_into(m, heap, heap);
            }
            // No block goes beyond its page.
            for (std::int64_t row = 0, count; row < plan.sizes[l]; row += count) {
                const std::int64_t in_page = row % pages.rows_per_page;
                count = std::min<std::int64_t>({kPqRows, pages.rows_per_page - in_page, plan.sizes[l] - row});
                const std::uint32_t wanted = plan.wanted(l, row, count);
                if (wanted == 0) continue;
                const std::uint8_t* const codes =
                    pages.base + own[row / pages.rows_per_page] * pages.page_bytes + in_page * row_bytes;
                for (std::int64_t i = 0; i < kPqRows * row_bytes; i += 64) __builtin_prefetch(codes + kBytesAhead + i, 0, 2);
                if (form.has_terms() && form.bits == 4)
                    std::memcpy(terms, codes + kPqRows * code_size, sizeof(terms));
                else if (form.has_terms())
                    for (std::int64_t r = 0; r < count; ++r)
                        std::memcpy(terms + r, codes + r * row_bytes + code_size, sizeof(float));
                group.compare({codes, row_bytes, terms, static_cast<int>(count), wanted, own_ids + row});
            }
        }
    }
    for (QueryHeap& heap : heaps) heap.finish(!form.l2);
}

RowQueries::Need pq_scratch_need(const PqForm& form, std::int64_t k) {
    return {.fixed = static_cast<std::int64_t>(sizeof(PqGroup)) + kPqRows * 4,
            .per_query = PqQueries::bytes_each(form) + PqGroup::bytes_each() + static_cast<std::int64_t>(sizeof(QueryHeap)) + 12 * k};
}

}  // namespace hybridindex
