#include "rabitq/kernels.h"

#include <cstring>
#include <initializer_list>
#include <string_view>

#include "simd/block_kernels.h"

namespace hybridindex {
namespace {

bool runs(const RabitqKernels* kernels) {
#if defined(__x86_64__)
    if (kernels == avx512_rabitq_kernels)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
    if (kernels == avx2_rabitq_kernels) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
#endif
    return kernels == portable_rabitq_kernels;
}

// Whether they give what the portable ones give, for blocks and tables of any bytes.
bool agree(const RabitqKernels& kernels, int bits) {
    constexpr int kQueries = 15;  // of all widths of a kernel
    constexpr std::int64_t kChunks = 67;
    static std::uint8_t planes[2 * kChunks * kChunkBytes], tables[kQueries * kChunks * kTableBytes];
    std::uint32_t state = 1;
    const auto next = [&state] { return state = state * 1664525u + 1013904223u, state >> 24; };
    for (std::uint8_t& byte : planes) byte = static_cast<std::uint8_t>(next());
    for (std::uint8_t& byte : tables) byte = static_cast<std::uint8_t>(next() % static_cast<std::uint32_t>(2 * table_bias(bits) + 1));
    const std::uint8_t* of_query[kQueries];
    for (int q = 0; q < kQueries; ++q) of_query[q] = tables + q * kChunks * kTableBytes;
    std::int32_t sums[2][kQueries * kCodedRows];
    float factors[3 * kCodedRows], of_queries[4][kQueries], found[2][2][kQueries * kCodedRows];
    std::uint32_t near[2][2][kQueries];
    for (float& factor : factors) factor = static_cast<float>(next()) / 7.0f - 9.0f;
    for (auto& values : of_queries)
        for (float& value : values) value = static_cast<float>(next()) / 3.0f - 40.0f;
    const QueryFactors queries{of_queries[0], of_queries[1], of_queries[2], of_queries[3]};
    int turn = 0;
    for (const RabitqKernels* one : {portable_rabitq_kernels, &kernels}) {
        one->products(planes, bits, kChunks, of_query, kQueries, sums[turn]);
        for (int l2 = 0; l2 < 2; ++l2) {
            const float* const h = l2 ? factors + 2 * kCodedRows : nullptr;
            one->estimates(factors, factors + kCodedRows, h, sums[turn], kQueries, queries, found[turn][l2], near[turn][l2]);
        }
        ++turn;
    }
    return std::memcmp(sums[0], sums[1], sizeof(sums[0])) == 0 && std::memcmp(found[0], found[1], sizeof(found[0])) == 0 &&
           std::memcmp(near[0], near[1], sizeof(near[0])) == 0;
}

bool usable(const RabitqKernels* kernels) {
    return kernels != nullptr && runs(kernels) && agree(*kernels, 1) && agree(*kernels, 2);
}

}  // namespace

const RabitqKernels& rabitq_kernels_for(const BlockKernels& level) {
    static const bool avx512 = usable(avx512_rabitq_kernels), avx2 = usable(avx2_rabitq_kernels);
    const std::string_view most = level.name;
    if (avx512 && (most == "avx512" || most == "amx")) return *avx512_rabitq_kernels;
    if (avx2 && most != "portable") return *avx2_rabitq_kernels;
    return *portable_rabitq_kernels;
}

}  // namespace hybridindex
