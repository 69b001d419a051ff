// The portable kernels, which say what is right, and the choice of others.
#include "rabitq/kernels.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <string_view>
#include <vector>

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
bool agree(const RabitqKernels& kernels, int bits, bool l2) {
    constexpr int kQueries = 8;  // of all widths of a kernel
    constexpr std::int64_t kChunks = 67, kBlocks = 3, kMostBytes = 4 * kChunks * kChunkBytes + 128;
    static std::uint8_t blocks[kBlocks * kMostBytes], tables[kQueries * kChunks * kTableBytes];
    static std::int8_t whole[kQueries * kChunks * kChunkDims];
    const std::int64_t planes = bits * kChunks * kChunkBytes, size = planes + (l2 ? 128 : 64);
    std::uint32_t state = 1;
    const auto next = [&state] { return state = state * 1664525u + 1013904223u, state >> 24; };
    for (std::int64_t block = 0; block < kBlocks; ++block) {
        std::uint8_t* const at = blocks + block * size;
        for (std::int64_t i = 0; i < size; ++i) at[i] = static_cast<std::uint8_t>(next());
        // Factors are numbers: of halves and floats one bit of the exponent is not set.
        for (std::int64_t i = planes + 1; i < planes + 64; i += 2) at[i] &= 0xbf;
        for (std::int64_t i = planes + 67; i < size; i += 4) at[i] &= 0xbf;
    }
    const int most = most_whole(bits);
    for (std::int8_t& number : whole)
        number = static_cast<std::int8_t>(static_cast<int>(next()) % (2 * most + 1) - most);
    const std::uint8_t* tables_of[kQueries];
    const std::int8_t* whole_of[kQueries];
    float u[kQueries], w[kQueries], products[kQueries], limits[kQueries];
    for (int q = 0; q < kQueries; ++q) {
        tables_of[q] = tables + q * kChunks * kTableBytes, whole_of[q] = whole + q * kChunks * kChunkDims;
        fill_tables(whole_of[q], kChunks, bits, tables + q * kChunks * kTableBytes);
        for (float* const value : {u + q, w + q, products + q}) *value = static_cast<float>(next()) / 3.0f - 40.0f;
    }
    const CodedRun run{blocks, kBlocks * kCodedRows - 3, size, bits, kChunks, l2, portable_kernels->decode_f16, 0, nullptr, 0};
    const QueriesOfRun queries{tables_of, whole_of, u, w, products, limits};
    constexpr std::int64_t kRoom = (kBlocks + 1) * kCodedRows;
    static float estimates[2][kQueries][kRoom];
    static std::int64_t positions[2][kQueries][kRoom];
    std::int32_t sums[kQueries * kCodedRows];
    float out[kQueries * kCodedRows];
    const auto same = [&](int n, std::int64_t first, std::int64_t room) {
        FoundRows found[2][kQueries];
        std::int64_t ended[2];
        for (int side = 0; side < 2; ++side) {
            FoundRows* of[kQueries];
            for (int q = 0; q < n; ++q) {
                found[side][q] = {estimates[side][q], positions[side][q], 0, room};
                of[q] = &found[side][q];
            }
            const RabitqKernels& one = side == 0 ? *portable_rabitq_kernels : kernels;
            ended[side] = one.find(run, first, queries, n, 77, of, sums, out);
        }
        bool equal = ended[0] == ended[1];
        for (int q = 0; equal && q < n; ++q) {
            const std::size_t count = static_cast<std::size_t>(found[0][q].count);
            equal = found[1][q].count == found[0][q].count &&
                    std::memcmp(estimates[0][q], estimates[1][q], count * sizeof(float)) == 0 &&
                    std::memcmp(positions[0][q], positions[1][q], count * sizeof(std::int64_t)) == 0;
        }
        return equal;
    };
    for (int n = 1; n <= kQueries; ++n) {
        // Everything is near; then one row is, and what is nearer.
        for (float& limit : limits) limit = 3e38f;
        if (!same(n, 0, kRoom) || !same(n, 0, kCodedRows) || !same(n, kBlocks - 1, kRoom)) return false;
        same(n, 0, kRoom);
        for (int q = 0; q < n; ++q) limits[q] = q == n / 2 ? estimates[0][q][kCodedRows + 5] : -3e38f;
        if (!same(n, 0, kRoom)) return false;
    }
    std::int32_t keys[2][kRoom], last[2];
    for (const std::int64_t k : {1, 7, 40}) {
        const std::int64_t count = kBlocks * kCodedRows - 3;
        if (portable_rabitq_kernels->least_key(estimates[0][0], count, k, keys[0], last) !=
                kernels.least_key(estimates[0][0], count, k, keys[1], last + 1) ||
            last[0] != last[1])
            return false;
    }
    return true;
}

bool usable(const RabitqKernels* kernels) {
    if (kernels == nullptr || !runs(kernels)) return false;
    for (const int bits : {1, 2, 4})
        for (const bool l2 : {false, true})
            if (!agree(*kernels, bits, l2)) return false;
    return true;
}

constexpr RabitqKernels portable{"portable", kTogether, find, least_key};

}  // namespace

const RabitqKernels* const portable_rabitq_kernels = &portable;

void fill_tables(const std::int8_t* whole, std::int64_t chunks, int bits, std::uint8_t* tables) {
    for (std::int64_t c = 0; c < chunks; ++c, tables += kTableBytes)
        for (int b = 0; b < 4; ++b)
            for (int half = 0; half < 2; ++half)
                fill_table(whole + c * kChunkDims + 8 * b + 4 * half, table_bias(bits), tables + 64 * half + 16 * b);
}

float keep_best_rows(float* estimates, std::int64_t* positions, std::int64_t n, std::int64_t k, std::int32_t* keys) {
    static const auto least_key_of = rabitq_kernels_for(best_kernels()).least_key;
    std::int32_t last = 0;
    const std::int64_t within = least_key_of(estimates, n, k, keys, &last);
    // Of those with the last key the first by position stay: all before `end`, and so many at it.
    std::int64_t end = std::numeric_limits<std::int64_t>::max(), at_end = 0;
    if (within > k) {
        std::vector<std::int64_t> equal;
        for (std::int64_t i = 0; i < n; ++i)
            if (keys[i] == last) equal.push_back(positions[i]);
        const std::int64_t staying = k - (within - static_cast<std::int64_t>(equal.size()));
        std::nth_element(equal.begin(), equal.begin() + (staying - 1), equal.end());
        end = equal[static_cast<std::size_t>(staying - 1)];
        at_end = staying - std::count_if(equal.begin(), equal.begin() + staying, [&](std::int64_t p) { return p < end; });
    }
    float most = -std::numeric_limits<float>::infinity();
    std::int64_t kept = 0;
    for (std::int64_t i = 0; i < n; ++i) {
        const float estimate = estimates[i];
        const std::int64_t position = positions[i];
        bool stays = keys[i] <= last;
        if (keys[i] == last && position >= end) stays = position == end && at_end-- > 0;
        if (kept < k) estimates[kept] = estimate, positions[kept] = position;
        most = stays && estimate > most ? estimate : most;
        kept += stays;
    }
    return most;
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
