#include "scan/scan_pages.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "simd/aligned_buffer.h"
#include "scan/row_scan.h"
#include "jobs/scan_items.h"

namespace hybridindex {
void check_plan(const PagePlan& plan, std::int64_t n_pages, std::int64_t rows_per_page, std::int64_t n) {
    for (std::int64_t l = 0; l < plan.n_lists; ++l) {
        if (plan.list_ids[l] < 0 || plan.list_ids[l] > std::numeric_limits<std::int32_t>::max())
            throw std::out_of_range("list id " + std::to_string(plan.list_ids[l]) + " does not fit a position");
        const std::int64_t held = plan.page_starts[l + 1] - plan.page_starts[l];
        if (plan.sizes[l] < 0 || plan.sizes[l] > std::numeric_limits<std::uint32_t>::max() ||
            plan.sizes[l] > held * rows_per_page)
            throw std::out_of_range("list " + std::to_string(plan.list_ids[l]) + " has more rows than its pages hold");
        if (plan.mask.bits != nullptr) {
            const std::int64_t list = plan.list_ids[l];
            if (list >= plan.mask.nlist || plan.mask.first[list] < 0 || plan.mask.first[list + 1] > plan.mask.n_bits ||
                plan.mask.first[list + 1] - plan.mask.first[list] != plan.sizes[l])
                throw std::out_of_range("list " + std::to_string(list) + " does not have a bit for each of its rows");
        }
        for (std::int64_t p = plan.page_starts[l]; p < plan.page_starts[l + 1]; ++p)
            if (plan.pages[p] < 0 || plan.pages[p] >= n_pages)
                throw std::out_of_range("page " + std::to_string(plan.pages[p]) + " is outside the arena");
        for (std::int64_t i = plan.member_starts[l]; i < plan.member_starts[l + 1]; ++i)
            if (plan.members[i] < 0 || plan.members[i] >= n)
                throw std::out_of_range("query " + std::to_string(plan.members[i]) + " is outside the batch");
    }
}

namespace {

// One call of scan_pages(). Blocks are rows 16 i .. 16 i + 15 of a list wherever these lie: what a page boundary or a
// gap between pages cuts is gathered.
class PageScan {
public:
    PageScan(const PagedCodes& codes, const PagePlan& plan, const PageTask& task, const BlockKernels& kernels)
        : codes_(codes), plan_(plan), task_(task),
          queries_(codes.rows, plan.centroids != nullptr, task.keep_max, kernels) {}

    void run() {
        make_work();
        // A query may probe a list twice: more members than queries.
        group_ = std::min({widest_, task_.n, kGroup});
        queries_.prepare(task_.queries, task_.n, task_.k, group_, task_.distances, task_.positions);
        scan_.make_room(queries_, group_);
        gathered_.grow(kBlockRows * codes_.rows.code_size);
        scan_.begin();
        for (std::size_t i = 0; i < items_.size(); ++i)
            scan(items_[i], i + 1 < items_.size() ? first_run(items_[i + 1]) : std::span<const std::uint8_t>{});
        scan_.end();
        for (std::int32_t q = 0; q < task_.n; ++q) queries_.heap(q).finish(task_.keep_max);
    }

private:
    void make_work() {
        std::vector<std::int64_t> extents(static_cast<std::size_t>(plan_.n_lists) * 3);
        probed_.starts.push_back(0);
        for (std::int64_t l = 0; l < plan_.n_lists; ++l) {
            extents[static_cast<std::size_t>(l) * 3] = plan_.sizes[l];
            const std::int32_t* first = plan_.members + plan_.member_starts[l];
            const std::int32_t* last = plan_.members + plan_.member_starts[l + 1];
            if (plan_.sizes[l] == 0 || first == last) continue;
            probed_.lists.push_back(l);
            probed_.members.insert(probed_.members.end(), first, last);
            probed_.starts.push_back(static_cast<std::int64_t>(probed_.members.size()));
            widest_ = std::max<std::int64_t>(widest_, last - first);
        }
        std::vector<std::int32_t> items_of_query;
        make_items(probed_, {extents.data(), codes_.rows.code_size, codes_.rows.dim}, task_.n, 1, false, items_, items_of_query);
    }

    // The list of an item, as a row of the plan.
    std::int64_t list_of(const ScanItem& item) const { return probed_.lists[static_cast<std::size_t>(item.list)]; }

    PagedList pages_of(const ScanItem& item) const {
        return {codes_, plan_.pages + plan_.page_starts[list_of(item)]};
    }

    std::span<const std::uint8_t> first_run(const ScanItem& item) const {
        const PagedList pages = pages_of(item);
        return {pages.row(item.first), static_cast<std::size_t>(pages.run(item.first, item.count) * codes_.rows.code_size)};
    }

    // `following` is what will be read after the item.
    void scan(const ScanItem& item, std::span<const std::uint8_t> following) {
        const std::size_t probed = static_cast<std::size_t>(item.list);
        const PagedList pages = pages_of(item);
        const float* centroid = plan_.centroids == nullptr ? nullptr : plan_.centroids + list_of(item) * codes_.rows.dim;
        const std::int64_t origin = plan_.list_ids[list_of(item)] << 32;
        for (std::int64_t first = probed_.starts[probed]; first < probed_.starts[probed + 1]; first += group_) {
            scan_.start_group(probed_.members.data() + first,
                              static_cast<int>(std::min(group_, probed_.starts[probed + 1] - first)), centroid, following);
            for (BlockWalk at(pages, item.first, item.first + item.count); at.more(); at.advance()) {
                const std::uint32_t wanted = plan_.wanted(list_of(item), at.first(), at.rows());
                if (wanted == 0) continue;
                scan_.scan({.codes = at.whole() ? at.row(0) : gather(at),
                            .n_rows = at.rows(),
                            .wanted = wanted,
                            .ids = nullptr,
                            .first_id = origin | at.first(),
                            .terms = {},
                            .next = block_at(at.fetch_next(following.data()))});
            }
        }
    }

    // A block, or nothing where there is none.
    std::span<const std::uint8_t> block_at(const std::uint8_t* codes) const {
        return {codes, codes == nullptr ? 0 : static_cast<std::size_t>(kBlockRows * codes_.rows.code_size)};
    }

    const std::uint8_t* gather(const BlockWalk& at) {
        const std::size_t row_bytes = static_cast<std::size_t>(codes_.rows.code_size);
        for (int r = 0; r < at.rows(); ++r)
            std::memcpy(gathered_.data() + r * codes_.rows.code_size, at.row(r), row_bytes);
        return gathered_.data();
    }

    const PagedCodes& codes_;
    const PagePlan& plan_;
    const PageTask& task_;

    ProbedLists probed_;  // rows of the plan
    std::vector<ScanItem> items_;
    std::int64_t widest_ = 0, group_ = 0;
    RowQueries queries_;
    RowScan scan_;
    AlignedBuffer<std::uint8_t> gathered_;  // a block that does not lie in one piece
};

}  // namespace

void scan_pages(const PagedCodes& codes, const PagePlan& plan, const PageTask& task, const BlockKernels& kernels) {
    check_plan(plan, codes.n_pages, codes.rows_per_page, task.n);
    PageScan(codes, plan, task, kernels).run();
}

RowQueries::Need scratch_need(const RowCodes& codes, bool has_centroids, std::int64_t k) {
    RowQueries::Need need = RowQueries(codes, has_centroids, false, best_kernels()).need(k);
    need.fixed += kBlockRows * codes.code_size;
    return need;
}

}  // namespace hybridindex
