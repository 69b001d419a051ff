// The portable kernels, which say what is right, and the choice of others.
#include "rabitq/kernels.h"

#include <cstring>
#include <initializer_list>
#include <string_view>

#include "rabitq/kernels_impl.h"
#include "simd/block_kernels.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace hybridindex {
namespace {

bool runs(const RabitqKernels* kernels) {
#if defined(__x86_64__)
    if (kernels == avx512_rabitq_kernels)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
    if (kernels == avx2_rabitq_kernels) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
#elif defined(__aarch64__)
    if (kernels == neon_dot_rabitq_kernels) return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#endif
    if (kernels == neon_rabitq_kernels) return kernels_named("neon") != nullptr;
    return kernels == portable_rabitq_kernels;
}

// Table of four whole numbers: byte v is the sum of those whose bit in v is set, less the others, plus the bias.
void fill_table(const std::int8_t* four, int bias, std::uint8_t* table) {
    std::int8_t sums[16];
    sums[0] = static_cast<std::int8_t>(-four[0] - four[1] - four[2] - four[3]);
    for (int bit = 0; bit < 4; ++bit)
        for (int v = 0; v < 1 << bit; ++v) sums[v | 1 << bit] = static_cast<std::int8_t>(sums[v] + 2 * four[bit]);
    for (int v = 0; v < 16; ++v) table[v] = static_cast<std::uint8_t>(sums[v] + bias);
}

// Whether they give what the portable ones give, for blocks of any bytes and any queries.
bool agree(const RabitqKernels& kernels, int bits) {
    constexpr int kQueries = 23;  // of all widths of a kernel; and fewer, which another loop may compare
    constexpr std::int64_t kChunks = 67;
    static std::uint8_t planes[4 * kChunks * kChunkBytes], tables[kQueries * kChunks * kTableBytes];
    static std::int8_t whole[kQueries * kChunks * kChunkDims];
    std::uint32_t state = 1;
    const auto next = [&state] { return state = state * 1664525u + 1013904223u, state >> 24; };
    for (std::uint8_t& byte : planes) byte = static_cast<std::uint8_t>(next());
    const int most = most_whole(bits);
    for (std::int8_t& number : whole)
        number = static_cast<std::int8_t>(static_cast<int>(next()) % (2 * most + 1) - most);
    const std::uint8_t* tables_of[kQueries];
    const std::int8_t* whole_of[kQueries];
    for (int q = 0; q < kQueries; ++q) {
        tables_of[q] = tables + q * kChunks * kTableBytes, whole_of[q] = whole + q * kChunks * kChunkDims;
        fill_tables(whole_of[q], kChunks, bits, tables + q * kChunks * kTableBytes);
    }
    std::int32_t sums[2][kQueries * kCodedRows], few[2][7 * kCodedRows];
    float factors[3 * kCodedRows], of_queries[4][kQueries], found[2][2][kQueries * kCodedRows];
    std::uint32_t near[2][2][kQueries];
    for (float& factor : factors) factor = static_cast<float>(next()) / 7.0f - 9.0f;
    for (auto& values : of_queries)
        for (float& value : values) value = static_cast<float>(next()) / 3.0f - 40.0f;
    const QueryFactors queries{of_queries[0], of_queries[1], of_queries[2], of_queries[3]};
    int turn = 0;
    for (const RabitqKernels* one : {portable_rabitq_kernels, &kernels}) {
        one->products(planes, bits, kChunks, tables_of, whole_of, kQueries, sums[turn]);
        one->products(planes, bits, kChunks, tables_of, whole_of, 7, few[turn]);
        for (int l2 = 0; l2 < 2; ++l2) {
            const float* const h = l2 ? factors + 2 * kCodedRows : nullptr;
            one->estimates(factors, factors + kCodedRows, h, sums[turn], kQueries, queries, found[turn][l2], near[turn][l2]);
        }
        ++turn;
    }
    return std::memcmp(sums[0], sums[1], sizeof(sums[0])) == 0 && std::memcmp(few[0], few[1], sizeof(few[0])) == 0 &&
           std::memcmp(found[0], found[1], sizeof(found[0])) == 0 &&
           std::memcmp(near[0], near[1], sizeof(near[0])) == 0;
}

bool usable(const RabitqKernels* kernels) {
    return kernels != nullptr && runs(kernels) && agree(*kernels, 1) && agree(*kernels, 2) && agree(*kernels, 4);
}

constexpr RabitqKernels portable{"portable", products, estimates};

}  // namespace

const RabitqKernels* const portable_rabitq_kernels = &portable;

void fill_tables(const std::int8_t* whole, std::int64_t chunks, int bits, std::uint8_t* tables) {
    for (std::int64_t c = 0; c < chunks; ++c, tables += kTableBytes)
        for (int b = 0; b < 4; ++b)
            for (int half = 0; half < 2; ++half)
                fill_table(whole + c * kChunkDims + 8 * b + 4 * half, table_bias(bits), tables + 64 * half + 16 * b);
}

const RabitqKernels& rabitq_kernels_for(const BlockKernels& level) {
    static const bool avx512 = usable(avx512_rabitq_kernels), avx2 = usable(avx2_rabitq_kernels),
                      neon = usable(neon_rabitq_kernels), dot = usable(neon_dot_rabitq_kernels);
    const std::string_view most = level.name;
    if (avx512 && (most == "avx512" || most == "amx")) return *avx512_rabitq_kernels;
    if (avx2 && most != "portable") return *avx2_rabitq_kernels;
    if (dot && most == "neon") return *neon_dot_rabitq_kernels;
    if (neon && most == "neon") return *neon_rabitq_kernels;
    return *portable_rabitq_kernels;
}

}  // namespace hybridindex
