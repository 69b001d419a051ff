// Scan of RaBitQ codes of probed lists, list-major as the scan of rows: estimates of all rows, of which the best candidates
// of each query are kept.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "jobs/scan_job.h"
#include "rabitq/candidates.h"
#include "rabitq/encode.h"
#include "simd/aligned_buffer.h"
#include "simd/block_kernels.h"
#include "rabitq/kernels.h"

namespace hybridindex {

// Mapped codes, list by list in whole blocks.
struct CodeTable {
    const std::uint8_t* base;
    std::int64_t nbytes;
    const std::int64_t* sizes;  // (nlist): rows
    std::int64_t nlist;
    const float* centre_squares;  // (nlist): |c|^2
    CodeFormat format;
};

// Its distances are estimates, smaller is better; its ids are positions, list << 32 | row.
struct CodeTask : AnswerTask {
    const std::int64_t* probes;     // (n, p), -1: none
    const float* centre_products;   // (n, p): <query, c>
    std::int64_t p;
};

// Rotates a query, dims floats, in place and rounds it to dims whole numbers. Returns their step times f_scale.
float round_query(const CodeFormat& format, float* query, std::int8_t* whole);

// Queries as the scan reads them.
class CodedQueries {
public:
    CodedQueries(const CodeFormat& format) : format_(format) {}
    void prepare(const float* queries, std::int64_t n);
    // Their memory goes where it is more than `most` bytes.
    void let_go(std::size_t most) { tables_.let_go(most), whole_.let_go(most); }
    const std::uint8_t* tables(std::int32_t query) const { return tables_.data() + query * format_.chunks() * kTableBytes; }
    const std::int8_t* whole(std::int32_t query) const { return whole_.data() + query * format_.dims(); }
    // The step of its whole numbers times f_scale.
    float u(std::int32_t query) const { return u_[static_cast<std::size_t>(query)]; }

private:
    const CodeFormat& format_;
    AlignedBuffer<float> turned_;
    AlignedBuffer<std::int8_t> whole_;
    AlignedBuffer<std::uint8_t> tables_;
    std::vector<float> u_;
};

// Queries that are compared with the blocks of one list; one thread's. All estimates come about here.
class CodedGroup {
public:
    void make_room(std::int64_t widest) {
        sums_.grow(widest * kCodedRows);
        estimates_.grow(widest * kCodedRows);
    }
    // `members` of the prepared queries, the product of each with the list's centroid, and that one's square.
    void start(const CodeFormat& format, const CodedQueries& queries, const std::int32_t* members, int n,
               const float* centre_products, float square);
    // What the m-th finds goes into `heap`, as far as `limiting`'s limit lets it, too.
    void find_into(int m, Candidates& heap, const Candidates& limiting) {
        heaps_[m] = &heap, limiting_[m] = &limiting;
        found_[m] = &heap.found();
        heap.make_room();
        limits_[m] = limit(m);
    }
    // Compares the blocks with all of them; `position` is that of the first row.
    void compare(CodedRun run, std::int64_t position, const RabitqKernels& kernels);

private:
    float limit(int m) const { return std::min(heaps_[m]->limit(), limiting_[m]->limit()); }

    int n_ = 0;
    const float* centre_products_ = nullptr;
    AlignedBuffer<std::int32_t> sums_;
    const std::uint8_t* tables_[kGroup];
    const std::int8_t* whole_[kGroup];
    AlignedBuffer<float> estimates_;
    float u_[kGroup], w_[kGroup], limits_[kGroup];
    FoundRows* found_[kGroup];
    Candidates* heaps_[kGroup];
    const Candidates* limiting_[kGroup];
};

// A run of no blocks yet, that fetches at least so many bytes ahead.
CodedRun run_of(const CodeFormat& format, const BlockKernels& kernels, std::int64_t bytes_ahead);

// Probed codes as what a ScanJob scans.
class ListCodes {
public:
    using Task = CodeTask;
    using Heap = Candidates;
    class Shared {
    public:
        explicit Shared(const ListCodes& source) : queries(source.table_.format) {}
        void prepare(const CodeTask& task, const ScanPlan& plan, std::int64_t widest);
        Candidates& heap(std::int32_t query) { return heaps_[static_cast<std::size_t>(query)]; }
        void let_go();

        CodedQueries queries;
        std::vector<float> centre_products;  // of each member of the plan

    private:
        std::vector<Candidates> heaps_;
    };
    struct Rows {
        CodedGroup group;

        void make_room(const Shared&, std::int64_t widest) { group.make_room(widest); }
        void begin() const {}
        void end() const {}
    };

    ListCodes(const CodeTable& table, const BlockKernels& blocks, const RabitqKernels& kernels);

    std::int64_t plan(const CodeTask& task, int threads, ScanPlan& plan) const;
    bool scan(Rows& rows, Shared& shared, const ScanPlan& plan, const ScanItem& item, const ScanItem* following,
              std::int64_t first, int n, Candidates* apart, const Stopped& stopped) const;
    void finish(Candidates& heap) const { heap.finish(); }
    const RabitqKernels& kernels() const { return kernels_; }

private:
    std::span<const std::uint8_t> bytes_of(std::int64_t list, const ScanItem& item) const;

    const CodeTable table_;
    const RabitqKernels& kernels_;
    const CodedRun run_;  // without blocks
    const std::int64_t block_bytes_;
    std::vector<std::int64_t> extents_;  // (nlist, 3): size, blocks, byte offset
};

extern template class ScanJob<ListCodes>;
extern template class ScanJobs<ListCodes>;

// Safe to use from several threads at once.
class CodeScanner {
public:
    // Throws std::invalid_argument where the lists do not fit the buffer.
    CodeScanner(const CodeTable& table, const BlockKernels& blocks, const RabitqKernels& kernels)
        : codes_(table, blocks, kernels), jobs_(codes_) {}

    const RabitqKernels& kernels() const { return codes_.kernels(); }
    // As ListScanner's.
    void scan(const CodeTask& task, ThreadPool& pool) { jobs_.run(task, pool); }

private:
    const ListCodes codes_;
    ScanJobs<ListCodes> jobs_;
};

}  // namespace hybridindex
