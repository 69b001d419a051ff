// Scan of rows that lie anywhere in the lists: copied together block by block, then compared as the rows of a list are.
#pragma once
#include <cstdint>
#include <vector>

#include "jobs/scan_job.h"
#include "jobs/thread_pool.h"
#include "scan/list_scan.h"
#include "scan/row_scan.h"
#include "simd/aligned_buffer.h"
#include "simd/block_kernels.h"

namespace hybridindex {

struct ScatteredTask : AnswerTask {
    const std::int64_t* positions;  // (sets, w), list << 32 | row; -1, at the end: none
    std::int64_t sets;              // 1: all queries are compared with the same rows; or n: each with its own
    std::int64_t w;
};

// Copies of rows, gathered until they make a block. One thread's.
class GatheredRows {
public:
    void make_room(std::int64_t code_size) { codes_.grow(kBlockRows * code_size); }
    // Takes a row, which is fetched meanwhile; true: compare() has to be called before the next one.
    bool add(const std::uint8_t* code, const std::int64_t* id, std::int64_t code_size);
    // Compares the oldest ones, a block at most, with the group of `rows`.
    void compare(RowScan& rows, std::int64_t code_size);
    bool empty() const { return held_ == 0; }
    void clear() { held_ = 0; }

private:
    AlignedBuffer<std::uint8_t> codes_;
    const std::uint8_t* held_codes_[2 * kBlockRows];
    const std::int64_t* held_ids_[2 * kBlockRows];
    int held_ = 0;
};

class ScatteredRows {
public:
    using Task = ScatteredTask;
    using Heap = QueryHeap;
    struct Shared : RowQueries {
        std::vector<std::int64_t> positions;  // helpers may read them after the call
        std::int64_t w = 0;
        const std::int64_t code_size;

        explicit Shared(const ScatteredRows& source);
        void prepare(const ScatteredTask& task, const ScanPlan& plan, std::int64_t widest);
        void let_go();
    };
    struct Rows : RowScan {
        GatheredRows gathered;

        void make_room(Shared& shared, std::int64_t widest) {
            RowScan::make_room(shared, widest);
            gathered.make_room(shared.code_size);
        }
    };

    // Lists whose rows are whole vectors.
    ScatteredRows(const ListTable& lists, bool keep_max, const BlockKernels& kernels);

    // Throws std::out_of_range for a position that is no row, before anything is read.
    std::int64_t plan(const ScatteredTask& task, int threads, ScanPlan& plan) const;
    bool scan(Rows& rows, const Shared& shared, const ScanPlan& plan, const ScanItem& item, const ScanItem* following,
              std::int64_t first, int n, QueryHeap* apart, const Stopped& stopped) const;
    void finish(QueryHeap& heap) const { heap.finish(keep_max_); }

private:
    const ListTable lists_;
    const bool keep_max_;
    const BlockKernels& kernels_;
};

extern template class ScanJob<ScatteredRows>;
extern template class ScanJobs<ScatteredRows>;

// Safe to use from several threads at once.
class ScatteredScanner {
public:
    // Throws std::invalid_argument as check_lists() does, or where rows have a centroid added.
    ScatteredScanner(const ListTable& lists, bool keep_max, const BlockKernels& kernels)
        : rows_(lists, keep_max, kernels), jobs_(rows_) {}
    void scan(const ScatteredTask& task, ThreadPool& pool) { jobs_.run(task, pool); }

private:
    const ScatteredRows rows_;
    ScanJobs<ScatteredRows> jobs_;
};

}  // namespace hybridindex
