// Scan of probed inverted lists, list-major: the bytes of a list are read once per batch and compared with all queries
// that probe it. A query is complete the moment its last list is scanned. The calling thread waits for no other: what
// its helpers have not finished in time it scans itself.
#pragma once
#include <cstdint>
#include <memory>
#include <span>

#include "simd/block_kernels.h"
#include "simd/codes.h"
#include "scan/kept_terms.h"
#include "scan/row_scan.h"
#include "jobs/scan_job.h"
#include "jobs/thread_pool.h"
#include "routing/matching_rows.h"

namespace hybridindex {

// Mapped lists: rows, then ids; `extents` has (size, capacity, byte offset) per list.
struct ListTable {
    const std::uint8_t* base;
    std::int64_t nbytes;
    const std::int64_t* extents;
    std::int64_t nlist;
    RowCodes codes;
    const float* centroids;  // (nlist, dim), added to every decoded row; nullptr: rows are whole vectors
    // Whoever made the extents says that none overlap: looking takes as long as a search does.
    bool apart = false;
};

// Throws std::invalid_argument where extents leave the buffer, overlap or are not aligned.
void check_lists(const ListTable& lists);

// Which rows may be answered: by their ids, bit i of a bitmap of n_bits, or a sorted array; or by a bit for each row.
struct RowFilter {
    const std::uint8_t* bitmap = nullptr;
    std::int64_t n_bits = 0;
    const std::int64_t* sorted = nullptr;
    std::int64_t n_sorted = 0;
    RowMask rows{};
    // Of the arrays. Let go on a thread that scans or destroys the scanner; it may be after the scan. Nobody, where
    // they outlive the scanner.
    std::shared_ptr<const void> owner = nullptr;

    bool active() const { return bitmap != nullptr || sorted != nullptr || rows.bits != nullptr; }
    // Which of at most 32 rows of a list from `row` on, with these ids, it allows, as bits.
    std::uint32_t wanted(std::int64_t list, std::int64_t row, const std::int64_t* ids, std::int64_t count) const;

private:
    bool allows(std::int64_t id) const;
};

struct ScanTask : AnswerTask {
    const std::int64_t* probes;  // (n, p), -1: none
    std::int64_t p;
    RowFilter filter;
};

// Probed lists as what a ScanJob scans.
class ListRows {
public:
    using Task = ScanTask;
    using Heap = QueryHeap;
    using Rows = RowScan;
    struct Shared : RowQueries {
        RowFilter filter;

        explicit Shared(const ListRows& source);
        void prepare(const ScanTask& task, const ScanPlan& plan, std::int64_t widest);
        void let_go() { filter = {}, RowQueries::let_go(kMostKept); }
    };

    ListRows(const ListTable& lists, bool keep_max, const BlockKernels& kernels);

    std::int64_t plan(const ScanTask& task, int threads, ScanPlan& plan) const;
    bool scan(RowScan& rows, const Shared& shared, const ScanPlan& plan, const ScanItem& item, const ScanItem* following,
              std::int64_t first, int n, QueryHeap* apart, const Stopped& stopped) const;
    void finish(QueryHeap& heap) const { heap.finish(keep_max_); }

private:
    friend class ListScanner;
    std::span<const std::uint8_t> bytes_of(std::int64_t list, const ScanItem& item) const;
    KeptTerms::Block terms_of(std::int64_t list, std::int64_t row) const;

    const ListTable lists_;
    const bool keep_max_;
    const BlockKernels& kernels_;
    const std::unique_ptr<KeptTerms> terms_;  // of lists of bytes
};

extern template class ScanJob<ListRows>;
extern template class ScanJobs<ListRows>;

// Safe to use from several threads at once.
class ListScanner {
public:
    // Throws as check_lists() does.
    ListScanner(const ListTable& lists, bool keep_max, const BlockKernels& kernels);

    const BlockKernels& kernels() const { return rows_.kernels_; }

    // Throws std::out_of_range for a probe that is no list, before anything is read. Answers do not depend on the
    // number of threads.
    void scan(const ScanTask& task, ThreadPool& pool) { jobs_.run(task, pool); }

    // Computes and keeps what first scans of these lists would compute beside their distances. Reads all their rows.
    // Throws std::out_of_range for what is no list.
    void prepare(const std::int64_t* lists, std::int64_t n);
    // Nothing that was computed from the rows of these lists is used any more. Throws as prepare() does.
    void forget(const std::int64_t* lists, std::int64_t n);

private:
    void check_lists(const std::int64_t* lists, std::int64_t n) const;

    const ListRows rows_;
    ScanJobs<ListRows> jobs_;
};

}  // namespace hybridindex
