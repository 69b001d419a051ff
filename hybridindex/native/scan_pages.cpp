#include "scan_pages.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "block_rows.h"
#include "integer_query.h"
#include "query_heap.h"
#include "scan_items.h"

namespace hybridindex {
namespace {

// Queries compared with a block before the next block is read: bounds the scratch.
constexpr std::int64_t kGroup = 256;

void check(const PagedCodes& codes, const PagePlan& plan, std::int64_t n) {
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

// One call of scan_pages(). Blocks are rows 16 i .. 16 i + 15 of a list wherever these lie: what a page boundary or a
// gap between pages cuts is gathered.
class PageScan {
public:
    PageScan(const PagedCodes& codes, const PagePlan& plan, const PageTask& task, const BlockKernels& kernels)
        : codes_(codes), rows_(codes.rows), plan_(plan), task_(task), kernels_(kernels), dim_(padded_dim(rows_.dim)),
          code_dim_(padded_code(rows_.dim)), integer_(is_integer(rows_, plan.centroids != nullptr)),
          direct_(is_direct(rows_, plan.centroids != nullptr)) {}

    void run() {
        make_work();
        copy_queries();
        if (integer_) make_integer_queries();
        make_room();
        if (integer_) kernels_.begin();
        for (std::size_t i = 0; i < items_.size(); ++i) {
            following_ = i + 1 < items_.size() ? first_run(items_[i + 1]) : std::span<const std::uint8_t>{};
            later_ = following_;
            scan(items_[i]);
        }
        if (integer_) kernels_.end();
        for (QueryHeap& heap : heaps_) heap.finish(task_.keep_max);
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
        make_items(probed_, extents.data(), rows_.code_size, rows_.dim, task_.n, 1, false, items_, items_of_query);
    }

    void copy_queries() {
        queries_.assign(static_cast<std::size_t>(task_.n * dim_), 0.0f);
        const float sign = task_.keep_max ? -1.0f : 1.0f;
        for (std::int64_t q = 0; q < task_.n; ++q)
            for (std::int64_t i = 0; i < rows_.dim; ++i)
                queries_[static_cast<std::size_t>(q * dim_ + i)] = sign * task_.queries[q * rows_.dim + i];
    }

    void make_integer_queries() {
        weights_.assign(static_cast<std::size_t>(task_.n * code_dim_), 0);
        std::vector<float> w(static_cast<std::size_t>(rows_.dim));
        whole_.reserve(static_cast<std::size_t>(task_.n));
        for (std::int64_t q = 0; q < task_.n; ++q)
            whole_.push_back(make_integer_query(kernels_, rows_, task_.keep_max, queries_.data() + q * dim_, w.data(),
                                                weights_.data() + q * code_dim_));
    }

    void make_room() {
        heaps_.resize(static_cast<std::size_t>(task_.n));
        for (std::int64_t q = 0; q < task_.n; ++q)
            heaps_[static_cast<std::size_t>(q)].reset(task_.distances + q * task_.k, task_.positions + q * task_.k, task_.k);
        // A query may probe a list twice: more members than queries.
        group_ = std::min({widest_, task_.n, kGroup});
        block_.resize(static_cast<std::size_t>(kBlockRows * dim_));
        if (integer_) {
            bytes_.resize(static_cast<std::size_t>(kBlockRows * code_dim_));
            packed_.resize(static_cast<std::size_t>(kernels_.packed_bytes(static_cast<int>(group_), code_dim_)));
            for (std::vector<float>* limits : {&base_, &square_, &length_})
                limits->resize(static_cast<std::size_t>(round_up(group_, kBlockRows)));
            found_.resize(static_cast<std::size_t>(group_ * kBlockRows));
        } else {
            found_distances_.resize(static_cast<std::size_t>(group_ * kBlockRows));
        }
    }

    // The list of an item, as a row of the plan.
    std::int64_t list_of(const ScanItem& item) const { return probed_.lists[static_cast<std::size_t>(item.list)]; }

    PagedList pages_of(const ScanItem& item) const {
        return {codes_, plan_.pages + plan_.page_starts[list_of(item)]};
    }

    std::span<const std::uint8_t> first_run(const ScanItem& item) const {
        const PagedList pages = pages_of(item);
        return {pages.row(item.first), static_cast<std::size_t>(pages.run(item.first, item.count) * rows_.code_size)};
    }

    void scan(const ScanItem& item) {
        const std::size_t probed = static_cast<std::size_t>(item.list);
        const PagedList pages = pages_of(item);
        for (std::int64_t first = probed_.starts[probed]; first < probed_.starts[probed + 1]; first += group_) {
            const std::int32_t* members = probed_.members.data() + first;
            const int n = static_cast<int>(std::min(group_, probed_.starts[probed + 1] - first));
            if (integer_)
                filter_rows(item, pages, members, n);
            else
                compare_rows(item, pages, members, n);
        }
    }

    // Exact distances of whole blocks.
    void compare_rows(const ScanItem& item, const PagedList& pages, const std::int32_t* members, int n) {
        const float* queries[kGroup];
        for (int m = 0; m < n; ++m) queries[m] = queries_.data() + members[m] * dim_;
        const float* centroid = plan_.centroids == nullptr ? nullptr : plan_.centroids + list_of(item) * rows_.dim;
        const auto distances_of = task_.keep_max ? kernels_.inner_products : kernels_.squared_l2;
        const std::int64_t origin = plan_.list_ids[list_of(item)] << 32;
        for (BlockWalk at(pages, item.first, item.first + item.count); at.more(); at.advance()) {
            const int rows = at.rows();
            const float* block = reinterpret_cast<const float*>(at.row(0));
            if (!direct_ || rows < kBlockRows || !at.whole()) {
                for (int r = 0; r < rows; ++r)
                    decode_row(kernels_, rows_, at.row(r), centroid, block_.data() + r * dim_);
                std::fill_n(block_.data() + rows * dim_, (kBlockRows - rows) * dim_, 0.0f);
                block = block_.data();
            }
            const bool fetch_later = direct_ && n >= kFetchQueries + kTileQueries && !later_.empty();
            distances_of(block, dim_, queries, n, dim_, found_distances_.data(),
                         direct_ ? at.fetch_next(following_.data()) : nullptr, fetch_later ? later_.data() : nullptr);
            if (fetch_later) {
                const std::int64_t fetched = kBlockRows * rows_.code_size / 4 * ((n - kFetchQueries) / kTileQueries);
                later_ = later_.subspan(std::min(later_.size(), static_cast<std::size_t>(fetched)));
            }
            const std::uint32_t real = (1u << rows) - 1u;
            for (int m = 0; m < n; ++m) {
                QueryHeap& heap = heaps_[static_cast<std::size_t>(members[m])];
                const float* found = found_distances_.data() + m * kBlockRows;
                for (std::uint32_t near = kernels_.at_most(found, heap.limit()) & real; near != 0; near &= near - 1) {
                    const int r = std::countr_zero(near);
                    heap.push(found[r], origin | (at.first() + r));
                }
            }
        }
    }

    float base_limit(std::int32_t query) const {
        return whole_[static_cast<std::size_t>(query)].base(heaps_[static_cast<std::size_t>(query)].limit());
    }

    // Whole-number dot products first; exact distances only for rows that these cannot rule out.
    void filter_rows(const ScanItem& item, const PagedList& pages, const std::int32_t* members, int n) {
        const std::int8_t* weights[kGroup];
        for (int m = 0; m < n; ++m) {
            const IntegerQuery& query = whole_[static_cast<std::size_t>(members[m])];
            weights[m] = weights_.data() + members[m] * code_dim_;
            base_[static_cast<std::size_t>(m)] = base_limit(members[m]);
            square_[static_cast<std::size_t>(m)] = query.square();
            length_[static_cast<std::size_t>(m)] = query.length();
        }
        const QueryLimits limits{base_.data(), square_.data(), length_.data()};
        RowTerms terms{};
        kernels_.pack(weights, n, code_dim_, packed_.data());
        const auto distance_of = task_.keep_max ? kernels_.inner_product : kernels_.squared_l2_one;
        const std::int64_t origin = plan_.list_ids[list_of(item)] << 32;
        for (BlockWalk at(pages, item.first, item.first + item.count); at.more(); at.advance()) {
            const int rows = at.rows();
            const std::uint8_t* block = at.row(0);
            std::int64_t stride = rows_.code_size;
            if (rows_.dim != code_dim_ || rows < kBlockRows || !at.whole()) {
                for (int r = 0; r < rows; ++r)
                    std::memcpy(bytes_.data() + r * code_dim_, at.row(r), static_cast<std::size_t>(rows_.dim));
                block = bytes_.data();
                stride = code_dim_;
            }
            kernels_.row_terms(block, stride, rows, rows_.dim, task_.keep_max ? nullptr : rows_.scale,
                               &terms);
            const int n_found = kernels_.filter(block, stride, packed_.data(), n, code_dim_, limits, terms, found_.data(),
                                                at.fetch_next(following_.data()));
            std::uint32_t decoded = 0;
            for (int f = 0; f < n_found; ++f) {
                const int m = static_cast<int>(found_[static_cast<std::size_t>(f)] >> 4);
                const int r = static_cast<int>(found_[static_cast<std::size_t>(f)] & 15u);
                if (r >= rows) continue;
                float* row = block_.data() + r * dim_;
                if (!(decoded >> r & 1)) {
                    decode_row(kernels_, rows_, block + r * stride, nullptr, row);
                    decoded |= 1u << r;
                }
                QueryHeap& heap = heaps_[static_cast<std::size_t>(members[m])];
                const float distance = distance_of(row, queries_.data() + members[m] * dim_, dim_);
                if (distance <= heap.limit()) {
                    heap.push(distance, origin | (at.first() + r));
                    base_[static_cast<std::size_t>(m)] = base_limit(members[m]);
                }
            }
        }
    }

    const PagedCodes& codes_;
    const RowCodes& rows_;
    const PagePlan& plan_;
    const PageTask& task_;
    const BlockKernels& kernels_;
    const std::int64_t dim_, code_dim_;
    const bool integer_, direct_;

    ProbedLists probed_;  // rows of the plan
    std::vector<ScanItem> items_;
    std::int64_t widest_ = 0, group_ = 0;
    // Where reading goes on after this item, and how far that was fetched.
    std::span<const std::uint8_t> following_, later_;

    std::vector<float> queries_;  // (n, dim_), negated for inner products
    std::vector<std::int8_t> weights_;
    std::vector<IntegerQuery> whole_;
    std::vector<QueryHeap> heaps_;
    std::vector<float> block_;            // decoded
    std::vector<std::uint8_t> bytes_;     // a padded block of codes
    std::vector<float> found_distances_;  // (group, kBlockRows)
    std::vector<std::int8_t> packed_;
    std::vector<float> base_, square_, length_;  // QueryLimits
    std::vector<std::uint32_t> found_;
};

}  // namespace

void scan_pages(const PagedCodes& codes, const PagePlan& plan, const PageTask& task, const BlockKernels& kernels) {
    check(codes, plan, task.n);
    PageScan(codes, plan, task, kernels).run();
}

ScratchNeed scratch_need(const RowCodes& codes, bool has_centroids, std::int64_t k) {
    constexpr std::int64_t kFloat = sizeof(float);
    const std::int64_t place = sizeof(float) + sizeof(std::int64_t), dim = padded_dim(codes.dim);
    ScratchNeed need{kBlockRows * dim * kFloat,
                     dim * kFloat + static_cast<std::int64_t>(sizeof(QueryHeap)) + k * place + kBlockRows * kFloat};
    if (is_integer(codes, has_centroids)) {
        // A block of bytes and 16 more queries, as these are packed in sixteens.
        need.fixed += 2 * kBlockRows * padded_code(codes.dim) + codes.dim * kFloat + 3 * kBlockRows * kFloat;
        need.per_query += 2 * padded_code(codes.dim) + static_cast<std::int64_t>(sizeof(IntegerQuery)) + 3 * kFloat;
    }
    return need;
}

}  // namespace hybridindex
