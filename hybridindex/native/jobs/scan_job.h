// One call of a scan, whatever is scanned: the caller leads, helpers help, and nobody waits for a thread that lost its
// core. A source says what the items are and how one of them is scanned.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include <time.h>
#include <unistd.h>

#include "jobs/scan_items.h"
#include "jobs/thread_pool.h"

namespace hybridindex {

// What every source's task begins with.
struct AnswerTask {
    const float* queries;  // (n, dim)
    std::int64_t n;
    std::int64_t k;
    float* distances;   // (n, k), best first
    std::int64_t* ids;  // (n, k), -1 in empty places, which are at infinite distance
    // Called on the calling thread with rows that are complete, each once; may throw, which ends the scan.
    std::function<void(const std::vector<std::int32_t>&)> on_done;
};

// Complete rows that make a report, and how long fewer may wait for one.
inline constexpr std::size_t kRowsOfAReport = 16;
inline constexpr std::chrono::microseconds kTimeOfAReport{250};
inline constexpr std::size_t kNoPiece = static_cast<std::size_t>(-1);
// Items are taken by pieces, some one behind the other: about so many for each thread. And how many for each are left when
// threads stop taking two at a time.
inline constexpr std::size_t kPiecesPerThread = 16, kReserveUntil = 4;
// Work, as in make_items, that is worth waking a thread for.
inline constexpr std::int64_t kWorkOfAHelper = 256 << 10;
// So long without its core a scan is disturbed, if that is not little beside its work.
inline constexpr std::chrono::microseconds kDisturbed{200};
inline constexpr int kMostSkipped = 256, kSkippedWhenLate = 4;
// Bytes of what was found that a call's memory may hold for calls to come; of its threads together, and of the queries.
inline constexpr std::size_t kMostKept = 16 << 20;

// Items of one call.
struct ScanPlan {
    std::vector<std::int32_t> slot_of;  // scratch of group_probes
    ProbedLists probed;
    std::vector<ScanItem> items;
    std::vector<std::int32_t> left;  // items of each query
};

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

// Of a piece that a helper began: what it found is its own until the state is found, and the caller's from then on.
// `taken`: the caller was first.
enum class PieceState : std::uint8_t { open, found, taken };

// Whether calls ask for help: not all of them while that does not pay. Callers may overwrite each other's count: nothing but
// time depends on it.
class HelpThatPays {
public:
    bool worth_asking() {
        const int skipped = skipped_.load(std::memory_order_relaxed);
        if (skipped > 0) skipped_.store(skipped - 1, std::memory_order_relaxed);
        return skipped == 0;
    }
    // It did not pay: so many calls will not ask.
    void skip(int calls) { skipped_.store(calls, std::memory_order_relaxed); }

private:
    std::atomic<int> skipped_{0};
};

// Asked between blocks: whether somebody else has scanned the piece, or the scan is over. Never of what the caller scans.
class Stopped {
public:
    Stopped(const std::atomic<PieceState>* state, const std::atomic<bool>& closed) : state_(state), closed_(closed) {}
    bool operator()() const {
        return state_ != nullptr &&
               (state_->load(std::memory_order_relaxed) != PieceState::open || closed_.load(std::memory_order_relaxed));
    }

private:
    const std::atomic<PieceState>* const state_;
    const std::atomic<bool>& closed_;
};

// A call of scan(), and the memory of calls to come.
//
// The calling thread owns the answers. Helpers put aside what they find, piece by piece, and the caller takes it in. When
// nothing is left to begin, the caller scans what helpers have begun and not finished: whoever finds first counts, both
// find the same. A helper that lost its core may still be inside after the call; it reads what lies here, the lists and
// the filter, and writes nothing that anybody waits for.
//
// A Source has
//   Task    an AnswerTask
//   Heap    the best of one query: a QueryHeap, or what can do the same; kInArrays: where its answer goes it also works;
//           kept_bytes(): of its own memory
//   Shared  what all threads of a call read, helpers that are late too: made of the source; prepare(task, plan, widest)
//           copies what the task points to; heap(query); let_go() of what is another's, and of more than kMostKept
//   Rows    one thread's scratch: make_room(shared, widest), begin(), end()
//   plan(task, threads, plan)  fills in a plan and returns the work, about in bytes read
//   scan(rows, shared, plan, item, following, first, n, apart, stopped)  scans an item for the n members from `first`,
//           into their own heaps or into `apart`; false where stopped() said so. `following` is read next, or nullptr
//   finish(heap)  puts an answer in its order
template <class Source>
class ScanJob final : public ThreadPool::Work {
public:
    using Task = typename Source::Task;
    using Rows = typename Source::Rows;
    using Heap = typename Source::Heap;

    explicit ScanJob(const Source& source) : source_(source), shared_(source) {}

    // No helper may be inside. `help`: of the calls of this source.
    void run(const Task& task, ThreadPool& pool, HelpThatPays& help) {
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
        if (wanted_ > 0 && !help.worth_asking()) wanted_ = 0;
        alone_ = wanted_ == 0;
        const int asked = alone_ ? 0 : pool.ask(*this, wanted_);
        wanted_ -= asked;
        // What on_done waits for says nothing.
        std::optional<Clocks> clocks;
        if (asked > 0 && !task.on_done) clocks.emplace();
        lead(pool);
        if (clocks) help.skip(scans_to_skip(*clocks));
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
    // No helper may be inside.
    void let_go() {
        shared_.let_go();
        std::size_t kept = 0;
        for (const Thread& thread : threads_) kept += thread.kept_bytes();
        for (const Aside& aside : asides_) kept += aside.found.capacity() * sizeof(Found);
        if (kept > kMostKept) threads_.clear(), asides_.clear();
    }

    void help() override {
        Thread& mine = threads_[static_cast<std::size_t>(next_thread_.fetch_add(1, std::memory_order_relaxed))];
        try {
            mine.rows.make_room(shared_, widest_);
            const Registers registers(mine.rows);
            Claims claims(*this);
            for (Claim claim = claims.next(); claim.piece < n_pieces_; claim = claims.next()) {
                if (closed_.load(std::memory_order_relaxed)) break;
                Aside& aside = asides_[claim.piece];
                if (!scan_aside(claim, mine, aside.state)) continue;
                aside.found.swap(mine.found);
                PieceState open = PieceState::open;
                aside.state.compare_exchange_strong(open, PieceState::found, std::memory_order_release, std::memory_order_relaxed);
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
    struct Aside {
        std::atomic<PieceState> state{PieceState::open};
        std::vector<Found> found;
    };

    struct Thread {
        Rows rows;
        // What is put aside: heaps of the queries of a group, in these arrays if they need some, the best of a whole piece.
        std::vector<Heap> heaps;
        std::vector<float> distances;
        std::vector<std::int64_t> ids;
        std::vector<Found> found;

        Heap* fresh_heaps(int n, std::int64_t k) {
            const std::int64_t step = Heap::kInArrays ? k : 0;
            const std::size_t places = static_cast<std::size_t>(n * step);
            if (heaps.size() < static_cast<std::size_t>(n)) heaps.resize(static_cast<std::size_t>(n));
            if (distances.size() < places) distances.resize(places), ids.resize(places);
            for (int m = 0; m < n; ++m) heaps[static_cast<std::size_t>(m)].reset(distances.data() + m * step, ids.data() + m * step, k);
            return heaps.data();
        }

        std::size_t kept_bytes() const {
            std::size_t bytes = distances.capacity() * sizeof(float) + ids.capacity() * sizeof(std::int64_t);
            for (const Heap& heap : heaps) bytes += heap.kept_bytes();
            return bytes + found.capacity() * sizeof(Found);
        }
    };

    // The CPU's registers are the scan's.
    struct Registers {
        const Rows& rows;
        explicit Registers(const Rows& of) : rows(of) { rows.begin(); }
        ~Registers() { rows.end(); }
    };

    // A piece, and what this thread will read next, as far as anybody knows. No piece: at or beyond the last one.
    struct Claim {
        std::size_t piece, following;
    };

    // Pieces of one thread.
    class Claims {
    public:
        // `others` gets the pieces that other threads took.
        explicit Claims(ScanJob& job, std::vector<std::size_t>* others = nullptr) : job_(job), others_(others) {}

        Claim next() {
            const std::size_t piece = reserved_ != kNoPiece ? reserved_ : take();
            // One more, so that its bytes can be fetched meanwhile; not near the end, where another may be idle.
            reserved_ = kNoPiece;
            const std::size_t left_for_all = kReserveUntil * job_.threads_.size();
            if (job_.next_piece_.load(std::memory_order_relaxed) + left_for_all < job_.n_pieces_) reserved_ = take();
            return {piece, reserved_ != kNoPiece ? reserved_ : job_.next_piece_.load(std::memory_order_relaxed)};
        }

    private:
        std::size_t take() {
            const std::size_t at = job_.take_piece();
            if (others_ != nullptr)
                for (; seen_ < std::min(at, job_.n_pieces_); ++seen_) others_->push_back(seen_);
            seen_ = at + 1;
            return at;
        }

        ScanJob& job_;
        std::vector<std::size_t>* const others_;
        std::size_t reserved_ = kNoPiece, seen_ = 0;
    };

    void prepare(const Task& task, int n_helpers) {
        task_ = &task;
        whole_ = false;
        error_ = nullptr;
        done_.clear();
        reported_ = {};
        const std::int64_t work = source_.plan(task, n_helpers + 1, plan_);
        wanted_ = static_cast<int>(std::min<std::int64_t>(n_helpers, work / kWorkOfAHelper));
        widest_ = 0;
        for (std::size_t i = 0; i + 1 < plan_.probed.starts.size(); ++i)
            widest_ = std::max(widest_, plan_.probed.starts[i + 1] - plan_.probed.starts[i]);
        widest_ = std::min(widest_, kGroup);
        shared_.prepare(task, plan_, widest_);
        n_queries_ = task.n, k_ = task.k;
        for (std::int32_t q = 0; q < task.n; ++q)
            if (plan_.left[static_cast<std::size_t>(q)] == 0) finish_query(q);
        threads_.resize(std::max(threads_.size(), static_cast<std::size_t>(wanted_) + 1));
        const std::size_t wanted_pieces = kPiecesPerThread * (static_cast<std::size_t>(wanted_) + 1);
        of_piece_ = wanted_ > 0 ? std::max<std::size_t>(1, plan_.items.size() / wanted_pieces) : 1;
        n_pieces_ = (plan_.items.size() + of_piece_ - 1) / of_piece_;
        theirs_.clear();
        helped_ = false;
        if (wanted_ > 0) {
            if (asides_.size() < n_pieces_) asides_ = std::vector<Aside>(2 * n_pieces_);
            for (std::size_t i = 0; i < n_pieces_; ++i) asides_[i].state.store(PieceState::open, std::memory_order_relaxed);
        }
        next_thread_.store(1, std::memory_order_relaxed);
        next_piece_.store(0, std::memory_order_relaxed);
        closed_.store(false, std::memory_order_relaxed);
    }

    std::size_t take_piece() {
        if (!alone_) return next_piece_.fetch_add(1, std::memory_order_relaxed);
        // Without an exchange that waits for all writes before it.
        const std::size_t piece = next_piece_.load(std::memory_order_relaxed);
        next_piece_.store(piece + 1, std::memory_order_relaxed);
        return piece;
    }
    std::size_t begin_of(std::size_t piece) const { return std::min(piece * of_piece_, plan_.items.size()); }

    // -- on the calling thread

    void lead(ThreadPool& pool) {
        Thread& mine = threads_[0];
        mine.rows.make_room(shared_, widest_);
        const Registers registers(mine.rows);
        Claims claims(*this, &theirs_);
        for (Claim claim = claims.next(); claim.piece < n_pieces_; claim = claims.next()) {
            for (std::size_t item = begin_of(claim.piece); item < begin_of(claim.piece + 1); ++item) {
                scan(claim, item, mine, nullptr);
                settle(item);
                deliver_between(mine.rows);
                if (error_) return;
            }
            take_in_found();
            deliver_between(mine.rows);
            if (error_) return;
            // Helpers that were with another caller.
            if (wanted_ > 0 && pool.has_idle()) wanted_ -= pool.ask(*this, wanted_);
        }
        for (take_in_found(); !theirs_.empty(); take_in_found()) {
            Aside& aside = asides_[theirs_.back()];
            PieceState open = PieceState::open;
            if (scan_aside({theirs_.back(), kNoPiece}, mine, aside.state) &&
                aside.state.compare_exchange_strong(open, PieceState::taken, std::memory_order_relaxed)) {
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
            const std::size_t piece = theirs_[i];
            if (asides_[piece].state.load(std::memory_order_acquire) == PieceState::open) {
                ++i;
                continue;
            }
            take_in(piece, asides_[piece].found);
            helped_ = true;
            theirs_[i] = theirs_.back();
            theirs_.pop_back();
        }
    }

    void take_in(std::size_t piece, const std::vector<Found>& found) {
        for (const Found& one : found) shared_.heap(one.query).push(one.distance, one.id);
        for (std::size_t item = begin_of(piece); item < begin_of(piece + 1); ++item) settle(item);
    }

    // The rows of an item are in its queries' heaps.
    void settle(std::size_t item) {
        const std::size_t list = static_cast<std::size_t>(plan_.items[item].list);
        for (std::int64_t m = plan_.probed.starts[list]; m < plan_.probed.starts[list + 1]; ++m) {
            const std::int32_t query = plan_.probed.members[static_cast<std::size_t>(m)];
            if (--plan_.left[static_cast<std::size_t>(query)] == 0) finish_query(query);
        }
    }

    void finish_query(std::int32_t query) {
        source_.finish(shared_.heap(query));
        if (task_->on_done) done_.push_back(query);
    }

    // While there is work, a report must be worth its time: it runs in Python.
    void deliver_between(const Rows& rows) {
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

    // A piece into mine.found. False when somebody else was first, or the scan is over.
    bool scan_aside(const Claim& claim, Thread& mine, const std::atomic<PieceState>& state) {
        mine.found.clear();
        // A query alone has one heap for the whole piece.
        if (n_queries_ == 1) mine.fresh_heaps(1, k_);
        for (std::size_t item = begin_of(claim.piece); item < begin_of(claim.piece + 1); ++item)
            if (!scan(claim, item, mine, &state)) return false;
        if (n_queries_ == 1) put_aside(mine, 0, 0);
        return true;
    }

    // Into the queries' own heaps, which only the caller may; with `state`, that of its piece, into mine.found.
    bool scan(const Claim& claim, std::size_t at, Thread& mine, const std::atomic<PieceState>* state) {
        const ScanItem& item = plan_.items[at];
        const std::size_t next = at + 1 < begin_of(claim.piece + 1) ? at + 1
                                 : claim.following < n_pieces_      ? begin_of(claim.following)
                                                                    : plan_.items.size();
        const ScanItem* const following = next < plan_.items.size() ? &plan_.items[next] : nullptr;
        const std::int64_t begin = plan_.probed.starts[item.list], end = plan_.probed.starts[item.list + 1];
        const Stopped stopped(state, closed_);
        for (std::int64_t first = begin; first < end; first += kGroup) {
            const std::int32_t* const members = plan_.probed.members.data() + first;
            const int n = static_cast<int>(std::min(kGroup, end - first));
            Heap* const apart = state == nullptr ? nullptr : n_queries_ == 1 ? mine.heaps.data() : mine.fresh_heaps(n, k_);
            if (!source_.scan(mine.rows, shared_, plan_, item, following, first, n, apart, stopped)) return false;
            if (apart == nullptr) continue;
            for (int m = 0; m < n; ++m) {
                if (n_queries_ > 1) put_aside(mine, m, members[m]);
                shared_.heap(members[m]).lower(apart[m].limit());
            }
        }
        return true;
    }

    void put_aside(Thread& mine, int heap, std::int32_t query) const {
        mine.heaps[static_cast<std::size_t>(heap)].each(
            [&](float distance, std::int64_t id) { mine.found.push_back({distance, query, id}); });
    }

    const Source& source_;

    // Written by the caller before helpers are asked.
    ScanPlan plan_;
    typename Source::Shared shared_;  // with the limits of their heaps, which helpers read
    std::int64_t n_queries_ = 0, k_ = 0, widest_ = 0;
    std::vector<Thread> threads_;  // the caller's is the first
    std::vector<Aside> asides_;    // of each piece
    std::size_t of_piece_ = 1, n_pieces_ = 0;  // items of a piece, and how many there are

    std::atomic<int> next_thread_{1};
    std::atomic<std::size_t> next_piece_{0};
    std::atomic<bool> closed_{false};
    bool alone_ = false;  // no helper can come

    // The caller's alone.
    const Task* task_ = nullptr;
    int wanted_ = 0;                   // helpers that could still be asked
    bool helped_ = false;
    std::vector<std::size_t> theirs_;  // pieces that helpers began, not taken in yet
    std::vector<std::int32_t> done_;   // complete, not reported
    std::chrono::steady_clock::time_point reported_{};
    std::exception_ptr error_;
    bool whole_ = true;
};

// Calls that are over, kept for their memory. One in which helpers still are is used again when they left. Safe to use
// from several threads at once.
template <class Source>
class ScanJobs {
public:
    explicit ScanJobs(const Source& source) : source_(source), pid_(getpid()) {}
    // Waits for helpers that are still in a scan of which the answer was given.
    ~ScanJobs() {
        if (getpid() != pid_) return;
        for (const auto& job : late_)
            while (job->inside() > 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
    }

    void run(const typename Source::Task& task, ThreadPool& pool) {
        const struct Held {
            ScanJobs& jobs;
            std::unique_ptr<ScanJob<Source>> job;
            ~Held() { jobs.give_back(std::move(job)); }
        } held{*this, take()};
        held.job->run(task, pool, help_);
    }

private:
    using Job = std::unique_ptr<ScanJob<Source>>;

    Job take() {
        Job taken;
        bool late = false;
        {
            const std::lock_guard lock(mutex_);
            const auto left = std::find_if(late_.begin(), late_.end(), [](const auto& job) { return job->inside() == 0; });
            late = left != late_.end();
            std::vector<Job>& from = late ? late_ : idle_;
            if (!from.empty()) {
                if (late) std::swap(*left, late_.back());
                taken = std::move(from.back());
                from.pop_back();
            }
        }
        if (late) taken->let_go();
        return taken != nullptr && taken->whole() ? std::move(taken) : std::make_unique<ScanJob<Source>>(source_);
    }

    void give_back(Job job) {
        const bool late = job->inside() > 0;
        if (!late && !job->whole()) return;
        if (!late) job->let_go();
        const std::lock_guard lock(mutex_);
        if (late)
            late_.push_back(std::move(job));
        else if (idle_.size() < 2)
            idle_.push_back(std::move(job));
    }

    const Source& source_;
    const pid_t pid_;  // a child process has none of the helpers
    HelpThatPays help_;
    std::mutex mutex_;
    std::vector<Job> idle_;
    std::vector<Job> late_;  // given back while helpers were inside
};

}  // namespace hybridindex
