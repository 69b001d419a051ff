// Scan of probed lists of product-quantized rows, list-major as that of other rows.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "jobs/scan_job.h"
#include "pq/queries.h"
#include "scan/list_scan.h"

namespace hybridindex {

// Mapped lists: codes, then ids; `extents` has (size, capacity, byte offset) per list.
struct PqTable {
    const std::uint8_t* base;
    std::int64_t nbytes;
    const std::int64_t* extents;
    std::int64_t nlist;
    PqForm form;
    const float* centroids;  // (nlist, dim); nullptr where rows are whole vectors
};

// The terms of `n` rows of a list, `out`, of codes as they lie in a file.
void row_terms(const PqForm& form, const PqKernels& kernels, const std::uint8_t* codes, std::int64_t n, const float* centroid,
               float* out);

// Terms of rows, kept from the first scan of their list: 4 bytes a row. Safe to use from several threads at once.
class ListTerms {
public:
    struct Kept {
        std::uint64_t epoch;
        std::vector<float> values;
    };
    using Terms = std::shared_ptr<const Kept>;

    ListTerms(const PqTable& table, const PqKernels& kernels)
        : table_(table), kernels_(kernels), known_(static_cast<std::size_t>(table.nlist)),
          epochs_(static_cast<std::size_t>(table.nlist)) {}
    // Of all rows of a list, and room for a block more.
    Terms of(std::int64_t list) const;
    // Uses nothing from now on that came from the bytes of before, nor what scans that are under way keep of them.
    void forget(std::int64_t list) const;

private:
    const PqTable& table_;
    const PqKernels& kernels_;
    mutable std::vector<std::atomic<Terms>> known_;
    mutable std::vector<std::atomic<std::uint64_t>> epochs_;
};

// Probed lists as what a ScanJob scans.
class PqLists {
public:
    using Task = ScanTask;
    using Heap = QueryHeap;
    class Shared {
    public:
        explicit Shared(const PqLists& source) : queries(source.table_.form, source.kernels_) {}
        void prepare(const ScanTask& task, const ScanPlan& plan, std::int64_t widest);
        QueryHeap& heap(std::int32_t query) { return heaps_[static_cast<std::size_t>(query)]; }
        void let_go() { filter = {}, queries.let_go(kMostKept); }

        PqQueries queries;
        RowFilter filter;

    private:
        std::vector<QueryHeap> heaps_;
    };
    struct Rows {
        PqGroup group;

        void make_room(const Shared&, std::int64_t widest) { group.make_room(widest); }
        void begin() const {}
        void end() const {}
    };

    PqLists(const PqTable& table, const PqKernels& kernels);

    std::int64_t plan(const ScanTask& task, int threads, ScanPlan& plan) const;
    bool scan(Rows& rows, Shared& shared, const ScanPlan& plan, const ScanItem& item, const ScanItem* following,
              std::int64_t first, int n, QueryHeap* apart, const Stopped& stopped) const;
    void finish(QueryHeap& heap) const { heap.finish(!table_.form.l2); }

private:
    friend class PqScanner;
    // Codes of an item, of whole blocks.
    std::span<const std::uint8_t> bytes_of(const ScanPlan& plan, const ScanItem& item) const;

    const PqTable table_;
    const PqKernels& kernels_;
    const ListTerms terms_;
};

extern template class ScanJob<PqLists>;
extern template class ScanJobs<PqLists>;

// As ListScanner.
class PqScanner {
public:
    PqScanner(const PqTable& table, const PqKernels& kernels) : lists_(table, kernels), jobs_(lists_) {}

    const PqKernels& kernels() const { return lists_.kernels_; }
    void scan(const ScanTask& task, ThreadPool& pool) { jobs_.run(task, pool); }
    void prepare(const std::int64_t* lists, std::int64_t n);
    void forget(const std::int64_t* lists, std::int64_t n);

private:
    void check_lists(const std::int64_t* lists, std::int64_t n) const;

    const PqLists lists_;
    ScanJobs<PqLists> jobs_;
};

}  // namespace hybridindex
