#include "rabitq/code_pages.h"

#include <algorithm>
#include <vector>

namespace hybridindex {
namespace {

// Bytes between what is compared and what is fetched.
constexpr std::int64_t kPageBytesAhead = 2 << 10;

// The blocks of one list in its pages.
class PagedBlocks {
public:
    PagedBlocks(const CodePages& pages, const std::int32_t* own, std::int64_t size)
        : pages_(pages), own_(own), size_(size), block_bytes_(pages.format.block_bytes()) {}

    // The block that begins with this row.
    const std::uint8_t* at(std::int64_t row) const {
        return pages_.base + own_[row / pages_.rows_per_page] * pages_.page_bytes +
               row % pages_.rows_per_page / kCodedRows * block_bytes_;
    }
    void fetch(std::int64_t row) const {
        if (row >= size_) return;
        const std::uint8_t* const block = at(row);
        for (std::int64_t i = 0; i < block_bytes_; i += 64) __builtin_prefetch(block + i, 0, 2);
    }

private:
    const CodePages& pages_;
    const std::int32_t* const own_;
    const std::int64_t size_, block_bytes_;
};

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
    const std::int64_t ahead = (kPageBytesAhead / pages.format.block_bytes() + 1) * kCodedRows;
    CodedGroup group;
    group.make_room(kGroup);
    for (std::int64_t l = 0; l < plan.n_lists; ++l) {
        const PagedBlocks list(pages, plan.pages + plan.page_starts[l], plan.sizes[l]);
        for (std::int64_t first = plan.member_starts[l]; first < plan.member_starts[l + 1]; first += kGroup) {
            const std::int32_t* const members = plan.members + first;
            const int n = static_cast<int>(std::min(kGroup, plan.member_starts[l + 1] - first));
            group.start(pages.format, queries, members, n, task.centre_products + first, task.centre_squares[l]);
            for (int m = 0; m < n; ++m) {
                Candidates& heap = heaps[static_cast<std::size_t>(members[m])];
                group.find_into(m, heap, heap);
            }
            for (std::int64_t row = 0; row < plan.sizes[l]; row += kCodedRows) {
                list.fetch(row + ahead);
                group.compare(list.at(row), plan.sizes[l] - row, plan.list_ids[l] << 32 | row, blocks, kernels);
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
