#include "pq/kernels.h"

#include <cstring>
#include <string_view>

#include "simd/block_kernels.h"

namespace hybridindex {
namespace {

constexpr int kQueries = 11, kPairs = 9;  // queries of all widths of a kernel
constexpr std::int64_t kEntries = 2 * kPairs * 16;

struct Results {
    float tables[2][kEntries], base, sums[2];
    double bound[3];
    std::uint8_t levels[kEntries];
    std::uint16_t of_block[kQueries * kPqRows], of_rows[kPqRows];
    std::uint32_t near[kQueries + 1];
    float of_some[kPqRows];
};

// What these give for numbers and levels of any bytes.
void run(const PqKernels& kernels, Results& out) {
    static std::uint8_t bytes[kPqRows * 2 * kPairs], levels[256 * 2 * kPairs];
    static float numbers[2 * kPairs * 2 * 16 + 8 * kPairs + kPqRows];
    std::uint32_t state = 1;
    const auto next = [&state] { return state = state * 1664525u + 1013904223u, state >> 24; };
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(next());
    for (std::uint8_t& level : levels) level = static_cast<std::uint8_t>(next());
    for (float& number : numbers) number = static_cast<float>(next()) / 7.0f - 9.0f;
    std::memset(&out, 0, sizeof(out));  // padding is compared, too
    constexpr std::int64_t kDim = 4 * kPairs;
    const float *const codewords = numbers, *const middle = numbers + 16 * kDim, *const query = middle + kDim;
    const float* const terms = query + kDim;
    const PqForm form{kDim, 2 * kPairs, 4, true, true, codewords, middle};
    kernels.table(form, query, out.tables[0]);
    kernels.term_table(form, query, out.tables[1]);
    const PqBound bound = kernels.round(form, out.tables[0], out.levels);
    out.bound[0] = bound.step, out.bound[1] = bound.low, out.bound[2] = bound.most;
    out.base = kernels.base(form, query, middle);
    const std::uint8_t* of_query[kQueries];
    for (int q = 0; q < kQueries; ++q) of_query[q] = levels + q * kEntries;
    kernels.sums_of_block(bytes, kPairs, of_query, kQueries, out.of_block, bytes);
    kernels.sums_of_rows(bytes, 2 * kPairs, kPqRows, 2 * kPairs, levels, out.of_rows);
    std::uint16_t limits[kQueries];
    for (int q = 0; q < kQueries; ++q) limits[q] = out.of_block[q * kPqRows + q];
    kernels.at_most(out.of_block, kQueries, limits, out.near);
    out.near[kQueries] = kernels.at_most_with(out.of_block, terms, 0.03f, 60.0f);
    out.sums[0] = kernels.sum_in_block(bytes, 21, 2 * kPairs, out.tables[0]);
    constexpr std::uint32_t kSome = 0x000a5ff3;
    kernels.sums_in_block(bytes, kSome, 2 * kPairs, out.tables[0], out.of_some);
    for (int row = 0; row < kPqRows; ++row)
        if (!(kSome >> row & 1)) out.of_some[row] = 0;
    out.sums[1] = kernels.sum_of_row(bytes, 1, numbers);
}

bool runs(const PqKernels* kernels) {
#if defined(__x86_64__)
    if (kernels == avx512_pq_kernels)
        return kernels_named("avx512") != nullptr && __builtin_cpu_supports("avx512vbmi");
    if (kernels == avx2_pq_kernels) return kernels_named("avx2") != nullptr;
#endif
    return kernels == neon_pq_kernels && kernels_named("neon") != nullptr;
}

bool usable(const PqKernels* kernels) {
    if (kernels == nullptr || !runs(kernels)) return false;
    static Results right, found;
    run(*portable_pq_kernels, right);
    run(*kernels, found);
    return std::memcmp(&right, &found, sizeof(right)) == 0;
}

}  // namespace

const PqKernels& pq_kernels_for(const BlockKernels& level) {
    static const bool avx512 = usable(avx512_pq_kernels), avx2 = usable(avx2_pq_kernels), neon = usable(neon_pq_kernels);
    const std::string_view most = level.name;
    if (avx512 && (most == "avx512" || most == "amx")) return *avx512_pq_kernels;
    if (avx2 && most != "portable") return *avx2_pq_kernels;
    if (neon && most == "neon") return *neon_pq_kernels;
    return *portable_pq_kernels;
}

}  // namespace hybridindex
