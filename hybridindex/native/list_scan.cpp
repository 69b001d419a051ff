#include "list_scan.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>
#include <new>
#include <span>
#include <stdexcept>
#include <string>

#include "query_bounds.h"
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
// Blocks that are compared exactly after one of which a third passed the filter: so many at first, twice as many each
// time in a row, up to the second number.
constexpr int kFewestExactBlocks = 8, kMostExactBlocks = 4096;
// Pairs whose exact distances are computed at a time.
constexpr int kPairs = 64;
constexpr std::size_t kNoItem = static_cast<std::size_t>(-1);
// Items for each thread that are left when threads stop taking two at a time.
constexpr std::size_t kReserveUntil = 4;
// Work, as in make_items, that is worth waking a thread for.
constexpr std::int64_t kWorkOfAHelper = 256 << 10;

std::int64_t round_up(std::int64_t value, std::int64_t step) { return (value + step - 1) / step * step; }

// Memory that grows and whose content nobody keeps; begins at a multiple of 64 bytes.
template <typename T>
class Room {
public:
    T* data() { return data_.get(); }
    T& operator[](std::size_t i) { return data_.get()[i]; }

    void grow(std::size_t size) {
        if (size <= size_) return;
        data_.reset(static_cast<T*>(::operator new[](size * sizeof(T), std::align_val_t(64))));
        std::memset(data_.get(), 0, size * sizeof(T));
        size_ = size;
    }

private:
    struct Free {
        void operator()(T* data) const { ::operator delete[](data, std::align_val_t(64)); }
    };
    std::unique_ptr<T[], Free> data_;
    std::size_t size_ = 0;
};

// What one thread needs for one item at a time.
struct ThreadScratch {
    // Where this thread will go on reading after its item, and how far that was fetched: empty where nobody knows.
    std::span<const std::uint8_t> following, later;
    // Blocks that are still compared without the filter, and how many that were.
    int exact_left = 0, exact_run = 0;
    Room<float> rows;           // a decoded block
    Room<std::uint8_t> codes;   // a block in the filter's numbers
    Room<float> distances;      // (group, kBlockRows)
    Room<std::int8_t> packed;
    Room<float> base, square, length;  // QueryLimits
    Room<std::uint32_t> found;
};

}  // namespace

class Scratch {
public:
    std::vector<std::int32_t> slot_of;
    ProbedLists probed;
    std::vector<ScanItem> items;
    std::vector<std::int32_t> items_of_query;
    std::vector<float> queries;  // (n, padded dim), negated for inner products
    Room<std::int8_t> filtered;   // (n, row_bytes), queries in the filter's numbers
    std::vector<QueryBound> bounds;
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
          dim_(round_up(lists.dim, kDimStep)),
          bytes_(lists.code == Code::u8 && lists.centroids == nullptr && lists.dim <= kMostIntegerDim),
          halves_(!bytes_ && kernels.filter_halves != nullptr),
          row_bytes_(round_up(bytes_ ? lists.dim : 2 * dim_, kFilterStep)),
          direct_(lists.code == Code::f32 && lists.centroids == nullptr && lists.dim == dim_) {}

    void run() {
        prepare();
        pool_.run(n_helpers_, [this] { work(false); }, [this] { work(true); }, [this] { deliver(); });
        deliver();
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
        std::int64_t widest = 0;
        for (std::size_t i = 0; i + 1 < scratch_.probed.starts.size(); ++i)
            widest = std::max(widest, scratch_.probed.starts[i + 1] - scratch_.probed.starts[i]);
        group_ = std::min(widest, kGroup);
        copy_queries();
        if (may_filter(group_)) bound_queries();
        const std::size_t n = static_cast<std::size_t>(task_.n);
        scratch_.heaps.resize(n);
        if (scratch_.left.size() < n) scratch_.left = std::vector<std::atomic<std::int32_t>>(n);
        for (std::size_t q = 0; q < n; ++q) {
            scratch_.heaps[q].reset(task_.distances + q * task_.k, task_.ids + q * task_.k, task_.k);
            scratch_.left[q].store(scratch_.items_of_query[q], std::memory_order_relaxed);
            if (scratch_.items_of_query[q] == 0) finish_query(static_cast<std::int32_t>(q));
        }
        if (scratch_.threads.size() < static_cast<std::size_t>(threads))
            scratch_.threads.resize(static_cast<std::size_t>(threads));
        for (int t = 0; t < threads; ++t) make_room(scratch_.threads[static_cast<std::size_t>(t)]);
    }

    bool filters() const { return may_filter(group_); }

    // Whether a filter is worth it for so many queries; bytes are always filtered.
    bool may_filter(std::int64_t n) const { return bytes_ || (halves_ && n >= kFewestHalves); }

    // Everything that a thread will need, so that nothing can fail on it.
    void make_room(ThreadScratch& mine) const {
        const std::size_t group = static_cast<std::size_t>(group_);
        mine.rows.grow(static_cast<std::size_t>(kBlockRows * dim_));
        mine.distances.grow(group * kBlockRows);
        mine.exact_left = 0, mine.exact_run = kFewestExactBlocks;
        if (!may_filter(group_)) return;
        mine.codes.grow(static_cast<std::size_t>(kBlockRows * row_bytes_));
        mine.packed.grow(static_cast<std::size_t>(kernels_.packed_bytes(static_cast<int>(group_), row_bytes_)));
        for (Room<float>* limits : {&mine.base, &mine.square, &mine.length})
            limits->grow(static_cast<std::size_t>(round_up(group_, kBlockRows)));
        mine.found.grow(group * kBlockRows);
    }

    void copy_queries() {
        scratch_.queries.assign(static_cast<std::size_t>(task_.n * dim_), 0.0f);
        const float sign = keep_max_ ? -1.0f : 1.0f;
        for (std::int64_t q = 0; q < task_.n; ++q)
            for (std::int64_t i = 0; i < lists_.dim; ++i)
                scratch_.queries[q * dim_ + i] = sign * task_.queries[q * lists_.dim + i];
    }

    void bound_queries() {
        const std::size_t n = static_cast<std::size_t>(task_.n);
        scratch_.filtered.grow(n * static_cast<std::size_t>(row_bytes_));
        scratch_.bounds.resize(n);
        std::vector<float> weights(static_cast<std::size_t>(lists_.dim));
        for (std::size_t q = 0; q < n; ++q) {
            const float* query = scratch_.queries.data() + q * dim_;
            std::int8_t* filtered = filtered_query(q);
            scratch_.bounds[q] =
                bytes_ ? bound_of_bytes(query, lists_.scale, lists_.offset, lists_.dim, keep_max_, kernels_, weights.data(), filtered)
                       : bound_of_halves(query, dim_, keep_max_, reinterpret_cast<std::uint16_t*>(filtered));
            const std::int64_t used = bytes_ ? lists_.dim : 2 * dim_;
            std::memset(filtered + used, 0, static_cast<std::size_t>(row_bytes_ - used));
        }
    }

    std::int8_t* filtered_query(std::size_t query) const {
        return scratch_.filtered.data() + query * static_cast<std::size_t>(row_bytes_);
    }

    // -- on any thread

    void work(bool leading) {
        ThreadScratch& mine = scratch_.threads[static_cast<std::size_t>(next_thread_.fetch_add(1))];
        const std::size_t n_items = scratch_.items.size();
        std::size_t reserved = kNoItem;
        if (filters()) kernels_.begin();
        for (;;) {
            if (leading && worth_delivering()) {
                // on_done may run anything, another scan for one, that needs the same registers.
                if (filters()) kernels_.end();
                deliver();
                if (filters()) kernels_.begin();
            }
            const std::size_t item = reserved != kNoItem ? reserved : next_item_.fetch_add(1, std::memory_order_relaxed);
            if (item >= n_items || cancelled_.load(std::memory_order_relaxed)) break;
            // One more, so that its bytes can be fetched meanwhile; not near the end, where another may be idle.
            reserved = kNoItem;
            if (next_item_.load(std::memory_order_relaxed) + kReserveUntil * scratch_.threads.size() < n_items)
                reserved = next_item_.fetch_add(1, std::memory_order_relaxed);
            mine.following = item_bytes(reserved != kNoItem ? reserved : next_item_.load(std::memory_order_relaxed));
            mine.later = mine.following;
            scan(scratch_.items[item], mine);
        }
        if (filters()) kernels_.end();
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
            scan_rows(codes, ids, item.count, members, n, list, mine);
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

    // The rows of an item against a group of queries: through the filter where that pays, block by block.
    void scan_rows(const std::uint8_t* codes, const std::int64_t* ids, std::int64_t count, const std::int32_t* members,
                   int n, std::int64_t list, ThreadScratch& mine) {
        const float* queries[kGroup];
        for (int m = 0; m < n; ++m) queries[m] = scratch_.queries.data() + members[m] * dim_;
        const bool filtered = may_filter(n);
        if (filtered) pack_queries(members, n, mine);
        const float* centroid = lists_.centroids == nullptr ? nullptr : lists_.centroids + list * lists_.dim;
        const std::int64_t block_bytes = kBlockRows * lists_.code_size;
        for (std::int64_t first = 0; first < count; first += kBlockRows, codes += block_bytes) {
            Block block{.codes = codes, .ids = ids + first, .members = members, .queries = queries, .centroid = centroid};
            block.n_queries = n;
            block.n_rows = static_cast<int>(std::min<std::int64_t>(kBlockRows, count - first));
            block.wanted = wanted_rows(ids + first, count - first);
            if (block.wanted == 0) continue;
            // What is read after this block, to be fetched ahead; nullptr where nobody knows.
            block.next = first + kBlockRows < count ? codes + block_bytes
                         : mine.following.empty()   ? nullptr
                                                    : mine.following.data();
            if (!bytes_) read_rows(block, mine);
            if (filtered && filter_rows(block, mine)) continue;
            compare_rows(block, mine);
        }
    }

    // A block of rows, and the queries that are compared with it.
    struct Block {
        const std::uint8_t* codes;
        const std::int64_t* ids;
        const std::int32_t* members;
        const float* const* queries;
        const float* centroid;
        int n_queries = 0, n_rows = 0;
        std::uint32_t wanted = 0;
        const std::uint8_t* next = nullptr;
        const float* rows = nullptr;  // kBlockRows of dim_ floats
    };

    // Rows as floats: where they lie, or decoded, with zeros in places of rows that are not there.
    void read_rows(Block& block, ThreadScratch& mine) const {
        if (direct_ && block.n_rows == kBlockRows) {
            block.rows = reinterpret_cast<const float*>(block.codes);
            return;
        }
        float* rows = mine.rows.data();
        for (std::int64_t r = 0; r < block.n_rows; ++r) decode(block.codes + r * lists_.code_size, block.centroid, rows + r * dim_);
        std::fill_n(rows + block.n_rows * dim_, (kBlockRows - block.n_rows) * dim_, 0.0f);
        block.rows = rows;
    }

    // Exact distances of a whole block.
    void compare_rows(const Block& block, ThreadScratch& mine) {
        const int n = block.n_queries;
        const bool fetch_later = direct_ && n >= kFetchQueries + kTileQueries && !mine.later.empty();
        (keep_max_ ? kernels_.inner_products : kernels_.squared_l2)(
            block.rows, dim_, block.queries, n, dim_, mine.distances.data(), direct_ ? block.next : nullptr,
            fetch_later ? mine.later.data() : nullptr);
        if (fetch_later) {
            const std::int64_t fetched = kBlockRows * lists_.code_size / 4 * ((n - kFetchQueries) / kTileQueries);
            mine.later = mine.later.subspan(std::min(mine.later.size(), static_cast<std::size_t>(fetched)));
        }
        for (int m = 0; m < n; ++m) {
            QueryHeap& heap = scratch_.heaps[static_cast<std::size_t>(block.members[m])];
            const float* found = mine.distances.data() + m * kBlockRows;
            for (std::uint32_t near = kernels_.at_most(found, heap.limit()) & block.wanted; near != 0; near &= near - 1) {
                const int r = std::countr_zero(near);
                heap.push(found[r], block.ids[r]);
            }
        }
    }

    void pack_queries(const std::int32_t* members, int n, ThreadScratch& mine) {
        const std::int8_t* rows[kGroup];
        for (int m = 0; m < n; ++m) {
            rows[m] = filtered_query(static_cast<std::size_t>(members[m]));
            const QueryBound& bound = scratch_.bounds[static_cast<std::size_t>(members[m])];
            mine.square[static_cast<std::size_t>(m)] = static_cast<float>(bound.square / bound.step);
            mine.length[static_cast<std::size_t>(m)] = static_cast<float>(bound.length / bound.step);
        }
        renew_limits(members, n, mine);
        kernels_.pack(rows, n, row_bytes_, mine.packed.data());
    }

    void renew_limits(const std::int32_t* members, int n, ThreadScratch& mine) const {
        for (int m = 0; m < n; ++m) mine.base[static_cast<std::size_t>(m)] = base_limit(members[m]);
    }

    // QueryLimits::base: no row beyond it can enter the query's answer.
    float base_limit(std::int32_t query) const {
        return scratch_.bounds[static_cast<std::size_t>(query)].base(scratch_.heaps[static_cast<std::size_t>(query)].limit());
    }

    // Exact distances only of pairs that the filter cannot rule out; false where these would be too many, and nothing is
    // done.
    bool filter_rows(const Block& block, ThreadScratch& mine) {
        const int n = block.n_queries;
        if (mine.exact_left > 0) {
            if (--mine.exact_left == 0) renew_limits(block.members, n, mine);
            return false;
        }
        const QueryLimits limits{mine.base.data(), mine.square.data(), mine.length.data()};
        RowTerms terms{};
        int n_found;
        if (bytes_) {
            const std::uint8_t* rows = block.codes;
            std::int64_t stride = lists_.code_size;
            if (block.n_rows < kBlockRows || lists_.dim != row_bytes_) {  // not to read beyond them
                for (std::int64_t r = 0; r < block.n_rows; ++r)
                    std::memcpy(mine.codes.data() + r * row_bytes_, rows + r * stride, static_cast<std::size_t>(stride));
                rows = mine.codes.data();
                stride = row_bytes_;
            }
            kernels_.row_terms(block.codes, lists_.code_size, block.n_rows, lists_.dim, keep_max_ ? nullptr : lists_.scale, &terms);
            n_found = kernels_.filter(rows, stride, mine.packed.data(), n, row_bytes_, limits, terms, mine.found.data(), block.next);
        } else {
            const std::uint8_t* next = direct_ ? block.next : nullptr;
            kernels_.round_rows(block.rows, dim_, dim_, row_bytes_, mine.codes.data(), &terms, next);
            n_found = kernels_.filter_halves(mine.codes.data(), row_bytes_, mine.packed.data(), n, row_bytes_, limits, terms,
                                             mine.found.data(), next);
            if (n_found * 3 > n * kBlockRows) {
                mine.exact_left = mine.exact_run;
                mine.exact_run = std::min(2 * mine.exact_run, kMostExactBlocks);
                return false;
            }
            mine.exact_run = kFewestExactBlocks;
        }
        compare_pairs(block, n_found, mine);
        return true;
    }

    // Exact distances of found pairs.
    void compare_pairs(const Block& block, int n_found, ThreadScratch& mine) {
        const auto distances_of = keep_max_ ? kernels_.inner_product_pairs : kernels_.squared_l2_pairs;
        const float* rows[kPairs];
        const float* queries[kPairs];
        float distances[kPairs];
        int members[kPairs], places[kPairs];
        std::uint32_t decoded = block.rows == nullptr ? 0 : 0xffffu;
        float* own_rows = mine.rows.data();
        for (int f = 0; f < n_found;) {
            int count = 0;
            for (; f < n_found && count < kPairs; ++f) {
                const int m = static_cast<int>(mine.found[static_cast<std::size_t>(f)] >> 4);
                const int r = static_cast<int>(mine.found[static_cast<std::size_t>(f)] & 15u);
                if (!(block.wanted >> r & 1)) continue;
                if (!(decoded >> r & 1)) {
                    decode(block.codes + r * lists_.code_size, block.centroid, own_rows + r * dim_);
                    decoded |= 1u << r;
                }
                rows[count] = (block.rows == nullptr ? own_rows : block.rows) + r * dim_;
                queries[count] = block.queries[m];
                members[count] = m;
                places[count++] = r;
            }
            distances_of(rows, queries, count, dim_, distances);
            for (int pair = 0; pair < count; ++pair) {
                const std::int32_t query = block.members[members[pair]];
                QueryHeap& heap = scratch_.heaps[static_cast<std::size_t>(query)];
                if (!(distances[pair] <= heap.limit())) continue;
                heap.push(distances[pair], block.ids[places[pair]]);
                mine.base[static_cast<std::size_t>(members[pair])] = base_limit(query);
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

    // While there is work, a report must be worth its time: it runs in Python.
    bool worth_delivering() const {
        if (!task_.on_done || error_) return false;
        const std::size_t ready = n_done_.load(std::memory_order_acquire) - n_delivered_;
        return ready >= kRowsOfAReport || (ready > 0 && std::chrono::steady_clock::now() - reported_ >= kTimeOfAReport);
    }

    // Reports what is complete.
    void deliver() {
        if (!task_.on_done || error_ || n_done_.load(std::memory_order_acquire) == n_delivered_) return;
        reported_ = std::chrono::steady_clock::now();
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
    const std::int64_t dim_;
    const bool bytes_, halves_;      // which filter there is
    const std::int64_t row_bytes_;   // of a row in the filter's numbers
    const bool direct_;              // rows are read where they lie
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
