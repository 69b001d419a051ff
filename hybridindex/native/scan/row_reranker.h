// Exact distances of chosen rows, the same, to the bit, as those of a scan of their lists; and the k best of each query.
#pragma once
#include <cstdint>
#include <vector>

#include "jobs/scan_job.h"
#include "scan/list_scan.h"
#include "scan/query_heap.h"
#include "simd/aligned_buffer.h"
#include "simd/block_kernels.h"

namespace hybridindex {

struct RerankTask : AnswerTask {
    const std::int64_t* positions;  // (n, p): list << 32 | row; -1: none
    std::int64_t p;
};

// Chosen rows as what a ScanJob scans: the items of a query are stretches of its positions.
class ChosenRows {
public:
    using Task = RerankTask;
    using Heap = QueryHeap;
    class Shared {
    public:
        explicit Shared(const ChosenRows& source) : source_(source) {}
        void prepare(const RerankTask& task, const ScanPlan& plan, std::int64_t widest);
        QueryHeap& heap(std::int32_t query) { return heaps_[static_cast<std::size_t>(query)]; }
        void let_go() {
            queries_.let_go(kMostKept);
            if (positions_.capacity() * sizeof(positions_[0]) > kMostKept) positions_ = std::vector<std::int64_t>();
        }
        const float* query(std::int32_t i) const;
        const std::int64_t* positions(std::int32_t query) const { return positions_.data() + query * width_; }

    private:
        const ChosenRows& source_;
        AlignedBuffer<float> queries_;
        std::vector<std::int64_t> positions_;
        std::int64_t width_ = 0;
        std::vector<QueryHeap> heaps_;
    };
    struct Rows {
        AlignedBuffer<float> decoded;

        void make_room(const Shared&, std::int64_t) {}
        void begin() const {}
        void end() const {}
    };

    ChosenRows(const ListTable& lists, bool keep_max, const BlockKernels& kernels);

    // Throws std::out_of_range for a position that is no row, before anything is read.
    std::int64_t plan(const RerankTask& task, int threads, ScanPlan& plan) const;
    bool scan(Rows& rows, Shared& shared, const ScanPlan& plan, const ScanItem& item, const ScanItem* following,
              std::int64_t first, int n, QueryHeap* apart, const Stopped& stopped) const;
    void finish(QueryHeap& heap) const { heap.finish(keep_max_); }

private:
    struct Place {
        const std::uint8_t* code;
        const std::int64_t* id;
        const float* centroid;
    };
    Place place(std::int64_t position) const;
    void decode(const Place& place, float* row) const;

    const ListTable lists_;
    const bool keep_max_;
    const BlockKernels& kernels_;
    const std::int64_t dims_;  // of a row of floats, zeros included
    const bool direct_;        // rows are read where they lie
};

extern template class ScanJob<ChosenRows>;
extern template class ScanJobs<ChosenRows>;

// Safe to use from several threads at once.
class RowReranker {
public:
    // Throws as ListScanner does.
    RowReranker(const ListTable& lists, bool keep_max, const BlockKernels& kernels)
        : rows_(lists, keep_max, kernels), jobs_(rows_) {}
    void rerank(const RerankTask& task, ThreadPool& pool) { jobs_.run(task, pool); }

private:
    const ChosenRows rows_;
    ScanJobs<ChosenRows> jobs_;
};

// Rows of lists in the pages of an arena, one behind the other: a row may lie across two pages and more.
struct PagedRows {
    const std::uint8_t* base;
    std::int64_t n_pages;
    std::int64_t page_bytes;
    const std::int64_t* sizes;        // (nlist) rows
    const std::int64_t* first_pages;  // (nlist) where the pages of each list begin in page_numbers
    const std::int32_t* page_counts;  // (nlist) 0: the list is not there
    std::int64_t nlist;
    const std::int32_t* page_numbers;
    std::int64_t n_numbers;
    RowCodes codes;
    const float* centroids;  // (nlist, dim), added to every decoded row; nullptr: rows are whole vectors
};

// out[q * p + i]: the distance of query q and the row at positions[q * p + i], the same, to the bit, as RowReranker
// computes; NaN for position -1, and for what is no candidate. Throws std::out_of_range for a position that is no row of
// a list that is there, before anything is read.
void paged_distances(const PagedRows& rows, const float* queries, std::int64_t n, const std::int64_t* positions,
                     std::int64_t p, bool keep_max, const BlockKernels& kernels, float* out);

// Bytes that it takes for itself.
std::int64_t paged_distances_need(const RowCodes& codes);

// out[q * p + i] = <query q, centroid of probe i>, each summed in the order of the scan of rows whatever else is asked
// for; 0 for probe -1. Throws std::out_of_range for a probe that is no list.
void pair_products(const float* queries, std::int64_t n, const float* centroids, std::int64_t nlist, std::int64_t dim,
                   const std::int64_t* probes, std::int64_t p, const BlockKernels& kernels, float* out);

}  // namespace hybridindex
