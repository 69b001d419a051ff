#include "list_scan.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>

#include "query_heap.h"
#include "scan_items.h"

namespace hybridindex {
namespace {

// Queries compared with a block before the next block is read: bounds the scratch of a thread.
constexpr std::int64_t kGroup = 256;

// Products of more bytes than this, 255 * 127 each, do not fit 32 bits.
constexpr std::int64_t kMostIntegerDim = 1 << 16;

// Complete rows that make a report, and how long fewer may wait for one.
constexpr std::size_t kRowsOfAReport = 16;
constexpr std::chrono::microseconds kTimeOfAReport{500};
// Below it the integer filter's own arithmetic would underflow.
constexpr double kLeastStep = 0x1p-90;
constexpr std::size_t kNoItem = static_cast<std::size_t>(-1);
// Items for each thread that are left when threads stop taking two at a time.
constexpr std::size_t kReserveUntil = 4;
// Work, as in make_items, that is worth waking a thread for.
constexpr std::int64_t kWorkOfAHelper = 256 << 10;

std::int64_t round_up(std::int64_t value, std::int64_t step) { return (value + step - 1) / step * step; }

// What one thread needs for one item at a time.
struct ThreadScratch {
    // Where this thread will go on reading after its item, and how far that was fetched: empty where nobody knows.
    std::span<const std::uint8_t> following, later;
    std::vector<float> rows;         // a decoded block
    std::vector<std::uint8_t> codes; // a padded block of codes
    std::vector<float> distances;    // (group, kBlockRows)
    std::vector<std::int8_t> packed;
    std::vector<float> base, square, length;  // QueryLimits
    std::vector<std::uint32_t> found;
};

// sq8 only: the query as whole numbers. The distance to a row of bytes c is
//   constant + square(c) + sum of w[i] c[i],  w = step * weights + error,
// and sum of error[i] c[i] = 128 * sum of error[i] + sum of error[i] (c[i] - 128), where the last sum is at least
// -|error| |c - 128| (Cauchy-Schwarz). `constant` has the middle part in it, `rounding` bounds what float sums lose.
struct IntegerQuery {
    double constant, step, error_length, rounding;
};

}  // namespace

class Scratch {
public:
    std::vector<std::int32_t> slot_of;
    ProbedLists probed;
    std::vector<ScanItem> items;
    std::vector<std::int32_t> items_of_query;
    std::vector<float> queries;  // (n, padded dim), negated for inner products
    std::vector<std::int8_t> weights;
    std::vector<IntegerQuery> integer;
    std::vector<QueryHeap> heaps;
    std::vector<std::atomic<std::int32_t>> left;
    std::vector<ThreadScratch> threads;
};

bool IdFilter::allows(std::int64_t id) const {
    if (bitmap != nullptr) return id >= 0 && id < n_bits && (bitmap[id >> 3] >> (id & 7) & 1);
    return std::binary_search(sorted, sorted + n_sorted, id);
}

namespace {

// One call of scan(): what its threads share.
class Job {
public:
    Job(const ListTable& lists, bool keep_max, const BlockKernels& kernels, const ScanTask& task, Scratch& scratch,
        ThreadPool& pool)
        : lists_(lists), keep_max_(keep_max), kernels_(kernels), task_(task), scratch_(scratch), pool_(pool),
          dim_(round_up(lists.dim, kDimStep)), code_dim_(round_up(lists.dim, kCodeStep)),
          integer_(lists.code == Code::u8 && lists.centroids == nullptr && lists.dim <= kMostIntegerDim),
          direct_(lists.code == Code::f32 && lists.centroids == nullptr && lists.dim == dim_) {}

    void run() {
        prepare();
        pool_.run(n_helpers_, [this] { work(false); }, [this] { work(true); }, [this] { deliver(false); });
        deliver(false);
        if (error_) std::rethrow_exception(error_);
    }

private:
    void prepare() {
        const int threads = pool_.n_helpers() + 1;
        group_probes(task_.probes, task_.n, task_.p, lists_.extents, lists_.nlist, scratch_.slot_of, scratch_.probed);
        const std::int64_t work =
            make_items(scratch_.probed, lists_.extents, lists_.code_size, lists_.dim, task_.n, threads,
                       static_cast<bool>(task_.on_done), scratch_.items, scratch_.items_of_query);
        n_helpers_ = static_cast<int>(std::min<std::int64_t>(pool_.n_helpers(), work / kWorkOfAHelper));
        copy_queries();
        if (integer_) make_integer_queries();
        const std::size_t n = static_cast<std::size_t>(task_.n);
        scratch_.heaps.resize(n);
        if (scratch_.left.size() < n) scratch_.left = std::vector<std::atomic<std::int32_t>>(n);
        for (std::size_t q = 0; q < n; ++q) {
            scratch_.heaps[q].reset(task_.distances + q * task_.k, task_.ids + q * task_.k, task_.k);
            scratch_.left[q].store(scratch_.items_of_query[q], std::memory_order_relaxed);
            if (scratch_.items_of_query[q] == 0) finish_query(static_cast<std::int32_t>(q));
        }
        std::int64_t widest = 0;
        for (std::size_t i = 0; i + 1 < scratch_.probed.starts.size(); ++i)
            widest = std::max(widest, scratch_.probed.starts[i + 1] - scratch_.probed.starts[i]);
        group_ = std::min(widest, kGroup);
        if (scratch_.threads.size() < static_cast<std::size_t>(threads))
            scratch_.threads.resize(static_cast<std::size_t>(threads));
        for (int t = 0; t < threads; ++t) make_room(scratch_.threads[static_cast<std::size_t>(t)]);
    }

    // Everything that a thread will need, so that nothing can fail on it.
    void make_room(ThreadScratch& mine) const {
        const std::size_t group = static_cast<std::size_t>(group_);
        grow(mine.rows, static_cast<std::size_t>(kBlockRows * dim_));
        if (integer_) {
            grow(mine.codes, static_cast<std::size_t>(kBlockRows * code_dim_));
            grow(mine.packed, static_cast<std::size_t>(kernels_.packed_bytes(static_cast<int>(group_), code_dim_)));
            for (std::vector<float>* limits : {&mine.base, &mine.square, &mine.length})
                grow(*limits, static_cast<std::size_t>(round_up(group_, kBlockRows)));
            grow(mine.found, group * kBlockRows);
        } else {
            grow(mine.distances, group * kBlockRows);
        }
    }

    template <typename T>
    static void grow(std::vector<T>& vector, std::size_t size) {
        if (vector.size() < size) vector.resize(size);
    }

    void copy_queries() {
        scratch_.queries.assign(static_cast<std::size_t>(task_.n * dim_), 0.0f);
        const float sign = keep_max_ ? -1.0f : 1.0f;
        for (std::int64_t q = 0; q < task_.n; ++q)
            for (std::int64_t i = 0; i < lists_.dim; ++i)
                scratch_.queries[q * dim_ + i] = sign * task_.queries[q * lists_.dim + i];
    }

    void make_integer_queries() {
        scratch_.weights.assign(static_cast<std::size_t>(task_.n * code_dim_), 0);
        scratch_.integer.resize(static_cast<std::size_t>(task_.n));
        std::vector<float> w(static_cast<std::size_t>(lists_.dim));
        for (std::int64_t q = 0; q < task_.n; ++q) {
            const float* query = scratch_.queries.data() + q * dim_;
            double constant = 0, magnitude = 0;
            for (std::int64_t i = 0; i < lists_.dim; ++i) {
                const double x = query[i], a = lists_.offset[i], b = lists_.scale[i];
                const double most = std::abs(a) + 255 * std::abs(b);
                if (keep_max_) {  // the query is negated: distance = <x, a + b c>
                    constant += x * a;
                    w[i] = static_cast<float>(x * b);
                    magnitude += std::abs(x) * most;
                } else {  // distance = sum of ((x - a) - b c)^2
                    constant += (x - a) * (x - a);
                    w[i] = static_cast<float>(-2 * (x - a) * b);
                    magnitude += (std::abs(x) + most) * (std::abs(x) + most);
                }
            }
            const QueryWeights made = kernels_.weigh(w.data(), lists_.dim, scratch_.weights.data() + q * code_dim_);
            if (!(made.step > kLeastStep)) {  // too near the end of float's range to say anything: every row passes
                scratch_.integer[q] = {-std::numeric_limits<double>::infinity(), 1, 0, 0};
                continue;
            }
            // Rounding: of w, of the exact distance and what it is compared with, of the row's square, of the filter.
            scratch_.integer[q] = {constant + 128 * made.error_sum, made.step, made.error_length,
                                   magnitude * static_cast<double>(lists_.dim + 16) * 0x1p-20};
        }
    }

    // -- on any thread

    void work(bool leading) {
        ThreadScratch& mine = scratch_.threads[static_cast<std::size_t>(next_thread_.fetch_add(1))];
        const std::size_t n_items = scratch_.items.size();
        std::size_t reserved = kNoItem;
        for (;;) {
            if (leading) deliver(true);
            const std::size_t item = reserved != kNoItem ? reserved : next_item_.fetch_add(1, std::memory_order_relaxed);
            if (item >= n_items || cancelled_.load(std::memory_order_relaxed)) break;
            // One more, so that its bytes can be fetched meanwhile; not near the end, where another may be idle.
            reserved = kNoItem;
            if (next_item_.load(std::memory_order_relaxed) + kReserveUntil * scratch_.threads.size() < n_items)
                reserved = next_item_.fetch_add(1, std::memory_order_relaxed);
            mine.following = item_bytes(reserved != kNoItem ? reserved : next_item_.load(std::memory_order_relaxed));
            mine.later = mine.following;
            // Around the item alone: on_done may run anything, another scan for one, that needs the same registers.
            if (integer_) kernels_.begin();
            scan(scratch_.items[item], mine);
            if (integer_) kernels_.end();
        }
    }

    void scan(const ScanItem& item, ThreadScratch& mine) {
        const std::int64_t begin = scratch_.probed.starts[item.list], end = scratch_.probed.starts[item.list + 1];
        const std::int64_t list = scratch_.probed.lists[item.list];
        const std::int64_t* extent = lists_.extents + list * 3;
        const std::uint8_t* codes = lists_.base + extent[2] + item.first * lists_.code_size;
        const std::int64_t* ids =
            reinterpret_cast<const std::int64_t*>(lists_.base + extent[2] + extent[1] * lists_.code_size) + item.first;
        for (std::int64_t first = begin; first < end; first += kGroup) {
            const std::int32_t* members = scratch_.probed.members.data() + first;
            const int n = static_cast<int>(std::min(kGroup, end - first));
            if (integer_)
                filter_rows(codes, ids, item.count, members, n, mine);
            else
                compare_rows(codes, ids, item.count, members, n, list, mine);
        }
        for (std::int64_t m = begin; m < end; ++m)
            if (scratch_.left[scratch_.probed.members[m]].fetch_sub(1, std::memory_order_acq_rel) == 1)
                finish_query(scratch_.probed.members[m]);
    }

    // The codes of an item, or nothing where there is no such item.
    std::span<const std::uint8_t> item_bytes(std::size_t item) const {
        if (item >= scratch_.items.size()) return {};
        const ScanItem& next = scratch_.items[item];
        const std::int64_t start = lists_.extents[scratch_.probed.lists[next.list] * 3 + 2] + next.first * lists_.code_size;
        return {lists_.base + start, static_cast<std::size_t>(next.count * lists_.code_size)};
    }

    // What will be read after a block, to be fetched ahead; nullptr where nobody knows.
    static const std::uint8_t* after(const std::uint8_t* block, std::int64_t block_bytes, bool last,
                                     const ThreadScratch& mine) {
        if (!last) return block + block_bytes;
        return mine.following.empty() ? nullptr : mine.following.data();
    }

    // Rows that exist and whose ids are allowed, as bits.
    std::uint32_t wanted_rows(const std::int64_t* ids, std::int64_t count) const {
        const std::uint32_t valid = count >= kBlockRows ? 0xffffu : (1u << count) - 1u;
        if (!task_.filter.active()) return valid;
        std::uint32_t wanted = 0;
        for (std::uint32_t rest = valid; rest != 0; rest &= rest - 1)
            if (task_.filter.allows(ids[std::countr_zero(rest)])) wanted |= rest & -rest;
        return wanted;
    }

    void decode(const std::uint8_t* code, const float* centroid, float* row) const {
        switch (lists_.code) {
            case Code::f32: std::memcpy(row, code, static_cast<std::size_t>(lists_.dim) * 4); break;
            case Code::f16: kernels_.decode_f16(code, lists_.dim, row); break;
            case Code::bf16: kernels_.decode_bf16(code, lists_.dim, row); break;
            case Code::u8: kernels_.decode_u8(code, lists_.scale, lists_.offset, lists_.dim, row); break;
        }
        if (centroid != nullptr)
            for (std::int64_t i = 0; i < lists_.dim; ++i) row[i] += centroid[i];
        for (std::int64_t i = lists_.dim; i < dim_; ++i) row[i] = 0;
    }

    // Exact distances of whole blocks.
    void compare_rows(const std::uint8_t* codes, const std::int64_t* ids, std::int64_t count, const std::int32_t* members,
                      int n, std::int64_t list, ThreadScratch& mine) {
        const float* queries[kGroup];
        for (int m = 0; m < n; ++m) queries[m] = scratch_.queries.data() + members[m] * dim_;
        const float* centroid = lists_.centroids == nullptr ? nullptr : lists_.centroids + list * lists_.dim;
        const auto distances_of = keep_max_ ? kernels_.inner_products : kernels_.squared_l2;
        const std::int64_t block_bytes = kBlockRows * lists_.code_size;
        for (std::int64_t first = 0; first < count; first += kBlockRows, codes += block_bytes) {
            const std::uint32_t wanted = wanted_rows(ids + first, count - first);
            if (wanted == 0) continue;
            const std::int64_t rows = std::min<std::int64_t>(kBlockRows, count - first);
            const float* block = reinterpret_cast<const float*>(codes);
            if (!direct_ || rows < kBlockRows) {
                for (std::int64_t r = 0; r < rows; ++r)
                    decode(codes + r * lists_.code_size, centroid, mine.rows.data() + r * dim_);
                std::fill_n(mine.rows.data() + rows * dim_, (kBlockRows - rows) * dim_, 0.0f);
                block = mine.rows.data();
            }
            const bool fetch_later = direct_ && n >= kFetchQueries + kTileQueries && !mine.later.empty();
            distances_of(block, dim_, queries, n, dim_, mine.distances.data(),
                         direct_ ? after(codes, block_bytes, first + kBlockRows >= count, mine) : nullptr,
                         fetch_later ? mine.later.data() : nullptr);
            if (fetch_later) {
                const std::int64_t fetched = block_bytes / 4 * ((n - kFetchQueries) / kTileQueries);
                mine.later = mine.later.subspan(std::min(mine.later.size(), static_cast<std::size_t>(fetched)));
            }
            for (int m = 0; m < n; ++m) {
                QueryHeap& heap = scratch_.heaps[static_cast<std::size_t>(members[m])];
                const float* found = mine.distances.data() + m * kBlockRows;
                for (std::uint32_t near = kernels_.at_most(found, heap.limit()) & wanted; near != 0; near &= near - 1) {
                    const int r = std::countr_zero(near);
                    heap.push(found[r], ids[first + r]);
                }
            }
        }
    }

    // QueryLimits::base: no row beyond it can enter the query's answer.
    float base_limit(std::int32_t query) const {
        const IntegerQuery& integer = scratch_.integer[static_cast<std::size_t>(query)];
        const double limit = scratch_.heaps[static_cast<std::size_t>(query)].limit();
        const double base = (limit + integer.rounding - integer.constant) / integer.step;
        return static_cast<float>(base + std::abs(base) * 0x1p-22);
    }

    // Whole-number dot products first; exact distances only for rows that these cannot rule out.
    void filter_rows(const std::uint8_t* codes, const std::int64_t* ids, std::int64_t count, const std::int32_t* members,
                     int n, ThreadScratch& mine) {
        const std::int8_t* weights[kGroup];
        for (int m = 0; m < n; ++m) {
            weights[m] = scratch_.weights.data() + members[m] * code_dim_;
            const IntegerQuery& integer = scratch_.integer[static_cast<std::size_t>(members[m])];
            mine.base[static_cast<std::size_t>(m)] = base_limit(members[m]);
            mine.square[static_cast<std::size_t>(m)] = static_cast<float>(1 / integer.step);
            mine.length[static_cast<std::size_t>(m)] =
                static_cast<float>(integer.error_length / integer.step * (1 + 0x1p-20));
        }
        const QueryLimits limits{mine.base.data(), mine.square.data(), mine.length.data()};
        RowTerms terms{};
        kernels_.pack(weights, n, code_dim_, mine.packed.data());
        const auto distance_of = keep_max_ ? kernels_.inner_product : kernels_.squared_l2_one;
        const std::int64_t block_bytes = kBlockRows * lists_.code_size;
        for (std::int64_t first = 0; first < count; first += kBlockRows, codes += block_bytes) {
            const std::uint32_t wanted = wanted_rows(ids + first, count - first);
            if (wanted == 0) continue;
            const std::int64_t rows = std::min<std::int64_t>(kBlockRows, count - first);
            const std::uint8_t* block = codes;
            std::int64_t stride = lists_.code_size;
            const bool whole = rows == kBlockRows && lists_.dim == code_dim_;
            if (!whole) {
                for (std::int64_t r = 0; r < rows; ++r)
                    std::memcpy(mine.codes.data() + r * code_dim_, codes + r * lists_.code_size,
                                static_cast<std::size_t>(lists_.dim));
                block = mine.codes.data();
                stride = code_dim_;
            }
            kernels_.row_terms(codes, lists_.code_size, static_cast<int>(rows), lists_.dim,
                               keep_max_ ? nullptr : lists_.scale, &terms);
            const int n_found =
                kernels_.filter(block, stride, mine.packed.data(), n, code_dim_, limits, terms, mine.found.data(),
                                after(codes, block_bytes, first + kBlockRows >= count, mine));
            std::uint32_t decoded = 0;
            for (int f = 0; f < n_found; ++f) {
                const int m = static_cast<int>(mine.found[static_cast<std::size_t>(f)] >> 4);
                const int r = static_cast<int>(mine.found[static_cast<std::size_t>(f)] & 15u);
                if (!(wanted >> r & 1)) continue;
                float* row = mine.rows.data() + r * dim_;
                if (!(decoded >> r & 1)) {
                    decode(codes + r * lists_.code_size, nullptr, row);
                    decoded |= 1u << r;
                }
                QueryHeap& heap = scratch_.heaps[static_cast<std::size_t>(members[m])];
                const float distance = distance_of(row, scratch_.queries.data() + members[m] * dim_, dim_);
                if (distance <= heap.limit()) {
                    heap.push(distance, ids[first + r]);
                    mine.base[static_cast<std::size_t>(m)] = base_limit(members[m]);
                }
            }
        }
    }

    void finish_query(std::int32_t query) {
        scratch_.heaps[static_cast<std::size_t>(query)].finish(keep_max_);
        if (!task_.on_done) return;
        {
            const std::lock_guard lock(done_mutex_);
            done_.push_back(query);
        }
        n_done_.fetch_add(1, std::memory_order_release);
        pool_.nudge();
    }

    // -- on the calling thread

    // Reports what is complete. While there is work, only when it is worth the report: that runs in Python.
    void deliver(bool working) {
        if (!task_.on_done || error_) return;
        const std::size_t ready = n_done_.load(std::memory_order_acquire) - n_delivered_;
        if (ready == 0) return;
        const auto now = std::chrono::steady_clock::now();
        if (working && ready < kRowsOfAReport && now - reported_ < kTimeOfAReport) return;
        reported_ = now;
        std::vector<std::int32_t> rows;
        {
            const std::lock_guard lock(done_mutex_);
            rows.swap(done_);
        }
        if (rows.empty()) return;  // went with the last ones, before they were counted
        n_delivered_ += rows.size();
        try {
            task_.on_done(rows);
        } catch (...) {
            error_ = std::current_exception();
            cancelled_.store(true, std::memory_order_relaxed);
        }
    }

    const ListTable& lists_;
    const bool keep_max_;
    const BlockKernels& kernels_;
    const ScanTask& task_;
    Scratch& scratch_;
    ThreadPool& pool_;
    const std::int64_t dim_, code_dim_;
    const bool integer_, direct_;
    std::int64_t group_ = 0;
    int n_helpers_ = 0;

    std::atomic<int> next_thread_{0};
    std::atomic<std::size_t> next_item_{0};
    std::atomic<bool> cancelled_{false};

    std::mutex done_mutex_;
    std::vector<std::int32_t> done_;
    std::atomic<std::size_t> n_done_{0};
    std::size_t n_delivered_ = 0;
    std::chrono::steady_clock::time_point reported_{};
    std::exception_ptr error_;
};

void check(const ListTable& lists) {
    const auto fail = [](std::int64_t list, const std::string& what) {
        throw std::invalid_argument("list " + std::to_string(list) + " " + what);
    };
    const std::int64_t element = lists.code == Code::f32 ? 4 : lists.code == Code::u8 ? 1 : 2;
    if (lists.dim < 1 || lists.code_size != lists.dim * element)
        throw std::invalid_argument("code_size is " + std::to_string(lists.code_size) + "; expected " +
                                    std::to_string(lists.dim * element));
    if (reinterpret_cast<std::uintptr_t>(lists.base) % 8 != 0)
        throw std::invalid_argument("the lists must start at a multiple of 8 bytes");
    std::vector<std::int64_t> order;
    for (std::int64_t i = 0; i < lists.nlist; ++i) {
        const std::int64_t size = lists.extents[3 * i], capacity = lists.extents[3 * i + 1], offset = lists.extents[3 * i + 2];
        if (size < 0 || capacity < size || size > std::numeric_limits<std::int32_t>::max())
            fail(i, "has size " + std::to_string(size) + " and capacity " + std::to_string(capacity));
        if (offset < 0 || offset > lists.nbytes || capacity > (lists.nbytes - offset) / (lists.code_size + 8))
            fail(i, "leaves the buffer");
        if (offset % 8 != 0 || (capacity * lists.code_size) % 8 != 0) fail(i, "is not aligned to 8 bytes");
        if (capacity > 0) order.push_back(i);
    }
    std::sort(order.begin(), order.end(),
              [&](std::int64_t a, std::int64_t b) { return lists.extents[3 * a + 2] < lists.extents[3 * b + 2]; });
    for (std::size_t i = 0; i + 1 < order.size(); ++i) {
        const std::int64_t a = order[i], b = order[i + 1];
        if (lists.extents[3 * a + 2] + lists.extents[3 * a + 1] * (lists.code_size + 8) > lists.extents[3 * b + 2])
            fail(b, "overlaps list " + std::to_string(a));
    }
}

}  // namespace

ListScanner::ListScanner(const ListTable& lists, bool keep_max, const BlockKernels& kernels)
    : lists_(lists), keep_max_(keep_max), kernels_(kernels) {
    check(lists);
}

ListScanner::~ListScanner() = default;

std::unique_ptr<Scratch> ListScanner::take_scratch() {
    {
        const std::lock_guard lock(mutex_);
        if (!idle_.empty()) {
            std::unique_ptr<Scratch> taken = std::move(idle_.back());
            idle_.pop_back();
            return taken;
        }
    }
    auto made = std::make_unique<Scratch>();
    made->slot_of.assign(static_cast<std::size_t>(lists_.nlist), -1);
    return made;
}

void ListScanner::scan(const ScanTask& task, ThreadPool& pool) {
    // Not given back where the scan throws: what it left half done goes with it.
    std::unique_ptr<Scratch> scratch = take_scratch();
    Job(lists_, keep_max_, kernels_, task, *scratch, pool).run();
    const std::lock_guard lock(mutex_);
    if (idle_.size() < 2) idle_.push_back(std::move(scratch));
}

}  // namespace hybridindex
