#include "rabitq/code_pages.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

namespace hybridindex {
namespace {

// Bytes between what is compared and what is fetched.
constexpr std::int64_t kPageBytesAhead = 2 << 10;

}  // namespace

void scan_code_pages(const CodePages& pages, const PagePlan& plan, const CodePageTask& task, const BlockKernels& blocks,
                     const RabitqKernels& kernels) {
    const PageTask& answer = task.answer;
    check_plan(plan, pages.n_pages, pages.rows_per_page, answer.n);
    CodedQueries queries(pages.format);
    queries.prepare(answer.queries, answer.n);
    std::vector<Candidates> heaps(static_cast<std::size_t>(answer.n));
    for (std::int64_t q = 0; q < answer.n; ++q)
        heaps[static_cast<std::size_t>(q)].reset(answer.distances + q * answer.k, answer.positions + q * answer.k, answer.k);
    CodedRun run = run_of(pages.format, blocks, kPageBytesAhead);
    CodedGroup group;
    group.make_room(kGroup);
    for (std::int64_t l = 0; l < plan.n_lists; ++l) {
        const std::int32_t* const own = plan.pages + plan.page_starts[l];
        const std::int64_t size = plan.sizes[l], rows_of_page = pages.rows_per_page;
        for (std::int64_t first = plan.member_starts[l]; first < plan.member_starts[l + 1]; first += kGroup) {
            const std::int32_t* const members = plan.members + first;
            const int n = static_cast<int>(std::min(kGroup, plan.member_starts[l + 1] - first));
            // CodedGroup tells by its neighbours whether a query comes twice.
            if (!std::is_sorted(members, members + n)) throw std::invalid_argument("members of a list must be in order");
            group.start(pages.format, queries, members, n, task.centre_products + first, task.centre_squares[l]);
            for (int m = 0; m < n; ++m) {
                Candidates& heap = heaps[static_cast<std::size_t>(members[m])];
                group.find_into(m, heap, heap);
            }
            for (std::int64_t row = 0; row < size; row += rows_of_page) {
                const auto page = [&](std::int64_t of) {
                    return pages.base + own[of / rows_of_page] * pages.page_bytes;
                };
                const std::int64_t behind = std::clamp<std::int64_t>(size - row - rows_of_page, 0, rows_of_page);
                run.blocks = page(row);
                run.rows = std::min(rows_of_page, size - row);
                run.later = behind > 0 ? page(row + rows_of_page) : nullptr;
                run.later_bytes = (behind + kCodedRows - 1) / kCodedRows * run.block_bytes;
                group.compare(run, plan.list_ids[l] << 32 | row, kernels);
            }
        }
    }
    for (Candidates& heap : heaps) heap.finish();
}

RowQueries::Need code_scratch_need(const CodeFormat& format, std::int64_t k) {
    const std::int64_t query = 4 + format.dims() + format.chunks() * kTableBytes +
                               static_cast<std::int64_t>(sizeof(Candidates)) + Candidates::most_bytes(k);
    return {.fixed = kGroup * kCodedRows * 8 + 4 * format.dims() + static_cast<std::int64_t>(sizeof(CodedGroup)),
            .per_query = query};
}

}  // namespace hybridindex
