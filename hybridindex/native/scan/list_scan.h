// Scan of probed inverted lists, list-major: the bytes of a list are read once per batch and compared with all queries
// that probe it. A query is complete the moment its last list is scanned. The calling thread waits for no other: what
// its helpers have not finished in time it scans itself.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "simd/block_kernels.h"
#include "simd/codes.h"
#include "scan/kept_terms.h"
#include "scan/thread_pool.h"

namespace hybridindex {

// Mapped lists: rows, then ids; `extents` has (size, capacity, byte offset) per list.
struct ListTable {
    const std::uint8_t* base;
    std::int64_t nbytes;
    const std::int64_t* extents;
    std::int64_t nlist;
    RowCodes codes;
    const float* centroids;  // (nlist, dim), added to every decoded row; nullptr: rows are whole vectors
};

// Which ids may be answered: bit i of a bitmap of n_bits, or a sorted array.
struct IdFilter {
    const std::uint8_t* bitmap = nullptr;
    std::int64_t n_bits = 0;
    const std::int64_t* sorted = nullptr;
    std::int64_t n_sorted = 0;
    // Of the arrays. Let go on a thread that scans or destroys the scanner; it may be after the scan. Nobody, where
    // they outlive the scanner.
    std::shared_ptr<const void> owner = nullptr;

    bool active() const { return bitmap != nullptr || sorted != nullptr; }
    bool allows(std::int64_t id) const;
};

struct ScanTask {
    const float* queries;        // (n, dim)
    std::int64_t n;
    const std::int64_t* probes;  // (n, p), -1: none
    std::int64_t p;
    std::int64_t k;
    float* distances;   // (n, k), best first
    std::int64_t* ids;  // (n, k), -1 in empty places, which are at infinite distance
    IdFilter filter;
    // Called on the calling thread with rows that are complete, each once; may throw, which ends the scan.
    std::function<void(const std::vector<std::int32_t>&)> on_done;
};

class ScanJob;

// Safe to use from several threads at once.
class ListScanner {
public:
    // Throws std::invalid_argument where extents leave the buffer, overlap or are not aligned.
    ListScanner(const ListTable& lists, bool keep_max, const BlockKernels& kernels);
    // Waits for helpers that are still in a scan of which the answer was given.
    ~ListScanner();

    const BlockKernels& kernels() const { return kernels_; }

    // Throws std::out_of_range for a probe that is no list, before anything is read. Answers do not depend on the
    // number of threads.
    void scan(const ScanTask& task, ThreadPool& pool);

    // Computes and keeps what first scans of these lists would compute beside their distances. Reads all their rows.
    // Throws std::out_of_range for what is no list.
    void prepare(const std::int64_t* lists, std::int64_t n);

private:
    std::unique_ptr<ScanJob> take_job();
    void give_back(std::unique_ptr<ScanJob> job);

    const ListTable lists_;
    const bool keep_max_;
    const BlockKernels& kernels_;
    const std::unique_ptr<const KeptTerms> terms_;  // of lists of bytes
    const pid_t pid_;  // a child process has none of the helpers
    std::mutex mutex_;
    std::vector<std::unique_ptr<ScanJob>> idle_;
    std::vector<std::unique_ptr<ScanJob>> late_;  // given back while helpers were inside
};

}  // namespace hybridindex
