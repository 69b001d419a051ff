#include "scan/list_scan.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <exception>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>

#include "scan/row_scan.h"
#include "scan/scan_items.h"

namespace hybridindex {
namespace {

// Complete rows that make a report, and how long fewer may wait for one.
constexpr std::size_t kRowsOfAReport = 16;
constexpr std::chrono::microseconds kTimeOfAReport{250};
// Bytes between what is read and what is fetched, a block at least: what is read in the time of a memory access, and
// short of what one item after this one may hold.
constexpr std::int64_t kBytesAhead = 16 << 10, kFloatsAhead = 32 << 10;
constexpr std::size_t kNoItem = static_cast<std::size_t>(-1);
// Items for each thread that are left when threads stop taking two at a time.
constexpr std::size_t kReserveUntil = 4;
// Work, as in make_items, that is worth waking a thread for.
constexpr std::int64_t kWorkOfAHelper = 256 << 10;

}  // namespace

class Scratch {
public:
    std::vector<std::int32_t> slot_of;
    ProbedLists probed;
    std::vector<ScanItem> items;
    std::vector<std::int32_t> items_of_query;
    RowQueries queries;
    std::vector<std::atomic<std::int32_t>> left;  // items of each query
    std::vector<RowScan> threads;

    explicit Scratch(RowQueries made) : queries(std::move(made)) {}
};

bool IdFilter::allows(std::int64_t id) const {
    if (bitmap != nullptr) return id >= 0 && id < n_bits && (bitmap[id >> 3] >> (id & 7) & 1);
    return std::binary_search(sorted, sorted + n_sorted, id);
}

namespace {

// One call of scan(): what its threads share.
class Job {
public:
    Job(const ListTable& lists, const KeptTerms* terms, bool keep_max, const ScanTask& task, Scratch& scratch,
        ThreadPool& pool)
        : lists_(lists), terms_(terms), keep_max_(keep_max), task_(task), scratch_(scratch), pool_(pool) {}

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
            make_items(scratch_.probed, {lists_.extents, lists_.codes.code_size, lists_.codes.dim}, task_.n, threads,
                       static_cast<bool>(task_.on_done), scratch_.items, scratch_.items_of_query);
        n_helpers_ = static_cast<int>(std::min<std::int64_t>(pool_.n_helpers(), work / kWorkOfAHelper));
        std::int64_t widest = 0;
        for (std::size_t i = 0; i + 1 < scratch_.probed.starts.size(); ++i)
            widest = std::max(widest, scratch_.probed.starts[i + 1] - scratch_.probed.starts[i]);
        widest = std::min(widest, kGroup);
        scratch_.queries.prepare(task_.queries, task_.n, task_.k, widest, task_.distances, task_.ids);
        const std::size_t n = static_cast<std::size_t>(task_.n);
        if (scratch_.left.size() < n) scratch_.left = std::vector<std::atomic<std::int32_t>>(n);
        for (std::size_t q = 0; q < n; ++q) {
            scratch_.left[q].store(scratch_.items_of_query[q], std::memory_order_relaxed);
            if (scratch_.items_of_query[q] == 0) finish_query(static_cast<std::int32_t>(q));
        }
        if (scratch_.threads.size() < static_cast<std::size_t>(threads))
            scratch_.threads.resize(static_cast<std::size_t>(threads));
        for (RowScan& thread : scratch_.threads) thread.make_room(scratch_.queries, widest);
    }

    // -- on any thread

    void work(bool leading) {
        RowScan& mine = scratch_.threads[static_cast<std::size_t>(next_thread_.fetch_add(1))];
        const std::size_t n_items = scratch_.items.size();
        std::size_t reserved = kNoItem;
        mine.begin();
        for (;;) {
            if (leading && worth_delivering()) {
                // on_done may run anything, another scan for one, that needs the same registers.
                mine.end();
                deliver();
                mine.begin();
            }
            const std::size_t item = reserved != kNoItem ? reserved : next_item_.fetch_add(1, std::memory_order_relaxed);
            if (item >= n_items || cancelled_.load(std::memory_order_relaxed)) break;
            // One more, so that its bytes can be fetched meanwhile; not near the end, where another may be idle.
            reserved = kNoItem;
            if (next_item_.load(std::memory_order_relaxed) + kReserveUntil * scratch_.threads.size() < n_items)
                reserved = next_item_.fetch_add(1, std::memory_order_relaxed);
            const std::size_t following = reserved != kNoItem ? reserved : next_item_.load(std::memory_order_relaxed);
            scan(scratch_.items[item], following < n_items ? &scratch_.items[following] : nullptr, mine);
        }
        mine.end();
    }

    // `following` is what this thread will read next, as far as anybody knows; nullptr: nothing.
    void scan(const ScanItem& item, const ScanItem* following, RowScan& mine) {
        const std::int64_t begin = scratch_.probed.starts[item.list], end = scratch_.probed.starts[item.list + 1];
        const std::int64_t list = scratch_.probed.lists[item.list];
        const std::int64_t* extent = lists_.extents + list * 3;
        const std::uint8_t* codes = item_bytes(item).data();
        const std::int64_t* ids =
            reinterpret_cast<const std::int64_t*>(lists_.base + extent[2] + extent[1] * lists_.codes.code_size) + item.first;
        const std::int64_t block_bytes = kBlockRows * lists_.codes.code_size;
        const float* centroid = lists_.centroids == nullptr ? nullptr : lists_.centroids + list * lists_.codes.dim;
        const std::int64_t distance = lists_.codes.code == Code::u8 ? kBytesAhead : kFloatsAhead;
        const std::int64_t ahead = (distance + block_bytes - 1) / block_bytes;
        const std::int64_t blocks = (item.count + kBlockRows - 1) / kBlockRows;
        const std::span<const std::uint8_t> later = following == nullptr ? std::span<const std::uint8_t>{} : item_bytes(*following);
        // What is fetched while a block is read.
        const auto fetched_with = [&](std::int64_t block) {
            const bool here = block + ahead < blocks;
            const std::int64_t fetched = block + ahead - (here ? 0 : blocks);
            const std::span<const std::uint8_t> bytes = here ? item_bytes(item) : later;
            const std::size_t start = static_cast<std::size_t>(fetched * block_bytes);
            if (start >= bytes.size()) return std::span<const std::uint8_t>{};
            terms_of(here ? item : *following, fetched * kBlockRows).fetch();
            return bytes.subspan(start, std::min(static_cast<std::size_t>(block_bytes), bytes.size() - start));
        };
        for (std::int64_t first = begin; first < end; first += kGroup) {
            mine.start_group(scratch_.probed.members.data() + first, static_cast<int>(std::min(kGroup, end - first)),
                             centroid, later);
            for (std::int64_t row = 0; row < item.count; row += kBlockRows) {
                const std::uint8_t* block = codes + row / kBlockRows * block_bytes;
                mine.scan({.codes = block,
                           .n_rows = static_cast<int>(std::min<std::int64_t>(kBlockRows, item.count - row)),
                           .wanted = wanted_rows(ids + row, item.count - row),
                           .ids = ids + row,
                           .first_id = 0,
                           .terms = terms_of(item, row),
                           .next = fetched_with(row / kBlockRows)});
            }
        }
        for (std::int64_t m = begin; m < end; ++m)
            if (scratch_.left[scratch_.probed.members[m]].fetch_sub(1, std::memory_order_acq_rel) == 1)
                finish_query(scratch_.probed.members[m]);
    }

    std::span<const std::uint8_t> item_bytes(const ScanItem& item) const {
        const std::int64_t start =
            lists_.extents[scratch_.probed.lists[item.list] * 3 + 2] + item.first * lists_.codes.code_size;
        return {lists_.base + start, static_cast<std::size_t>(item.count * lists_.codes.code_size)};
    }

    // Of the block at `row` of an item.
    KeptTerms::Block terms_of(const ScanItem& item, std::int64_t row) const {
        return terms_ == nullptr ? KeptTerms::Block{} : terms_->block(scratch_.probed.lists[item.list], item.first + row);
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

    void finish_query(std::int32_t query) {
        scratch_.queries.heap(query).finish(keep_max_);
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
    const KeptTerms* const terms_;
    const bool keep_max_;
    const ScanTask& task_;
    Scratch& scratch_;
    ThreadPool& pool_;
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
    const std::int64_t element = element_size(lists.codes.code), code_size = lists.codes.code_size;
    if (lists.codes.dim < 1 || code_size != lists.codes.dim * element)
        throw std::invalid_argument("code_size is " + std::to_string(code_size) + "; expected " +
                                    std::to_string(lists.codes.dim * element));
    if (reinterpret_cast<std::uintptr_t>(lists.base) % 8 != 0)
        throw std::invalid_argument("the lists must start at a multiple of 8 bytes");
    std::vector<std::int64_t> order;
    for (std::int64_t i = 0; i < lists.nlist; ++i) {
        const std::int64_t size = lists.extents[3 * i], capacity = lists.extents[3 * i + 1], offset = lists.extents[3 * i + 2];
        if (size < 0 || capacity < size || size > std::numeric_limits<std::int32_t>::max())
            fail(i, "has size " + std::to_string(size) + " and capacity " + std::to_string(capacity));
        if (offset < 0 || offset > lists.nbytes || capacity > (lists.nbytes - offset) / (code_size + 8))
            fail(i, "leaves the buffer");
        if (offset % 8 != 0 || (capacity * code_size) % 8 != 0) fail(i, "is not aligned to 8 bytes");
        if (capacity > 0) order.push_back(i);
    }
    std::sort(order.begin(), order.end(),
              [&](std::int64_t a, std::int64_t b) { return lists.extents[3 * a + 2] < lists.extents[3 * b + 2]; });
    for (std::size_t i = 0; i + 1 < order.size(); ++i) {
        const std::int64_t a = order[i], b = order[i + 1];
        if (lists.extents[3 * a + 2] + lists.extents[3 * a + 1] * (code_size + 8) > lists.extents[3 * b + 2])
            fail(b, "overlaps list " + std::to_string(a));
    }
}

}  // namespace

ListScanner::ListScanner(const ListTable& lists, bool keep_max, const BlockKernels& kernels)
    : lists_((check(lists), lists)), keep_max_(keep_max), kernels_(kernels),
      terms_(lists.codes.code == Code::u8 && lists.centroids == nullptr
                 ? std::make_unique<KeptTerms>(lists.extents, lists.nlist, !keep_max) : nullptr) {}

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
    auto made = std::make_unique<Scratch>(RowQueries(lists_.codes, lists_.centroids != nullptr, keep_max_, kernels_));
    made->slot_of.assign(static_cast<std::size_t>(lists_.nlist), -1);
    return made;
}

void ListScanner::scan(const ScanTask& task, ThreadPool& pool) {
    // Not given back where the scan throws: what it left half done goes with it.
    std::unique_ptr<Scratch> scratch = take_scratch();
    Job(lists_, terms_.get(), keep_max_, task, *scratch, pool).run();
    const std::lock_guard lock(mutex_);
    if (idle_.size() < 2) idle_.push_back(std::move(scratch));
}

}  // namespace hybridindex
