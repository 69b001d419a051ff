// Copies from host memory to pages of a device: hybridindex/tiers/paged/staging.py and streams.py.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hybridindex {

// By address; one entry is one copy.
struct Copies {
    std::vector<std::int64_t> targets, sources, sizes;
};

// The fewest copies of at most `most` bytes that bring parts of lists to their pages. Part i has counts[i] of `pages`, and
// lies on the host from sources[i] on, page by page, in the allocation regions[i]: no copy reads from two, of which CUDA
// promises nothing. Page p is `page_bytes` bytes from base + p * page_bytes on.
Copies merge_runs(const std::int32_t* pages, std::int64_t n_pages, const std::int64_t* counts,
                  const std::int64_t* sources, const std::int64_t* regions, std::int64_t n_parts, std::int64_t base, std::int64_t page_bytes,
                  std::int64_t most);

// Functions of CUDA's driver, which is not linked: cuMemcpyHtoDAsync, and cuMemcpyBatchAsync as CUDA 12.8 has it.
using CopyFunction = int (*)(std::uint64_t target, const void* source, std::size_t bytes, void* stream);
struct CopyAttributes {
    int source_order;
    int source_location[2], target_location[2];
    unsigned int flags;
};
using BatchFunction = int (*)(std::uint64_t* targets, std::uint64_t* sources, std::size_t* sizes, std::size_t count,
                              CopyAttributes* attributes, std::size_t* first_with, std::size_t n_attributes,
                              std::size_t* failed, void* stream);

// Queues the copies, in one call where `batch` is there. What the first call that failed said; 0 where none did.
int start_copies(const std::int64_t* targets, const std::int64_t* sources, const std::int64_t* sizes, std::int64_t n,
                 CopyFunction copy, BatchFunction batch, void* stream);

}  // namespace hybridindex
