#include "scan/list_scan.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <exception>
#include <limits>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include <time.h>
#include <unistd.h>

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
// So long without its core a scan is disturbed, if that is not little beside its work.
constexpr std::chrono::microseconds kDisturbed{200};
constexpr int kMostSkipped = 256, kSkippedWhenLate = 4;

// Time since it was made, of the world and of this thread's work.
class Clocks {
public:
    std::chrono::nanoseconds off_core() const { return passed() - worked(); }
    std::chrono::nanoseconds worked() const {
        return std::max(now(CLOCK_THREAD_CPUTIME_ID) - idle_, std::chrono::nanoseconds{1});
    }

private:
    static std::chrono::nanoseconds now(clockid_t clock) {
        timespec time{};
        clock_gettime(clock, &time);
        return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
    }
    std::chrono::nanoseconds passed() const { return now(CLOCK_MONOTONIC) - started_; }

    const std::chrono::nanoseconds started_ = now(CLOCK_MONOTONIC), idle_ = now(CLOCK_THREAD_CPUTIME_ID);
};

}  // namespace

bool IdFilter::allows(std::int64_t id) const {
    if (bitmap != nullptr) return id >= 0 && id < n_bits && (bitmap[id >> 3] >> (id & 7) & 1);
    return std::binary_search(sorted, sorted + n_sorted, id);
}

// A call of scan(), and the memory of calls to come.
//
// The calling thread owns the answers. Helpers put aside what they find, item by item, and the caller takes it in. When
// nothing is left to begin, the caller scans what helpers have begun and not finished: whoever finds first counts, both
// find the same. A helper that lost its core may still be inside after the call; it reads what lies here, the lists and
// the filter, and writes nothing that anybody waits for.
class ScanJob final : public ThreadPool::Work {
public:
    ScanJob(const ListTable& lists, const KeptTerms* terms, bool keep_max, const BlockKernels& kernels)
        : lists_(lists), terms_(terms), keep_max_(keep_max),
          slot_of_(static_cast<std::size_t>(lists.nlist), -1),
          queries_(lists.codes, lists.centroids != nullptr, keep_max, kernels) {}

    // No helper may be inside.
    void run(const ScanTask& task, ThreadPool& pool) {
        prepare(task, pool.n_helpers());
        // Whatever happens here: nothing is begun afterwards.
        const struct Closing {
            ScanJob& job;
            ThreadPool& pool;
            ~Closing() {
                job.closed_.store(true, std::memory_order_relaxed);
                pool.take_back(job);
            }
        } closing{*this, pool};
        if (wanted_ > 0 && !pool.worth_asking()) wanted_ = 0;
        const int asked = pool.ask(*this, wanted_);
        wanted_ -= asked;
        const Clocks clocks;
        lead(pool);
        // What on_done waits for says nothing.
        if (asked > 0 && !task.on_done) pool.skip(scans_to_skip(clocks));
        deliver();
        whole_ = true;
        if (error_) std::rethrow_exception(error_);
    }

    // While all cores are busy a helper comes late, or gets its caller's core, which may then go to somebody else. Help saves
    // about as much time as the caller worked, so that many scans pay for the time that one lost.
    int scans_to_skip(const Clocks& clocks) const {
        const std::chrono::nanoseconds off_core = clocks.off_core(), worked = clocks.worked();
        if (off_core >= kDisturbed && off_core >= worked / 4)
            return static_cast<int>(std::min<std::int64_t>(1 + 2 * (off_core / worked), kMostSkipped));
        return helped_ ? 0 : kSkippedWhenLate;
    }

    // Whether the last run came to its end. What another left half done is of no use.
    bool whole() const { return whole_; }
    void let_go() { filter_ = {}; }

    void help() override {
        Thread& mine = threads_[static_cast<std::size_t>(next_thread_.fetch_add(1, std::memory_order_relaxed))];
        try {
            mine.rows.make_room(queries_, widest_);
            const Registers registers(mine.rows);
            Claims claims(*this);
            for (Claim claim = claims.next(); claim.item < items_.size(); claim = claims.next()) {
                if (closed_.load(std::memory_order_relaxed)) break;
                Aside& aside = asides_[claim.item];
                if (!scan(claim, mine, &aside.state)) continue;
                aside.found.swap(mine.found);
                State open = State::open;
                aside.state.compare_exchange_strong(open, State::found, std::memory_order_release, std::memory_order_relaxed);
            }
        } catch (const std::bad_alloc&) {
            // What it began is as that of a helper without a core.
        }
    }

private:
    struct Found {
        float distance;
        std::int32_t query;
        std::int64_t id;
    };
    // Of an item that a helper began: `found` is its own until the state is found, and the caller's from then on. `taken`:
    // the caller was first.
    enum class State : std::uint8_t { open, found, taken };
    struct Aside {
        std::atomic<State> state{State::open};
        std::vector<Found> found;
    };

    struct Thread {
        RowScan rows;
        // What is put aside: heaps of the queries of a group, the best of a whole item.
        std::vector<QueryHeap> heaps;
        std::vector<float> distances;
        std::vector<std::int64_t> ids;
        std::vector<Found> found;

        QueryHeap* fresh_heaps(int n, std::int64_t k) {
            const std::size_t places = static_cast<std::size_t>(n * k);
            if (heaps.size() < static_cast<std::size_t>(n)) heaps.resize(static_cast<std::size_t>(n));
            if (distances.size() < places) distances.resize(places), ids.resize(places);
            for (int m = 0; m < n; ++m) heaps[static_cast<std::size_t>(m)].reset(distances.data() + m * k, ids.data() + m * k, k);
            return heaps.data();
        }
    };

    // The CPU's registers are the scan's.
    struct Registers {
        const RowScan& rows;
        explicit Registers(const RowScan& of) : rows(of) { rows.begin(); }
        ~Registers() { rows.end(); }
    };

    // An item, and what this thread will read next, as far as anybody knows. No item: at or beyond the last one.
    struct Claim {
        std::size_t item, following;
    };

    // Items of one thread.
    class Claims {
    public:
        // `others` gets the items that other threads took.
        explicit Claims(ScanJob& job, std::vector<std::size_t>* others = nullptr) : job_(job), others_(others) {}

        Claim next() {
            const std::size_t item = reserved_ != kNoItem ? reserved_ : take();
            // One more, so that its bytes can be fetched meanwhile; not near the end, where another may be idle.
            reserved_ = kNoItem;
            const std::size_t left_for_all = kReserveUntil * job_.threads_.size();
            if (job_.next_item_.load(std::memory_order_relaxed) + left_for_all < job_.items_.size()) reserved_ = take();
            return {item, reserved_ != kNoItem ? reserved_ : job_.next_item_.load(std::memory_order_relaxed)};
        }

    private:
        std::size_t take() {
            const std::size_t at = job_.next_item_.fetch_add(1, std::memory_order_relaxed);
            if (others_ != nullptr)
                for (; seen_ < std::min(at, job_.items_.size()); ++seen_) others_->push_back(seen_);
            seen_ = at + 1;
            return at;
        }

        ScanJob& job_;
        std::vector<std::size_t>* const others_;
        std::size_t reserved_ = kNoItem, seen_ = 0;
    };

    void prepare(const ScanTask& task, int n_helpers) {
        task_ = &task;
        filter_ = task.filter;
        whole_ = false;
        error_ = nullptr;
        done_.clear();
        reported_ = {};
        group_probes(task.probes, task.n, task.p, lists_.extents, lists_.nlist, slot_of_, probed_);
        const std::int64_t work =
            make_items(probed_, {lists_.extents, lists_.codes.code_size, lists_.codes.dim}, task.n, n_helpers + 1,
                       static_cast<bool>(task.on_done), items_, left_);
        wanted_ = static_cast<int>(std::min<std::int64_t>(n_helpers, work / kWorkOfAHelper));
        widest_ = 0;
        for (std::size_t i = 0; i + 1 < probed_.starts.size(); ++i)
            widest_ = std::max(widest_, probed_.starts[i + 1] - probed_.starts[i]);
        widest_ = std::min(widest_, kGroup);
        queries_.prepare(task.queries, task.n, task.k, widest_, task.distances, task.ids);
        k_ = task.k;
        for (std::int32_t q = 0; q < task.n; ++q)
            if (left_[static_cast<std::size_t>(q)] == 0) finish_query(q);
        threads_.resize(std::max(threads_.size(), static_cast<std::size_t>(wanted_) + 1));
        theirs_.clear();
        helped_ = false;
        if (wanted_ > 0) {
            if (asides_.size() < items_.size()) asides_ = std::vector<Aside>(2 * items_.size());
            for (std::size_t i = 0; i < items_.size(); ++i) asides_[i].state.store(State::open, std::memory_order_relaxed);
        }
        next_thread_.store(1, std::memory_order_relaxed);
        next_item_.store(0, std::memory_order_relaxed);
        closed_.store(false, std::memory_order_relaxed);
    }

    // -- on the calling thread

    void lead(ThreadPool& pool) {
        Thread& mine = threads_[0];
        mine.rows.make_room(queries_, widest_);
        const Registers registers(mine.rows);
        Claims claims(*this, &theirs_);
        for (Claim claim = claims.next(); claim.item < items_.size(); claim = claims.next()) {
            scan(claim, mine, nullptr);
            settle(claim.item);
            take_in_found();
            deliver_between(mine.rows);
            if (error_) return;
            // Helpers that were with another caller.
            if (wanted_ > 0 && pool.has_idle()) wanted_ -= pool.ask(*this, wanted_);
        }
        for (take_in_found(); !theirs_.empty(); take_in_found()) {
            Aside& aside = asides_[theirs_.back()];
            State open = State::open;
            if (scan({theirs_.back(), kNoItem}, mine, &aside.state) &&
                aside.state.compare_exchange_strong(open, State::taken, std::memory_order_relaxed)) {
                take_in(theirs_.back(), mine.found);
                theirs_.pop_back();
            }
            deliver_between(mine.rows);
            if (error_) return;
        }
    }

    // Takes in what helpers found.
    void take_in_found() {
        for (std::size_t i = 0; i < theirs_.size();) {
            const std::size_t item = theirs_[i];
            if (asides_[item].state.load(std::memory_order_acquire) == State::open) {
                ++i;
                continue;
            }
            take_in(item, asides_[item].found);
            helped_ = true;
            theirs_[i] = theirs_.back();
            theirs_.pop_back();
        }
    }

    void take_in(std::size_t item, const std::vector<Found>& found) {
        for (const Found& one : found) queries_.heap(one.query).push(one.distance, one.id);
        settle(item);
    }

    // The rows of an item are in its queries' heaps.
    void settle(std::size_t item) {
        const std::size_t list = static_cast<std::size_t>(items_[item].list);
        for (std::int64_t m = probed_.starts[list]; m < probed_.starts[list + 1]; ++m) {
            const std::int32_t query = probed_.members[static_cast<std::size_t>(m)];
            if (--left_[static_cast<std::size_t>(query)] == 0) finish_query(query);
        }
    }

    void finish_query(std::int32_t query) {
        queries_.heap(query).finish(keep_max_);
        if (task_->on_done) done_.push_back(query);
    }

    // While there is work, a report must be worth its time: it runs in Python.
    void deliver_between(const RowScan& rows) {
        if (done_.empty()) return;
        if (done_.size() < kRowsOfAReport && std::chrono::steady_clock::now() - reported_ < kTimeOfAReport) return;
        // on_done may run anything, another scan for one, that needs the same registers.
        rows.end();
        deliver();
        rows.begin();
    }

    // Reports what is complete.
    void deliver() {
        if (done_.empty() || error_) return;
        reported_ = std::chrono::steady_clock::now();
        std::vector<std::int32_t> rows;
        rows.swap(done_);
        try {
            task_->on_done(rows);
        } catch (...) {
            error_ = std::current_exception();
        }
    }

    // -- on any thread

    // Into the queries' own heaps, which only the caller may; with `state`, that of its item, into mine.found. That ends
    // with false when somebody else was first, or the scan is over.
    bool scan(const Claim& claim, Thread& mine, const std::atomic<State>* state) {
        const ScanItem& item = items_[claim.item];
        const ScanItem* const following = claim.following < items_.size() ? &items_[claim.following] : nullptr;
        mine.found.clear();
        const std::int64_t begin = probed_.starts[item.list], end = probed_.starts[item.list + 1];
        const std::int64_t list = probed_.lists[item.list];
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
            const std::int32_t* const members = probed_.members.data() + first;
            const int n = static_cast<int>(std::min(kGroup, end - first));
            QueryHeap* const apart = state == nullptr ? nullptr : mine.fresh_heaps(n, k_);
            mine.rows.start_group(members, n, centroid, later, apart);
            for (std::int64_t row = 0; row < item.count; row += kBlockRows) {
                if (state != nullptr && is_over(*state)) return false;
                const std::uint8_t* block = codes + row / kBlockRows * block_bytes;
                mine.rows.scan({.codes = block,
                                .n_rows = static_cast<int>(std::min<std::int64_t>(kBlockRows, item.count - row)),
                                .wanted = wanted_rows(ids + row, item.count - row),
                                .ids = ids + row,
                                .first_id = 0,
                                .terms = terms_of(item, row),
                                .next = fetched_with(row / kBlockRows)});
            }
            if (apart == nullptr) continue;
            for (int m = 0; m < n; ++m) {
                apart[m].each([&](float distance, std::int64_t id) { mine.found.push_back({distance, members[m], id}); });
                queries_.heap(members[m]).lower(apart[m].limit());
            }
        }
        return true;
    }

    bool is_over(const std::atomic<State>& state) const {
        return state.load(std::memory_order_relaxed) != State::open || closed_.load(std::memory_order_relaxed);
    }

    std::span<const std::uint8_t> item_bytes(const ScanItem& item) const {
        const std::int64_t start =
            lists_.extents[probed_.lists[item.list] * 3 + 2] + item.first * lists_.codes.code_size;
        return {lists_.base + start, static_cast<std::size_t>(item.count * lists_.codes.code_size)};
    }

    // Of the block at `row` of an item.
    KeptTerms::Block terms_of(const ScanItem& item, std::int64_t row) const {
        return terms_ == nullptr ? KeptTerms::Block{} : terms_->block(probed_.lists[item.list], item.first + row);
    }

    // Rows that exist and whose ids are allowed, as bits.
    std::uint32_t wanted_rows(const std::int64_t* ids, std::int64_t count) const {
        const std::uint32_t valid = count >= kBlockRows ? 0xffffu : (1u << count) - 1u;
        if (!filter_.active()) return valid;
        std::uint32_t wanted = 0;
        for (std::uint32_t rest = valid; rest != 0; rest &= rest - 1)
            if (filter_.allows(ids[std::countr_zero(rest)])) wanted |= rest & -rest;
        return wanted;
    }

    const ListTable& lists_;
    const KeptTerms* const terms_;
    const bool keep_max_;

    // Written by the caller before helpers are asked.
    std::vector<std::int32_t> slot_of_;
    ProbedLists probed_;
    std::vector<ScanItem> items_;
    RowQueries queries_;  // and the limits of their heaps, which helpers read
    IdFilter filter_;
    std::int64_t k_ = 0, widest_ = 0;
    std::vector<Thread> threads_;  // the caller's is the first
    std::vector<Aside> asides_;    // of each item

    std::atomic<int> next_thread_{1};
    std::atomic<std::size_t> next_item_{0};
    std::atomic<bool> closed_{false};

    // The caller's alone.
    const ScanTask* task_ = nullptr;
    int wanted_ = 0;                   // helpers that could still be asked
    bool helped_ = false;
    std::vector<std::int32_t> left_;   // items of each query
    std::vector<std::size_t> theirs_;  // items that helpers began, not taken in yet
    std::vector<std::int32_t> done_;   // complete, not reported
    std::chrono::steady_clock::time_point reported_{};
    std::exception_ptr error_;
    bool whole_ = true;
};

namespace {

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
                 ? std::make_unique<KeptTerms>(lists.extents, lists.nlist, !keep_max) : nullptr),
      pid_(getpid()) {}

ListScanner::~ListScanner() {
    if (getpid() != pid_) return;
    for (const auto& job : late_)
        while (job->inside() > 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
}

std::unique_ptr<ScanJob> ListScanner::take_job() {
    {
        const std::lock_guard lock(mutex_);
        const auto left = std::find_if(late_.begin(), late_.end(),
                                       [](const auto& job) { return job->inside() == 0 && job->whole(); });
        std::vector<std::unique_ptr<ScanJob>>& from = left != late_.end() ? late_ : idle_;
        if (!from.empty()) {
            if (left != late_.end()) std::swap(*left, late_.back());
            std::unique_ptr<ScanJob> taken = std::move(from.back());
            from.pop_back();
            return taken;
        }
    }
    return std::make_unique<ScanJob>(lists_, terms_.get(), keep_max_, kernels_);
}

void ListScanner::give_back(std::unique_ptr<ScanJob> job) {
    const bool late = job->inside() > 0;
    if (!late && !job->whole()) return;
    if (!late) job->let_go();
    const std::lock_guard lock(mutex_);
    if (late)
        late_.push_back(std::move(job));
    else if (idle_.size() < 2)
        idle_.push_back(std::move(job));
}

void ListScanner::scan(const ScanTask& task, ThreadPool& pool) {
    const struct Held {
        ListScanner& scanner;
        std::unique_ptr<ScanJob> job;
        ~Held() { scanner.give_back(std::move(job)); }
    } held{*this, take_job()};
    held.job->run(task, pool);
}

void ListScanner::prepare(const std::int64_t* lists, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i)
        if (lists[i] < 0 || lists[i] >= lists_.nlist)
            throw std::out_of_range("list " + std::to_string(lists[i]) + "; expected 0.." + std::to_string(lists_.nlist - 1));
    RowQueries none(lists_.codes, false, keep_max_, kernels_);
    if (terms_ == nullptr || !none.may_filter(1)) return;
    RowScan rows;
    rows.make_room(none, 1);
    for (std::int64_t i = 0; i < n; ++i) {
        const std::int64_t* const extent = lists_.extents + lists[i] * 3;
        for (std::int64_t row = 0; row < extent[0]; row += kBlockRows)
            rows.keep_terms({.codes = lists_.base + extent[2] + row * lists_.codes.code_size,
                             .n_rows = static_cast<int>(std::min<std::int64_t>(kBlockRows, extent[0] - row)),
                             .wanted = 0,
                             .ids = nullptr,
                             .first_id = 0,
                             .terms = terms_->block(lists[i], row),
                             .next = {}});
    }
}

}  // namespace hybridindex
